"""Full or small model: rows of the table, a plain reference, stories; and no mode is a trap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client import scenarios
from client.world import World
from dlm.client.config import FailoverConfig
from dlm.client.modes import (
    Action,
    Cascade,
    Event,
    Messages,
    Mode,
    Probe,
    ProbeDone,
    ReachabilityTick,
    Switch,
    step,
)

CONFIG = FailoverConfig()
FULL, LOCAL_FALLBACK = Mode.FULL, Mode.LOCAL_FALLBACK


def small(**more: float) -> Cascade:
    """In LOCAL_FALLBACK since 100, the first probe due at 101."""
    fields = {"since": 100.0, "wait_s": 1.0, "due": 101.0, **more}
    return Cascade(LOCAL_FALLBACK, **fields)  # type: ignore[arg-type]


OUT = {"probe": 3, "until": 103.0, "due": 101.0}


def row(name: str, state: Cascade, event: Event, at: float, *did: Action) -> Any:
    """A row of the table: an event at a time, and the actions after it."""
    return pytest.param(state, event, at, list(did), id=name)


LATER, SLOW = ReachabilityTick(), ReachabilityTick(slow=True)
TWO_CAME = small(**OUT, passed=2)


@pytest.mark.parametrize(
    ("state", "event", "at", "actions"),
    [
        row("more-than-a-thousandth", Cascade(), Messages(4000, 5), 50.0,
            Switch(LOCAL_FALLBACK, "failures", 4000, 5)),
        row("a-thousandth-exactly", Cascade(), Messages(5000, 5), 50.0),
        row("too-few-to-tell", Cascade(), Messages(10, 4), 50.0),
        row("slow-since-now", Cascade(), SLOW, 50.0),
        row("slow-for-two-seconds", Cascade(slow_from=48.0), SLOW, 50.0,
            Switch(LOCAL_FALLBACK, "delay")),
        row("slow-no-more", Cascade(slow_from=49.0), LATER, 50.0),
        row("too-early", small(), LATER, 100.9),
        row("the-first-probe", small(), LATER, 101.0, Probe(1)),
        row("nobody-there", small(), ReachabilityTick(reachable=False), 101.0),
        row("still-slow", small(), SLOW, 101.0),
        row("one-is-out", small(**OUT), LATER, 102.0),
        row("one-came-back", small(**OUT), ProbeDone(3, True), 102.0),
        row("three-came-back", TWO_CAME, ProbeDone(3, True), 102.0, Switch(FULL, "recovered")),
        row("an-older", TWO_CAME, ProbeDone(2, True), 102.0),
        row("one-failed", TWO_CAME, ProbeDone(3, False), 102.0),
        row("one-came-too-late", TWO_CAME, ProbeDone(3, True), 103.0),
        row("what-finishes-on-full", small(), Messages(1000, 1000), 102.0),
    ],
)  # fmt: skip
def test_each_row_of_the_table_holds(
    state: Cascade, event: Event, at: float, actions: list[Action]
) -> None:
    """One event at one time: the actions are those of the row, and the mode changes with a switch
    alone."""
    found, did = step(state, event, at, CONFIG)
    switch = actions[0] if actions and isinstance(actions[0], Switch) else None
    assert did == actions
    assert found.mode == (switch.to if switch else state.mode)
    assert found.reason == (switch.reason if switch else "")


def test_waiting_grows_while_probes_fail_and_is_short_again_after_a_stable_time() -> None:
    """1, 2, 4 ... 30 s; then a minute of peace."""
    state, now, waits = small(), 101.0, []
    for _ in range(8):
        state, (probe,) = step(state, ReachabilityTick(), now, CONFIG)
        assert isinstance(probe, Probe)
        state, _ = step(state, ProbeDone(probe.number, False), now, CONFIG)
        waits.append(state.due - now)
        now = state.due
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    for stayed, wait in ((10.0, 30.0), (CONFIG.stable_s, 1.0)):
        full = Cascade(since=now, wait_s=30.0)
        found, _ = step(full, Messages(100, 50), now + stayed, CONFIG)
        assert found.due - (now + stayed) == wait


batches = st.tuples(st.floats(0.0, 3.0, width=16), st.integers(0, 3000), st.floats(0.0, 0.004))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(batches, max_size=60))
def test_the_switch_is_the_one_of_a_plain_count(script) -> None:
    """The window is counted anew each time, from all that happened, in its ten steps."""
    state, now, history = Cascade(), 0.0, list[tuple[int, int, int]]()
    for passes, ended, share in script:
        now += passes
        failed = min(ended, round(ended * share))
        state, actions = step(state, Messages(ended, failed), now, CONFIG)
        bucket = int(now // 1.0)
        history.append((bucket, ended, failed))
        inside = [h for h in history if bucket - h[0] < 10]
        total, bad = sum(h[1] for h in inside), sum(h[2] for h in inside)
        if bad >= 5 and bad > 0.001 * total:
            assert actions == [Switch(LOCAL_FALLBACK, "failures", total, bad)]
            return
        assert actions == [] and state.failing() == (total, bad)


faults = st.lists(
    st.tuples(
        st.floats(0.125, 8.0, width=16),
        st.sampled_from(["kill", "start", "slow", "quick", "loss", "no loss"]),
        st.sampled_from(["0a", "0b", "1a", "1b"]),
    ),
    max_size=12,
)


def do(world: World, what: str, name: str) -> None:
    """One thing happens to a server, or to the network."""
    server = world.server(name)
    if what == "kill":
        server.alive = False
    elif what == "start":
        server.instance += not server.alive
        server.alive = True
    elif what in ("slow", "quick"):
        server.delay_s = 0.3 if what == "slow" else 0.001
    else:
        world.lossy = 0.05 if what == "loss" else 0.0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(faults)
def test_whatever_happened_the_full_model_is_back_once_faults_end(script) -> None:
    """At most one long wait, its probes, and what heartbeats need to see it."""
    world = World(2, 2)
    world.run(3.0)
    for seconds, what, name in script:
        do(world, what, name)
        world.run(seconds)
    for name in ("0a", "0b", "1a", "1b"):
        do(world, "start", name)
        do(world, "quick", name)
    world.lossy = 0.0
    world.run(CONFIG.max_wait_s + CONFIG.probe_timeout_s + 15.0)
    assert world.cascade.mode is FULL
    assert all(s.member.usable for shard in world.shards for s in shard)


@pytest.mark.parametrize("path", scenarios.named("cascade", at_least=7), ids=lambda path: path.stem)
def test_the_transcript_of_a_scenario_is_what_happens(path: Path) -> None:
    """Commands: ``cluster shards=S replicas=R traffic=T``, ``run SECONDS``, ``kill NAME``,
    ``start NAME``, ``delay NAME MS``, ``loss SHARE``, ``late SHARE``; what happens, by seconds
    since the start."""
    world = World(1)

    def outcome(commands: list[str]) -> list[str]:
        nonlocal world
        world.said.clear()
        for command in commands:
            name, *rest = command.split()
            if name == "cluster":
                fields = {key: int(value) for key, value in (word.split("=") for word in rest)}
                world = World(fields["shards"], fields["replicas"], traffic=fields["traffic"])
            elif name == "run":
                world.run(float(rest[0]))
            elif name == "delay":
                world.server(rest[0]).delay_s = float(rest[1]) / 1e3
            elif name == "loss":
                world.lossy = float(rest[0])
            elif name == "late":
                for shard in world.shards:
                    shard[0].late = float(rest[0])
            else:
                assert name in ("kill", "start"), name
                do(world, name, rest[0])
        said = [f"{at:.2f} s  {text}" for at, text in world.said] or ["nothing"]
        return [*said, f"new utterances: {world.cascade.mode} model"]

    scenarios.check(path, outcome)
