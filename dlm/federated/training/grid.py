"""Adds discrete noise to a round's sums, and returns a noised average.

A round releases one row of integers: the sum of updates, in steps of 2^-32 of the clip norm
(rounded up to a power of two), and the count for the adaptive clip norm, in steps of 2^-32 users.
Noise is added to the row; anything computed from the noised row reveals no more than that row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dlm.errors import PrivacyError
from dlm.federated.fixed_point import GRID_BITS, steps_per_unit
from dlm.federated.keys import Key
from dlm.federated.noise.discrete import DiscreteNoise, DiscreteState
from dlm.federated.noise.stream import GENERATOR
from dlm.federated.training.clip import Estimator, FixedDenominator
from dlm.federated.training.engine import Engine, LocalEngine, RoundSums

ARITHMETIC = f"integers, {GRID_BITS} bits"  # part of the settings that a run must keep
MOST_COST = 1.001  # largest factor by which rounding may raise rho
MOST_LOOSE_REPORTS = 1 << 14  # a sum of this many reports is exact to half a step in a double
_COUNT_UNIT = 2.0**GRID_BITS


@dataclass(frozen=True)
class GridRelease:
    """Adds noise to the sums of a run. `count_stddev`, in users, is the standard deviation of the
    noise on the count that adapts the clip norm; None if the norm is fixed. Sums are rounded first
    unless they are whole steps (`on_grid`)."""

    noise: DiscreteNoise
    estimator: Estimator
    multiplier: float
    count_stddev: float | None
    on_grid: bool

    def init(self, key: Key, params: Any) -> DiscreteState:
        return self.noise.init(key, self.size(params))

    def size(self, params: Any) -> int:
        return sum(map(np.size, jax.tree.leaves(params))) + (self.count_stddev is not None)

    def factor(self, size: int, sensitivity: float) -> float:
        """Returns the factor, at least 1, by which the grid raises the sensitivity. Raises
        PrivacyError if rho would grow by more than a thousandth."""
        clipped = float(self.estimator.sensitivity(1.0)) * self.estimator.denominator
        largest = self.multiplier * clipped * 2.0**GRID_BITS
        if self.count_stddev is not None:
            largest = max(largest, self.count_stddev * _COUNT_UNIT)
        least = 2.0 ** (GRID_BITS - 1)  # fewest steps in a clip norm; also the steps in half a user
        # Rounding to the grid can move the sums of neighbouring data sets a step further apart.
        loose = 1.0 if self.on_grid else 1 + 2 * math.sqrt(size) / least
        factor = loose + self.noise.added(size, largest) / (sensitivity * least)
        if factor * factor > MOST_COST:
            raise PrivacyError(
                f"the grid of discrete noise is too coarse: for {size:,} numbers over "
                f"{self.noise.rounds:,} rounds of {self.noise.name}, it raises rho by a factor of "
                f"{factor * factor:.6g}; at most {MOST_COST} is allowed. Use fewer rounds, or "
                "privacy.mechanism = tree"
            )
        return factor

    def noised(
        self, state: DiscreteState, sums: RoundSums, bound: float
    ) -> tuple[Any, float, DiscreteState]:
        """Returns (noised average, centred count, next state); the count has noise if the norm
        adapts. PrivacyError if an off-grid sum has too many reports to be exact to half a step."""
        if not self.on_grid and float(sums.users) > MOST_LOOSE_REPORTS:
            raise PrivacyError(
                f"a round has {int(sums.users):,} users; a sum that is decoded or averaged before "
                f"noise is added is exact for at most {MOST_LOOSE_REPORTS:,} users. Lower the "
                "report goal or q, or use estimator = fixed without secure aggregation"
            )
        unit, over = steps_per_unit(bound, GRID_BITS), self.estimator.denominator
        total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums.update)
        if not isinstance(self.estimator, FixedDenominator):
            mean = self.estimator.average(total, sums.weight)
            total = jax.tree.map(lambda leaf: leaf * over, mean)
        leaves, tree = jax.tree.flatten(total)
        steps = np.concatenate([np.rint(leaf.ravel() * unit).astype(np.int64) for leaf in leaves])
        deviation = self.multiplier * float(self.estimator.sensitivity(bound)) * over * unit
        parts = [(len(steps), deviation)]
        if self.count_stddev is not None:
            count = round(float(sums.below) * _COUNT_UNIT)
            steps = np.append(steps, np.int64(count))
            parts.append((1, self.count_stddev * _COUNT_UNIT))
        drawn, state = self.noise.step(state, parts)
        steps += drawn  # not drawn += steps: `drawn` may be a buffer of the noise's stream
        averages, at = [], 0
        for leaf in leaves:
            part = steps[at : at + leaf.size] / (unit * over)
            averages.append(part.astype(np.float32).reshape(leaf.shape))
            at += leaf.size
        below = float(sums.below) if self.count_stddev is None else float(steps[at]) / _COUNT_UNIT
        return jax.tree.unflatten(tree, averages), below, state


def is_on_grid(engine: Engine, estimator: Estimator) -> bool:
    """Tells whether an engine's sums are whole steps, so that they need no rounding."""
    return (
        type(engine) is LocalEngine
        and engine.aggregator is None
        and engine.bits == GRID_BITS
        and isinstance(estimator, FixedDenominator)
    )


def described() -> dict[str, str]:
    """Describes the grid and the generator, for records."""
    return {
        "grid": f"2^-{GRID_BITS} of the clip norm, which is rounded up to a power of two",
        "generator": GENERATOR,
    }
