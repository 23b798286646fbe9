"""Noise whose running sums are small: the mechanisms of DP-FTRL and of DP-FedAvg.

`make_mechanism` builds one by name; `mechanism.Mechanism` is what all of them answer.
"""

from __future__ import annotations

from dlm.federated.noise.keys import NoiseKey, key_from_seed, key_from_system
from dlm.federated.noise.make import NAMES, make_mechanism
from dlm.federated.noise.mechanism import Mechanism, NoiseState
from dlm.federated.noise.participation import gap_from_min_sep, min_sep_from_gap

__all__ = [
    "NAMES",
    "Mechanism",
    "NoiseKey",
    "NoiseState",
    "gap_from_min_sep",
    "key_from_seed",
    "key_from_system",
    "make_mechanism",
    "min_sep_from_gap",
]
