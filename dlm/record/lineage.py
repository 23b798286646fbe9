"""The ledger rule: a stage that several records share counts once; all others add up.

So that copies of a run differ that went on separately, a stage whose rounds are releases names its
run (`extras.run`, a random id) and the digest of what it released (`extras.released`).
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class Stages:
    """Releases of several records, each once, in order; and the names of the records that have
    it."""

    stages: tuple[Stage, ...]
    holders: tuple[tuple[str, ...], ...]


def stages_of(records: Mapping[str, Provenance]) -> Stages:
    """The stages of several records, by name: two are the same releases only if they name a ledger
    and all their fields are equal."""
    stages: list[Stage] = []
    holders: list[list[str]] = []
    known: dict[str, int] = {}  # digest of a stage with a ledger -> its place
    for what, record in records.items():
        for stage in record.stages:
            name = digest_of(stage) if ledger_of(stage) else ""
            if not name or name not in known:
                known[name] = len(stages)
                stages.append(stage)
                holders.append([])
            place = known[name]
            if what not in holders[place]:
                holders[place].append(what)
    return Stages(tuple(stages), tuple(map(tuple, holders)))


def ledger_of(stage: Stage) -> str | None:
    """The digest of a stage's participation ledger, or None."""
    return (stage.get("extras") or {}).get("ledger") or None


def shared_ledgers(one: Provenance, other: Provenance) -> tuple[str, ...]:
    """Evidence, in words, that two records share users: a common ledger, or a common run."""
    found = []
    for mine, theirs in itertools.product(one.stages, other.stages):
        for what, of in (("ledger", ledger_of), ("run", _run_of)):
            if (mark := of(mine)) is not None and mark == of(theirs):
                found.append(f"the {what} {mark} (stage {mine.get('stage')})")
                break
    return tuple(dict.fromkeys(found))


def _run_of(stage: Stage) -> str | None:
    """The id of a stage's run, which copies of it share."""
    return (stage.get("extras") or {}).get("run") or None


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
    found = stages_of(records)
    return Inherited(
        tuple(dict.fromkeys(reasons)),
        found.stages,
        _once(record.ledgers for record in records.values()),
        _once(record.derived for record in records.values()),
        _once(record.public_inputs for record in records.values()),
        tuple(dict.fromkeys(unverified)),
    )


def _once(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _is_simulated(stage: Stage) -> bool:
    return stage.get("simulated") is True
