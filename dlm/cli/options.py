"""Options that commands share, each with one name and one help text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.config import number, settings_of


def option(kind: type, field: str, *short: str, **more: Any) -> Any:
    """The option that gives a setting: its name, its help, its bounds and its default.

    Typer shows no other default: most commands get None for what is not given.

    Args
        kind   the dataclass of the settings
        short  further names, such as "-n"
        more   what else `typer.Option` takes, such as `metavar`
    """
    (one,) = (one for one in settings_of(kind) if one.field == field)
    default = one.default if isinstance(one.default, (str, bool)) else number(one.default)
    facts = [one.expected, f"default: {default}" if default else ""]
    known = "; ".join(filter(None, facts))
    text = one.meaning + (f"  [{known}]" if known else "")
    return typer.Option(
        f"--{one.name.replace('_', '-')}", *short, help=text, show_default=False, **more
    )


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not report progress.")]


class EngineName(StrEnum):
    """Where a command works."""

    LOCAL = "local"
    SPARK = "spark"


Silent = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing unless the command fails.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

# Models and what is made of them.
ArpaModel = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="ARPA file (plain, .gz, .zst or .xz), or KenLM binary file."
    ),
]
ArpaOutput = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="ARPA file to write; .gz, .zst or .xz compresses it.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory limit, such as 800M or 4G.  [default: the free memory]",
    ),
]
HalfMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
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
]
Threads = Annotated[int, typer.Option("--threads", metavar="N", help="Number of threads.")]

# Text.
Skip = Annotated[
    bool,
    typer.Option(
        "--skip",
        help="Skip and count lines that are not UTF-8, exceed 1 MiB or contain NUL, and null "
        "values of parquet.",
    ),
]
TextColumn = Annotated[
    str, typer.Option("--text-column", metavar="NAME", help="Text column of parquet files.")
]

Public = Annotated[
    str,
    typer.Option(
        "--public-attested-by",
        metavar="NAME",
        help="Who vouches that inputs without a privacy record contain no user's text.",
    ),
]

# Users' text.
Users = Annotated[
    Path,
    typer.Argument(
        metavar="USERS",
        help="Users' text: parquet or TSV (plain, .zst or .gz) with a column of user ids.",
    ),
]
UserColumn = Annotated[
    str, typer.Option("--user-column", metavar="NAME", help="Column of user ids.")
]
UserTextColumn = Annotated[str, typer.Option("--text-column", metavar="NAME", help="Text column.")]
Missing = Annotated[
    str,
    typer.Option(
        "--missing",
        metavar="POLICY",
        help="For rows without a user id and users without text: refuse, or count them and "
        "continue.",
    ),
]
RunSettings = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="TOML file with the run's settings.")
]

# Servers, and a client's credentials.
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
        "--phrases", metavar="FILE", help="Phrases that are likelier, one per line; see above."
    ),
]
Ca = Annotated[
    str,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="PEM file of the CA that signed the servers' certificates; enables TLS.",
    ),
]
Cert = Annotated[
    str, typer.Option("--cert", metavar="FILE", help="PEM file of this client's certificate.")
]
Key = Annotated[
    str,
    typer.Option(
        "--key",
        metavar="FILE",
        help="PEM file of this client's private key, mode 600 (640 if root owns it).",
    ),
]
ServerName = Annotated[
    str, typer.Option("--server-name", metavar="NAME", help="Name in the servers' certificates.")
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with this client's token, mode 600 (640 if root owns it).",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Send the token to other hosts without TLS."),
]
UseProxy = Annotated[
    bool,
    typer.Option("--use-proxy", help="Use the proxy set in the environment; requires TLS."),
]

# Servers.
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
]
