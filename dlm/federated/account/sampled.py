"""Accounting for Gaussian noise on Poisson-sampled cohorts, as in DP-FedAvg."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from dlm.errors import ConfigError, PrivacyError


def moments_epsilon(q: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon by the moments accountant as used in DPF: integer moments 1 to 32 (Abadi et al. 2016,
    Theorem 2). DPF's Tables 1 and 2 print this epsilon, which is looser than `tight_epsilon`."""
    _check(q, noise_multiplier, delta)
    return min(
        (rounds * log_moment(q, noise_multiplier, moment) - math.log(delta)) / moment
        for moment in range(1, 33)
    )


def log_moment(q: float, noise_multiplier: float, moment: int) -> float:
    """Returns the natural log-moment of order `moment` of the privacy loss in one round
    (Mironov, Talwar and Zhang 2019, section 3.3, with Renyi order `moment + 1`)."""
    order = moment + 1
    k = np.arange(order + 1)
    with np.errstate(divide="ignore"):
        kept = np.where(k == order, 0.0, (order - k) * np.log1p(-q)) if q < 1 else None
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    growth = (k * k - k) / (2 * noise_multiplier**2)
    if kept is None:  # everybody takes part in every round
        return float(growth[-1])
    return float(logsumexp(log_binomial + kept + k * math.log(q) + growth))


def tight_epsilon(
    q: float, noise_multiplier: float, rounds: int, delta: float, *, accountant: str = "pld"
) -> float:
    """Epsilon by current accounting: "pld" (numerical, tight) or "rdp" (Renyi orders, fast)."""
    from dp_accounting import dp_event

    _check(q, noise_multiplier, delta)
    event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(noise_multiplier))
    ledger = make_accountant(accountant)
    ledger.compose(event, rounds)
    return float(ledger.get_epsilon(delta))


def make_accountant(name: str, *, whole_orders: bool = False):  # type: ignore[no-untyped-def]
    """Makes the accountant "pld" or "rdp" of dp-accounting, for zero-out adjacency. `whole_orders`
    limits "rdp" to integer orders, at which sampled discrete noise has a Gaussian's divergences."""
    import dp_accounting

    neighbours = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if name == "pld":
        return dp_accounting.pld.PLDAccountant(neighbours)
    if name == "rdp":
        orders = [*range(2, 129), *range(136, 513, 8)] if whole_orders else None
        return dp_accounting.rdp.RdpAccountant(orders, neighboring_relation=neighbours)
    raise ConfigError(f"unknown accountant {name!r}; expected pld or rdp")


def refuse_unless_poisson(sampling: str) -> None:
    """Raises PrivacyError unless cohorts were drawn as amplification assumes."""
    if sampling != "poisson":
        raise PrivacyError(
            f"cohorts were sampled with {sampling!r}, but only Poisson sampling amplifies privacy. "
            "Account without amplification, from the gap and the number of participations"
        )


def _check(q: float, noise_multiplier: float, delta: float) -> None:
    if not 0 < q <= 1:
        raise ConfigError(f"the sampling probability is {q}; it must be above 0 and at most 1")
    if not noise_multiplier > 0:
        raise ConfigError(f"the noise multiplier is {noise_multiplier}; it must be above 0")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be between 0 and 1")
