"""Mixes models into one: static linear interpolation, with weights tuned on held-out text."""

from dlm.estimate.merge.heldout import Heldout, read_heldout
from dlm.estimate.merge.mixture import MergedModel, merge_models
from dlm.estimate.merge.union import Union, unite
from dlm.estimate.merge.weights import TunedWeights, check_weights, tune

__all__ = [
    "Heldout",
    "MergedModel",
    "TunedWeights",
    "Union",
    "check_weights",
    "merge_models",
    "read_heldout",
    "tune",
    "unite",
]
