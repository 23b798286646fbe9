"""The guarantee of several runs together. Each user counts as being in all of them, unless the
caller says that two share nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.account.compose import StageRecord, compose
from dlm.record.lineage import Stages, ledger_of, shared_ledgers, stages_of
from dlm.record.provenance import Guarantee, Provenance, digest_of, take_digest

PIPELINE_REPORT = "dlm pipeline report"  # `format` of a pipeline's report


@dataclass(frozen=True)
class ReportedRun:
    """What a run's report or record says about it; `own` has the ledger digests of its own stages.
    Without a report (and `delta`), a stage is its own only if it is the only one."""

    name: str
    record: Provenance
    delta: float | None = None
    own: frozenset[str] = frozenset()

    @property
    def own_stages(self) -> frozenset[str]:
        """Digests of the stages that the run did; the others it inherits."""
        named = [stage for stage in self.record.stages if ledger_of(stage) in self.own]
        alone = self.record.stages if len(self.record.stages) == 1 else ()
        return frozenset(map(digest_of, named or alone))


@dataclass(frozen=True)
class Together:
    """What several runs guarantee to each user, or the `reasons` why nothing; `worst` has the
    indices of the runs that together give some users the largest epsilon."""

    guarantee: Guarantee | None
    simulated: Guarantee | None
    reasons: tuple[str, ...]
    worst: tuple[int, ...]
    notes: tuple[str, ...]


def read_run(path: Path) -> ReportedRun:
    """The run of a `privacy.json`, or of the record beside a file; FormatError if it is neither,
    PrivacyError if it was changed after it was written."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        found = dict(body)
        if found.get("format") == PIPELINE_REPORT:
            take_digest(found, path)
            found = dict(found["privacy"])
        if "checklist" in found:  # a report, which has a digest of its own
            take_digest(found, path)
        delta = float(found["delta"]) if "delta" in found else None
        books = found["ledgers"].values() if "checklist" in found else ()
        own = frozenset(str(book["digest"]) for book in books)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FormatError(f"{path} is not a privacy report (privacy.json): {exc}") from exc
    return ReportedRun(
        str(path), Provenance.from_dict(found.get("provenance", found), str(path)), delta, own
    )


def compose_runs(
    runs: Sequence[ReportedRun],
    *,
    delta: float | None = None,
    disjoint: Collection[tuple[int, int]] = (),
) -> Together:
    """The guarantee of all runs together for every user, whichever runs they are in.

    For runs that share no users, the worst counts, not the sum. An inherited stage, such as the
    counts behind a vocabulary, counts for everyone, unless the run that did it is given.

    Args
        delta     of the guarantee; default: that of the reports, if they agree
        disjoint  pairs of indices of runs that have no user in common
    Raises
        ConfigError   no run, one twice, no common delta, an invalid pair
        PrivacyError  runs with other units or adjacency; a pair whose records show that they share
                      users
    """
    _check(runs, disjoint)
    delta = _delta(runs) if delta is None else delta
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; expected a number between 0 and 1")
    reasons, simulated = [], False
    for run in runs:
        record = run.record
        simulated |= record.simulated is not None
        if record.guarantee is None:
            reasons += [f"{run.name}: {reason}" for reason in record.reasons]
        elif not record.stages and not record.is_public:
            reasons.append(f"{run.name}: it names no stage to compose")
    labels = [f"run {place} ({run.name})" for place, run in enumerate(runs, 1)]
    known = stages_of({label: run.record for label, run in zip(labels, runs, strict=True)})
    owners = _owners(known, labels, runs)
    notes = (*_notes(runs, disjoint), *_floating(known, owners, bool(disjoint)))
    if any(run.record.guarantee is None and run.record.simulated is None for run in runs):
        return Together(None, None, tuple(reasons), (), notes)
    worst: tuple[int, ...] = ()
    epsilon = 0.0
    rho = 0.0
    for group in _groups(len(runs), disjoint):
        stages = [
            StageRecord.from_json(stage)
            for stage, did in zip(known.stages, owners, strict=True)
            if not did or did & set(group)
        ]
        if not stages:  # all of them public
            continue
        numbers = compose(stages, delta)
        notes = tuple(dict.fromkeys([*notes, *numbers.notes]))
        if math.isinf(numbers.epsilon):
            reasons.append("accounting finds no finite epsilon")
            return Together(None, None, tuple(dict.fromkeys(reasons)), group, notes)
        rho = max(rho, numbers.rho)
        if not worst or numbers.epsilon > epsilon:
            worst, epsilon = group, numbers.epsilon
    found = Guarantee(epsilon, delta, rho if math.isfinite(rho) else None)
    if reasons:
        return Together(None, found if simulated else None, tuple(reasons), worst, notes)
    return Together(found, None, (), worst, notes)


def _check(runs: Sequence[ReportedRun], disjoint: Collection[tuple[int, int]]) -> None:
    if not runs:
        raise ConfigError("there is no run to account for; give one or more")
    names: dict[str, str] = {}
    for run in runs:
        digest = run.record.digest
        if digest in names and not run.record.is_public:
            raise ConfigError(f"{names[digest]} and {run.name} belong to one run; give it once")
        names[digest] = run.name
    first = runs[0].record
    for run in runs:
        if (run.record.unit, run.record.adjacency) != (first.unit, first.adjacency):
            raise PrivacyError(
                f"{run.name} protects each {run.record.unit} ({run.record.adjacency}), "
                f"{runs[0].name} each {first.unit} ({first.adjacency}): these "
                "cannot be composed. Compose only runs that protect the same"
            )
    for pair in disjoint:
        if len(set(pair)) != 2 or not all(0 <= place < len(runs) for place in pair):
            raise ConfigError(
                f"--disjoint names runs {' and '.join(str(place + 1) for place in pair)}; expected "
                f"two different runs of 1 to {len(runs)}"
            )
        a, b = sorted(pair)
        if shared := shared_ledgers(runs[a].record, runs[b].record):
            raise PrivacyError(
                f"runs {a + 1} ({runs[a].name}) and {b + 1} ({runs[b].name}) are declared to have "
                f"no user in common, but both have {'; '.join(shared)}, whose users are in both. "
                f"Leave out --disjoint {a + 1},{b + 1}"
            )


def _delta(runs: Sequence[ReportedRun]) -> float:
    deltas = sorted({run.delta for run in runs if run.delta is not None})
    if len(deltas) != 1:
        found = ", ".join(f"{delta:g}" for delta in deltas) or "none"
        raise ConfigError(f"the reports have no common delta (found: {found}); give --delta")
    return deltas[0]


def _notes(runs: Sequence[ReportedRun], disjoint: Collection[tuple[int, int]]) -> tuple[str, ...]:
    if len(runs) == 1:
        return ()
    if not disjoint:
        return (
            "each user is counted as being in all of these runs, which is the worst case; if two "
            "of them have no user in common, say so with --disjoint",
        )
    pairs = ", ".join(f"{a + 1} and {b + 1}" for a, b in sorted(map(sorted, disjoint)))
    return (
        f"runs {pairs} have no user in common: that is the caller's word, not in any record. A "
        "person with two ids is two users",
    )


def _owners(
    known: Stages, labels: Sequence[str], runs: Sequence[ReportedRun]
) -> list[frozenset[int]]:
    """For each stage the indices of the runs that did it; empty if all inherit it."""
    own = [run.own_stages for run in runs]
    return [
        frozenset(
            place
            for place, label in enumerate(labels)
            if label in holders and digest_of(stage) in own[place]
        )
        for stage, holders in zip(known.stages, known.holders, strict=True)
    ]


def _floating(known: Stages, owners: Sequence[frozenset[int]], are_apart: bool) -> Iterator[str]:
    """Notes on stages that count for everyone although some runs share no users."""
    for stage, holders, did in zip(known.stages, known.holders, owners, strict=True):
        if are_apart and not did:
            yield (
                f"stage {stage.get('stage')}, which {' and '.join(holders)} inherits, counts for "
                "every user: the report of the run that did it is not given here, so its users may "
                "be those of any run"
            )


def _groups(count: int, disjoint: Collection[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The largest sets of runs such that one user may be in all (Bron and Kerbosch 1973)."""
    apart = {frozenset(pair) for pair in disjoint}
    shares = [
        {b for b in range(count) if b != a and frozenset((a, b)) not in apart} for a in range(count)
    ]

    def grow(chosen: set[int], open_: set[int], done: set[int]) -> Iterator[tuple[int, ...]]:
        if not open_ and not done:
            yield tuple(sorted(chosen))
        for place in sorted(open_):
            yield from grow(chosen | {place}, open_ & shares[place], done & shares[place])
            open_, done = open_ - {place}, done | {place}

    yield from grow(set(), set(range(count)), set())
