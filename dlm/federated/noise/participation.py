"""The rounds in which one user may take part, and the resulting sensitivity.

The **gap** is the least difference between the rounds of a user's successive participations (1:
every round). The papers' tables print the *number of rounds between* them, MinS, which is one less;
`gap_from_min_separation` converts it.

All sensitivities are for a clip norm of 1 and the worst pattern of at most `max_participations`
participations with that gap.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError

Floats = NDArray[np.float64]

DENSE_GAP = 24  # up to this gap, `_dense_forest` is the faster search


def gap_from_min_separation(min_separation: int) -> int:
    """Converts the number of rounds between two participations (GDP, BLT: MinS) to the gap."""
    if min_separation < 0:
        raise ConfigError(
            f"the number of rounds between participations is {min_separation}; expected 0 or more"
        )
    return min_separation + 1


def min_separation_from_gap(gap: int) -> int:
    """The number of rounds between two participations, as the papers' tables print it."""
    return gap - 1


def check_participation(rounds: int, gap: int, max_participations: int) -> int:
    """The number of participations that fit in `rounds`, at most `max_participations`."""
    for name, value in (
        ("rounds", rounds),
        ("gap", gap),
        ("max_participations", max_participations),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    return min(max_participations, most_participations(rounds, gap))


def most_participations(rounds: int, gap: int) -> int:
    """The largest number of participations that `gap` allows in `rounds`, ceil(rounds / gap); the
    papers' rounds / MinS, rounded down, can be too small."""
    return -(-rounds // gap)


def check_restarts(restarts: Sequence[int], rounds: int) -> tuple[int, ...]:
    """Returns `restarts`; ConfigError unless they are ascending rounds after the first round."""
    if any(b <= a for a, b in itertools.pairwise([0, *restarts, rounds])):
        raise ConfigError(
            f"restarts are {list(restarts)}; expected ascending rounds between 1 and {rounds - 1}"
        )
    return tuple(restarts)


def toeplitz_sensitivity(coefs: Floats, rounds: int, gap: int, max_participations: int) -> float:
    """The sensitivity of a lower triangular Toeplitz matrix, exactly.

    `coefs` (<= rounds,) are its first column; missing coefficients are 0.

    Raises  ValueError  the coefficients rise or are negative, so the worst pattern is not known
    Paper   BLT Theorem 3.1: the worst pattern is the earliest, at distance `gap`
    """
    if np.any(coefs < 0) or np.any(np.diff(coefs) > 0):
        raise ValueError("the coefficients must be non-increasing and non-negative")
    times = check_participation(rounds, gap, max_participations)
    column = np.zeros(rounds)
    column[: min(len(coefs), rounds)] = coefs[:rounds]
    return float(np.linalg.norm(separated_sums(column, gap, times)))


def separated_sums(column: Floats, gap: int, times: int) -> Floats:
    """Adds to a column `times - 1` copies of it, shifted down by 1, 2, ... gaps, cut at the end."""
    rounds = len(column)
    rows = -(-rounds // gap)
    square = np.zeros((rows, gap))
    square.reshape(-1)[:rounds] = column
    sums = np.cumsum(square, axis=0)
    if times < rows:
        sums[times:] -= sums[:-times].copy()
    return sums.reshape(-1)[:rounds]


def orthogonal_sensitivity(norms_squared: Floats, gap: int, max_participations: int) -> float:
    """The sensitivity from squared column norms, if columns `gap` or more apart are orthogonal."""
    best = best_separated_sum(norms_squared, gap, max_participations)
    return math.sqrt(best)


def best_separated_sum(weights: Floats, gap: int, max_participations: int) -> float:
    """The largest sum of up to `max_participations` weights >= 0 whose places are at least `gap`
    apart."""
    rounds = len(weights)
    times = check_participation(rounds, gap, max_participations)
    # best[i] is the largest sum if all participations so far are at place i or earlier.
    best = np.zeros(rounds)
    for _ in range(times):
        before = np.zeros(rounds)
        before[gap:] = best[: max(rounds - gap, 0)]
        best = np.maximum.accumulate(weights + before)
    return float(best[-1])


def banded_sensitivity(bands: Floats, gap: int, max_participations: int) -> tuple[float, bool]:
    """The sensitivity of a matrix C with banded C^T C, and whether it is exact or an upper bound.

    It is exact if a participation overlaps only the previous and the next one (b <= 2 gap; products
    count by absolute value, since each contribution may flip the sign of the next). Otherwise it is
    an upper bound, computed from each column's own worst pattern.

    Shapes  bands  (b, rounds)  bands[d, j] = (C^T C)[j, j + d]; 0 where j + d >= rounds
    Paper   Choquette-Choo et al. 2023: multi-epoch, Theorem 2.1; banded, appendix
    """
    size = np.abs(bands)
    width, rounds = bands.shape
    times = check_participation(rounds, gap, max_participations)
    if width <= gap or times == 1:
        return orthogonal_sensitivity(size[0], gap, max_participations), True
    if width <= 2 * gap:
        return math.sqrt(_chain(size, gap, times)), True
    own = size[0].copy()
    for j in range(rounds):
        right = size[gap:width, j][: max(rounds - gap - j, 0)]
        reach = np.arange(gap, min(width, j + 1))
        left = size[reach, j - reach]
        worst = 0.0
        for row in (right, left):
            if len(row):
                worst += best_separated_sum(row, gap, max(times - 1, 1))
        own[j] += worst
    return math.sqrt(best_separated_sum(own, gap, times)), False


def _chain(size: Floats, gap: int, times: int) -> float:
    """The largest sum of diagonal terms and twice the off-diagonal terms, over all patterns."""
    width, rounds = size.shape
    ending = size[0].copy()  # [j]: the largest sum if the last participation so far is at j
    best = float(ending.max())
    for _ in range(times - 1):
        far = np.full(rounds, -np.inf)  # [j]: the most that participations before j can add
        reach = np.maximum.accumulate(ending)
        far[width:] = reach[: rounds - width]
        for d in range(gap, width):
            far[d:] = np.maximum(far[d:], ending[: rounds - d] + 2 * size[d, : rounds - d])
        ending = size[0] + far
        best = max(best, float(ending.max()))
    return best


def forest_sizes(rounds: int) -> list[int]:
    """Sizes of the complete binary trees that cover `rounds` leaves, largest first."""
    return [1 << bit for bit in range(rounds.bit_length() - 1, -1, -1) if rounds >> bit & 1]


def forest_sensitivity_squared(sizes: tuple[int, ...], gap: int, max_participations: int) -> int:
    """The squared sensitivity of a matrix with one row per node of complete binary trees, exactly.

    A user contributes the number of participations below a node to that node; the result is the
    largest sum of squared contributions. A tree's halves are searched apart; only the
    rounds forbidden at a half's start link them. `sizes` are leaf counts, powers of two, in order.

    Paper  Kairouz et al. 2021, appendix D (a dynamic program over the tree); GDP 3
    """
    times = check_participation(sum(sizes), gap, max_participations)
    if times == most_participations(sum(sizes), gap):
        return _unbounded_forest(sizes, gap)
    if gap <= DENSE_GAP:
        return _dense_forest(sizes, gap, times)

    @functools.cache
    def tree(size: int, closed: int, count: int) -> tuple[tuple[int, int], ...]:
        if count == 0:
            return ((0, max(0, closed - size)),)
        if closed + (count - 1) * gap >= size:
            return ()
        if count == 1 and size <= gap:
            return ((size.bit_length(), closed + gap - size),)
        half = size // 2
        room = most_participations(half, gap)
        return _front(
            (first + second + count * count, after)
            for here in range(max(0, count - room), min(count, room) + 1)
            for first, between in tree(half, closed, here)
            for second, after in tree(half, between, count - here)
        )

    # For each count of participations, the best (value, rounds closed when the next tree starts).
    states: list[tuple[tuple[int, int], ...]] = [((0, 0),)] + [()] * times
    for size in sizes:
        states = [
            _front(
                (value + more, after)
                for here in range(count + 1)
                for value, closed in states[count - here]
                for more, after in tree(size, closed, here)
            )
            for count in range(times + 1)
        ]
    return max(value for state in states for value, _ in state)


def _unbounded_forest(sizes: tuple[int, ...], gap: int) -> int:
    """The squared sensitivity if only the gap bounds participations. A pattern is always better
    with more participations, a larger value and fewer rounds closed after it, so few are kept."""

    @functools.cache
    def tree(size: int, closed: int) -> tuple[tuple[int, int, int], ...]:
        none = (0, 0, max(closed - size, 0))
        if closed >= size:
            return (none,)
        if size <= gap:
            return none, (1, size.bit_length(), closed + gap - size)
        half = size // 2
        return _three_way_front(
            (here + there, first + second + (here + there) ** 2, after)
            for here, first, between in tree(half, closed)
            for there, second, after in tree(half, between)
        )

    states: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    for size in sizes:
        # Trees share no node, so the number of participations in one does not affect the next.
        states = _three_way_front(
            (0, value + more, after)
            for _, value, closed in states
            for _, more, after in tree(size, closed)
        )
    return max(value for _, value, _ in states)


def _dense_forest(sizes: tuple[int, ...], gap: int, times: int) -> int:
    """The squared sensitivity for short gaps and many participations. Arrays hold a part's largest
    sum of squares by [rounds closed before it, rounds closed after it, participations]."""
    leaf = np.full((gap, gap, 2), -np.inf)
    leaf[0, gap - 1, 1] = 1.0
    for closed in range(gap):
        leaf[closed, max(closed - 1, 0), 0] = 0.0
    trees = {1: leaf}
    size = 1
    while size < max(sizes):
        whole = _joined(trees[size], trees[size], times)
        size *= 2
        trees[size] = whole + np.arange(whole.shape[2]) ** 2.0
    whole = trees[sizes[0]][:1]
    for size in sizes[1:]:
        whole = _joined(whole, trees[size], times)
    return int(whole[0].max())


def _joined(first: Floats, second: Floats, times: int) -> Floats:
    most = min(first.shape[2] + second.shape[2] - 2, times)
    out = np.full((first.shape[0], second.shape[1], most + 1), -np.inf)
    for between in range(second.shape[0]):
        for count in range(min(first.shape[2] - 1, most) + 1):
            room = most + 1 - count
            here = out[:, :, count : count + second.shape[2]]
            value = first[:, between, count, None, None] + second[None, between, :, :room]
            np.maximum(here, value, out=here)
    # Drops participation counts that cannot be reached.
    reached = np.flatnonzero(np.isfinite(out).any(axis=(0, 1)))
    return out[:, :, : reached[-1] + 1]


def _front(states: Any) -> tuple[tuple[int, int], ...]:
    kept: list[tuple[int, int]] = []
    least: int | None = None
    for value, closed in sorted(set(states), key=lambda state: (-state[0], state[1])):
        if least is None or closed < least:
            kept.append((value, closed))
            least = closed
    return tuple(kept)


def _three_way_front(states: Any) -> tuple[tuple[int, int, int], ...]:
    kept: list[tuple[int, int, int]] = []
    for count, value, closed in sorted(set(states), key=lambda s: (-s[0], -s[1], s[2])):
        if not any(value <= best and closed >= least for _, best, least in kept):
            kept.append((count, value, closed))
    return tuple(kept)


def named_sensitivity(
    name: str, rounds: int, gap: int, max_participations: int, restarts: tuple[int, ...] = ()
) -> float:
    """The sensitivity of gaussian, tree, tree-full or tree-restart, which have no parameters."""
    if name == "gaussian":
        return math.sqrt(check_participation(rounds, gap, max_participations))
    edges = [0, *check_restarts(restarts, rounds), rounds]
    sizes = tuple(size for a, b in itertools.pairwise(edges) for size in forest_sizes(b - a))
    return math.sqrt(forest_sensitivity_squared(sizes, gap, max_participations))
