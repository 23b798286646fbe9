"""Buffered linear Toeplitz noise (BLT): correlated over all rounds, with only a few buffers.

C is lower triangular Toeplitz with coefficients 1 and sum_i scale_i decay_i^(t - 1), t = 1, 2, ...
The noise of a round is a fresh draw minus the scaled buffers, and each buffer decays (BLT equation
3, Algorithm 3). C^-1 has the same form with other parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from dlm.errors import ConfigError
from dlm.federated.noise.cache import cached
from dlm.federated.noise.mechanism import Base, Floats, check_rounds
from dlm.federated.noise.participation import (
    check_participation,
    separated_sums,
    toeplitz_sensitivity,
)


@dataclasses.dataclass(frozen=True)
class BltParameters:
    """The parameters of a BLT, and the setting they were made for.

    Shapes
        decay  (buffers,)  theta of BLT 2.4, each in (0, 1], decreasing
        scale  (buffers,)  omega, each > 0, their sum at most 1
    """

    decay: tuple[float, ...]
    scale: tuple[float, ...]
    made_for: str = "given"

    def __post_init__(self) -> None:
        decay, scale = np.array(self.decay), np.array(self.scale)
        if (
            len(decay) != len(scale)
            or np.any((decay <= 0) | (decay > 1))
            or np.any(scale <= 0)
            or scale.sum() > 1
        ):
            raise ConfigError(
                f"a BLT with decays {self.decay} and scales {self.scale} has coefficients that "
                "rise or are negative, so its sensitivity is not known: decays must be in (0, 1], "
                "and scales must be above 0 and sum to at most 1"
            )

    def coefs(self, rounds: int) -> Floats:
        decay, scale = np.array(self.decay), np.array(self.scale)
        powers = decay ** np.arange(rounds - 1)[:, None]
        return np.concatenate([[1.0], powers @ scale])

    def inverse_coefs(self, rounds: int) -> Floats:
        """Returns (rounds,): the first column of C^-1, computed by running the buffers."""
        decay, scale = np.array(self.decay), np.array(self.scale)
        out = np.zeros(rounds)
        buffers = np.zeros(len(decay))
        for t in range(rounds):
            out[t] = (1.0 if t == 0 else 0.0) - scale @ buffers
            buffers = decay * buffers + out[t]
        return out


class Blt(Base):
    """BLT noise for `rounds` rounds; the parameters may be optimised for more or fewer rounds."""

    name = "blt"

    def __init__(self, rounds: int, parameters: BltParameters) -> None:
        self.rounds = check_rounds(rounds)
        self.parameters = parameters
        self.buffer_count = len(parameters.decay)

    def matrix(self) -> dict[str, Any]:
        decay, scale = list(self.parameters.decay), list(self.parameters.scale)
        return {**super().matrix(), "decay": decay, "scale": scale}

    def parameters_of(self) -> tuple[Floats, ...]:
        return np.array(self.parameters.decay), np.array(self.parameters.scale)

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """Computes the exact sensitivity by BLT Theorem 3.1."""
        return toeplitz_sensitivity(
            self.parameters.coefs(self.rounds), self.rounds, gap, max_participations
        )

    def prefix_variances(self) -> Floats:
        """The variances by BLT Proposition 3.3."""
        return _prefix_variances(self.parameters, self.rounds)


@functools.lru_cache(64)
def _prefix_variances(parameters: BltParameters, rounds: int) -> Floats:
    return np.cumsum(np.cumsum(parameters.inverse_coefs(rounds)) ** 2)


# The mechanisms that trained the keyboards of BLT Table 4, by the gap each was optimised for. The
# paper's text lacks the numbers of Appendix A; they were recomputed for (rounds, gap,
# participations) and MaxLoss, from the start of `_starts` that reproduces the table's last digit.
PRODUCTION = {
    100: BltParameters(
        (0.98974, 0.7352033, 0.167809), (0.2050288, 0.2335745, 0.0695948), "n=2000 gap=100 k=10"
    ),
    400: BltParameters(
        (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
        (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734),
        "n=4000 gap=400 k=5",
    ),
    1000: BltParameters(
        (0.9999999997, 0.9973412111, 0.9584628531, 0.6581791542),
        (0.0086574, 0.0589089, 0.1454820, 0.2770115),
        "n=4000 gap=1000 k=2",
    ),
}


def nearest_production(gap: int) -> BltParameters:
    return PRODUCTION[min(PRODUCTION, key=lambda made_for: abs(np.log(made_for / gap)))]


def optimise_blt(
    rounds: int, gap: int, max_participations: int, *, buffers: int = 4, error: str = "max"
) -> BltParameters:
    """Returns the BLT with the least loss for these participations, and keeps it on disk.

    Different starts lead to different optima; some optima with nearly the same largest error have
    very different mean errors. Of the optima within 1 % of the least loss, the best by the other
    error is chosen. `error` is "max" to optimise MaxLoss or "mean" for RmsLoss (BLT 3.3).
    """
    times = check_participation(rounds, gap, max_participations)
    if buffers < 1 or buffers > 10:
        raise ConfigError(f"buffers is {buffers}; it must be between 1 and 10, and 2 to 4 suffice")
    if error not in ("max", "mean"):
        raise ConfigError(f"error={error!r}; expected 'max' or 'mean'")
    settings = {
        "mechanism": "blt", "rounds": rounds, "gap": gap, "max_participations": times,
        "buffers": buffers, "error": error,
    }  # fmt: skip
    found = cached(settings, 1, lambda: _optimise(rounds, gap, times, buffers, error))
    return BltParameters(
        tuple(found["decay"]),
        tuple(found["scale"]),
        f"n={rounds} gap={gap} k={times} buffers={buffers} error={error}",
    )


def _optimise(rounds: int, gap: int, times: int, buffers: int, error: str) -> dict[str, Any]:
    candidates = []
    for start in _starts(rounds, gap, buffers):
        done = minimize(  # the search may stop early at the limits of doubles, which is fine
            log_loss, start, args=(rounds, gap, times, error), jac=True, method="BFGS",
            options={"gtol": 1e-7, "maxiter": 400},
        )  # fmt: skip
        decay, inverse = _decays(done.x)
        scale = _scales(decay, inverse)
        try:
            made = BltParameters(tuple(map(float, decay)), tuple(map(float, scale)))
        except ConfigError:  # the search ended at a limit, where rounding breaks the bounds
            continue
        blt = Blt(rounds, made)
        losses = [
            blt.max_loss(gap=gap, max_participations=times),
            blt.rms_loss(gap=gap, max_participations=times),
        ]
        candidates.append((losses if error == "max" else losses[::-1], made))
    least = min(losses[0] for losses, _ in candidates)
    losses, best = min(
        ((ls, p) for ls, p in candidates if ls[0] <= 1.01 * least), key=lambda c: c[0][1]
    )
    return {"decay": best.decay, "scale": best.scale, "loss": losses[0], "other_loss": losses[1]}


def _starts(rounds: int, gap: int, buffers: int) -> list[Floats]:
    out = []
    for slowest in (1e-6, 1 / rounds, 1 / gap):
        leaks = np.geomspace(min(slowest, 0.2), 0.6, 2 * buffers)
        logits = np.log1p(-leaks) - np.log(leaks)
        out.append(np.concatenate([logits[:1], np.log(-np.diff(logits))]))
    return out


def _decays(x: Floats) -> tuple[Floats, Floats]:
    """Returns (decays of C, decays of C^-1), computed from unbounded numbers.

    The decays of C and C^-1 interleave between 1 and 0, so the search needs no penalty to keep the
    scales of C positive with a sum below 1, and the scales of C^-1 negative.

    Paper  Dvijotham et al. 2024, Lemma 5.2; BLT Algorithm 5
    """
    chain = expit(x[0] - np.concatenate([[0.0], np.cumsum(np.exp(x[1:]))]))
    return chain[0::2], chain[1::2]


def _scales(own: Floats, other: Floats) -> Floats:
    """Residues of prod(1 - other x) / prod(1 - own x): the scales that belong to `own`."""
    apart = own[:, None] - own + np.eye(len(own))
    return np.asarray(np.prod(own[:, None] - other, axis=1) / np.prod(apart, axis=1))


def log_loss(x: Floats, rounds: int, gap: int, times: int, error: str) -> tuple[float, Floats]:
    """Returns (log of the squared loss, its gradient) at `x` (2 * buffers,), the input of `_decays`
    (BLT Algorithm 4). Even MaxLoss is smooth: the last running sum always has the largest error."""
    if np.any(np.abs(x) > 40):  # rounding may make decays equal, or 0 or 1
        return 1e3, np.zeros(len(x))
    decay, inverse = _decays(x)
    both = np.concatenate([decay, inverse])
    if both.min() < 1e-12 or len(np.unique(both)) < len(both):
        return 1e3, np.zeros(len(x))
    coefs = _column(decay, _scales(decay, inverse), rounds)
    total = separated_sums(coefs, gap, times)
    squared_sensitivity = total @ total
    coefs_slope = 2 * separated_sums(total[::-1], gap, times)[::-1] / squared_sensitivity

    sums = np.cumsum(_column(inverse, _scales(inverse, decay), rounds))
    weight = 1.0 if error == "max" else (rounds - np.arange(rounds)) / rounds
    squared_error = np.sum(weight * sums**2)
    noising_slope = np.cumsum((2 * weight * sums / squared_error)[::-1])[::-1]

    from_coefs = _column_slope(decay, inverse, coefs_slope)
    from_noising = _column_slope(inverse, decay, noising_slope)
    slope = np.empty(len(x))
    slope[0::2] = from_coefs[0] + from_noising[1]
    slope[1::2] = from_coefs[1] + from_noising[0]
    chain = np.empty(len(x))
    chain[0::2], chain[1::2] = decay, inverse
    logits_slope = slope * chain * (1 - chain)
    after = np.cumsum(logits_slope[::-1])[::-1]
    x_slope = np.concatenate([after[:1], -np.exp(x[1:]) * after[1:]])
    return float(np.log(squared_sensitivity) + np.log(squared_error)), x_slope


def _column(decay: Floats, scale: Floats, rounds: int) -> Floats:
    powers = np.exp(np.log(decay)[:, None] * np.arange(rounds - 1))
    return np.concatenate([[1.0], scale @ powers])


def _column_slope(own: Floats, other: Floats, slope: Floats) -> tuple[Floats, Floats]:
    """Gradients wrt the `own` and `other` decays, from `slope`, the gradient wrt coefficients."""
    scale = _scales(own, other)
    steps = np.arange(len(slope) - 1)
    powers = np.exp(np.log(own)[:, None] * steps)
    by_scale = powers @ slope[1:]
    by_own = scale / own * (powers @ (steps * slope[1:]))
    across = 1 / (own[:, None] - other)
    apart = own[:, None] - own
    np.fill_diagonal(apart, np.inf)
    weighted = by_scale * scale
    by_own = by_own + weighted * (across.sum(1) - (1 / apart).sum(1)) + weighted @ (1 / apart)
    return by_own, -(weighted @ across)
