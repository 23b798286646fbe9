"""How far dlm's accounting is from that of dp-accounting, jax-privacy and the papers.

Run as a program, it prints the table: `PYTHONPATH=tests python -m federated.test_comparison`.
"Equal to x": x is the largest relative difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax_privacy", reason="pip install -e '.[peers]'")
pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

import dp_accounting
import jax
import jax.numpy as jnp
from jax_privacy.matrix_factorization import buffered_toeplitz, sensitivity, toeplitz

from benchmarks.privacy_tables import blt_table_4, gdp_tables
from dlm.federated.account.recheck import event_of
from dlm.federated.account.sampled import make_accountant
from dlm.federated.account.zcdp import gaussian_epsilon, zcdp_epsilon
from dlm.federated.noise.blt import PRODUCTION, Blt
from dlm.federated.noise.participation import banded_sensitivity, toeplitz_sensitivity
from federated.linear import linear_map
from federated.test_jax_privacy import PATTERNS, band_matrix, falling, their_band_matrix
from federated.test_recheck import STAGES

RHOS, DELTAS = (0.02, 0.2, 1.0, 5.0), (1e-6, 1e-10)
BOUNDS = (1e-12, 1e-9, 1e-6, 1e-4)  # of a relative difference, as the table has them

EXPECTED = [
    (10, "equal to 1e-12"),
    (8, "equal to 1e-06"),
    (8, "4 to 8 % larger"),
    (15, "equal to 1e-12"),
    (16, "equal to 1e-12"),
    (6, "up to 2 % smaller, and exact"),
    (72, "equal to 1e-09"),
    (30, "27 agree; 3 do not, and are explained"),
]


class Row(NamedTuple):
    """What is compared with what, in how many cases, and what comes of it."""

    ours: str
    theirs: str
    cases: int
    found: str


def equal(pairs: Iterator[tuple[float, float]]) -> tuple[int, str]:
    """(cases, the least of `BOUNDS` that no relative difference exceeds)."""
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs]
    worst = max(differences)
    return len(differences), f"equal to {min(b for b in BOUNDS if b >= worst):.0e}"


def stages() -> Iterator[tuple[float, float]]:
    """Rho of each mechanism's stage, and of the event that its report prints."""
    for stage in STAGES:
        event = eval(event_of(stage), {"dp_accounting": dp_accounting})
        yield stage.rho, 1 / (2 * event.noise_multiplier**2)


def pld_epsilon(rho: float, delta: float) -> float:
    """Of one Gaussian, by privacy loss distributions."""
    ledger = make_accountant("pld")
    ledger.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(2 * rho)))
    return float(ledger.get_epsilon(delta))


def toeplitz_squares() -> Iterator[tuple[float, float]]:
    """Squared sensitivities: coefficients that fall anyhow, and those of a production BLT."""
    for rounds, gap, most in PATTERNS:
        for coefs in (falling(rounds, 1), falling(rounds // 2, 2), PRODUCTION[100].coefs(rounds)):
            theirs = toeplitz.minsep_sensitivity_squared(jnp.asarray(coefs), gap, most, rounds)
            yield toeplitz_sensitivity(coefs, rounds, gap, most) ** 2, float(theirs)


def banded(gaps: tuple[int, ...], *, overlap: bool) -> Iterator[tuple[float, float]]:
    """Sensitivities of banded matrices, exact ones alone; with `overlap`, beside their bound."""
    for gap in gaps:
        for bands in (2, 4, 7, 13):
            made = band_matrix(37, bands)
            dense = their_band_matrix(made).materialize()
            for most in (3, 100):
                ours, exact = banded_sensitivity(made.gram(), gap, most)
                if exact and overlap == (bands > gap):
                    of = (
                        sensitivity.get_min_sep_sensitivity_upper_bound
                        if overlap
                        else sensitivity.get_sensitivity_banded
                    )
                    yield ours, float(of(dense, gap, most))


def blt_covariances() -> Iterator[tuple[float, float]]:
    """Of the noise that streams draw, round by round."""
    for parameters in PRODUCTION.values():
        mapped = linear_map(Blt(24, parameters))
        their = buffered_toeplitz.BufferedToeplitz.build(parameters.decay, parameters.scale)
        matrix = np.asarray(their.inverse_as_streaming_matrix().materialize(24))
        yield from zip(np.diag(mapped @ mapped.T), np.diag(matrix @ matrix.T), strict=True)


def rows() -> list[Row]:
    """The table, computed."""
    peer, papers = "jax-privacy", (blt_table_4(), gdp_tables())
    gaussian = [(gaussian_epsilon(r, d), pld_epsilon(r, d)) for r in RHOS for d in DELTAS]
    reported = [zcdp_epsilon(r, d) / gaussian_epsilon(r, d) - 1 for r in RHOS for d in DELTAS]
    with jax.enable_x64():
        squares = equal(toeplitz_squares())
        alike = equal(banded((4, 7, 12), overlap=False))
        bounds = [ours / bound - 1 for ours, bound in banded((4, 7, 12), overlap=True)]
        drawn = equal(blt_covariances())
    agree, differ = (sum(text.count(f"| {word}") for text in papers) for word in ("yes |", "no "))
    return [
        Row("rho of a stage", "dp-accounting: the event in its report", *equal(stages())),
        Row("epsilon of exact Gaussian noise", "dp-accounting: PLD", *equal(iter(gaussian))),
        Row(
            "epsilon that a run reports", "exact Gaussian noise of the same rho", len(reported),
            f"{100 * min(reported):.0f} to {100 * max(reported):.0f} % larger",
        ),
        Row("sensitivity of Toeplitz matrices, squared", peer, *squares),
        Row("sensitivity of banded matrices, bands up to the gap", peer, *alike),
        Row(
            "the same, bands up to twice the gap", f"{peer}: an upper bound", len(bounds),
            f"up to {-100 * min(bounds):.0f} % smaller, and exact",
        ),
        Row("variance of BLT noise, as drawn", peer, *drawn),
        Row(
            "rho and epsilon of published runs", "BLT Table 4, GDP Tables 1 and 2", agree + differ,
            f"{agree} agree; {differ} do not, and are explained",
        ),
    ]  # fmt: skip


def test_the_accounting_is_as_near_to_others_as_it_was() -> None:
    """Row by row."""
    assert [(row.cases, row.found) for row in rows()] == EXPECTED


if __name__ == "__main__":
    print("| dlm | compared with | cases | result |", "| --- | --- | ---: | --- |", sep="\n")
    for row in rows():
        print(f"| {' | '.join(map(str, row))} |")
