"""Noise whose running sums are small: the mechanisms of DP-FTRL and of DP-FedAvg."""

from __future__ import annotations

from dlm.federated.noise.make import NAMES, make_mechanism
from dlm.federated.noise.mechanism import Mechanism
from dlm.federated.noise.participation import gap_from_min_separation, min_separation_from_gap

__all__ = [
    "NAMES",
    "Mechanism",
    "gap_from_min_separation",
    "make_mechanism",
    "min_separation_from_gap",
]
