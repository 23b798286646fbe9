"""Options that the commands of `dlm privacy` share, and the plots that they draw."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import WRITE, integers_of, parsed
from dlm.errors import ConfigError

if TYPE_CHECKING:
    from dlm.federated.account.plan import NoisePlan
    from dlm.federated.noise.blt import BltParameters
    from dlm.federated.noise.mechanism import Mechanism


class Name(StrEnum):
    """Names of mechanisms on the command line."""

    gaussian = "gaussian"
    tree = "tree"
    tree_full = "tree-full"
    bandmf = "bandmf"
    bandtoep = "bandtoep"
    bandfhu = "bandfhu"
    blt = "blt"


# Noise multipliers with which runs of 500 users per round learned well: GDP 2.2 has the tree's; the
# BLT's is 7.379 at 6,500 users (BLT Table 4), scaled in proportion.
SIMULATED = {Name.tree: 0.54, Name.blt: 7.379 * 500 / 6500}

Delta = Annotated[float, typer.Option("--delta", help="Delta of the guarantee, such as 1e-10.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Number of rounds.")]
Gap = Annotated[
    int | None,
    typer.Option(
        "--gap",
        help="Minimum number of rounds from one participation of a user to the next; 1 allows "
        "every round.",
    ),
]
MinSep = Annotated[
    int | None,
    typer.Option(
        "--min-separation",
        help="Instead of --gap: the rounds in between (MinS in the papers), gap - 1.",
    ),
]
MaxPart = Annotated[
    int, typer.Option("--max-participations", help="Maximum participations per user.")
]
Which = Annotated[Name, typer.Option("--mechanism", help="How noise is correlated between rounds.")]
Buffers = Annotated[
    int | None, typer.Option("--buffers", help="Buffers of an optimised BLT.  [default: 4]")
]
Bands = Annotated[
    int | None,
    typer.Option("--bands", help="Bands of bandmf, bandtoep and bandfhu.  [default: the gap]"),
]
MadeFor = Annotated[
    str | None,
    typer.Option(
        "--made-for",
        metavar="ROUNDS,GAP,MAXPART",
        help="Participation to optimise a BLT for, such as 2000,100,10.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Figure to write, .png, .svg or .pdf."),
    WRITE,
]

# Texts that say for which noise an epsilon holds.
AS_REPORTED = "as a run reports it (discrete noise)"
AS_PUBLISHED = "for exact Gaussian noise, as papers print it"

BANDED = ("bandmf", "bandtoep", "bandfhu")
ONLY_OF = {
    **dict.fromkeys(("made_for", "buffers", "error", "decay", "scale"), ("blt",)),
    "bands": BANDED,
    "coefficients": ("bandtoep",),
    "restarts": ("tree",),
}
DEFAULT_BUFFERS, MOST_BUFFERS = 4, 10


def gap_of(gap: int | None, min_separation: int | None) -> int:
    """Returns the gap; `ConfigError` unless exactly one of --gap, --min-separation is given."""
    from dlm.federated.noise.participation import gap_from_min_separation

    if gap is not None and min_separation is not None:
        raise ConfigError(
            "--gap and --min-separation were both given; give one of them (gap = MinS + 1)"
        )
    if gap is not None:
        return gap
    if min_separation is None:
        raise ConfigError("the gap is missing; give --gap, or --min-separation, which is one less")
    return gap_from_min_separation(min_separation)


def only_of_some(name: str, rounds: int, **given: str | int | None) -> None:
    """Rejects options that do not apply to a mechanism, and values out of range."""
    for setting, found in given.items():
        only = ONLY_OF[setting]
        if found is not None and name not in only:
            option = f"--{setting.replace('_', '-')}"
            raise ConfigError(
                f"{option} applies to --mechanism {' or '.join(only)} only, but the mechanism is "
                f"{name}; leave the option out"
            )
    buffers, bands = given.get("buffers"), given.get("bands")
    if buffers is not None and not 1 <= int(buffers) <= MOST_BUFFERS:
        raise ConfigError(
            f"--buffers is {buffers}; expected 1 to {MOST_BUFFERS} (2 to 4 are enough)"
        )
    if bands is not None and not 1 <= int(bands) <= rounds:
        raise ConfigError(f"--bands is {bands}; expected 1 to the number of rounds, {rounds}")


def blt_made_for(made_for: str, buffers: int | None, error: str) -> BltParameters:
    """The BLT optimised for ROUNDS,GAP,MAXPART."""
    from dlm.federated.noise.blt import optimise_blt

    expected = "ROUNDS,GAP,MAXPART, such as 2000,100,10"
    rounds, gap, max_participations = parsed("--made-for", made_for, _three, expected)
    buffers = DEFAULT_BUFFERS if buffers is None else buffers
    return optimise_blt(rounds, gap, max_participations, buffers=buffers, error=error)


def _three(text: str) -> tuple[int, int, int]:
    first, second, third = integers_of(text)
    return first, second, third


def progress_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# File formats of the figures of `dlm privacy mechanism` and `plan`.
DRAWN = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Rejects a figure that cannot be written, before its content is computed."""
    if path is None:
        return
    if path.suffix.lower() not in DRAWN:
        raise ConfigError(f"--plot is {path}; expected a name ending in {' or '.join(DRAWN)}")
    _figure()


def _figure() -> Any:
    from dlm.extras import pip_install

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as exc:
        command = pip_install(["matplotlib"])
        raise ConfigError(
            f"--plot needs matplotlib, which is not installed; run\n  {command}"
        ) from exc
    return pyplot


def plot_errors(made: Mechanism, sensitivity: float, path: Path) -> None:
    import numpy as np

    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(sensitivity * np.sqrt(made.prefix_variances()))
    axes.set(xlabel="round", ylabel="sensitivity x standard deviation", title=made.name)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def plot_plan(made: NoisePlan, path: Path) -> None:
    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([s.report_goal for s in made.considered], [s.rho for s in made.considered])
    axes.axhline(made.target_rho, linestyle=":", color="grey")
    axes.plot([made.chosen.report_goal], [made.chosen.rho], "o")
    axes.set(xlabel="report goal, noise in proportion", ylabel="zCDP rho", yscale="log")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
