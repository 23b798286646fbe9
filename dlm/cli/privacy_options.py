"""What the commands of `dlm privacy` share: options, and how answers are printed."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dlm.federated.noise.blt import BltParameters


class Name(StrEnum):
    """Mechanisms by the names of the command line."""

    gaussian = "gaussian"
    tree = "tree"
    tree_full = "tree-full"
    bandmf = "bandmf"
    bandtoep = "bandtoep"
    bandfhu = "bandfhu"
    blt = "blt"


# Noise multipliers that learned well with 500 users a round: GDP 2.2, and in proportion 7.379 with
# 6,500 (BLT Table 4).
SIMULATED = {Name.tree: 0.54, Name.blt: 7.379 * 500 / 6500}

Delta = Annotated[float, typer.Option("--delta", help="Probability that epsilon does not hold.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Rounds that are run.")]
Gap = Annotated[
    int | None,
    typer.Option(
        "--gap",
        help="Least difference between the rounds of two participations of a user; 1 is every "
        "round.",
    ),
]
MinSep = Annotated[
    int | None,
    typer.Option(
        "--min-sep", help="Or the rounds between the two (MinS of the papers): the gap less 1."
    ),
]
MaxPart = Annotated[int, typer.Option("--max-part", help="Most participations of one user.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Which = Annotated[Name, typer.Option("--mechanism", help="How noise is correlated over rounds.")]
Buffers = Annotated[
    int | None, typer.Option("--buffers", help="Of a BLT that is optimised; 4 if not given.")
]
Bands = Annotated[
    int | None, typer.Option("--bands", help="Of bandmf, bandtoep, bandfhu; the gap if not given.")
]
MadeFor = Annotated[
    str | None,
    typer.Option(help="Of a BLT: optimise it for ROUNDS,GAP,MAXPART, as 2000,100,10."),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw to this file, as .png or .svg.")]

# Whose epsilon a number is.
AS_REPORTED = "as a run reports it (discrete noise)"
AS_SIMULATED = "for exact Gaussian noise, as simulations report it (noise in floats)"

BANDED = ("bandmf", "bandtoep", "bandfhu")
DEFAULT_BUFFERS, MOST_BUFFERS = 4, 10


def gap_of(gap: int | None, min_sep: int | None) -> int:
    """The gap, given by itself or as the number of rounds between.

    Raises  ConfigError  neither or both were given
    """
    from dlm.errors import ConfigError
    from dlm.federated.noise.participation import gap_from_min_sep

    if gap is not None and min_sep is not None:
        raise ConfigError("--gap and --min-sep were both given; one is expected (gap = MinS + 1)")
    if gap is not None:
        return gap
    if min_sep is None:
        raise ConfigError("give --gap, or --min-sep, which is one less")
    return gap_from_min_sep(min_sep)


def only_of_some(
    name: str,
    rounds: int,
    *,
    made_for: str | None = None,
    buffers: int | None = None,
    bands: int | None = None,
    error: str | None = None,
) -> None:
    """Refuses options that mean nothing for a mechanism, and values that are none."""
    from dlm.errors import ConfigError

    if name != "blt":
        for option, found in (("--made-for", made_for), ("--buffers", buffers), ("--error", error)):
            if found is not None:
                raise ConfigError(
                    f"{option} is {found} with {name}; it is for a BLT (--mechanism blt). The "
                    "bands of banded mechanisms are --bands"
                )
    elif buffers is not None and not 1 <= buffers <= MOST_BUFFERS:
        raise ConfigError(
            f"--buffers is {buffers}; a BLT of 1 to {MOST_BUFFERS} can be optimised, and 2 to 4 do"
        )
    if bands is not None:
        if name not in BANDED:
            raise ConfigError(f"--bands is {bands} with {name}; it is for {', '.join(BANDED)}")
        if not 1 <= bands <= rounds:
            raise ConfigError(f"--bands is {bands}; it must be 1 to the number of rounds, {rounds}")


def blt_made_for(made_for: str, buffers: int | None, error: str) -> BltParameters:
    """The BLT that is optimised for ROUNDS,GAP,MAXPART."""
    from dlm.errors import ConfigError
    from dlm.federated.noise.blt import optimise_blt

    try:
        rounds, gap, max_part = (int(part) for part in made_for.split(","))
    except ValueError:
        raise ConfigError(
            f"--made-for is {made_for!r}, not ROUNDS,GAP,MAXPART as 2000,100,10"
        ) from None
    buffers = DEFAULT_BUFFERS if buffers is None else buffers
    return optimise_blt(rounds, gap, max_part, buffers=buffers, error=error)


def progress_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_json(answer: dict[str, Any]) -> None:
    """JSON has no infinity: an infinite number is null there."""
    from dlm.federated.run_folder import finite

    print(json.dumps(finite(answer), indent=2))
