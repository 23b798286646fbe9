"""Noise whose running sums are small: the mechanisms of DP-FTRL and of DP-FedAvg.

`make_mechanism` builds one by name; `mechanism.Mechanism` is their interface. Names are imported on
first use, because exact draws (`discrete_gaussian`) do not need JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_LIES_IN = {
    "NAMES": "make",
    "Mechanism": "mechanism",
    "NoiseKey": "keys",
    "NoiseState": "mechanism",
    "gap_from_min_sep": "participation",
    "key_from_seed": "keys",
    "key_from_system": "keys",
    "make_mechanism": "make",
    "min_sep_from_gap": "participation",
}


def __getattr__(name: str) -> Any:
    if name not in _LIES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LIES_IN[name]}"), name)
