"""Independent Gaussian noise in every round: DP-FedAvg's (DPF Algorithm 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dlm.federated.noise.mechanism import Base, Floats, NoiseState, PyTree, check_rounds, draw
from dlm.federated.noise.participation import check_participation


class GaussianMechanism(Base):
    """C is the identity: each round's noise is independent, and running sums add it all up."""

    name = "gaussian"
    buffer_count = 0

    def __init__(self, rounds: int) -> None:
        self.rounds = check_rounds(rounds)

    def _advance(self, state: NoiseState) -> tuple[PyTree, PyTree]:
        return draw(state), state.buffers

    def matrix(self) -> dict[str, Any]:
        """Nothing: C is the identity."""
        return {}

    def sensitivity(self, *, gap: int, max_part: int) -> float:
        """The square root of the number of participations."""
        return math.sqrt(check_participation(self.rounds, gap, max_part))

    def prefix_variances(self) -> Floats:
        """One more per round."""
        return np.arange(1.0, self.rounds + 1)
