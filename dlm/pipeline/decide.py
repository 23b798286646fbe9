"""Decides what a pipeline does next: a pure function of its stages, journal and files on disk.

| the journal says | and | then |
| --- | --- | --- |
| nothing about the stage | its output exists | refuse: the output is not the pipeline's |
| nothing | | begin |
| begun | its run can resume, settings or inputs changed | refuse |
| begun | it has written all its files, the `last` one last | adopt |
| begun | its run can resume | go on |
| begun | otherwise | begin: nothing of it counts yet |
| done | settings, inputs or output changed | refuse |
| done | | check the next stage; after the last, finished |

`redo` is a person's request: the stage begins again, and so do the stages that use its output. A
stage that released something about users is never redone: a second release adds to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class StagePlan:
    """What must be known about a stage to choose the next action.

    Fields
        settings  those that change its output, as JSON values
        reads     its inputs: path by name
        writes    paths, in the order they are written
        releases  whether it releases something about users, which may be done only once
        goes_on   whether a stopped run resumes with what it has
        last      path that exists once everything is written; "" if there is none
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
    """The journal's entry of a stage that has begun. `reads` has the digests of its inputs by name,
    `wrote` those of its outputs by path, once done."""

    settings: Mapping[str, Any]
    reads: Mapping[str, str]
    wrote: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Found:
    """The state of the disk: digests of files by path, and the stages with a stopped run."""

    digests: Mapping[str, str] = field(default_factory=dict)
    under_way: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NextAction:
    """What to do: "begin" removes the outputs of the stages in `anew` and runs `stage`; "go on"
    resumes it; "adopt" records it as done; "refuse" reports `why`; "finished": no stage is left."""

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
    """Returns the next action, or why there can be none, by the table above. Each of `stages` reads
    only inputs and outputs of earlier stages. The stages in `redo` begin again."""
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
                gone = "is missing" if path not in found.digests else "has changed since"
                changes.append(f"its output {path} {gone}")
        if changes:
            return _refused(stage, changes)
    return NextAction("finished")


def made_of(stages: Sequence[StagePlan], name: str) -> tuple[str, ...]:
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
            "Restore journal.json, or give another [run] folder. What the stage released about "
            "users stays released, so the privacy costs of both runs add up (dlm privacy compose)"
        )
    return NextAction(
        "refuse",
        stage.name,
        why=f"{stage.name}: {what} exists, but the journal of this folder does not list it. {todo}",
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
                why=f"{one.name} has already released something about users, so it cannot be "
                "redone here. Start in another [run] folder; the privacy costs of both runs add "
                "up (dlm privacy compose)",
            )
    return NextAction("begin", stage.name, anew)


def _changes(stage: StagePlan, entry: Entry, found: Found) -> list[str]:
    now, then = dict(stage.settings), dict(entry.settings)
    said = [
        f"{name} was {then.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(now.keys() | then.keys())
        if now.get(name) != then.get(name)
    ]
    for name, path in stage.reads.items():
        if entry.reads.get(name) != found.digests.get(path):
            gone = "is missing" if path not in found.digests else "has other content"
            said.append(f"{name} ({path}) {gone}")
    said += [f"{name} is no longer read" for name in entry.reads if name not in stage.reads]
    return said


def _refused(stage: StagePlan, changes: Sequence[str]) -> NextAction:
    if stage.releases:
        todo = (
            "Undo the change. To keep it, start in another [run] folder: what the stage released "
            "about users stays released, so the privacy costs of both runs add up"
        )
    else:
        todo = f"Undo the change, pass --redo {stage.name}, or give another [run] folder"
    return NextAction("refuse", stage.name, why=f"{stage.name}: {'; '.join(changes)}. {todo}")
