"""What a pipeline does next: a pure function of its stages, its journal and what is on disk.

| the journal says | and | then |
| --- | --- | --- |
| nothing of the stage | what it would write is there | refuse: it is not the pipeline's |
| nothing | | begin |
| begun | its run can go on, settings or inputs changed | refuse |
| begun | it has written all that it writes, last its `last` file | adopt |
| begun | its run can go on | go on |
| begun | else | begin: nothing of it counts yet |
| done | settings, inputs or what it wrote changed | refuse |
| done | | look at the next stage; after the last, finished |

`redo` is asked for by a person: the stage begins anew, and so does what was made of it. A stage
that released something about users is never redone: a second release adds to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class StagePlan:
    """A stage, as far as deciding goes.

    Fields
        name      as `--redo` has it
        settings  that change what it writes; JSON values
        reads     what it reads: path by name
        writes    paths, the last one last
        releases  whether it releases something about users, which may be done once
        goes_on   whether a run of it that was stopped goes on with what it has
        last      path that stands once all is written; "" where nothing tells
    """

    name: str
    settings: Mapping[str, Any]
    reads: Mapping[str, str]
    writes: tuple[str, ...]
    releases: bool = False
    goes_on: bool = False
    last: str = ""


@dataclass(frozen=True)
class Entry:
    """What the journal knows of a stage that has begun.

    Fields
        settings, reads  as they were; of what it read the digests, by name
        wrote            digests by path, once it is done; None before
    """

    settings: Mapping[str, Any]
    reads: Mapping[str, str]
    wrote: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Found:
    """What is on disk.

    Fields
        digests    path -> digest of a file that is there
        under_way  stages that have a run which was stopped
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    under_way: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NextAction:
    """What to do.

    Fields
        kind   begin: remove what the stages of `anew` wrote, and run; go on: run; adopt: note that
               it is done; refuse: tell `why`; finished: nothing is left to do
        stage  which; "" where all are finished
        anew   stages whose entries and files go first
        why    what was found, and what to do
    """

    kind: Literal["begin", "go on", "adopt", "refuse", "finished"]
    stage: str = ""
    anew: tuple[str, ...] = ()
    why: str = ""


def next_action(
    stages: Sequence[StagePlan],
    journal: Mapping[str, Entry],
    found: Found,
    redo: Iterable[str] = (),
) -> NextAction:
    """The first thing that is not done, or why it cannot be.

    Args
        stages   in order: each reads what is given and what those before it write
        journal  entry by the name of its stage
        redo     stages to begin anew, whatever the journal says
    """
    redo = set(redo)
    for stage in stages:
        if stage.name in redo:
            return _redo(stage, stages, journal)
        entry = journal.get(stage.name)
        if entry is None:
            return _first(stage, found)
        changes = _changes(stage, entry, found)
        if entry.wrote is None:
            under_way = stage.name in found.under_way
            if (
                stage.last
                and stage.last in found.digests
                and all(map(found.digests.get, stage.writes))
            ):
                return _refused(stage, changes) if changes else NextAction("adopt", stage.name)
            if not (stage.goes_on and under_way):
                return NextAction("begin", stage.name, (stage.name,))
            return _refused(stage, changes) if changes else NextAction("go on", stage.name)
        for path, digest in entry.wrote.items():
            if found.digests.get(path) != digest:
                gone = "is missing" if path not in found.digests else "was changed since"
                changes.append(f"{path}, which it wrote, {gone}")
        if changes:
            return _refused(stage, changes)
    return NextAction("finished")


def made_of(stages: Sequence[StagePlan], name: str) -> tuple[str, ...]:
    """A stage and those that read, directly or not, what it writes; in order."""
    made: list[str] = []
    written: set[str] = set()
    for stage in stages:
        if stage.name == name or written & set(stage.reads.values()):
            made.append(stage.name)
            written |= set(stage.writes)
    return tuple(made)


def _first(stage: StagePlan, found: Found) -> NextAction:
    there = [path for path in stage.writes if path in found.digests]
    if not there and stage.name not in found.under_way:
        return NextAction("begin", stage.name, (stage.name,))
    what = there[0] if there else f"a run of {stage.name}"
    todo = "Remove it, or give another [run] folder"
    if stage.releases:
        todo = (
            "Restore journal.json, or give another [run] folder: what the stage released about "
            "users stays released, and the guarantees of both runs add up (dlm privacy compose)"
        )
    return NextAction(
        "refuse",
        stage.name,
        why=f"{stage.name}: {what} is there, and the journal of this folder does not know it. "
        f"{todo}",
    )


def _redo(
    stage: StagePlan, stages: Sequence[StagePlan], journal: Mapping[str, Entry]
) -> NextAction:
    anew = made_of(stages, stage.name)
    for one in stages:
        if one.name in anew and one.releases and one.name in journal:
            return NextAction(
                "refuse",
                one.name,
                why=f"{one.name} has released something about users, which cannot be taken back, "
                "and is not done again here. Begin in another [run] folder: the guarantees of "
                "both runs add up (dlm privacy compose)",
            )
    return NextAction("begin", stage.name, anew)


def _changes(stage: StagePlan, entry: Entry, found: Found) -> list[str]:
    """What is other than when the stage began, in words."""
    now, then = dict(stage.settings), dict(entry.settings)
    said = [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(now.keys() | then.keys())
        if now.get(name) != then.get(name)
    ]
    for name, path in stage.reads.items():
        if entry.reads.get(name) != found.digests.get(path):
            gone = "is missing" if path not in found.digests else "has another content"
            said.append(f"{name} ({path}) {gone}")
    said += [f"{name} is no longer read" for name in entry.reads if name not in stage.reads]
    return said


def _refused(stage: StagePlan, changes: Sequence[str]) -> NextAction:
    if stage.releases:
        todo = (
            "Put it back as it was. What the stage released about users stays released: to change "
            "it, begin in another [run] folder, and the guarantees of both add up"
        )
    else:
        todo = f"Put it back as it was, or give --redo {stage.name}, or another [run] folder"
    return NextAction("refuse", stage.name, why=f"{stage.name}: {'; '.join(changes)}. {todo}")
