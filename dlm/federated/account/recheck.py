"""Checks that the epsilon in a record follows from the noise that the record states, and gives the
commands and dp-accounting events with which an outsider can repeat a report's accounting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dlm.errors import DlmError

if TYPE_CHECKING:
    from dlm.federated.account.compose import StageRecord
    from dlm.record.provenance import Guarantee, Provenance

TOLERANCE = 1e-6  # relative; two accountings of the same stages differ by far less
# What a record must state about a matrix so that its sensitivity can be recomputed.
PARAMETERS = {
    "gaussian": set[str](),
    "tree": set[str](),
    "tree-restart": {"restarts"},
    "tree-full": {"rounds"},
    "blt": {"rounds", "decay", "scale"},
    "bandtoep": {"rounds", "coefficients"},
    "bandfhu": {"rounds", "bands"},
    "bandmf": {"rounds", "bands"},
}
DIFFERS = "the stated epsilon does not follow from the stated noise"


@dataclass(frozen=True)
class Recheck:
    """The result of a recheck: `follows` is true if a record's numbers agree with its stages, and
    None if they cannot be recomputed; `text` gives the reason."""

    follows: bool | None
    text: str


def recheck(record: Provenance) -> Recheck:
    """Recomputes the guarantee from a record's stages, and compares it with the stated one.

    Epsilon, rho and sensitivities may differ by a relative 1e-6. A record without a matrix is not
    judged. The columns of BandMF are assumed to have norm 1.
    """
    stated = record.guarantee or record.simulated
    if stated is None:
        return Recheck(None, "not recomputed: the record states no epsilon")
    if not record.stages:
        return Recheck(None, "not recomputed: the record has no stage that touched users")
    try:
        from dlm.federated.account.compose import StageRecord, compose

        stages = [StageRecord.from_json(stage) for stage in record.stages]
        found = compose(stages, stated.delta)
        sensitivities = [sensitivity_of_stage(stage) for stage in stages if not stage.raw]
    except ImportError as exc:
        return Recheck(None, f"not recomputed: {exc.name or exc} is missing (the extra train)")
    except (DlmError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        return Recheck(None, f"not recomputed: the record does not hold enough ({exc})")
    differing = _differences(stated, found.epsilon, found.rho)
    noised = [stage for stage in stages if not stage.raw]
    for stage, value in zip(noised, sensitivities, strict=True):
        claimed = stage.worst_sensitivity
        if value is not None and not math.isclose(claimed, value, rel_tol=TOLERANCE):
            differing.append(
                f"stage {stage.stage} states a sensitivity of {claimed:.6g}, but {stage.mechanism} "
                f"has {value:.6g} for gap {stage.gap} and {stage.max_participations} participations"
            )
    if differing:
        return Recheck(False, f"{DIFFERS}: {'; '.join(differing)}")
    names = ", ".join(stage.stage for stage in stages)
    if None in sensitivities:
        which = noised[sensitivities.index(None)]
        return Recheck(
            None,
            f"not recomputed: the record does not have the matrix of {which.mechanism}, so the "
            f"sensitivity {which.worst_sensitivity:.6g} of stage {which.stage} is only stated",
        )
    return Recheck(
        True,
        f"epsilon {found.epsilon:.6g} follows from the stated noise of {names}; "
        f"{_trusted_of_all(stages)}",
    )


def _trusted_of_all(stages: Sequence[StageRecord]) -> str:
    trusted = [", ".join(trusted_of(stage)) for stage in stages]
    if len(set(trusted)) == 1:
        return f"trusted: {trusted[0]}"
    return "; ".join(
        f"trusted of {stage.stage}: {what}" for stage, what in zip(stages, trusted, strict=True)
    )


def _differences(stated: Guarantee, epsilon: float, rho: float) -> list[str]:
    pairs = [("epsilon", stated.epsilon, epsilon)]
    if stated.rho is not None:
        pairs.append(("rho", stated.rho, rho))
    return [
        f"{name} is stated as {claimed:.9g}, but the stages give {found:.9g}"
        for name, claimed, found in pairs
        if not math.isclose(claimed, found, rel_tol=TOLERANCE)
    ]


def sensitivity_of_stage(stage: StageRecord) -> float | None:
    """Returns the sensitivity that a stage's stated matrix gives; None if too little is stated."""
    from dlm.federated.account.answers import sensitivity_of
    from dlm.federated.noise.participation import check_participation

    matrix = stage.matrix
    if set(matrix) != PARAMETERS.get(stage.mechanism, set()):
        return None
    # The sensitivity for fewer rounds than were run could be too small.
    rounds = max(matrix.get("rounds", 1), stage.rounds)
    times = check_participation(rounds, stage.gap, stage.max_participations)
    if stage.mechanism == "bandmf" and matrix["bands"] > stage.gap and times > 1:
        return None  # the entries of overlapping columns matter, but are not stated
    blt = None
    if stage.mechanism == "blt":
        from dlm.federated.noise.blt import BltParameters

        blt = BltParameters(tuple(matrix["decay"]), tuple(matrix["scale"]))
    return sensitivity_of(
        stage.mechanism, rounds, stage.gap, stage.max_participations, blt=blt,
        bands=matrix.get("bands"),
        coefficients=matrix.get("coefficients"), restarts=matrix.get("restarts", ()),
    ).value  # fmt: skip


def trusted_of(stage: StageRecord) -> list[str]:
    """Lists what accounting trusts: a stage's numbers, and the claim that unstated costs are 0."""
    found = ["noise multipliers, rounds and participation"]
    if stage.sampling_rate is not None:
        found.append(f"Poisson sampling with probability {stage.sampling_rate:g}")
    if "rounds" in stage.matrix:
        found.append("parameters of matrices")
    if stage.mechanism == "bandmf":
        found.append("columns of norm 1 (bandmf)")
    lacking = [what for what, text in _costs(stage).items() if not text]
    if lacking:
        *others, last = lacking
        together = f"{', '.join(others)} and {last} cost" if others else f"{last} costs"
        found.append(f"that {together} nothing")
    return found + costs_of(stage)


def costs_of(stage: StageRecord) -> list[str]:
    """The costs that make `effective_noise` smaller than the noise multiplier."""
    return [text for text in _costs(stage).values() if text]


def _costs(stage: StageRecord) -> dict[str, str]:
    inflation, clip, grid = stage.norm_inflation, stage.clip_noise, stage.rounding
    return {
        "secure aggregation": f"a factor of {inflation:.9g} for secure aggregation"
        if inflation > 1
        else "",
        "clip counts": "" if clip is None else f"clip counts with noise {clip:.6g}",
        "the grid": f"a factor of 1 + {grid - 1:.3g} for the grid" if grid > 1 else "",
    }


class Check(NamedTuple):
    """A way to reproduce the numbers of a stage, or of all stages together: `event` is an
    expression for dp-accounting; `rho` leaves out amplification; `text` says what is trusted."""

    stage: str
    command: str
    event: str
    rho: float
    text: str


def checks_of(stages: Sequence[StageRecord], delta: float) -> list[Check]:
    """Returns a check per noised stage, and one for all if several exist and none is sampled."""
    found = [_check(stage, delta) for stage in stages if not stage.raw]
    if len(found) > 1 and not any(stage.sampling_rate is not None for stage in stages):
        rho = math.fsum(check.rho for check in found)
        one = _gaussian_of(rho)
        command, event = account_command(one, delta), event_of(one)
        found.append(Check("all stages together", command, event, rho, "the stages' rho add up"))
    return found


def _check(stage: StageRecord, delta: float) -> Check:
    known = sensitivity_of_stage(stage) is not None
    command = account_command(stage if known else _gaussian_of(stage.rho), delta)
    text = f"sensitivity {stage.worst_sensitivity:.6g}"
    text += (
        ", recomputed"
        if known
        else ", which is trusted: the record does not contain the whole matrix"
    )
    if costs := costs_of(stage):
        text += f"; noise multiplier {stage.noise_multiplier:.6g}, reduced by {', '.join(costs)}"
    text += f"; trusted: {', '.join(trusted_of(stage))}"
    return Check(stage.stage, command, event_of(stage), stage.rho, text)


def _gaussian_of(rho: float) -> StageRecord:
    from dlm.federated.account.compose import StageRecord

    return StageRecord("", "gaussian", 1 / math.sqrt(2 * rho), 1)


def account_command(stage: StageRecord, delta: float) -> str:
    """Returns the command that prints a stage's numbers, with noise reduced by `costs_of`."""
    options: dict[str, Any] = {
        "mechanism": stage.mechanism.removesuffix("-restart"),
        "noise-multiplier": stage.effective_noise,
        "rounds": stage.rounds,
    }
    if stage.sampling_rate is not None:
        options["sampling-probability"] = stage.sampling_rate
    else:
        options |= {
            "gap": stage.gap,
            "max-participations": stage.max_participations,
            **stage.matrix,
        }
    options["delta"] = delta
    given = [f"--{name} {_value(value)}" for name, value in options.items() if value != []]
    return " ".join(["dlm privacy account", *given])


def event_of(stage: StageRecord) -> str:
    noise = stage.effective_noise
    if stage.sampling_rate is None:
        return f"dp_accounting.GaussianDpEvent({_value(noise / stage.worst_sensitivity)})"
    return (
        "dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent("
        f"{_value(stage.sampling_rate)}, dp_accounting.GaussianDpEvent({_value(noise)})), "
        f"{stage.rounds})"
    )


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_value, value))
    return repr(float(value)) if isinstance(value, float) else str(value)
