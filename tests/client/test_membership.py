"""Heartbeats of one server: rows of the table, delays, and that no state is a trap."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.client.config import HeartbeatConfig
from dlm.client.membership import (
    FIRST_BEATS,
    RENEW_AFTER,
    Action,
    Beat,
    Changed,
    Event,
    Liveness,
    Member,
    Ping,
    Refused,
    Renew,
    Restarted,
    Tick,
    Unreachable,
    step,
)

CONFIG = HeartbeatConfig()
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
    found, did = step(state, event, at, CONFIG)
    assert ((found.health, found.run), did) == (after, actions)


def test_a_server_that_drains_is_up_but_not_to_be_asked() -> None:
    """And is asked again when it says that it is ready."""
    state, _ = step(member(UP), Beat(7, 1, "draining"), 10.1, CONFIG)
    assert (state.health, state.usable) == (UP, False)
    state, (ping,) = step(state, Tick(), 10.6, CONFIG)
    assert isinstance(ping, Ping)
    state, _ = step(state, Beat(ping.sequence, 1), 10.7, CONFIG)
    assert state.usable


def beaten(trips: list[float], state: Member | None = None, now: float = 0.0) -> Member:
    """A member after round trips of these lengths, an interval apart."""
    state = state or Member()
    for trip in trips:
        now = max(now + CONFIG.interval_s * 1.3, state.due)
        state, actions = step(state, Tick(), now, CONFIG)
        (ping,) = (a for a in actions if isinstance(a, Ping))
        state, _ = step(state, Beat(ping.sequence, 1), now + trip, CONFIG)
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
        state, actions = step(state, event, now, CONFIG)
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
        state, _ = step(state, event or Beat(state.sequence, 1), now, CONFIG)
    end = now + CONFIG.timeout_s + 4 * CONFIG.interval_s * (1 + CONFIG.jitter)
    while now < end:
        now += 0.05
        state, actions = step(state, Tick(), now, CONFIG)
        for action in actions:
            if isinstance(action, Ping):
                state, _ = step(state, Beat(action.sequence, 1), now + 0.001, CONFIG)
    assert state.usable
