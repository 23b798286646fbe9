"""The papers' figures on privacy, drawn from what dlm computes: no training, no measured data.

::

    python tests/benchmarks/privacy_figures.py --out FOLDER [--only blt3 gdp4 ...]
    python tests/benchmarks/privacy_figures.py --costs   # BLT Figure 1, Tables 1 and 2, in Markdown

Rounds, bands and populations are written in each title; where a paper's caption lost its numbers,
those of its text are taken (BLT 4.2, BLT 5, GDP 2.2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from privacy_tables import table

from dlm.federated.account.plan import extrapolate
from dlm.federated.account.zcdp import rho_of
from dlm.federated.noise import make_mechanism
from dlm.federated.noise.blt import PRODUCTION, Blt, _column, _scales, optimise_blt
from dlm.federated.noise.mechanism import Base
from dlm.federated.noise.participation import most_participations, named_sensitivity
from dlm.federated.noise.toeplitz import band_fhu, band_toep, inverse_coefs
from dlm.federated.noise.tree import TreeAggFull

Curves = dict[str, list[tuple[float, float]]]
ROUNDS = 2000
BANDS = 400


def losses(
    mechanism: Any, gaps: Sequence[int], max_participations: Callable[[int], int]
) -> list[Any]:
    """(gap, RmsLoss) along gaps."""
    return [
        (gap, mechanism.rms_loss(gap=gap, max_participations=max_participations(gap)))
        for gap in gaps
    ]


def named(rounds: int) -> dict[str, Any]:
    """The mechanisms that are compared over gaps, made once for 2,000 rounds and a gap of 400."""
    return {
        f"BandMF({BANDS})": make_mechanism("bandmf", rounds=rounds, gap=BANDS),
        "TreeAgg-Full": TreeAggFull(rounds),
        "BLT(4, max), made for 400": Blt(rounds, optimise_blt(rounds, BANDS, 5)),
        "BLT(4, mean), made for 400": Blt(rounds, optimise_blt(rounds, BANDS, 5, error="mean")),
    }


def blt1() -> tuple[str, str, str, Curves]:
    """CPU time to optimise, over the number of rounds, with bands or a gap of a fifth of them."""
    grid = {"BandMF": 1024, "BandToep": 16_384, "BLT(4)": 65_536}  # most rounds of each
    curves: Curves = {name: [] for name in grid}
    for rounds in (128, 256, 512, 1024, 2048, 4096, 16_384, 65_536):
        for name, most in grid.items():
            if rounds <= most:
                curves[name].append((rounds, optimising_s(name, rounds, rounds // 5)))
    return "gap, or bands, of n / 5; one core", "rounds n", "CPU seconds to optimise", curves


def optimising_s(name: str, rounds: int, gap: int) -> float:
    """CPU seconds that an optimisation takes, whose result is kept nowhere."""
    make: dict[str, Callable[[], object]] = {
        "BandMF": lambda: make_mechanism("bandmf", rounds=rounds, gap=gap),
        "BandToep": lambda: band_toep(rounds, gap),
        "BLT(4)": lambda: optimise_blt(rounds, gap, most_participations(rounds, gap)),
    }
    kept = os.environ.get("DLM_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DLM_CACHE_DIR"] = folder
        began = time.process_time()
        make[name]()
        spent = time.process_time() - began
    if kept is None:
        del os.environ["DLM_CACHE_DIR"]
    else:
        os.environ["DLM_CACHE_DIR"] = kept
    return spent


def blt10() -> tuple[str, str, str, Curves]:
    """Coefficients of C and of C^-1 of the BLTs that trained keyboards."""
    curves: Curves = {}
    for made_for, parameters in PRODUCTION.items():
        steps = range(1, 401)
        of_c, of_inverse = parameters.coefs(401), parameters.inverse_coefs(401)
        curves[f"C, made for {made_for}"] = [(t, float(of_c[t])) for t in steps]
        curves[f"-C^-1, made for {made_for}"] = [(t, -float(of_inverse[t])) for t in steps]
    return "BLTs of BLT Table 4, by the gap that each was made for", "t", "coefficient", curves


def blt12() -> tuple[str, str, str, Curves]:
    """MaxLoss over the gap, two participations: Figure 2 by the other loss."""
    gaps = [50, 100, 200, 300, 350, 390, 400, 450, 500, 600, 700, 800, 999]
    curves: Curves = {
        name: [(gap, made.max_loss(gap=gap, max_participations=2)) for gap in gaps]
        for name, made in named(ROUNDS).items()
    }
    for error in ("max", "mean"):
        curves[f"BLT(4, {error}), made for each gap"] = [
            (gap, blt.max_loss(gap=gap, max_participations=2))
            for gap in gaps
            for blt in [Blt(ROUNDS, optimise_blt(ROUNDS, gap, 2, error=error))]
        ]
    return "2,000 rounds, 2 participations", "gap", "MaxLoss", curves


def blt2() -> tuple[str, str, str, Curves]:
    """RmsLoss over the gap, few participations."""
    gaps = [50, 100, 200, 300, 350, 390, 400, 450, 500, 600, 700, 800, 999]
    curves = {name: losses(made, gaps, lambda _: 2) for name, made in named(ROUNDS).items()}
    curves["BLT(4, mean), made for each gap"] = [
        (
            gap,
            Blt(ROUNDS, optimise_blt(ROUNDS, gap, 2, error="mean")).rms_loss(
                gap=gap, max_participations=2
            ),
        )
        for gap in gaps
    ]
    return "2,000 rounds, 2 participations", "gap", "RmsLoss", curves


def blt3() -> tuple[str, str, str, Curves]:
    """Robustness to the gap at 3 participations."""
    gaps = [100, 200, 300, 350, 399, 400, 450, 500, 600, 700, 800, 900, 990, 999]
    curves = {name: losses(made, gaps, lambda _: 3) for name, made in named(ROUNDS).items()}
    for made_for in (100, 1000):
        blt = Blt(ROUNDS, PRODUCTION[made_for])
        curves[f"BLT made for {made_for}"] = losses(blt, gaps, lambda _: 3)
    return "2,000 rounds, 3 participations", "gap", "RmsLoss", curves


def blt4() -> tuple[str, str, str, Curves]:
    """As many participations as the gap allows."""
    gaps = [100, 125, 200, 250, 400, 500, 1000, 2000]
    curves = {
        name: losses(made, gaps, lambda gap: ROUNDS // gap) for name, made in named(ROUNDS).items()
    }
    return "2,000 rounds, 2,000 / gap participations", "gap", "RmsLoss", curves


def blt5() -> tuple[str, str, str, Curves]:
    """Robustness to the number of rounds: RmsLoss over the square root of the participations."""
    grid = [200, 400, 600, 800, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000, 3500, 4000]

    def point(mechanism: Any, rounds: int) -> tuple[float, float]:
        times = most_participations(rounds, BANDS)
        return rounds, mechanism.rms_loss(gap=BANDS, max_participations=times) / math.sqrt(times)

    curves: Curves = {}
    full = make_mechanism("bandmf", rounds=ROUNDS, gap=BANDS)
    curves[f"BandMF({BANDS}), made for {ROUNDS}"] = [
        point(full.truncated(rounds), rounds)  # type: ignore[attr-defined]
        for rounds in grid
        if rounds <= ROUNDS
    ]
    for made_for in (500, 2000, 4000):
        blt = optimise_blt(made_for, BANDS, most_participations(made_for, BANDS))
        curves[f"BLT(4), made for {made_for}"] = [point(Blt(n, blt), n) for n in grid]
    curves["TreeAgg-Full"] = [point(TreeAggFull(n), n) for n in grid]
    return "gap 400, as many participations as fit", "rounds run", "RmsLoss / sqrt(MaxP)", curves


def blt6() -> tuple[str, str, str, Curves]:
    """Other Toeplitz mechanisms, each made for the gap."""
    gaps = [50, 100, 200, 342, 500, 684, 1026]
    families: dict[str, Callable[[int, int], Base]] = {
        "BandToep": lambda gap, _: band_toep(2052, gap),
        "BandFHU": lambda gap, _: band_fhu(2052, gap),
        "BLT(4, mean)": lambda gap, k: Blt(2052, optimise_blt(2052, gap, k, error="mean")),
        "BLT(4, max)": lambda gap, k: Blt(2052, optimise_blt(2052, gap, k)),
    }
    curves: Curves = {name: [] for name in families}
    for gap in gaps:
        times = most_participations(2052, gap)
        for name, make in families.items():
            curves[name].append((gap, make(gap, times).rms_loss(gap=gap, max_participations=times)))
    return "2,052 rounds, as many participations as fit", "gap", "RmsLoss", curves


def sensitivity_of(name: str) -> Callable[[int, int, int], float]:
    """For the extrapolations: the tree, or the BLT whose noise multiplier is known for 6,500 users.

    That is one BLT throughout: the same multiplier with another one is other noise.
    """
    if name == "tree":
        return lambda rounds, gap, times: named_sensitivity("tree", rounds, gap, times)
    return lambda rounds, gap, times: Blt(rounds, PRODUCTION[400]).sensitivity(
        gap=gap, max_participations=times
    )


def blt8() -> tuple[str, str, str, Curves]:
    """Privacy over the report goal, noise in proportion."""
    curves: Curves = {}
    for population in (1_000_000, 3_000_000):
        for label, name, noise in (("TreeAgg-7", "tree", 7.0), ("BLT-7.379", "blt", 7.379)):
            curves[f"{label}, {population / 1e6:g} M users"] = [
                (
                    goal,
                    extrapolate(
                        population, ROUNDS, goal, noise * goal / 6500, 1e-10, sensitivity_of(name)
                    ).rho,
                )
                for goal in range(1000, 20001, 1000)
            ]
    title = "2,000 rounds, z in proportion to the report goal (as named at 6,500)"
    return title, "report goal", "zCDP rho", curves


def blt9() -> tuple[str, str, str, Curves]:
    """Privacy over the number of rounds, all else fixed."""
    grid = list(range(100, 4001, 100))
    curves: Curves = {}
    for label, name, noise in (("TreeAgg-7", "tree", 7.0), ("BLT-7.379", "blt", 7.379)):
        reach = sensitivity_of(name)
        curves[label] = [
            (n, rho_of(reach(n, 401, most_participations(n, 401)), noise)) for n in grid
        ]
    return "MinS 400, as many participations as fit", "rounds", "zCDP rho", curves


def gdp4(population: int) -> tuple[str, str, str, Curves]:
    """Privacy of TreeAgg over the report goal."""
    curves: Curves = {
        f"{rounds} rounds": [
            (
                goal,
                extrapolate(
                    population, rounds, goal, 7.0 * goal / 6500, 1e-10, sensitivity_of("tree")
                ).rho,
            )
            for goal in range(500, 10001, 500)
        ]
        for rounds in (500, 1000, 2000, 3000)
    }
    return f"TreeAgg, {population / 1e6:g} M users", "report goal", "zCDP rho", curves


def gdp4c() -> tuple[str, str, str, Curves]:
    """Privacy of TreeAgg over the separation."""
    curves: Curves = {
        f"{rounds} rounds": [
            (
                min_separation,
                rho_of(
                    named_sensitivity(
                        "tree",
                        rounds,
                        min_separation + 1,
                        most_participations(rounds, min_separation + 1),
                    ),
                    7.0,
                ),
            )
            for min_separation in range(50, 1001, 50)
        ]
        for rounds in (500, 1000, 2000, 3000)
    }
    return "TreeAgg, z = 7, report goal 6,500", "MinS", "zCDP rho", curves


def memory_table() -> str:
    """BLT Table 1: what is kept between rounds, in models, of 2,052 rounds and a gap of 342."""
    rows = []
    for label, name, more, formula in (
        ("independent", "gaussian", {}, "0"),
        ("TreeAgg, online", "tree", {}, "log2(n) + 1"),
        ("TreeAgg-Full", "tree-full", {}, "log2(n)"),
        ("BandMF", "bandmf", {}, "bands - 1"),
        ("BandToep", "bandtoep", {}, "bands - 1"),
        ("BLT, 2 buffers", "blt", {"buffers": 2}, "buffers"),
        ("BLT, 4 buffers", "blt", {"buffers": 4}, "buffers"),
    ):
        made = make_mechanism(name, rounds=2052, gap=342, max_participations=6, **more)  # type: ignore[arg-type]
        rows.append([label, formula, made.state_size(1)])
    return (
        "**BLT Table 1, memory** (2,052 rounds, gap 342: models of noise kept between rounds). The "
        "paper's cells are lost in the text at hand; it says that BLT saves most of what BandMF "
        "keeps, and that TreeAgg's is logarithmic.\n\n"
        + table(["mechanism", "models kept", "here"], rows)
    )


def inverse_table() -> str:
    """BLT Table 2: coefficients of C^-1 by solving for them, and from a pair of decays."""
    rows = []
    chain = np.linspace(0.999, 0.3, 8)  # of C and of C^-1 by turns
    own, other = chain[0::2], chain[1::2]
    for rounds in (500, 1000, 2000, 4000, 8000):
        coefs = _column(own, _scales(own, other), rounds)
        solved, slow = timed(lambda c=coefs, n=rounds: inverse_coefs(c, n))  # type: ignore[misc]
        paired, quick = timed(
            lambda n=rounds: _column(other, _scales(other, own), n)  # type: ignore[misc]
        )
        assert np.allclose(solved, paired, atol=1e-9)
        rows.append([f"{rounds:,}", f"{1e3 * slow:.2f}", f"{1e3 * quick:.3f}",
                     f"{slow / quick:.0f}"])  # fmt: skip
    return (
        "**BLT Table 2, time to compute the coefficients of C^-1** (CPU milliseconds, 4 buffers; "
        "the shortest of 5). By solving C x = e_0, and from the pair of BLT Algorithm 5. The "
        "paper's cells, of a V100, are lost in the text at hand; it says orders of magnitude.\n\n"
        + table(["n", "solved", "by the pair", "times"], rows)
    )


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """(result, CPU seconds), the shortest of five."""
    spent = []
    for _ in range(5):
        began = time.process_time()
        found = make()
        spent.append(time.process_time() - began)
    return found, max(min(spent), 1e-6)


def figure_1_table() -> str:
    """BLT Figure 1, in numbers."""
    _, _, _, curves = blt1()
    at = sorted({n for points in curves.values() for n, _ in points})
    rows = [
        [name, *(f"{dict(points)[n]:.2f}" if n in dict(points) else "" for n in at)]
        for name, points in curves.items()
    ]
    return (
        "**BLT Figure 1, CPU seconds to optimise** (gap, or bands, of n / 5, one core; all "
        "searches of a BLT together). The paper's is drawn: BandMF rises steeply, BLT goes on to "
        "far larger n.\n\n" + table(["mechanism", *(f"n = {n:,.0f}" for n in at)], rows)
    )


FIGURES: Mapping[str, Callable[[], tuple[str, str, str, Curves]]] = {
    "blt1": blt1, "blt10": blt10, "blt12": blt12,
    "blt2": blt2, "blt3": blt3, "blt4": blt4, "blt5": blt5, "blt6": blt6, "blt8": blt8,
    "blt9": blt9, "gdp4a": lambda: gdp4(1_000_000), "gdp4b": lambda: gdp4(3_000_000),
    "gdp4c": gdp4c,
}  # fmt: skip


def main() -> None:
    """Writes NAME.png and NAME.json for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the figures")
    parser.add_argument("--costs", action="store_true", help="tables of memory and time instead")
    parser.add_argument("--only", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    arguments = parser.parse_args()
    if arguments.costs:
        print("\n\n".join([memory_table(), inverse_table(), figure_1_table()]))
        return
    if arguments.out is None:
        parser.error("give --out, or --costs")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("figures need matplotlib: pip install matplotlib")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        title, across, up, curves = FIGURES[name]()
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.set(title=title, xlabel=across, ylabel=up)
        if up in ("zCDP rho", "CPU seconds to optimise", "coefficient"):
            axes.set_yscale("log")
        if name in ("blt1", "blt10"):
            axes.set_xscale("log")
        axes.legend(fontsize=8)
        figure.savefig(arguments.out / f"{name}.png", bbox_inches="tight", dpi=110)
        pyplot.close(figure)
        (arguments.out / f"{name}.json").write_text(
            json.dumps({"title": title, "x": across, "y": up, "curves": curves})
        )
        print(f"{name} done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
