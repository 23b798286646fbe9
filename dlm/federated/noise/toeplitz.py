"""Banded Toeplitz noise: BandToep, which is optimised, and BandFHU, which needs no optimisation.

C is lower triangular Toeplitz with `bands` coefficients. A round's noise depends on the noise of
the `bands - 1` preceding rounds, which is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize

from dlm.errors import ConfigError
from dlm.federated.noise.cache import cached
from dlm.federated.noise.mechanism import Base, Floats, check_rounds
from dlm.federated.noise.participation import banded_sensitivity, toeplitz_sensitivity


class BandedToeplitz(Base):
    def __init__(self, name: str, rounds: int, coefs: Floats) -> None:
        self.name = name
        self.rounds = check_rounds(rounds)
        if len(coefs) > rounds or not coefs[0] > 0:
            raise ConfigError(
                f"found {len(coefs)} bands for {rounds} rounds; expected at most one band per "
                "round, and a first coefficient above 0"
            )
        self.coefs = np.asarray(coefs, np.float64)
        self.buffer_count = len(coefs) - 1

    def matrix(self) -> dict[str, Any]:
        """Returns the coefficients or, for BandFHU, whose coefficients are known, their number."""
        if self.name == "bandfhu":
            return {**super().matrix(), "bands": len(self.coefs)}
        return {**super().matrix(), "coefficients": self.coefs.tolist()}

    def parameters_of(self) -> tuple[Floats, ...]:
        return (self.coefs,)

    def _falls(self) -> bool:
        return bool(np.all(self.coefs >= 0) and np.all(np.diff(self.coefs) <= 0))

    def _gram(self) -> Floats:
        """Returns (bands, rounds): the diagonals of C^T C, from the main diagonal outwards."""
        bands = np.zeros((len(self.coefs), self.rounds))
        for d in range(len(self.coefs)):
            products = np.cumsum(self.coefs[d:] * self.coefs[: len(self.coefs) - d])
            # The last columns are cut off: column j has rounds - j coefficients.
            left = np.minimum(self.rounds - d - np.arange(self.rounds - d), len(products))
            bands[d, : self.rounds - d] = products[left - 1]
        return bands

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """The sensitivity, exact if `sensitivity_is_exact`; otherwise an upper bound."""
        if self._falls():
            return toeplitz_sensitivity(self.coefs, self.rounds, gap, max_participations)
        return banded_sensitivity(self._gram(), gap, max_participations)[0]

    def sensitivity_is_exact(self, *, gap: int, max_participations: int) -> bool:
        return self._falls() or banded_sensitivity(self._gram(), gap, max_participations)[1]

    def prefix_variances(self) -> Floats:
        """The variances by BLT Proposition 3.3."""
        return np.cumsum(np.cumsum(inverse_coefs(self.coefs, self.rounds)) ** 2)


def inverse_coefs(coefs: Floats, rounds: int) -> Floats:
    """Returns (rounds,): the first column of the inverse of a lower triangular Toeplitz matrix."""
    out = np.zeros(rounds)
    back = coefs[:0:-1]
    for t in range(rounds):
        width = min(t, len(back))
        known = back[len(back) - width :] @ out[t - width : t]
        out[t] = ((1.0 if t == 0 else 0.0) - known) / coefs[0]
    return out


def square_root_coefs(count: int) -> Floats:
    """Coefficients of 1 / sqrt(1 - x): optimal for MaxLoss and one participation (Fichtenberger,
    Henzinger and Upadhyay 2022)."""
    steps = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def band_fhu(rounds: int, bands: int) -> BandedToeplitz:
    """The first `bands` coefficients of the square root, scaled to a column norm of 1 (Kalinin and
    Lampert 2024; BLT 4.2 BandFHU)."""
    coefs = square_root_coefs(min(bands, rounds))
    return BandedToeplitz("bandfhu", rounds, coefs / np.linalg.norm(coefs))


def band_toep(
    rounds: int, bands: int, *, progress: Callable[[str], None] | None = None
) -> BandedToeplitz:
    """Returns the banded Toeplitz matrix with column norm 1 and the least RmsLoss for gaps of at
    least `bands` (McKenna 2024); caches the matrix on disk."""
    bands = min(bands, rounds)
    settings = {"mechanism": "bandtoep", "rounds": rounds, "bands": bands}
    found = cached(settings, 1, lambda: _optimise(rounds, bands, progress))
    return BandedToeplitz("bandtoep", rounds, found["coefs"])


def _optimise(rounds: int, bands: int, progress: Callable[[str], None] | None) -> dict[str, Any]:
    steps = 0

    def show(intermediate_result: Any) -> None:
        nonlocal steps
        steps += 1
        if progress is not None and steps % 25 == 0:
            loss = math.exp(intermediate_result.fun / 2) / math.sqrt(rounds)
            progress(f"BandToep, {rounds} rounds, {bands} bands: step {steps}, RmsLoss {loss:.4f}")

    done = minimize(
        toeplitz_log_loss, square_root_coefs(bands), args=(rounds,), jac=True, method="L-BFGS-B",
        callback=show,
        options={"maxiter": 500, "maxfun": 1000, "maxcor": 20, "ftol": 1e-9, "gtol": 0},
    )  # fmt: skip
    coefs = done.x * np.sign(done.x[0]) / np.linalg.norm(done.x)
    made = BandedToeplitz("bandtoep", rounds, coefs)
    return {"coefs": coefs, "loss": made.rms_loss(gap=bands, max_participations=1)}


def toeplitz_log_loss(coefs: Floats, rounds: int) -> tuple[float, Floats]:
    """Logarithm of `rounds` times the squared RmsLoss for one participation, and its gradient: if
    c changes by e, the coefficients r of 1 / c change by -r * r * e (convolved)."""
    noising = inverse_coefs(coefs, rounds)
    if not np.all(np.isfinite(noising)):
        return 1e3, np.zeros(len(coefs))
    weight = rounds - np.arange(rounds)
    sums = np.cumsum(noising)
    error = float(np.sum(weight * sums**2))
    by_noising = np.cumsum((2 * weight * sums / error)[::-1])[::-1]
    size = 1 << (2 * rounds).bit_length()
    squared = np.fft.irfft(np.fft.rfft(noising, size) ** 2, size)[:rounds]
    across = np.fft.irfft(np.fft.rfft(by_noising, size) * np.conj(np.fft.rfft(squared, size)), size)
    norm = float(coefs @ coefs)
    return math.log(norm) + math.log(error), 2 * coefs / norm - across[: len(coefs)]
