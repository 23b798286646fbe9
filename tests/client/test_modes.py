"""Full or small model: rows of the table, a plain reference, stories; and no mode is a trap."""

from __future__ import annotations

from math import inf
from pathlib import Path

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
from dlm.errors import ConfigError

CONFIG = FailoverConfig()
FULL, LOCAL_FALLBACK = Mode.FULL, Mode.LOCAL_FALLBACK
SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("cascade_*.txt"))


def small(**more: float) -> Cascade:
    """In LOCAL_FALLBACK since 100, the first probe due at 101."""
    fields = {"since": 100.0, "wait_s": 1.0, "due": 101.0, **more}
    return Cascade(LOCAL_FALLBACK, **fields)  # type: ignore[arg-type]


OUT = {"probe": 3, "until": 103.0, "due": 101.0}


@pytest.mark.parametrize(
    ("state", "event", "at", "after", "actions"),
    [
        pytest.param(
            Cascade(),
            Messages(4000, 5),
            50.0,
            FULL,
            [Switch(LOCAL_FALLBACK, "failures", 4000, 5)],
            id="more-than-a-thousandth",
        ),
        pytest.param(Cascade(), Messages(5000, 5), 50.0, FULL, [], id="a-thousandth-exactly"),
        pytest.param(Cascade(), Messages(10, 4), 50.0, FULL, [], id="too-few-to-tell"),
        pytest.param(Cascade(), ReachabilityTick(slow=True), 50.0, FULL, [], id="slow-since-now"),
        pytest.param(
            Cascade(slow_from=48.0),
            ReachabilityTick(slow=True),
            50.0,
            FULL,
            [Switch(LOCAL_FALLBACK, "delay")],
            id="slow-for-two-seconds",
        ),
        pytest.param(
            Cascade(slow_from=49.0), ReachabilityTick(), 50.0, FULL, [], id="slow-no-more"
        ),
        pytest.param(small(), ReachabilityTick(), 100.9, LOCAL_FALLBACK, [], id="too-early"),
        pytest.param(
            small(), ReachabilityTick(), 101.0, LOCAL_FALLBACK, [Probe(1)], id="the-first-probe"
        ),
        pytest.param(
            small(), ReachabilityTick(reachable=False), 101.0, LOCAL_FALLBACK, [], id="nobody-there"
        ),
        pytest.param(
            small(), ReachabilityTick(slow=True), 101.0, LOCAL_FALLBACK, [], id="still-slow"
        ),
        pytest.param(small(**OUT), ReachabilityTick(), 102.0, LOCAL_FALLBACK, [], id="one-is-out"),
        pytest.param(
            small(**OUT), ProbeDone(3, True), 102.0, LOCAL_FALLBACK, [], id="one-came-back"
        ),
        pytest.param(
            small(**OUT, passed=2),
            ProbeDone(3, True),
            102.0,
            FULL,
            [Switch(FULL, "recovered")],
            id="three-came-back",
        ),
        pytest.param(
            small(**OUT, passed=2), ProbeDone(2, True), 102.0, LOCAL_FALLBACK, [], id="an-older"
        ),
        pytest.param(
            small(**OUT, passed=2), ProbeDone(3, False), 102.0, LOCAL_FALLBACK, [], id="one-failed"
        ),
        pytest.param(
            small(**OUT, passed=2),
            ProbeDone(3, True),
            103.0,
            LOCAL_FALLBACK,
            [],
            id="one-came-too-late",
        ),
        pytest.param(
            small(), Messages(1000, 1000), 102.0, LOCAL_FALLBACK, [], id="what-finishes-on-full"
        ),
    ],
)
def test_each_row_of_the_table_holds(
    state: Cascade, event: Event, at: float, after: Mode, actions: list[Action]
) -> None:
    """One event at one time; the mode after it and the actions are those of the row."""
    found, did = step(state, event, at, CONFIG)
    expected = actions[0].to if actions and isinstance(actions[0], Switch) else after
    assert (found.mode, did) == (expected, actions)
    assert found.reason == (did[0].reason if did and isinstance(did[0], Switch) else "")


def test_failures_are_forgotten_with_their_window() -> None:
    """Four now and four a window later are never more than four."""
    state = Cascade()
    for at in (0.0, 10.0, 20.0, 30.0):
        state, actions = step(state, Messages(100, 4), at, CONFIG)
        assert actions == [] and state.failing() == (100, 4)


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


def test_ten_healthy_minutes_have_no_transition() -> None:
    """One message in two thousand lost, as on a network that is well; and of the heartbeats that
    are answered, three in a hundred take up to half a second longer, as on a machine at work."""
    world = World(4, 1, traffic=1000)
    world.run(5.0)
    for shard in world.shards:
        shard[0].late = 0.03
    world.said.clear()
    world.lossy = 0.0005
    world.run(600.0)
    assert [text for _, text in world.said if "model" in text or "down" in text] == []


def test_one_of_two_replicas_killed_trips_nothing() -> None:
    """The other answers: no logical message fails."""
    world = World(4, 2)
    world.run(5.0)
    world.server("2a").alive = False
    world.run(60.0)
    assert world.cascade.mode is FULL
    assert world.server("2a").member.health == "down"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_transcript_of_a_scenario_is_what_happens(path: Path) -> None:
    """Commands: ``cluster shards=S replicas=R traffic=T``, ``run SECONDS``, ``kill NAME``,
    ``start NAME``, ``delay NAME MS``, ``loss SHARE``; what happens, by seconds since the start."""
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
            else:
                assert name in ("kill", "start"), name
                do(world, name, rest[0])
        said = [f"{at:.2f} s  {text}" for at, text in world.said] or ["nothing"]
        return [*said, f"new utterances: {world.cascade.mode} model"]

    scenarios.check(path, outcome)


def test_there_are_scenarios() -> None:
    """The parametrised test above runs."""
    assert len(SCENARIOS) >= 5


@pytest.mark.parametrize(
    "wrong",
    [{"window_s": 0.5}, {"failing": 1.5}, {"probes": 0}, {"max_wait_s": 0.5}, {"slow_s": inf}],
)
def test_a_setting_out_of_its_bounds_is_refused(wrong: dict[str, float]) -> None:
    """With its name, value and bounds."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"failover_config.{name} is"):
        FailoverConfig(**wrong)
