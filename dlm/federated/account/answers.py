"""The results of `dlm privacy` as plain values: a mechanism's sensitivity, guarantee and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.federated.account.compose import StageRecord, compose
from dlm.federated.account.sampled import moments_epsilon, tight_epsilon
from dlm.federated.account.zcdp import gaussian_epsilon, rho_of, zcdp_epsilon
from dlm.federated.noise.participation import (
    check_participation,
    most_participations,
    named_sensitivity,
    toeplitz_sensitivity,
)

if TYPE_CHECKING:
    from dlm.federated.noise.mechanism import Mechanism

BANDED = ("bandmf", "bandtoep", "bandfhu")
UNCORRELATED = (
    "the numbers hold only if each user was drawn independently with this probability in each "
    "round, not with a fixed report goal or from the users available"
)


class Sensitivity(NamedTuple):
    """The sensitivity of a mechanism, for a clip norm of 1 and the worst pattern of participation.
    `value` is an upper bound unless `is_exact`; `made_for` describes the mechanism's parameters."""

    value: float
    is_exact: bool
    made_for: str


def sensitivity_of(
    name: str,
    rounds: int,
    gap: int,
    max_participations: int,
    *,
    blt: Any = None,
    bands: int | None = None,
    coefficients: Sequence[float] | None = None,
    restarts: Sequence[int] = (),
    column_norm: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Sensitivity:
    """The sensitivity of a mechanism by its name.

    Args
        blt           `BltParameters`; by default those of BLT Table 4 with the nearest gap
        bands         bands of a banded mechanism; the gap if None
        coefficients  coefficients of bandtoep, which replace `bands`; optimised if None
        restarts      rounds at whose start a new tree begins
        column_norm   column norm behind a published noise multiplier; dlm's columns have norm 1
    """
    if column_norm != 1.0 and name not in BANDED:
        raise ConfigError(
            f"a column norm of {column_norm:g} was given for {name}, but applies only to "
            f"{', '.join(BANDED)}, whose columns all have the same norm; leave it out"
        )
    if not (column_norm > 0 and math.isfinite(column_norm)):
        raise ConfigError(f"the column norm is {column_norm}; it must be finite and above 0")
    times = check_participation(rounds, gap, max_participations)
    if name in ("gaussian", "tree", "tree-restart", "tree-full"):
        value = named_sensitivity(name, rounds, gap, max_participations, tuple(restarts))
        return Sensitivity(value, True, "")
    if name == "blt":
        from dlm.federated.noise.blt import Blt, nearest_production

        parameters = nearest_production(gap) if blt is None else blt
        value = Blt(rounds, parameters).sensitivity(gap=gap, max_participations=max_participations)
        return Sensitivity(value, True, parameters.made_for)
    if coefficients is not None:
        bands = len(coefficients)
    width = min(gap if bands is None else bands, rounds)
    made_for = f"{width} bands"
    if column_norm != 1.0:
        made_for += f", columns of norm {column_norm:g}"
    apart = width <= gap or times == 1
    # All columns of BandMF have norm 1, and so do the complete ones of BandToep; if one user's
    # columns do not overlap, their entries do not matter.
    whole = name == "bandmf" or (name == "bandtoep" and (times - 1) * gap + width <= rounds)
    if apart and whole and coefficients is None:
        return Sensitivity(column_norm * math.sqrt(times), True, made_for)
    made: Mechanism
    if coefficients is not None:
        from dlm.federated.noise.toeplitz import BandedToeplitz

        made = BandedToeplitz(name, rounds, np.asarray(coefficients, np.float64))
    else:
        from dlm.federated.noise.make import make_mechanism

        made = make_mechanism(
            name,
            rounds=rounds,
            gap=gap,
            max_participations=max_participations,
            bands=width,
            progress=progress,
        )
    exact = made.sensitivity_is_exact(gap=gap, max_participations=max_participations)
    value = made.sensitivity(gap=gap, max_participations=max_participations)
    return Sensitivity(column_norm * value, exact, made_for)


def guarantee_of(
    name: str,
    found: Sensitivity,
    *,
    noise_multiplier: float,
    rounds: int,
    gap: int,
    max_participations: int,
    delta: float,
) -> dict[str, Any]:
    """Returns rho and epsilon of a mechanism's noise, with notes for the reader.

    `epsilon` is what a run reports for this rho: a bound for every mechanism with this rho, since a
    run's noise is discrete. (A run whose grid adds more than 0.1 % to rho is refused.)
    `epsilon_gaussian` is for exact Gaussian noise, as in the papers.
    """
    rho = rho_of(found.value, noise_multiplier)
    most = most_participations(rounds, gap)
    notes = []
    if max_participations < most:
        notes.append(
            f"{most} participations fit into {rounds} rounds with this separation: the numbers "
            f"hold only if no user took part more than {max_participations} times, which must be "
            "enforced or measured"
        )
    if not found.is_exact:
        notes.append("the sensitivity is an upper bound, and so are the numbers computed from it")
    return {
        "mechanism": name,
        "made_for": found.made_for,
        "rounds": rounds,
        "min_separation": gap - 1,
        "gap": gap,
        "max_participations": max_participations,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "sensitivity": found.value,
        "sensitivity_exact": found.is_exact,
        "rho": rho,
        "epsilon": zcdp_epsilon(rho, delta),
        "epsilon_gaussian": gaussian_epsilon(rho, delta),
        "notes": notes,
    }


def sampled_guarantee_of(
    name: str, q: float, *, noise_multiplier: float, rounds: int, delta: float
) -> dict[str, Any]:
    """Returns epsilon and unamplified rho for independent noise with Poisson sampling.

    `epsilon` is what a run reports for discrete noise, from integer orders of Renyi divergence. The
    other epsilons are for exact Gaussian noise, from privacy loss distributions, from Renyi
    divergences, and from DP-FedAvg's moments accountant. ConfigError unless `name` is gaussian.
    """
    if name != "gaussian":
        raise ConfigError(
            f"sampling amplifies the privacy of independent noise only; the noise of {name} is "
            "correlated over rounds. Give --min-separation and --max-participations"
        )
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be 1 or more")
    names = ("rho", "epsilon", "epsilon_pld", "epsilon_rdp", "epsilon_moments")
    found = dict.fromkeys(names, math.inf)
    if noise_multiplier != 0:  # without noise, there is nothing to account for
        run = StageRecord(
            name, name, noise_multiplier, rounds, 1, rounds, sampling="poisson", sampling_rate=q
        )
        found = {
            "rho": run.rho,
            "epsilon": compose([run], delta).epsilon,
            "epsilon_pld": tight_epsilon(q, noise_multiplier, rounds, delta),
            "epsilon_rdp": tight_epsilon(q, noise_multiplier, rounds, delta, accountant="rdp"),
            "epsilon_moments": moments_epsilon(q, noise_multiplier, rounds, delta),
        }
    return {
        "mechanism": name,
        "sampling": "poisson",
        "sampling_probability": q,
        "rounds": rounds,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        **found,
        "notes": [UNCORRELATED],
    }


def losses_of(made: Any, name: str, *, gap: int, max_participations: int) -> dict[str, Any]:
    asked = {"gap": gap, "max_participations": max_participations}
    return {
        "mechanism": name,
        "rounds": made.rounds,
        **asked,
        "rms_loss": made.rms_loss(**asked),
        "max_loss": made.max_loss(**asked),
        "sensitivity": made.sensitivity(**asked),
        "sensitivity_exact": made.sensitivity_is_exact(**asked),
        "buffers": made.state_size(1),
        "matrix": made.matrix(),
    }


def planned_sensitivity(name: str) -> Callable[[int, int, int], float]:
    """Returns the sensitivity as a function; ConfigError if the matrix depends on the gap."""
    if name not in ("gaussian", "tree", "tree-full", "blt"):
        raise ConfigError(
            f"{name} has a different matrix for each gap, and the noise that a model tolerates "
            "differs, too: plan with tree or blt, then compare with `dlm privacy mechanism`"
        )

    @functools.cache  # many report goals share a gap
    def sensitivity(rounds: int, gap: int, max_participations: int) -> float:
        if name != "blt":
            return named_sensitivity(name, rounds, gap, max_participations)
        return toeplitz_sensitivity(coefs(rounds), rounds, gap, max_participations)

    @functools.cache
    def coefs(rounds: int) -> NDArray[np.float64]:
        from dlm.federated.noise.blt import PRODUCTION

        return PRODUCTION[400].coefs(rounds)

    return sensitivity
