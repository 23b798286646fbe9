"""Checks that the epsilon stated in a record follows from the noise stated there.

    found = recheck(record)
    found.follows                   # True, False, or None where the record does not hold enough
    found.text

A digest and a signature show that a record is the original. Neither shows that its numbers are
right: the author may have put any epsilon beside any noise. The stages of a record have everything
that accounting needs, so any reader can repeat it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlm.errors import DlmError

if TYPE_CHECKING:
    from dlm.federated.account.compose import StageRecord
    from dlm.federated.provenance import Guarantee, Provenance

TOLERANCE = 1e-6  # relative; accounting of the same stages agrees far better
DIFFERS = "the stated epsilon does not follow from the stated noise"


@dataclass(frozen=True)
class Recheck:
    """The result of accounting for a record's stages again.

    Fields
        follows  whether the stated numbers agree with it; None if they cannot be recomputed
        text     in words
    """

    follows: bool | None
    text: str


def recheck(record: Provenance) -> Recheck:
    """Accounts for the stages of a record again, and compares.

    Guarantees
        a record fails if its epsilon or rho differs from that of its stages by more than a relative
        1e-6, or if a sensitivity is too small for the stated participation. Sensitivities of
        matrices that the record does not contain (BLT, BandMF, BandToep, BandFHU) are trusted
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
    except ImportError as exc:
        return Recheck(None, f"not recomputed: {exc.name or exc} is missing (the extra train)")
    except (DlmError, ValueError, TypeError, OverflowError) as exc:
        return Recheck(None, f"not recomputed: the record does not hold enough ({exc})")
    differing = [*_differences(stated, found.epsilon, found.rho), *_too_small(stages)]
    if differing:
        return Recheck(False, f"{DIFFERS}: {'; '.join(differing)}")
    names = ", ".join(stage.stage for stage in stages)
    return Recheck(True, f"epsilon {found.epsilon:.6g} follows from the stated noise of {names}")


def _differences(stated: Guarantee, epsilon: float, rho: float) -> list[str]:
    pairs = [("epsilon", stated.epsilon, epsilon)]
    if stated.rho is not None:
        pairs.append(("rho", stated.rho, rho))
    return [
        f"{name} is stated as {claimed:.9g}, and the stages give {found:.9g}"
        for name, claimed, found in pairs
        if not math.isclose(claimed, found, rel_tol=TOLERANCE)
    ]


def _too_small(stages: list[StageRecord]) -> list[str]:
    """Stated sensitivities that are too small, for mechanisms without parameters."""
    from dlm.federated.noise.participation import named_sensitivity

    found = []
    for stage in stages:
        known = stage.mechanism in ("gaussian", "tree", "tree-full", "tree-restart")
        if stage.raw or stage.sensitivity is None or not known:
            continue
        least = named_sensitivity(
            stage.mechanism, stage.rounds, stage.gap, stage.max_part, stage.restarts
        )
        if stage.sensitivity < least * (1 - TOLERANCE):
            found.append(
                f"stage {stage.stage} states a sensitivity of {stage.sensitivity:.6g}, and "
                f"{stage.mechanism} has {least:.6g} for {stage.rounds} rounds, gap {stage.gap} and "
                f"{stage.max_part} participations"
            )
    return found
