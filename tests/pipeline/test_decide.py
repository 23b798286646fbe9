"""What a pipeline does next: no disk, no clock, each row of the table and what people do to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dlm.pipeline.decide import Entry, Found, NextAction, StagePlan, made_of, next_action

COUNT = StagePlan(
    "count", {"rounds": 4}, {"users": "u.tsv"}, ("c.tsv", "c.rec"), True, True, "c.rec"
)
TRAIN = StagePlan(
    "train", {"rounds": 8}, {"users": "u.tsv", "counts": "c.tsv"}, ("net",), True, True
)
TOPOLOGY = StagePlan("topology", {"order": 3}, {"text": "t.txt"}, ("top",))
DISTILL = StagePlan("distill", {"seed": 0}, {"network": "net", "topology": "top"}, ("model",))
SHARD = StagePlan("shard", {"shards": 2}, {"model": "model"}, ("shards",))
STAGES = [TOPOLOGY, COUNT, TRAIN, DISTILL, SHARD]
GIVEN = {"u.tsv": "U", "t.txt": "T"}


def made(path: str) -> str:
    """The digest of what a stage writes at `path`, where all is well."""
    return f"made {path}"


def entry(stage: StagePlan, *, done: bool = True) -> Entry:
    """Of a stage that read what is given and what was made."""
    reads = {name: GIVEN.get(path, made(path)) for name, path in stage.reads.items()}
    return Entry(
        stage.settings, reads, {path: made(path) for path in stage.writes} if done else None
    )


def after(*done: StagePlan) -> tuple[dict[str, Entry], Found]:
    """Journal and disk where these stages are done."""
    digests = {**GIVEN, **{path: made(path) for stage in done for path in stage.writes}}
    return {stage.name: entry(stage) for stage in done}, Found(digests)


@pytest.mark.parametrize("done", range(len(STAGES)))
def test_the_first_stage_that_is_not_done_begins(done: int) -> None:
    """And is the only one whose files go."""
    journal, found = after(*STAGES[:done])
    name = STAGES[done].name
    assert next_action(STAGES, journal, found) == NextAction("begin", name, (name,))


def test_with_all_done_nothing_is_left() -> None:
    """Whatever else lies in the folder."""
    journal, found = after(*STAGES)
    found = Found({**found.digests, "other": "X"}, frozenset({"count"}))
    assert next_action(STAGES, journal, found) == NextAction("finished")


def test_a_stage_that_was_stopped_goes_on_begins_anew_or_is_done() -> None:
    """By whether a run of it is there, whether it can go on, and whether all is written."""
    journal, found = after(TOPOLOGY)
    journal["count"] = entry(COUNT, done=False)
    assert next_action(STAGES, journal, found) == NextAction("begin", "count", ("count",))
    stopped = replace(found, under_way=frozenset({"count"}))
    assert next_action(STAGES, journal, stopped) == NextAction("go on", "count")
    for some in ({"c.tsv": "x"}, {"c.rec": "x"}):
        part = replace(stopped, digests={**found.digests, **some})
        assert next_action(STAGES, journal, part).kind == "go on"
    whole = Found({**found.digests, "c.tsv": "x", "c.rec": "y"}, frozenset({"count"}))
    assert next_action(STAGES, journal, whole) == NextAction("adopt", "count")
    # What touches no user is simply done again, with whatever settings it has now.
    journal, found = after(*STAGES[:3])
    journal["distill"] = replace(entry(DISTILL, done=False), settings={"seed": 9})
    found = replace(found, digests={**found.digests, "model": "half of it"})
    assert next_action(STAGES, journal, found) == NextAction("begin", "distill", ("distill",))


@pytest.mark.promise("changed_stage")
@pytest.mark.parametrize(("stage", "done"), list(product(STAGES, (True, False))))
def test_other_settings_are_refused_by_name(stage: StagePlan, done: bool) -> None:
    """With what they were, what they are, and what to do; of a run that was stopped, too."""
    at = STAGES.index(stage)
    journal, found = after(*STAGES[: at + done])
    journal[stage.name] = replace(entry(stage, done=done), settings={"a": 1})
    found = replace(found, under_way=frozenset() if done else frozenset({stage.name}))
    action = next_action(STAGES, journal, found)
    if not done and not stage.goes_on:
        assert action.kind == "begin"
        return
    assert (action.kind, action.stage) == ("refuse", stage.name)
    (name, value), *_ = stage.settings.items()
    assert f"{name} was None and is now {value}" in action.why
    assert "a was 1 and is now None" in action.why
    assert ("--redo" in action.why) != stage.releases
    assert "another [run] folder" in action.why


@pytest.mark.parametrize(
    ("digests", "stage", "why"),
    [
        ({"u.tsv": "V"}, "count", "users (u.tsv) has other content"),
        ({"u.tsv": None}, "count", "users (u.tsv) is missing"),
        ({"c.tsv": "V"}, "count", "its output c.tsv has changed since"),
        ({"c.rec": None}, "count", "its output c.rec is missing"),
        ({"t.txt": "V"}, "topology", "text (t.txt) has other content"),
        ({"model": "V"}, "distill", "its output model has changed since"),
        ({"shards": None}, "shard", "its output shards is missing"),
    ],
)
def test_what_changed_on_disk_is_refused_by_the_stage_that_read_or_wrote_it(
    digests: dict[str, str | None], stage: str, why: str
) -> None:
    """The first of them, so that nothing is made of it."""
    journal, found = after(*STAGES)
    now = {p: d for p, d in {**found.digests, **digests}.items() if d is not None}
    action = next_action(STAGES, journal, Found(now))
    assert (action.kind, action.stage) == ("refuse", stage)
    assert why in action.why


def test_files_of_nobody_are_not_overwritten() -> None:
    """A stage that the journal does not know, and whose output or run is there."""
    journal, found = after(TOPOLOGY)
    there = replace(found, digests={**found.digests, "c.tsv": "mine"})
    assert "c.tsv exists" in next_action(STAGES, journal, there).why
    running = replace(found, under_way=frozenset({"count"}))
    assert "a run of count exists" in next_action(STAGES, journal, running).why


def test_redo_takes_what_was_made_of_a_stage_with_it() -> None:
    """And nothing else; what was released about users stays."""
    journal, found = after(*STAGES)
    assert made_of(STAGES, "topology") == ("topology", "distill", "shard")
    assert next_action(STAGES, journal, found, ["topology"]) == NextAction(
        "begin", "topology", ("topology", "distill", "shard")
    )
    assert next_action(STAGES, journal, found, ["shard", "distill"]) == NextAction(
        "begin", "distill", ("distill", "shard")
    )
    for released in ("count", "train"):
        action = next_action(STAGES, journal, found, [released])
        assert (action.kind, action.stage) == ("refuse", released)
        assert "add up" in action.why
    # Of a simulation nothing was released.
    simulated = [replace(stage, releases=False) for stage in STAGES]
    action = next_action(simulated, journal, found, ["count"])
    assert action == NextAction("begin", "count", ("count", "train", "distill", "shard"))


def test_redo_mends_what_is_refused() -> None:
    """As the message says."""
    journal, found = after(*STAGES)
    broken = replace(found, digests={**found.digests, "model": "edited"})
    refused = next_action(STAGES, journal, broken)
    assert "--redo distill" in refused.why
    assert next_action(STAGES, journal, broken, ["distill"]).kind == "begin"


def test_an_input_that_came_or_went_is_a_change() -> None:
    """As a record that was put beside a list after the list was counted, or taken away."""
    with_record = replace(COUNT, reads={**COUNT.reads, "record": "u.rec"})
    stages = [TOPOLOGY, with_record, TRAIN, DISTILL, SHARD]
    journal, found = after(*STAGES)
    assert next_action(stages, journal, found).kind == "finished"  # there is none, as before
    came = replace(found, digests={**found.digests, "u.rec": "R"})
    assert "record (u.rec)" in next_action(stages, journal, came).why
    journal["count"] = replace(entry(COUNT), reads={**entry(COUNT).reads, "record": "R"})
    assert "record (u.rec) is missing" in next_action(stages, journal, found).why
    assert "record is no longer read" in next_action(STAGES, journal, found).why


def test_what_a_lost_journal_leaves_of_users_is_not_to_be_removed() -> None:
    """A second release adds to the first; other files may go."""
    _, found = after(TOPOLOGY, COUNT)
    assert "Remove it, or" in next_action(STAGES, {}, found).why
    journal, _ = after(TOPOLOGY)
    refused = next_action(STAGES, journal, found)
    assert (refused.kind, refused.stage) == ("refuse", "count")
    assert "Restore journal.json" in refused.why
    assert "remove" not in refused.why.lower()
