"""Settings: each part has a frozen dataclass beside its code; this file resolves them.

Flags override the environment (``DLM_<SECTION>_<FIELD>``), the environment overrides a TOML file,
and the file overrides the default. A value is checked once, when its dataclass is constructed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from dlm.errors import ConfigError

T = TypeVar("T")

LIKE = 0.8  # difflib's ratio above which a name is suggested: a letter or two are wrong
_A = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


def resolve(
    kind: type[T],
    section: str,
    *,
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    found: Mapping[str, Any] | None = None,
    tables: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    prefix: str = "DLM",
    within: str = "",
) -> T:
    """An instance of the dataclass `kind`, each field from the strongest source that names it.

    Args
        section  name of the table in the TOML file and middle part of the variables
        flags    field -> value; None means not given
        found    the content of the TOML file, if it was already read
        tables   other tables that the file may have
        prefix   of the variables; a command whose tables have the same names as another command's
                 uses its own prefix, so that neither reads the other's variables
        within   what precedes the table's name in the file, as "federate."
    Raises
        ConfigError  an unknown field in the file or the environment, an unknown table of the file,
                     or a value of the wrong type or out of bounds
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(kind)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    if found is None and file is not None:
        found = read_toml(file)
    if found is not None:
        misplaced = sorted(set(found) - {section, *tables})
        if misplaced:
            said = "; ".join(_misplaced(name, section, fields) for name in misplaced)
            raise ConfigError(f"{file}: {said}")
        table = found.get(section, {})
        unknown = sorted(set(table) - set(fields))
        if unknown:
            said = "; ".join(name + nearest(name, fields) for name in unknown)
            raise ConfigError(f"{file}: [{within}{section}] has no setting named {said}")
        values.update(table)
    prefix = f"{prefix}_{section}_".upper()
    variables = {prefix + name.upper(): name for name in fields}
    # A misspelt limit or path of a secret would otherwise silently have no effect.
    unknown = sorted(v for v in environ if v.startswith(prefix) and v not in variables)
    if unknown:
        said = "; ".join(v + _nearest_variable(v, prefix, fields) for v in unknown)
        noun = "variable" if len(unknown) == 1 else "variables"
        raise ConfigError(f"unknown environment {noun} {said}; unset it, or correct the name")
    from_environ = {variables[v]: environ[v] for v in variables if v in environ}
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    values |= from_environ | given
    text = from_environ.keys() - given.keys()
    return kind(
        **{
            name: _coerce(section, name, fields[name], value, text=name in text)
            for name, value in values.items()
        }
    )


def read_toml(file: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises  ConfigError  it cannot be opened, or is not TOML
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{file} cannot be opened: {exc.strerror}") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{file} cannot be read as TOML: {exc}") from exc


def _misplaced(name: str, section: str, fields: Iterable[str]) -> str:
    """What to do about a name in the file that is outside every known table."""
    if name in fields:
        return f"{name} is outside the table [{section}]; move it below that line"
    return f"{name} is not a known setting; settings belong in the table [{section}]"


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for the end of a message; empty if no name is similar."""
    found = difflib.get_close_matches(name, known, 1, LIKE)
    return f" (did you mean {found[0]}?)" if found else ""


def _nearest_variable(variable: str, prefix: str, fields: Iterable[str]) -> str:
    """Like `nearest`, without counting the common prefix as a similarity."""
    names = [name.upper() for name in fields]
    found = difflib.get_close_matches(variable.removeprefix(prefix), names, 1, LIKE)
    return f" (did you mean {prefix}{found[0]}?)" if found else ""


def _coerce(section: str, name: str, kind: Any, value: Any, *, text: bool) -> Any:
    """A value of the environment (`text`) converted to the field's type; others must have it.

    Paths are strings in every source.
    """
    kinds = [one for one in get_args(kind) if one is not type(None)]
    if len(kinds) == 1 and type(None) in get_args(kind):  # int | None
        kind = kinds[0]
    if isinstance(value, str) and "\0" in value:  # no path may have it
        raise ConfigError(f"{section}.{name} is {value!r}; it must not have the character NUL")
    try:
        if isinstance(value, str) and kind is not str:
            if kind is bool and text:
                return {"1": True, "true": True, "0": False, "false": False}[value.lower()]
            if kind is Path or (text and kind in (int, float)):
                return kind(value)
        if isinstance(value, bool) and kind in (int, float):  # an int, in Python
            raise ValueError
        if kind is float and isinstance(value, int):
            return float(value)
        if isinstance(kind, type) and not isinstance(value, kind):
            raise ValueError
    except (KeyError, OverflowError, ValueError) as exc:
        raise ConfigError(
            f"{section}.{name} is {value!r}; it must be {_A.get(kind) or kind}"
        ) from exc
    return value
