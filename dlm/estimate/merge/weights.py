"""Weights of a mixture: checked, or found by expectation maximisation on held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, EstimationError, shown
from dlm.estimate.merge import kernels
from dlm.estimate.merge.heldout import Heldout

# Weights that are written with six digits still sum to 1 within this tolerance.
SUM_TOLERANCE = 1e-5
MAX_ITERATIONS = 10_000


@dataclass(frozen=True, eq=False)
class TunedWeights:
    """Weights with sum 1; the best weights would raise the mean ln probability by at most `gap`."""

    weights: tuple[float, ...]
    iterations: int
    gap: float


MAX_WEIGHT = 1e6  # larger weights could overflow the sum that an error message divides by


def check_weights(weights: Sequence[float], models: int) -> NDArray[np.float64]:
    """Returns the weights as an array that sums to 1 to the last digit; ConfigError unless there is
    one weight per model, each is a number, 0 or more, and their sum is 1 within 1e-5."""
    if len(weights) != models:
        raise ConfigError(
            f"{len(weights)} weights were given for {models} models; give one weight per model, in "
            "the same order"
        )
    for weight in weights:
        valid = isinstance(weight, Real) and not isinstance(weight, bool)
        if not valid or not 0 <= weight <= MAX_WEIGHT:  # also rejects NaN
            raise ConfigError(
                f"the weight {shown(weight)} is not valid; expected numbers, 0 or more, that sum "
                "to 1"
            )
    total = math.fsum(weights)
    if abs(total - 1) > SUM_TOLERANCE:
        shares = ",".join(f"{w / total:.6g}" for w in weights) if total > 0 else "0.5,0.5"
        raise ConfigError(
            f"the weights sum to {total:g}; expected 1. In the same proportions: {shares}"
        )
    return np.array(weights, np.float64) / total


def tune(
    heldout: Heldout, *, gap: float = 1e-6, max_iterations: int = MAX_ITERATIONS
) -> TunedWeights:
    """Finds the weights under which the held-out text is most probable, word by word.

    Words that no model knows are left out: their scores say nothing about a mixture.

    Args    gap              how far from the maximum to stop, in natural logarithms per token
    Raises  EstimationError  the text has no word that a model knows
    Guarantees
        `gap` bounds the distance to the maximum. The mean of p_i / p over the tokens, less 1, is
        the slope towards model i alone; the logarithm is concave, so no weights gain more than the
        largest slope, and no step of EM (Jelinek and Mercer 1980) makes the text less probable
    """
    prob = np.ascontiguousarray(heldout.prob[:, heldout.in_any])
    models, tokens = prob.shape
    if tokens <= heldout.sentences:  # only sentence ends
        raise EstimationError(
            "the held-out text has no word that any of the models knows; give text of the kind "
            "that the mixture is for, one sentence per line, with words spelled as in the models"
        )
    weights = np.full(models, 1 / models)
    share = np.empty(models)
    iteration = 0
    while True:
        kernels.expect(prob, weights, share)
        left = float(share.max()) - 1
        if left <= gap or iteration >= max_iterations:
            return TunedWeights(tuple(weights.tolist()), iteration, max(left, 0.0))
        weights *= share
        weights /= weights.sum()
        iteration += 1
