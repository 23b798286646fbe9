"""Pure steps of health: heartbeats of a server, and full or small model; no state is a trap."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from client import scenarios
from client.world import World
from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.client.health import (
    FIRST_BEATS,
    RENEW_AFTER,
    Beat,
    Cascade,
    Changed,
    Liveness,
    Member,
    MemberAction,
    MemberEvent,
    Messages,
    Mode,
    ModeAction,
    ModeEvent,
    Ping,
    Probe,
    ProbeDone,
    ReachabilityTick,
    Refused,
    Renew,
    Restarted,
    Switch,
    Tick,
    Unreachable,
    member_after,
    mode_after,
)

CONFIG = HeartbeatConfig()
Event, Action = MemberEvent, MemberAction
UP, SUSPECT, DOWN = Liveness.UP, Liveness.SUSPECT, Liveness.DOWN


def member(health: Liveness, run: int = 0, *, out: bool = True) -> Member:
    """One whose beat 7 went out at 10, or whose next is due at 10."""
    return Member(
        health=health,
        ready=True,
        run=run,
        silent=run if health is SUSPECT else 0,
        due=10.5 if out else 10.0,
        sequence=7,
        sent=10.0 if out else -inf,
        instance=1,
    )


def row(
    name: str, state: Member, event: Event, at: float, health: Liveness, run: int, *did: Action
) -> Any:
    """A row of the table: an event at a time; health, the run and the actions after it."""
    return pytest.param(state, event, at, (health, run), list(did), id=name)


IDLE, BEAT = member(UP, out=False), Beat(7, 1)
ALMOST = member(DOWN)._replace(silent=3 + RENEW_AFTER - 1)


@pytest.mark.parametrize(
    ("state", "event", "at", "after", "actions"),
    [
        row("answered", member(UP), BEAT, 10.1, UP, 0),
        row("missed-and-sent-again-at-once", member(UP), Tick(), 11.0, SUSPECT, 1,
            Ping(8), Changed("up", "suspect", "silent")),
        row("a-message-found-nobody", IDLE, Unreachable(), 9.0, SUSPECT, 0,
            Changed("up", "suspect", "lost")),
        row("a-message-found-it-draining", IDLE, Refused("draining"), 9.0, UP, 0,
            Changed("up", "not_ready", "draining")),
        row("it-says-that-it-warms-up", member(UP), Beat(7, 1, "warming"), 10.1, UP, 0,
            Changed("up", "not_ready", "warming")),
        row("a-suspect-answers", member(SUSPECT, 1), BEAT, 10.1, UP, 0,
            Changed("suspect", "up", "answered")),
        row("missed-twice", member(SUSPECT, 1), Tick(), 11.0, SUSPECT, 2, Ping(8)),
        row("missed-three-times", member(SUSPECT, 2), Tick(), 11.0, DOWN, 0,
            Renew(), Ping(8), Changed("suspect", "down", "silent")),
        row("still-missed-ten-beats-later", ALMOST, Tick(), 11.0, DOWN, 0, Renew(), Ping(8)),
        row("one-answer-is-not-enough", member(DOWN), BEAT, 10.1, DOWN, 1),
        row("two-answers-are", member(DOWN, 1), BEAT, 10.1, UP, 0,
            Changed("down", "up", "answered")),
        row("answers-are-counted-anew", member(DOWN, 1), Tick(), 11.0, DOWN, 0, Ping(8)),
        row("one-is-out", member(UP), Tick(), 10.9, UP, 0),
        row("none-is-due", IDLE, Tick(), 9.9, UP, 0),
        row("one-is-due", IDLE, Tick(), 10.0, UP, 0, Ping(8)),
        row("an-answer-to-another", member(UP), Beat(6, 1), 10.1, UP, 0),
        row("an-answer-that-came-twice", IDLE, BEAT, 10.1, UP, 0),
        row("another-process-answers", member(UP), Beat(7, 2), 10.1, UP, 0, Restarted()),
    ],
)  # fmt: skip
def test_each_row_of_the_table_holds(
    state: Member, event: Event, at: float, after: tuple[Liveness, int], actions: list[Action]
) -> None:
    """One event at one time; health, the run, and the actions are those of the row."""
    found, did = member_after(state, event, at, CONFIG)
    assert ((found.health, found.run), did) == (after, actions)


def beaten(trips: list[float], state: Member | None = None, now: float = 0.0) -> Member:
    """A member after round trips of these lengths, an interval apart."""
    state = state or Member()
    for trip in trips:
        now = max(now + CONFIG.interval_s * 1.3, state.due)
        state, actions = member_after(state, Tick(), now, CONFIG)
        (ping,) = (a for a in actions if isinstance(a, Ping))
        state, _ = member_after(state, Beat(ping.sequence, 1), now + trip, CONFIG)
    return state


def test_a_way_that_takes_three_times_as_long_is_slow_and_one_slow_beat_is_not() -> None:
    """Within ten beats; by its own baseline."""
    healthy = beaten([0.02] * 50)
    assert not healthy.is_slow(CONFIG)
    assert not beaten([0.12], healthy, 100.0).is_slow(CONFIG)
    slow = beaten([0.06] * 10, healthy, 100.0)
    assert slow.is_slow(CONFIG) and 2.0 < slow.ratio < 3.0


def test_five_beats_must_agree_that_a_way_is_slow_and_one_that_it_is_not() -> None:
    """However long the others took: a lost packet, a restart, a busy core."""
    state = beaten([0.01] * 50)
    for trips, slow in (([0.9] * 4, False), ([0.01], False), ([0.9] * 5, True), ([0.01], False)):
        state = beaten(trips, state, state.measured)
        assert state.is_slow(CONFIG) is slow


def test_a_delay_too_short_to_notice_is_never_slow() -> None:
    """From 0.2 to 15 ms is 75 times as long, and what a busy client adds by itself."""
    assert not beaten([0.015] * 50, beaten([0.0002] * 50), 100.0).is_slow(CONFIG)


def test_the_first_round_trips_are_not_compared_with_themselves() -> None:
    """One slow beat at the start is no baseline for those after it, nor part of one."""
    assert beaten([0.5] + [0.001] * (FIRST_BEATS - 2)).ratio == 1.0
    assert beaten([0.5] + [0.001] * FIRST_BEATS).baseline_s == pytest.approx(0.001)
    assert not beaten([0.001, 0.5, 0.5]).is_slow(CONFIG)


def test_a_way_that_is_longer_for_good_is_slow_for_some_minutes_only() -> None:
    """The baseline follows: no state is a trap."""
    state, now, slow = beaten([0.01] * 50), 100.0, 0.0
    for _ in range(2000):
        state = beaten([0.1], state, now)
        now = state.measured
        slow = now if state.is_slow(CONFIG) else slow
    assert 60.0 < slow - 100.0 < CONFIG.baseline_s


events = st.lists(
    st.tuples(
        st.floats(0.0, 3.0, width=16),
        st.one_of(
            st.builds(Tick, st.floats(0.0, 1.0)),
            st.builds(
                Beat, st.integers(0, 12), st.integers(1, 2), st.sampled_from([None, "warming"])
            ),
            st.just(Unreachable()),
            st.just(Refused("draining")),
            st.just(None),  # the answer to the beat that is out
        ),
    ),
    max_size=60,
)


def plain(script: list[tuple[float, Event]]) -> list[tuple[Liveness, int | None, bool]]:
    """The table again: (health, sequence of the beat out, whether the connection is renewed)."""
    out: list[tuple[Liveness, int | None, bool]] = []
    health, missed, answered, sequence, silent = SUSPECT, 0, 0, 0, 0
    renewals = {CONFIG.down_after + k * RENEW_AFTER for k in range(len(script))}
    sent: float | None = None
    due, ready = -inf, False
    for now, event in script:
        renewed = False
        if isinstance(event, Beat):
            if sent is not None and event.sequence == sequence:
                sent, missed, silent, ready = None, 0, 0, event.refuses is None
                answered = answered + 1 if health is DOWN else 0
                if health is not DOWN or answered >= CONFIG.up_after:
                    health, answered = UP, 0
        elif isinstance(event, Unreachable):
            if health is UP:
                health, missed, due = SUSPECT, 0, now
        elif isinstance(event, Refused):
            due = now if health is UP and ready else due
            ready = False
        else:
            if sent is not None and now - sent >= CONFIG.timeout_s:
                sent = None
                silent += 1
                renewed = silent in renewals
                if health is DOWN:
                    answered = 0
                else:
                    due = now if health is UP else due
                    missed += 1
                    health = DOWN if missed >= CONFIG.down_after else SUSPECT
                    missed = 0 if health is DOWN else missed
            if sent is None and now >= due:
                sequence += 1
                sent = now
                due = now + CONFIG.interval_s * (1 + CONFIG.jitter * (2 * event.chance - 1))
        out.append((health, sequence if sent is not None else None, renewed))
    return out


@settings(max_examples=200, deadline=None, derandomize=True)
@given(events)
def test_the_machine_does_what_the_plain_reference_does(script) -> None:
    """Health, the beat that is out and the connection, after each of any events."""
    state, now, done, found = Member(), 0.0, [], []
    for passes, event in script:
        now += passes
        event = Beat(state.sequence, 1) if event is None else event
        state, actions = member_after(state, event, now, CONFIG)
        done.append((now, event))
        out = state.sequence if state.sent > -inf else None
        found.append((state.health, out, Renew() in actions))
    assert found == plain(done)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(events)
def test_whatever_happened_a_server_that_answers_is_up_soon(script) -> None:
    """Once beats are answered, four intervals and a timeout are enough."""
    state, now = Member(), 0.0
    for passes, event in script:
        now += passes
        state, _ = member_after(state, event or Beat(state.sequence, 1), now, CONFIG)
    end = now + CONFIG.timeout_s + 4 * CONFIG.interval_s * (1 + CONFIG.jitter)
    while now < end:
        now += 0.05
        state, actions = member_after(state, Tick(), now, CONFIG)
        for action in actions:
            if isinstance(action, Ping):
                state, _ = member_after(state, Beat(action.sequence, 1), now + 0.001, CONFIG)
    assert state.usable


FAILOVER = FailoverConfig()
FULL, LOCAL_FALLBACK = Mode.FULL, Mode.LOCAL_FALLBACK


def small(**more: float) -> Cascade:
    """In LOCAL_FALLBACK since 100, the first probe due at 101."""
    fields = {"since": 100.0, "wait_s": 1.0, "due": 101.0, **more}
    return Cascade(LOCAL_FALLBACK, **fields)  # type: ignore[arg-type]


OUT = {"probe": 3, "until": 103.0, "due": 101.0}


def turn(name: str, state: Cascade, event: ModeEvent, at: float, *did: ModeAction) -> Any:
    """A row of the table: an event at a time, and the actions after it."""
    return pytest.param(state, event, at, list(did), id=name)


LATER, SLOW = ReachabilityTick(), ReachabilityTick(slow=True)
TWO_CAME = small(**OUT, passed=2)


@pytest.mark.parametrize(
    ("state", "event", "at", "actions"),
    [
        turn("more-than-a-thousandth", Cascade(), Messages(4000, 5), 50.0,
            Switch(LOCAL_FALLBACK, "failures", 4000, 5)),
        turn("a-thousandth-exactly", Cascade(), Messages(5000, 5), 50.0),
        turn("too-few-to-tell", Cascade(), Messages(10, 4), 50.0),
        turn("slow-since-now", Cascade(), SLOW, 50.0),
        turn("slow-for-two-seconds", Cascade(slow_from=48.0), SLOW, 50.0,
            Switch(LOCAL_FALLBACK, "delay")),
        turn("slow-no-more", Cascade(slow_from=49.0), LATER, 50.0),
        turn("too-early", small(), LATER, 100.9),
        turn("the-first-probe", small(), LATER, 101.0, Probe(1)),
        turn("nobody-there", small(), ReachabilityTick(reachable=False), 101.0),
        turn("still-slow", small(), SLOW, 101.0),
        turn("one-is-out", small(**OUT), LATER, 102.0),
        turn("one-came-back", small(**OUT), ProbeDone(3, True), 102.0),
        turn("three-came-back", TWO_CAME, ProbeDone(3, True), 102.0, Switch(FULL, "recovered")),
        turn("an-older", TWO_CAME, ProbeDone(2, True), 102.0),
        turn("one-failed", TWO_CAME, ProbeDone(3, False), 102.0),
        turn("one-came-too-late", TWO_CAME, ProbeDone(3, True), 103.0),
        turn("what-finishes-on-full", small(), Messages(1000, 1000), 102.0),
    ],
)  # fmt: skip
def test_each_row_of_the_table_of_modes_holds(
    state: Cascade, event: ModeEvent, at: float, actions: list[ModeAction]
) -> None:
    """One event at one time: the actions are those of the row, and the mode changes with a switch
    alone."""
    found, did = mode_after(state, event, at, FAILOVER)
    switch = actions[0] if actions and isinstance(actions[0], Switch) else None
    assert did == actions
    assert found.mode == (switch.to if switch else state.mode)
    assert found.reason == (switch.reason if switch else "")


def test_waiting_grows_while_probes_fail_and_is_short_again_after_a_stable_time() -> None:
    """1, 2, 4 ... 30 s; then a minute of peace."""
    state, now, waits = small(), 101.0, []
    for _ in range(8):
        state, (probe,) = mode_after(state, ReachabilityTick(), now, FAILOVER)
        assert isinstance(probe, Probe)
        state, _ = mode_after(state, ProbeDone(probe.number, False), now, FAILOVER)
        waits.append(state.due - now)
        now = state.due
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    for stayed, wait in ((10.0, 30.0), (FAILOVER.stable_s, 1.0)):
        full = Cascade(since=now, wait_s=30.0)
        found, _ = mode_after(full, Messages(100, 50), now + stayed, FAILOVER)
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
        state, actions = mode_after(state, Messages(ended, failed), now, FAILOVER)
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
    world.run(FAILOVER.max_wait_s + FAILOVER.probe_timeout_s + 15.0)
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
