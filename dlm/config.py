"""Resolves settings, which each part of dlm declares once, in a frozen dataclass.

A field holds a setting's meaning, unit and bounds (see `setting`). The field defines the key in a
TOML file, the variable ``DLM_<SECTION>_<FIELD>``, the command's option (`cli/options.py`), the
check (`check`), the text of its error, and a row of the reference (`cli/reference.py`).

Flags override the environment, the environment overrides a TOML file, and the file overrides the
default. A value is checked once, when its dataclass is constructed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from dlm.errors import ConfigError

T = TypeVar("T")

LIKE = 0.8  # minimum difflib ratio of a suggestion; allows a wrong letter or two
_A = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
    Path: "a path",
}
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


class Setting(NamedTuple):
    """The metadata of a dataclass field that is a setting.

    meaning       the setting's effect, in whole sentences; the help of its option
    unit          plural; printed after the bounds
    low, high     inclusive bounds; a number must be finite, unless `high` is infinity
    above, below  exclusive bounds
    one_of        the strings allowed; those of a Literal need not be repeated
    why           reasons for the default and the bounds; shown only in the reference
    name          name in files, variables and options, if the field's own name differs
    metavar       placeholder for the value in the option's help
    default       the default value; None also if the field has no default
    """

    meaning: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()
    why: str = ""
    name: str = ""
    metavar: str = ""
    short: str = ""
    field: str = ""
    kind: Any = None
    optional: bool = False
    default: Any = None
    required: bool = False

    @property
    def expected(self) -> str:
        """The values allowed, such as "1 to 256 processes"; "" if there is no bound."""
        if self.one_of:
            *others, last = self.one_of
            return " or ".join(filter(None, (", ".join(others), last)))
        low, high, above, below = map(number, (self.low, self.high, self.above, self.below))
        least = f"{low} or more" if low else f"above {above}" if above else ""
        most = f"at most {high}" if high else f"below {below}" if below else ""
        text = f"{low} to {high}" if low and high else " and ".join(filter(None, (least, most)))
        return f"{text} {self.unit}" if text and self.unit else text

    def allows(self, value: Any) -> bool:
        if self.one_of:
            return value in self.one_of
        is_number = isinstance(value, Real)
        return not is_number or (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
            and (isinstance(value, Integral) or math.isfinite(value) or self.high == value)
        )


_KNOWN: dict[type, tuple[Setting, ...]] = {}  # cached, since each option looks up its class


def about(meaning: str, **more: Any) -> dict[str, Setting]:
    """Returns field metadata, for a setting that has no default or has a default factory."""
    return {"setting": Setting(meaning, **more)}


def setting(default: T, meaning: str, **more: Any) -> T:
    """A field of a dataclass, with a default; see `Setting`."""
    return field(default=default, metadata=about(meaning, **more))


def like(kind: Any, name: str, default: Any = MISSING) -> Any:
    """Returns a copy of field `name` of dataclass `kind`, with its own default or `default`."""
    one = kind.__dataclass_fields__[name]
    given = one.default if default is MISSING else default
    return field(default=given, repr=one.repr, metadata=one.metadata)


def settings_of(kind: type) -> tuple[Setting, ...]:
    if kind in _KNOWN:
        return _KNOWN[kind]
    found = []
    hints = get_type_hints(kind)
    for one in fields(kind):
        carried: Setting = one.metadata.get("setting", Setting())
        hint = hints[one.name]
        kinds = get_args(hint)
        optional = NoneType in kinds
        if optional and len(kinds) == 2:
            hint = kinds[kinds[0] is NoneType]
        found.append(
            carried._replace(
                one_of=get_args(hint) if get_origin(hint) is Literal else carried.one_of,
                name=carried.name or one.name,
                field=one.name,
                kind=hint,
                optional=optional,
                default=None if one.default is MISSING else one.default,
                required=one.default is MISSING and one.default_factory is MISSING,
            )
        )
    return _KNOWN.setdefault(kind, tuple(found))


def check(section: str, values: Any) -> None:
    """Raises `ConfigError` with SECTION.NAME for the first value with a wrong type or range."""
    for one in settings_of(type(values)):
        value = getattr(values, one.field)
        if value is None and one.optional:
            continue
        expected = one.expected or "a finite number"
        is_flag = isinstance(value, bool) and one.kind in _NUMBERS  # to Python, a bool is a number
        if is_flag or not isinstance(value, _NUMBERS.get(one.kind, object)):
            expected = kind_name(one.kind)
        elif one.allows(value):
            continue
        place = f"{section}.{one.name}".lstrip(".")
        raise ConfigError(f"{place} is {value!r}; expected {expected}")


def kind_name(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(kind_name(one) for one in get_args(kind) if one is not NoneType)
    return str(_A.get(get_origin(kind) or kind) or getattr(kind, "__name__", kind))


def number(value: float | None) -> str:
    """A bound or a default as text, such as 65,535, 0.5 or 1e+15; "" for None and infinity."""
    if value is None or value == math.inf:
        return ""
    return f"{int(value):,}" if value == value // 1 and abs(value) < 1e12 else f"{value:g}"


def resolve(
    kind: type[T],
    section: str,
    *,
    flags: Mapping[str, Any] | None = None,
    file: Path | Any = None,
    found: Mapping[str, Any] | None = None,
    tables: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    prefix: str = "DLM",
    within: str = "",
) -> T:
    """Returns an instance of dataclass `kind`; for each field, the strongest source wins.

    Args    section  name of the table in the TOML file and middle part of the variables; "" for
                     settings above all tables
            found    the content of the TOML file, if it was already read
            prefix   prefix of the variables; commands with tables of the same names use different
                     prefixes, so that neither reads the other's variables
            within   text before the table's name in the file, such as "federate."
    Raises  ConfigError  there is an unknown field or table, no source sets a required field, or a
                         value has the wrong type or is out of bounds
    """
    environ = os.environ if environ is None else environ
    settings = settings_of(kind)
    names = [one.name for one in settings]
    values: dict[str, Any] = {}
    if found is None and file is not None:
        found = read_toml(file)
    place = f"{file}: " if file else ""
    if found is not None:
        misplaced = sorted(set(found) - {section, *tables})
        if misplaced:
            said = "; ".join(_misplaced(name, section, names) for name in misplaced)
            raise ConfigError(place + said)
        table = found.get(section, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"{place}{section} is {table!r}; expected a table, [{section}]")
        unknown = sorted(set(table) - set(names))
        if unknown:
            said = "; ".join(name + nearest(name, names) for name in unknown)
            raise ConfigError(f"{place}[{within}{section}] does not have a setting named {said}")
        values.update(table)
    prefix = f"{prefix}_{section}_".upper()
    variables = {prefix + name.upper(): name for name in names}
    # A misspelt limit or path to a secret would otherwise silently have no effect.
    unknown = sorted(v for v in environ if v.startswith(prefix) and v not in variables)
    if unknown:
        said = "; ".join(v + _nearest_variable(v, prefix, names) for v in unknown)
        noun = "variable" if len(unknown) == 1 else "variables"
        raise ConfigError(f"unknown environment {noun} {said}; unset it, or correct the name")
    from_environ = {variables[v]: environ[v] for v in variables if v in environ}
    flags = flags or {}
    given = {s.name: flags[s.field] for s in settings if flags.get(s.field) is not None}
    values |= from_environ | given
    text = from_environ.keys() - given.keys()
    if lacking := [one.name for one in settings if one.required and one.name not in values]:
        raise ConfigError(f"{place}[{within}{section}] lacks {', '.join(lacking)}")
    return kind(
        **{
            s.field: _coerce(section, s.name, s.kind, values[s.name], text=s.name in text)
            for s in settings
            if s.name in values
        }
    )


def read_toml(file: Path) -> dict[str, Any]:
    """Reads a TOML file; raises `ConfigError` if it cannot be opened or is not TOML."""
    try:
        return parse_toml(file.read_text(encoding="utf-8"), file)
    except OSError as exc:
        raise ConfigError(f"{file} cannot be opened: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} cannot be read as TOML: {exc}") from exc


def parse_toml(text: str, file: str | os.PathLike[str]) -> dict[str, Any]:
    """Parses `text`, the content of `file`; raises `ConfigError` if it is not TOML."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # too long a number, or too deep a table
        raise ConfigError(f"{os.fspath(file)} cannot be read as TOML: {exc}") from exc


def _misplaced(name: str, section: str, fields: Iterable[str]) -> str:
    if name in fields:
        return f"{name} is outside the table [{section}]; move it below the table's header"
    return f"{name} is not a known setting; settings belong in the table [{section}]"


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for the end of a message; empty if no name is similar."""
    from difflib import get_close_matches  # imported late: a command's help does not need it

    found = get_close_matches(name, known, 1, LIKE)
    return f" (did you mean {found[0]}?)" if found else ""


def _nearest_variable(variable: str, prefix: str, fields: Iterable[str]) -> str:
    """Like `nearest`, for a variable; ignores the prefix that a section's variables share."""
    found = nearest(variable.removeprefix(prefix), [name.upper() for name in fields])
    return found.replace("mean ", f"mean {prefix}")


def _coerce(section: str, name: str, kind: Any, value: Any, *, text: bool) -> Any:
    """Returns the value, converted to the field's type if it is from the environment (`text`); any
    other value must already have that type. Paths are strings in every source."""
    place = f"{section}.{name}".lstrip(".")
    if isinstance(value, str) and "\0" in value:  # no path may contain NUL
        raise ConfigError(f"{place} is {value!r}; expected text without NUL characters")
    try:
        if isinstance(value, str) and kind is not str:
            if kind is bool and text:
                return {"1": True, "true": True, "0": False, "false": False}[value.lower()]
            if kind is Path or (text and kind in (int, float)):
                return kind(value)
        if isinstance(value, bool) and kind in (int, float):  # Python counts a bool as an int
            raise ValueError
        if kind is float and isinstance(value, int):
            return float(value)
        if isinstance(kind, type) and not isinstance(value, kind):
            raise ValueError
    except (KeyError, OverflowError, ValueError) as exc:
        expected = kind_name(kind)
        raise ConfigError(f"{place} is {value!r}; expected {expected}") from exc
    return value
