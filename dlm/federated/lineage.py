"""The ledger rule: which stages of two records are the same releases, and what records share.

    found = stages_of({"the counts": counts, "the network": network})
    found.stages, found.notes                   # each release once; diverged copies in full

A stage names its ledger (`extras.ledger`) and, if the run's folder kept them, its lives
(`extras.lives`): in order, a random id of each process that did rounds and the rounds done by its
end. Ledgers cannot distinguish two copies of a run that both continued with the same users but with
different noise. Lives can: each copy that continues draws a new id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm.errors import FormatError
from dlm.federated.provenance import (
    UNVERIFIED,
    Provenance,
    PublicInput,
    UnverifiedInput,
    digest_of,
)

T = TypeVar("T")
Stage = Mapping[str, Any]
Lives = tuple[tuple[str, int], ...]  # (id, rounds done at the end of that life)


@dataclass(frozen=True)
class Stages:
    """The stages of several records.

    Fields
        stages   each release once, in order
        holders  for each stage, the names of the records that have it
        notes    warnings about runs that were continued twice
    """

    stages: tuple[Stage, ...]
    holders: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def stages_of(records: Mapping[str, Provenance]) -> Stages:
    """The stages of several records, which are given by name.

    Guarantees
        two stages count as one if all their fields are equal, ledger and lives included: they are
        then the same releases. Without a ledger nobody can know, so both count, unless the whole
        records agree as those of one run do. Copies that diverged both count in full
    """
    stages: list[Stage] = []
    holders: list[list[str]] = []
    known: dict[str, int] = {}  # a stage with a ledger, all its fields -> its place
    claimed: dict[str, list[int]] = {}  # claims of a record with ledgers -> its stages
    for what, record in records.items():
        claims = digest_of(_claims(record)) if record.ledgers else None
        if claims is not None and claims in claimed:  # one run, with two things made from it
            for known_place in claimed[claims]:
                holders[known_place].append(what)
            continue
        places = []
        for stage in record.stages:
            name = digest_of(stage)
            place = known.get(name) if ledger_of(stage) else None
            if place is None:
                place = len(stages)
                stages.append(stage)
                holders.append([])
                known[name] = place
            if what not in holders[place]:
                holders[place].append(what)
            places.append(place)
        if claims is not None:
            claimed[claims] = places
    return Stages(tuple(stages), tuple(map(tuple, holders)), tuple(_notes(stages, holders)))


def ledger_of(stage: Stage) -> str | None:
    """The digest of a stage's participation ledger, or None."""
    return (stage.get("extras") or {}).get("ledger") or None


def lives_of(stage: Stage) -> Lives:
    """The lives of the run that did a stage, earliest first; empty if it names none.

    Raises
        FormatError  they are not pairs of an id and a number of rounds
    """
    given = (stage.get("extras") or {}).get("lives") or ()
    try:
        return tuple((str(name), int(rounds)) for name, rounds in given)
    except (TypeError, ValueError) as exc:
        raise FormatError(
            f"the lives of stage {stage.get('stage')} are {given!r}; expected pairs of an id and "
            "the rounds done by then"
        ) from exc


def shared_ledgers(one: Provenance, other: Provenance) -> tuple[str, ...]:
    """Evidence, in words, that two records share users: a ledger that both have, or a run that both
    are copies of."""
    found = []
    for mine, theirs in itertools.product(one.stages, other.stages):
        ledger = ledger_of(mine)
        if ledger is not None and ledger == ledger_of(theirs):
            found.append(f"the ledger {ledger} (stage {mine.get('stage')})")
        elif lives_of(mine)[:1] and _first(mine) == _first(theirs):
            found.append(f"the run {_first(mine)} (stage {mine.get('stage')})")
    named = {ledger_of(stage) for stage in (*one.stages, *other.stages)}
    # Records of earlier versions do not name the ledger in the stage.
    both = set(one.ledgers) & set(other.ledgers)
    found += [f"the ledger {ledger}" for ledger in sorted(both - named)]
    return tuple(dict.fromkeys(found))


def went_on_apart(one: Stage, other: Stage) -> bool:
    """Whether two stages come from copies of one run that both did further rounds."""
    if not lives_of(one) or _first(one) != _first(other):
        return False
    return not (_is_beginning(one, other) or _is_beginning(other, one))


def _first(stage: Stage) -> str | None:
    lives = lives_of(stage)
    return lives[0][0] if lives else None


def _is_beginning(one: Stage, other: Stage) -> bool:
    """Whether `one` is the run of `other` at the same or an earlier round."""
    mine, theirs = lives_of(one), lives_of(other)
    last = len(mine) - 1
    if len(theirs) <= last or mine[:last] != theirs[:last]:
        return False
    return mine[last][0] == theirs[last][0] and mine[last][1] <= theirs[last][1]


def _notes(stages: list[Stage], holders: list[list[str]]) -> list[str]:
    """A note for each two stages that began as one run."""
    notes = []
    for (a, one), (b, other) in itertools.combinations(enumerate(stages), 2):
        if not lives_of(one) or _first(one) != _first(other):
            continue
        names = list(dict.fromkeys([*holders[a], *holders[b]]))
        who = " and ".join(names)
        if went_on_apart(one, other):
            notes.append(
                f"stage {one.get('stage')} of {who}: two copies of one run went on separately, "
                "so users were asked twice; both count in full"
            )
        else:
            notes.append(
                f"stage {one.get('stage')} of {who}: these are of one run at two times, and both "
                "count in full; the later record by itself covers both"
            )
    return notes


@dataclass(frozen=True)
class Inherited:
    """What an output inherits from its inputs.

    Fields
        reasons     why the whole has no guarantee; empty if all may be composed
        stages      that touched users, each once; with the ledgers, and what was made since
        unverified  inputs whose record was not verified with a trusted key
        notes       as in `Stages`
    """

    reasons: tuple[str, ...]
    stages: tuple[Stage, ...]
    ledgers: tuple[str, ...]
    derived: tuple[str, ...]
    public_inputs: tuple[PublicInput, ...]
    unverified: tuple[UnverifiedInput, ...]
    notes: tuple[str, ...]


def inherited(inputs: Mapping[str, Provenance | None]) -> Inherited:
    """What an output inherits from inputs, given by description ("the vocabulary words.txt").

    Guarantees
        an input without a record or a guarantee adds a reason. Stages count as `stages_of` says
    """
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
        found.notes,
    )


def _once(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    """The items of all parts, in order, each once."""
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _is_simulated(stage: Stage) -> bool:
    return stage.get("simulated") is True


def _claims(record: Provenance) -> dict[str, Any]:
    """A record's claims about users, whatever was made since."""
    body = record.to_dict()
    return {name: body[name] for name in ("guarantee", "reasons", "stages", "ledgers", "config")}
