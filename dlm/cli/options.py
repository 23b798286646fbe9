"""Options that commands share, each with one name and one help text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.models import ArgumentInfo, ParameterInfo

from dlm.cli.checks import READ, READ_ANY, SCRATCH, WRITE_ARPA, check_all, within
from dlm.config import number, settings_of
from dlm.errors import ConfigError
from dlm.resources import parse_size

_SETTING_IS = re.compile(r"^\w+\.(\w+) is ")


class Options(NamedTuple):
    """Annotates a command's parameter whose fields become options: see `spread`.
    `of` is the dataclass if the parameter is a dict for `config.resolve`; the fields in `required`
    have a default that this command does not use."""

    fields: str = ""
    of: type | None = None
    required: str = ""

    def parameters(self, kind: type) -> list[Parameter]:
        """One option per field, with the field's default, or with None if `of` is set."""
        kind = self.of or kind
        settings = {one.field: one for one in settings_of(kind)}
        made = []
        for name in self.fields.split() or settings:
            one = settings[name]
            default = None if self.of else one.default
            if name in self.required.split() or (one.required and not self.of):
                default = Parameter.empty
            hint: Any = one.kind if isinstance(one.kind, type) else str  # a union type takes text
            annotation = Annotated[hint | None, option(kind, name)]
            made.append(_parameter(name, default, annotation))
        return made


def _parameter(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Converts a command to what Typer accepts: single options, required ones first.

    A parameter `Annotated[KIND, Options(...)]` becomes an option for each field of the dataclass
    KIND, and the command gets a KIND made of their values. A parameter whose annotation has a check
    of `checks`, such as `READ`, is checked before the command runs.
    """
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    checks: dict[str, tuple[str, partial[None]]] = {}
    flat: list[Parameter] = []
    for name, one in inspect.signature(command, eval_str=True).parameters.items():
        made = [_parameter(name, one.default, one.annotation)]
        for fact in getattr(one.annotation, "__metadata__", ()):
            if isinstance(fact, Options):
                kind = one.annotation.__origin__
                made = fact.parameters(kind)
                groups[name] = kind, [part.name for part in made]
            elif isinstance(fact, partial):
                checks[name] = _shown_name(one), fact
        flat += made
    flat.sort(key=lambda one: one.default is not Parameter.empty)

    def run(**given: Any) -> None:
        for name, (kind, fields) in groups.items():
            values = {field: given.pop(field) for field in fields}
            try:
                given[name] = kind(**values)
            except ConfigError as exc:  # name the option, not the setting
                raise ConfigError(_SETTING_IS.sub(_as_option, str(exc))) from exc
        check_all((shown, given[name], check) for name, (shown, check) in checks.items())
        command(**given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run


def _as_option(found: re.Match[str]) -> str:
    return f"--{found[1].replace('_', '-')} is "


def _shown_name(one: Parameter) -> str:
    (info,) = (fact for fact in one.annotation.__metadata__ if isinstance(fact, ParameterInfo))
    if isinstance(info, ArgumentInfo):
        return str(info.metavar).strip("[].")
    # In Annotated, Typer stores an option's first name where its default would be.
    return str(info.default) if info.default is not ... else f"--{one.name.replace('_', '-')}"


def option(kind: type, field: str) -> Any:
    """Makes a setting's option, whose help shows the setting's bounds and default. Typer could not
    show this default, since most commands get None for an omitted option."""
    (one,) = (one for one in settings_of(kind) if one.field == field)
    default = one.default if isinstance(one.default, (str, bool)) else number(one.default)
    facts = [one.expected, f"default: {default}" if default else ""]
    known = "; ".join(filter(None, facts))
    text = one.meaning + (f"  [{known}]" if known else "")
    names = filter(None, (f"--{one.name.replace('_', '-')}", one.short))
    return typer.Option(*names, metavar=one.metavar or None, help=text, show_default=False)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not report progress.")]


class EngineName(StrEnum):
    LOCAL = "local"
    SPARK = "spark"


Silent = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing unless the command fails.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

# Models, and the files made from them.
ArpaModel = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="ARPA file (plain, .gz, .zst or .xz), or KenLM binary file."
    ),
    READ_ANY,
]
ArpaOutput = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="ARPA file to write; .gz, .zst or .xz compresses it.",
    ),
    WRITE_ARPA,
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=parse_size,
        help="Memory limit, such as 800M or 4G.  [default: the free memory]",
    ),
]
HalfMemory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=parse_size,
        help="Memory limit, such as 800M or 4G.  [default: half of the free memory]",
    ),
]
Tmp = Annotated[
    Path | None,
    typer.Option(
        "--tmp",
        metavar="DIR",
        help="Folder for data that exceeds the memory limit.  [default: beside the output]",
    ),
    SCRATCH,
]
Threads = Annotated[
    int, typer.Option("--threads", metavar="N", help="Number of threads."), within(low=1)
]

# Text.
Skip = Annotated[
    bool,
    typer.Option(
        "--skip",
        help="Skip and count lines that are not UTF-8, exceed 1 MiB or contain NUL, and null "
        "values in parquet files.",
    ),
]
TextColumn = Annotated[
    str, typer.Option("--text-column", metavar="NAME", help="Text column of parquet files.")
]
PiecesFile = Annotated[
    Path | None,
    typer.Option("--pieces", metavar="FILE", help="SentencePiece model that splits words."),
    READ,
]

Public = Annotated[
    str,
    typer.Option(
        "--public-attested-by",
        metavar="NAME",
        help="Name of the person who attests that inputs without a privacy record contain no "
        "user's text.",
    ),
]
PublicKey = Annotated[
    Path | None,
    typer.Option(
        "--public-key",
        metavar="FILE",
        help="PEM file of the Ed25519 key that the signature must be from.",
    ),
]

# Users' text.
Users = Annotated[
    Path,
    typer.Argument(
        metavar="USERS",
        help="Users' text: parquet or TSV (plain, .zst or .gz) with a column of user ids.",
    ),
    READ_ANY,
]
RunSettings = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="TOML file with the run's settings.")
]

# Servers.
ClusterFile = Annotated[
    Path, typer.Option("--cluster", metavar="FILE", help="cluster.toml that lists the servers.")
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="ID",
        help="Model to use if servers have several: 6 or more leading digits of its id.",
    ),
]
PhraseList = Annotated[
    Path | None,
    typer.Option(
        "--phrases",
        metavar="FILE",
        help="File of phrases to make more probable, one per line; see above.",
    ),
    READ,
]
LogLevel = Annotated[
    str,
    typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
    within(one_of=("debug", "info", "warning", "error")),
]

# Authentication: fields of `ServerConfig`.
ACCESS = "tls_cert tls_key tls_client_ca tokens"
# Fields of `ClientSecurity`.
CREDENTIALS = "ca cert key server_name token_file"
SECURITY = f"{CREDENTIALS} insecure use_proxy"
