"""Which rounds one user may take part in, and the sensitivity that follows.

One convention: the **gap** is the least difference between the rounds of a user's successive
participations (1: every round). The papers' tables print the *number of rounds between* them,
MinS, which is one less; `gap_from_min_sep` converts where such a number comes in.

All sensitivities are for a clip norm of 1 and for the worst pattern of at most `max_part`
participations with that gap.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError

Floats = NDArray[np.float64]


def gap_from_min_sep(min_sep: int) -> int:
    """The gap, from the number of rounds between two participations (GDP, BLT: MinS)."""
    if min_sep < 0:
        raise ConfigError(f"the number of rounds between participations is {min_sep}, not >= 0")
    return min_sep + 1


def min_sep_from_gap(gap: int) -> int:
    """The number of rounds between two participations, as the papers' tables print it."""
    return gap - 1


def check_participation(rounds: int, gap: int, max_part: int) -> int:
    """How many participations fit: the smaller of `max_part` and what `rounds` leave room for."""
    for name, value in (("rounds", rounds), ("gap", gap), ("max_part", max_part)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, not a number >= 1")
    return min(max_part, most_participations(rounds, gap))


def most_participations(rounds: int, gap: int) -> int:
    """The largest number of participations that `gap` allows in `rounds`: ceil(rounds / gap).

    The papers divide rounds by MinS and round down, which can be less than what may happen.
    """
    return -(-rounds // gap)


def toeplitz_sensitivity(coefs: Floats, rounds: int, gap: int, max_part: int) -> float:
    """Of a lower triangular Toeplitz matrix, exactly.

    Shapes
        coefs  (<= rounds,)  first column; what is missing is 0
    Raises
        ValueError  the coefficients rise or are negative: the worst pattern is not known then
    Paper           BLT Theorem 3.1: the worst pattern is the earliest, at distance `gap`
    """
    if np.any(coefs < 0) or np.any(np.diff(coefs) > 0):
        raise ValueError("the coefficients are not non-increasing and non-negative")
    times = check_participation(rounds, gap, max_part)
    column = np.zeros(rounds)
    column[: min(len(coefs), rounds)] = coefs[:rounds]
    total = np.zeros(rounds)
    for i in range(times):
        total[i * gap :] += column[: rounds - i * gap]
    return float(np.linalg.norm(total))


def orthogonal_sensitivity(norms_squared: Floats, gap: int, max_part: int) -> float:
    """Of a matrix whose columns at distance `gap` or more are orthogonal, exactly.

    Shapes
        norms_squared  (rounds,)  squared norm of each column
    """
    best = best_separated_sum(norms_squared, gap, max_part)
    return math.sqrt(best)


def best_separated_sum(weights: Floats, gap: int, max_part: int) -> float:
    """The largest sum of at most `max_part` weights >= 0 whose places differ by `gap` or more."""
    rounds = len(weights)
    times = check_participation(rounds, gap, max_part)
    # best[i]: with the participations so far at place i or before
    best = np.zeros(rounds)
    for _ in range(times):
        before = np.zeros(rounds)
        before[gap:] = best[: max(rounds - gap, 0)]
        best = np.maximum.accumulate(weights + before)
    return float(best[-1])


def banded_sensitivity(bands: Floats, gap: int, max_part: int) -> tuple[float, bool]:
    """Of a matrix C with banded C^T C, and whether that is exact or an upper bound.

    Shapes
        bands  (b, rounds)  bands[d, j] = (C^T C)[j, j + d]; 0 where j + d >= rounds
    Returns
        (sensitivity, exact). Exact where a participation meets only the one before and the one
        after (b <= 2 gap; products count by their size, since each contribution may turn the sign
        of the next). Otherwise an upper bound: each column with its own worst pattern.
    Paper
        Choquette-Choo et al. 2023 (multi-epoch), Theorem 2.1 and (banded), appendix
    """
    size = np.abs(bands)
    width, rounds = bands.shape
    times = check_participation(rounds, gap, max_part)
    if width <= gap or times == 1:
        return orthogonal_sensitivity(size[0], gap, max_part), True
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
    """The largest sum over patterns of diagonal terms and twice those of neighbours."""
    width, rounds = size.shape
    ending = size[0].copy()  # value of the best pattern of the participations so far, last at j
    best = float(ending.max())
    for _ in range(times - 1):
        far = np.full(rounds, -np.inf)  # the one before is out of reach
        reach = np.maximum.accumulate(ending)
        far[width:] = reach[: rounds - width]
        for d in range(gap, width):
            far[d:] = np.maximum(far[d:], ending[: rounds - d] + 2 * size[d, : rounds - d])
        ending = size[0] + far
        best = max(best, float(ending.max()))
    return best


def forest_sizes(rounds: int) -> list[int]:
    """The complete binary trees that cover `rounds` leaves, largest first: its binary digits."""
    return [1 << bit for bit in range(rounds.bit_length() - 1, -1, -1) if rounds >> bit & 1]


def forest_sensitivity_squared(sizes: tuple[int, ...], gap: int, max_part: int) -> int:
    """Of the matrix with one row for each node of a row of complete binary trees, exactly.

    A user's participations add, in each node, their number; the answer is the largest sum of its
    squares. Patterns are searched by halves: all that one half tells the next is how many rounds
    stay forbidden at its start.

    Args
        sizes  leaves of each tree, powers of two, in order of rounds
    Paper
        Kairouz et al. 2021, appendix D (a dynamic program over the tree); GDP 3
    """
    times = check_participation(sum(sizes), gap, max_part)
    if gap == 1:  # nothing is forbidden: numbers of participations alone tell the parts
        whole = np.zeros(1)
        for size in sizes:
            whole = _max_plus(whole, _free_tree(size))
        return int(whole[: times + 1].max())

    @functools.cache
    def tree(size: int, closed: int, count: int) -> tuple[tuple[int, int], ...]:
        """Best (value, rounds closed after it), `closed` rounds at its start being forbidden."""
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

    # By participations so far: best (value, rounds closed at the start of the next tree).
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


def _free_tree(size: int) -> Floats:
    """(size + 1,) largest sum of squares in a tree by the number of participations, any rounds."""
    best = np.array([0.0, 1.0])
    for _ in range(size.bit_length() - 1):
        best = _max_plus(best, best)
        best += np.arange(len(best)) ** 2.0
    return best


def _max_plus(first: Floats, second: Floats) -> Floats:
    """By sums of places: the largest sum of values."""
    out = np.full(len(first) + len(second) - 1, -np.inf)
    for i, value in enumerate(first):
        here = out[i : i + len(second)]
        np.maximum(here, value + second, out=here)
    return out


def _front(states: Any) -> tuple[tuple[int, int], ...]:
    """Those states that no other beats in value and in rounds left open."""
    kept: list[tuple[int, int]] = []
    least: int | None = None
    for value, closed in sorted(set(states), key=lambda state: (-state[0], state[1])):
        if least is None or closed < least:
            kept.append((value, closed))
            least = closed
    return tuple(kept)


def named_sensitivity(
    name: str, rounds: int, gap: int, max_part: int, restarts: tuple[int, ...] = ()
) -> float:
    """Of a mechanism that has no parameters: gaussian, tree, tree-full or tree-restart."""
    if name == "gaussian":
        return math.sqrt(check_participation(rounds, gap, max_part))
    edges = [0, *restarts, rounds]
    sizes = tuple(size for a, b in itertools.pairwise(edges) for size in forest_sizes(b - a))
    return math.sqrt(forest_sensitivity_squared(sizes, gap, max_part))
