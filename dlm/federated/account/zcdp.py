"""Converts noise to rho of zero-concentrated differential privacy, and rho to (epsilon, delta).

A matrix mechanism is one Gaussian mechanism on all rounds together, even if rounds depend on
earlier releases (Denisov et al. 2022, Theorem 2.1). So its tightest epsilon is that of a single
Gaussian with the same rho; a bound that holds for *every* rho-zCDP mechanism is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr

from dlm.errors import ConfigError, PrivacyError


def rho_of(sensitivity: float, noise_multiplier: float) -> float:
    """Returns the rho of Gaussian noise, sensitivity^2 / (2 noise_multiplier^2), for a clip norm of
    1 (Bun and Steinke 2016, Proposition 1.6); infinite without noise."""
    if not (noise_multiplier >= 0 and sensitivity >= 0):
        raise ConfigError(
            f"the noise multiplier is {noise_multiplier} and the sensitivity is {sensitivity}; "
            "expected 0 or more for both"
        )
    if sensitivity == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    ratio = sensitivity / noise_multiplier  # ratio * ratio may be infinite; ** would raise
    return ratio * ratio / 2


def noise_for(sensitivity: float, rho: float) -> float:
    if not rho > 0:
        raise ConfigError(f"rho is {rho}; it must be above 0")
    return sensitivity / math.sqrt(2 * rho)


def gaussian_delta(rho: float, epsilon: float) -> float:
    """Returns the exact smallest delta of a Gaussian mechanism with this rho at `epsilon` (Balle
    and Wang 2018, Theorem 8, with sensitivity / sigma = sqrt(2 rho))."""
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return 1.0
    mu = math.sqrt(2 * rho)
    upper = float(ndtr(mu / 2 - epsilon / mu))
    log_lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(upper - math.exp(min(log_lower, 0.0)), 0.0)


def gaussian_epsilon(rho: float, delta: float) -> float:
    """Returns the exact smallest epsilon of a Gaussian mechanism with this rho, which is also that
    of a matrix mechanism. Numerical accounting (PLD) agrees to within its own precision."""
    _check_delta(delta)
    if math.isinf(rho):
        return math.inf
    if gaussian_delta(rho, 0.0) <= delta:
        return 0.0
    # The difference of two nearly equal tails loses digits, so use logarithms.
    mu = math.sqrt(2 * rho)

    def excess(epsilon: float) -> float:
        log_upper = float(log_ndtr(mu / 2 - epsilon / mu))
        log_lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        log_delta = log_upper + math.log(-math.expm1(min(log_lower - log_upper, -1e-300)))
        return log_delta - math.log(delta)

    top = zcdp_epsilon(rho, delta)
    return float(brentq(excess, 0.0, top * (1 + 1e-9) + 1e-9, xtol=1e-12, rtol=1e-12))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """An epsilon that holds for every rho-zCDP mechanism, whatever its noise (Canonne, Kamath and
    Steinke 2020, Corollary 13, minimised over the order alpha)."""
    _check_delta(delta)
    if math.isinf(rho):
        return math.inf
    if rho == 0:
        return 0.0

    def bound(log_excess: float) -> float:
        alpha = 1 + math.exp(log_excess)
        tail = (-math.log(delta) + (alpha - 1) * math.log1p(-1 / alpha) - math.log(alpha)) / (
            alpha - 1
        )
        return rho * alpha + tail

    best = (math.log(-math.log(delta)) - math.log(rho)) / 2
    found = minimize_scalar(bound, bounds=(best - 8, best + 8), method="bounded")
    return max(float(found.fun), 0.0)


def rho_for_epsilon(
    epsilon: float, delta: float, *, of: Callable[[float, float], float] = zcdp_epsilon
) -> float:
    """Returns the largest rho whose epsilon, computed by the function `of`, is at most `epsilon`.
    Runs use `zcdp_epsilon`; `gaussian_epsilon` is the alternative."""
    _check_delta(delta)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"epsilon is {epsilon}; it must be finite and above 0")
    high = 1.0
    while of(high, delta) < epsilon:
        high *= 2
    # Search ln rho, since a small delta and epsilon need a tiny rho; at the low end epsilon is 0.
    found = brentq(
        lambda x: of(math.exp(x), delta) - epsilon,
        math.log(1e-300), math.log(high), xtol=1e-13, rtol=1e-13,
    )  # fmt: skip
    return math.exp(float(found))


def split_noise(noise_multiplier: float, clip_noise: float) -> float:
    """Returns the updates' noise multiplier if counts for the clip norm share the privacy budget.
    z, `noise_multiplier`, is for both together; sigma_b, `clip_noise`, is the noise on the counts.

    Raises  PrivacyError  2 sigma_b <= z, so the counts alone use up the budget
    Paper   GDP Theorem 1: z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)
    """
    if not (noise_multiplier > 0 and clip_noise > 0):
        raise ConfigError(
            f"the noise multiplier is {noise_multiplier} and the clip noise is {clip_noise}; both "
            "must be above 0"
        )
    rest = noise_multiplier**-2 - (2 * clip_noise) ** -2
    if rest <= 0:
        raise PrivacyError(
            f"a noise multiplier of {noise_multiplier} needs noise on the clip counts with a "
            f"standard deviation above half the multiplier; found {clip_noise:g}. If that is a "
            f"twentieth of the report goal, raise the goal above {10 * noise_multiplier:g}; "
            "otherwise raise the noise on the counts, or use a fixed clip norm"
        )
    return float(rest**-0.5)


def joined_noise(update_noise: float, clip_noise: float) -> float:
    return float((update_noise**-2 + (2 * clip_noise) ** -2) ** -0.5)


def _check_delta(delta: float) -> None:
    if not (0 < delta < 1) or not np.isfinite(delta):
        raise ConfigError(f"delta is {delta}; it must be between 0 and 1")
