"""Tree aggregation: noise on the nodes of a binary tree over rounds; a running sum needs few nodes.

There are two ways to add up the nodes. *Online* (`TreeAgg`): each node is estimated from itself and
everything below it as soon as it is complete (Honaker 2015, from below; GDP, Kairouz et al. 2021).
*Full* (`TreeAggFull`): the best estimate from all nodes, the pseudo-inverse of BLT 2.3. Both
release only complete nodes, so both have the same sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlm.federated.noise.mechanism import Base, Floats, check_rounds
from dlm.federated.noise.participation import (
    check_restarts,
    forest_sensitivity_squared,
    forest_sizes,
)


def node_variances(levels: int) -> Floats:
    """Returns (levels,): by height, the variance of the estimate that combines a complete node with
    the estimates of the node's children, weighted by precision (Honaker 2015)."""
    variances = np.ones(levels)
    for level in range(1, levels):
        variances[level] = 1 / (1 + 1 / (2 * variances[level - 1]))
    return variances


class TreeAgg(Base):
    """Tree aggregation with online variance reduction, and optional restarts.

    The buffers hold one noise estimate, of a complete subtree, per set bit of the number of
    rounds. A new round is added as in a binary counter, and the round's noise is the change in the
    buffers' sum. So log2(rounds + 1) buffers are enough, and each carry takes one draw.
    """

    def __init__(self, rounds: int, restarts: Sequence[int] = ()) -> None:
        self.rounds = check_rounds(rounds)
        self._restarts = check_restarts(restarts, rounds)
        self.name = "tree-restart" if self._restarts else "tree"
        self._lengths = np.diff([0, *self._restarts, rounds])
        self.buffer_count = int(max(self._lengths)).bit_length()

    @property
    def restarts(self) -> tuple[int, ...]:
        return self._restarts

    def matrix(self) -> dict[str, Any]:
        """Returns only the restarts, since a round's nodes do not depend on later rounds."""
        return {"restarts": list(self._restarts)} if self._restarts else {}

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """Computes the exact sensitivity by a dynamic program over the trees of all segments."""
        sizes = tuple(size for length in self._lengths for size in forest_sizes(int(length)))
        return math.sqrt(forest_sensitivity_squared(sizes, gap, max_participations))

    def prefix_variances(self) -> Floats:
        """Each running sum adds one estimate per binary digit of its length."""
        variances = node_variances(self.buffer_count)
        parts = []
        before = 0.0
        for length in self._lengths:
            counts = np.arange(1, length + 1)
            digits = (counts[:, None] >> np.arange(self.buffer_count)) & 1
            parts.append(before + digits @ variances)
            before = float(parts[-1][-1])
        return np.concatenate(parts)


class TreeAggFull(Base):
    """Tree aggregation with the best estimate from all complete nodes, drawn round by round.

    The noise has covariance (C^T C)^-1, where C has one row per complete node; so the noise depends
    on all rounds of the run. If rounds are drawn in order, a round's noise depends on earlier noise
    only through the sums of the complete left halves beside the round's path to the root:
    `buffer_count` sums, one per digit of the round, are enough.

    Paper  BLT 2.3 (pseudo-inverse of Denisov et al. 2022), which keeps the noise of all rounds
    """

    name = "tree-full"

    def __init__(self, rounds: int) -> None:
        self.rounds = check_rounds(rounds)
        self._sizes = forest_sizes(rounds)
        self.buffer_count = max(self._sizes[0].bit_length() - 1, 0)
        self._spread, self._pull = _conditionals(self._sizes)

    def conditionals(self) -> tuple[Floats, Floats, Floats]:
        """Returns, given earlier noise, (rounds,) standard deviations; (rounds, held) weights on
        the sums of complete left halves, smallest first; (rounds,) int64 places in a tree."""
        place = np.concatenate([np.arange(size) for size in self._sizes])
        return self._spread, self._pull, place

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """Computes the exact sensitivity by a dynamic program over the trees."""
        return math.sqrt(forest_sensitivity_squared(tuple(self._sizes), gap, max_participations))

    def prefix_variances(self) -> Floats:
        """Computes the variances tree by tree; the noise of different trees is independent."""
        parts = []
        before = 0.0
        for size in self._sizes:
            parts.append(before + _full_variances(size))
            before = float(parts[-1][-1])
        return np.concatenate(parts)


def _full_variances(size: int) -> Floats:
    """Returns (size,): the variance of each running sum in one complete tree, from all nodes."""
    levels = size.bit_length()
    # alone[h] is the variance of the sum over a subtree of height h, estimated from its own nodes.
    alone = node_variances(levels)

    def inside(level: int, whole: float) -> tuple[Floats, Floats]:
        """Returns (variance of each running sum in a subtree, covariance of each with the subtree's
        sum), all given the nodes above. `whole` is the variance of the subtree's sum."""
        if level == 0:
            return np.array([whole]), np.array([whole])
        # Given the subtree's sum, the left half's sum is half of it plus an independent residual.
        residual = alone[level - 1] / 2
        half = whole / 4 + residual
        variances, with_half = inside(level - 1, half)
        # Left half L = W/2 + E, right half R = W/2 - E; a running sum P in a half H is
        # with_half / half * H plus a part independent of both.
        slope = with_half / half
        left_with_whole = slope * whole / 2
        right = half + variances + 2 * slope * (whole / 4 - residual)
        right_with_whole = whole / 2 + slope * whole / 2
        return np.concatenate([variances, right]), np.concatenate(
            [left_with_whole, right_with_whole]
        )

    return inside(levels - 1, float(alone[levels - 1]))[0]


def _conditionals(sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """Given earlier noise, returns (rounds,) deviations and (rounds, held) weights on held sums."""
    held = max(sizes[0].bit_length() - 1, 0)
    spreads, pulls = [], []
    for size in sizes:
        top = size.bit_length() - 1
        alone = node_variances(top + 1)
        for place in range(size):
            # From the root down the path, the nodes above imply an estimate of each level's sum:
            # `weights` times the held sums, with precision `sure`.
            sure = 0.0
            weights = np.zeros(held)
            for level in range(top, 0, -1):
                # The node of this level adds the information that its sum is 0, with precision 1.
                weights *= sure / (sure + 1)
                sure += 1
                if place >> (level - 1) & 1:  # the left half is complete: the round is in the right
                    weights[level - 1] -= 1
                else:  # the right half is still to come
                    sure = 1 / (1 / sure + alone[level - 1])
            spreads.append(1 / math.sqrt(sure + 1))
            pulls.append(weights * sure / (sure + 1))
    return np.array(spreads), np.array(pulls).reshape(len(spreads), held)
