"""The ledger rule: a stage that several records share counts once; all others add up.

So that copies of a run differ that went on separately, a stage whose rounds are releases names its
run (`extras.run`, a random id) and the digest of what it released (`extras.released`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm.record.provenance import (
    UNVERIFIED,
    Provenance,
    PublicInput,
    UnverifiedInput,
    digest_of,
)

T = TypeVar("T")
Stage = Mapping[str, Any]


def stages_of(records: Iterable[Provenance]) -> tuple[Stage, ...]:
    """The stages of several records: two are the same releases only if they name a ledger and all
    their fields are equal."""
    stages: list[Stage] = []
    known: set[str] = set()  # digests of stages with a ledger
    for stage in (stage for record in records for stage in record.stages):
        name = digest_of(stage) if ledger_of(stage) else ""
        if name not in known:
            stages.append(stage)
            known |= {name} - {""}
    return tuple(stages)


def ledger_of(stage: Stage) -> str | None:
    """The digest of a stage's participation ledger, or None."""
    return (stage.get("extras") or {}).get("ledger") or None


@dataclass(frozen=True)
class Inherited:
    """What an output inherits from its inputs.

    `reasons` say why the whole has no guarantee; without any, all may be composed. `stages` touched
    users, each once. `unverified` inputs have a record that no trusted key has verified.
    """

    reasons: tuple[str, ...]
    stages: tuple[Stage, ...]
    ledgers: tuple[str, ...]
    derived: tuple[str, ...]
    public_inputs: tuple[PublicInput, ...]
    unverified: tuple[UnverifiedInput, ...]


def inherited(inputs: Mapping[str, Provenance | None]) -> Inherited:
    """What an output inherits from inputs, given by description ("the vocabulary words.txt"); one
    without a record or a guarantee adds a reason."""
    reasons: list[str] = []
    records: dict[str, Provenance] = {}
    unverified: list[UnverifiedInput] = []
    for what, record in inputs.items():
        if record is None:
            reasons.append(f"nothing says whose text {what} is: it has no record")
            continue
        records[what] = record
        # A simulation is reported below, once, and its figures are composed as such. A record that
        # does not name the simulated stage could pass for unknown noise.
        composed = record.simulated is not None and any(map(_is_simulated, record.stages))
        if record.guarantee is None and not composed:
            reasons += record.reasons
        elif not record.stages and not record.is_public:
            reasons.append(f"the record of {what} names no stage to compose")
        if record.guarantee is not None:
            unverified += record.still_unverified
            if record.standing == UNVERIFIED:
                unverified.append(UnverifiedInput(what, record.digest))
    return Inherited(
        tuple(dict.fromkeys(reasons)),
        stages_of(records.values()),
        _once(record.ledgers for record in records.values()),
        _once(record.derived for record in records.values()),
        _once(record.public_inputs for record in records.values()),
        tuple(dict.fromkeys(unverified)),
    )


def _once(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _is_simulated(stage: Stage) -> bool:
    return stage.get("simulated") is True
