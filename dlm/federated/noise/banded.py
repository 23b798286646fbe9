"""Banded matrix factorisation (BandMF): the banded C with the least RmsLoss, Toeplitz or not.

Columns have norm 1 and at most `bands` entries, so the sensitivity for participations at least
`bands` rounds apart is sqrt(participations). The noise of `bands - 1` earlier rounds is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import minimize

from dlm.errors import ConfigError
from dlm.federated.noise.cache import cached
from dlm.federated.noise.mechanism import Base, Floats, check_rounds
from dlm.federated.noise.participation import banded_sensitivity
from dlm.federated.noise.toeplitz import square_root_coefs

# With more rounds, an optimisation needs more than a few gigabytes and more than a few hours.
MOST_ROUNDS = 5_000


class BandMF(Base):
    """Noise correlated over `bands` rounds: `rows[t, d]` = C[t, t - d]; 0 where d > t."""

    name = "bandmf"

    def __init__(self, rows: Floats) -> None:
        self.rows = np.asarray(rows, np.float64)
        self.rounds = check_rounds(len(rows))
        self.buffer_count = rows.shape[1] - 1

    def truncated(self, rounds: int) -> BandMF:
        if rounds > self.rounds:
            raise ConfigError(
                f"this matrix is for {self.rounds} rounds, but {rounds} rounds were requested; "
                "make a matrix for that many"
            )
        return BandMF(self.rows[:rounds, : min(self.rows.shape[1], rounds)])

    def matrix(self) -> dict[str, Any]:
        return {**super().matrix(), "bands": self.rows.shape[1]}

    def parameters_of(self) -> tuple[Floats, ...]:
        return (self.rows,)

    def gram(self) -> Floats:
        """Returns (bands, rounds): the diagonals of C^T C, from the main diagonal outwards."""
        width = self.rows.shape[1]
        columns = self._columns()
        out = np.zeros((width, self.rounds))
        for d in range(width):
            out[d, : self.rounds - d] = np.sum(
                columns[d:, : self.rounds - d] * columns[: width - d, d:], axis=0
            )
        return out

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """The sensitivity, exact for gaps of at least half the bands; otherwise an upper bound."""
        return banded_sensitivity(self.gram(), gap, max_participations)[0]

    def sensitivity_is_exact(self, *, gap: int, max_participations: int) -> bool:
        return banded_sensitivity(self.gram(), gap, max_participations)[1]

    def prefix_variances(self) -> Floats:
        inverse = _solve_lower(_dense(self._columns()), np.eye(self.rounds), self.rows.shape[1])
        return np.asarray(np.sum(np.cumsum(inverse, axis=0) ** 2, axis=1))

    def _columns(self) -> Floats:
        out = np.zeros((self.rows.shape[1], self.rounds))
        for d in range(len(out)):
            out[d, : self.rounds - d] = self.rows[d:, d]
        return out


def optimise_bandmf(
    rounds: int, bands: int, *, progress: Callable[[str], None] | None = None
) -> BandMF:
    """Returns the banded matrix with columns of norm 1 and the least RmsLoss (Choquette-Choo et al.
    2023, banded, 4). A large search starts from a coarser one; the result is kept on disk."""
    bands = min(bands, rounds)
    if rounds > MOST_ROUNDS:
        raise ConfigError(
            f"BandMF for {rounds} rounds needs matrices of {rounds} x {rounds}; at most "
            f"{MOST_ROUNDS} rounds are supported. Use bandtoep or blt, or a shorter run"
        )
    settings = {"mechanism": "bandmf", "rounds": rounds, "bands": bands}
    found = cached(settings, 2, lambda: _optimise(rounds, bands, progress))
    return BandMF(found["rows"])


def _optimise(rounds: int, bands: int, progress: Callable[[str], None] | None) -> dict[str, Any]:
    columns = _solve(rounds, bands, progress)
    rows = np.zeros((rounds, bands))
    for d in range(bands):
        rows[d:, d] = columns[d, : rounds - d]
    return {"rows": rows, "loss": BandMF(rows).rms_loss(gap=bands, max_participations=1)}


def _solve(
    rounds: int,
    bands: int,
    progress: Callable[[str], None] | None,
    *,
    tolerance: float = 1e-6,
) -> Floats:
    """Returns (bands, rounds): the columns of the best C, from the diagonal entry down. The search
    stops at a step that lowers the squared error by less than the fraction `tolerance`."""
    inside = _inside(rounds, bands)
    if bands == 1:
        return np.ones((1, rounds))
    if rounds >= 128 and bands >= 16:
        coarse = _solve(rounds // 2, -(-bands // 2), progress, tolerance=1e-5)
        start = _stretched(coarse, rounds, bands)
    else:
        start = square_root_coefs(bands)[:, None] * inside
    # A late column affects few running sums: the loss is flatter along it, so a search would hardly
    # change the last sums, which determine MaxLoss. The loss scales columns to norm 1, so columns
    # can have any norm here: a smaller norm makes the search's steps longer.
    start = start / np.linalg.norm(start, axis=0) * np.sqrt(1 - np.arange(rounds) / rounds)
    steps = 0

    def objective(x: Floats) -> tuple[float, Floats]:
        columns = np.zeros((bands, rounds))
        columns[inside] = x
        loss, slope = column_loss(columns)
        return loss, slope[inside]

    def show(intermediate_result: Any) -> None:
        nonlocal steps
        steps += 1
        if progress is not None and steps % 10 == 0:
            error = np.sqrt(intermediate_result.fun)
            progress(f"BandMF, {rounds} rounds, {bands} bands: step {steps}, RMS error {error:.4f}")

    done = minimize(
        objective, start[inside], jac=True, method="L-BFGS-B", callback=show,
        options={"maxiter": 250, "maxfun": 400, "maxcor": 20, "ftol": tolerance, "gtol": 0},
    )  # fmt: skip
    columns = np.zeros((bands, rounds))
    columns[inside] = done.x
    return np.asarray(columns / np.linalg.norm(columns, axis=0))


def _inside(rounds: int, bands: int) -> NDArray[np.bool_]:
    return np.arange(rounds) < rounds - np.arange(bands)[:, None]


def column_loss(columns: Floats) -> tuple[float, Floats]:
    """With columns scaled to norm 1: (mean squared error of running sums, gradient wrt `columns`).

    With B = A C^-1 the error is the sum of B's squares divided by the rounds; the gradient wrt C is
    the band of -2 B^T (C^-1 B^T)^T, computed in blocks of about `bands` rows.
    """
    bands, rounds = columns.shape
    norms = np.linalg.norm(columns, axis=0)
    scaled = columns / norms
    dense = _dense(scaled)
    sums = np.cumsum(_solve_lower(dense, np.eye(rounds), bands), axis=0)
    solved = _solve_lower(dense, sums.T.copy(), bands)
    slope = np.zeros_like(columns)
    block = max(bands, 64)
    for first in range(0, rounds, block):  # rows of C, and of the gradient wrt C
        last = min(first + block, rounds)
        begin = max(first - bands + 1, 0)
        product = sums[first:, first:last].T @ solved[begin:last, first:].T
        for d in range(min(bands, last)):
            top = max(first, d)
            row, column = np.arange(top, last), np.arange(top - d, last - d)
            slope[d, column] = -2 * product[row - first, column - begin]
    slope /= rounds
    slope = (slope - scaled * np.sum(slope * scaled, axis=0)) / norms
    return float(np.sum(sums**2) / rounds), slope


def _dense(columns: Floats) -> Floats:
    bands, rounds = columns.shape
    dense = np.zeros((rounds, rounds))
    for d in range(bands):
        place = np.arange(rounds - d)
        dense[place + d, place] = columns[d, : rounds - d]
    return dense


def _solve_lower(dense: Floats, right: Floats, bands: int) -> Floats:
    """Overwrites `right` with C^-1 times `right`, block by block; C has `bands` diagonals."""
    rounds = len(dense)
    block = max(bands, 64)
    for first in range(0, rounds, block):
        last = min(first + block, rounds)
        begin = max(first - bands + 1, 0)
        if begin < first:
            right[first:last] -= dense[first:last, begin:first] @ right[begin:first]
        right[first:last] = solve_triangular(
            dense[first:last, first:last], right[first:last], lower=True, check_finite=False
        )
    return np.asarray(right)


def _stretched(columns: Floats, rounds: int, bands: int) -> Floats:
    """Stretches a solution to more rounds by interpolating its ratio to `square_root_coefs`."""
    small_bands, small_rounds = columns.shape
    ratio = columns / square_root_coefs(small_bands)[:, None]
    for d in range(1, small_bands):  # columns that end early continue like the last full one
        ratio[d, small_rounds - d :] = ratio[d, small_rounds - d - 1]
    ratio /= ratio[0].copy()
    down, part = _between(bands, small_bands)
    tall = ratio[down] * (1 - part[:, None]) + ratio[down + 1] * part[:, None]
    over, part = _between(rounds, small_rounds)
    wide = tall[:, over] * (1 - part) + tall[:, over + 1] * part
    return wide * square_root_coefs(bands)[:, None] * _inside(rounds, bands)


def _between(many: int, few: int) -> tuple[NDArray[np.int64], Floats]:
    """Spreads `many` points over `few` places; returns the place before each, and its distance."""
    place = np.arange(many) * (few - 1) / (many - 1)
    before = np.minimum(place.astype(np.int64), few - 2)
    return before, place - before
