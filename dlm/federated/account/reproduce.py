"""How an outsider repeats the accounting of a report: commands, and events of dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlm.federated.account.compose import StageRecord
from dlm.federated.account.recheck import costs_of, sensitivity_of_stage, trusted_of


class Check(NamedTuple):
    """How the numbers of a stage, or of all stages together, can be reproduced.

    `event` is an expression of dp-accounting with the same `rho`, which is without amplification.
    `text` says what it is computed from, and what is trusted.
    """

    stage: str
    command: str
    event: str
    rho: float
    text: str


def checks_of(stages: Sequence[StageRecord], delta: float) -> list[Check]:
    """One for each stage with noise; then one for all, if there are several and none is sampled."""
    found = [_check(stage, delta) for stage in stages if not stage.raw]
    if len(found) > 1 and not any(stage.sampling_rate is not None for stage in stages):
        rho = math.fsum(check.rho for check in found)
        one = _gaussian_of(rho)
        command, event = account_command(one, delta), event_of(one)
        found.append(Check("all stages together", command, event, rho, "their rho add up"))
    return found


def _check(stage: StageRecord, delta: float) -> Check:
    known = sensitivity_of_stage(stage) is not None
    command = account_command(stage if known else _gaussian_of(stage.rho), delta)
    text = f"sensitivity {stage.worst_sensitivity:.6g}"
    text += ", recomputed" if known else ", trusted: the record does not have all of its matrix"
    if costs := costs_of(stage):
        text += f"; noise multiplier {stage.noise_multiplier:.6g}, less {', '.join(costs)}"
    text += f"; trusted: {', '.join(trusted_of(stage))}"
    return Check(stage.stage, command, event_of(stage), stage.rho, text)


def _gaussian_of(rho: float) -> StageRecord:
    return StageRecord("", "gaussian", 1 / math.sqrt(2 * rho), 1)


def account_command(stage: StageRecord, delta: float) -> str:
    """The command that prints the numbers of a stage; its noise is less `costs_of` the stage."""
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
