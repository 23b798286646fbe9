"""The window of a shard: rows of its table, what must always hold, and transcripts to read."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.client.batcher import (
    LEASE_GRACE_S,
    MAX_QUEUED_ITEMS,
    Action,
    Done,
    Expire,
    Lease,
    QueuedItem,
    Refuse,
    Send,
    Submit,
    Unanswered,
    Window,
    step,
)
from dlm.client.pace import FIRST_ANSWERS

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("batcher_*.txt"))
REWRITE = "DLM_REWRITE_SCENARIOS"


def work(item: str, queries: int = 1, deadline: float = 100.0) -> QueuedItem[str]:
    """Work named `item`."""
    return QueuedItem(item, queries, deadline)


def window(in_flight: int = 0, *waiting: QueuedItem[str], limit: int = 2) -> Window[str]:
    """A window of at most 10 queries a message, and at most 10 queries that wait."""
    leases = tuple(Lease(message, inf, 0) for message in range(in_flight))
    earliest = min((w.deadline for w in waiting), default=inf)
    queued = sum(w.queries for w in waiting)
    return Window(limit, 10, leases, waiting, queued, earliest, in_flight, max_waiting=10)


def oldest(state: Window[Any]) -> Done:
    """The oldest message in flight comes back."""
    return Done(state.leases[0].message)


@pytest.mark.parametrize(
    ("state", "event", "after", "actions"),
    [
        pytest.param(
            window(1), Submit(work("a")), window(2), [Send((work("a"),))], id="room-sends-alone"
        ),
        pytest.param(window(2), Submit(work("a")), window(2, work("a")), [], id="full-waits"),
        pytest.param(window(2), Done(0), window(1), [], id="nothing-waits"),
        pytest.param(
            window(2, work("a"), work("b")),
            Done(0),
            window(2),
            [Send((work("a"), work("b")))],
            id="all-that-gathered-leaves-together",
        ),
        pytest.param(
            window(2, work("a", 6), work("b", 6), work("c", 4)),
            Done(0),
            window(2, work("b", 6), work("c", 4)),
            [Send((work("a", 6),))],
            id="what-does-not-fit-waits-on",
        ),
        pytest.param(
            window(2, work("a", 3, 5.0), work("b")),
            Done(0),
            window(2),
            [Expire(work("a", 3, 5.0)), Send((work("b"),))],
            id="the-late-are-told-first",
        ),
        pytest.param(
            window(2, work("a", 3, 5.0)),
            Submit(work("b")),
            window(2, work("b")),
            [Expire(work("a", 3, 5.0))],
            id="the-late-are-told-while-full",
        ),
        pytest.param(
            window(0),
            Submit(work("a", 1, 5.0)),
            window(0),
            [Expire(work("a", 1, 5.0))],
            id="late-on-arrival",
        ),
        pytest.param(
            window(1),
            Submit(work("a", 99)),
            window(2),
            [Send((work("a", 99),))],
            id="larger-than-a-message-goes-alone",
        ),
        pytest.param(
            window(2, work("a", 6), work("b", 6)),
            Submit(work("c")),
            window(2, work("a", 6), work("b", 6)),
            [Refuse(work("c"))],
            id="too-much-waits",
        ),
        pytest.param(
            window(2, work("a", 6), work("b", 6)),
            Submit(QueuedItem("c", 6, 100.0, more=True)),
            window(2, work("a", 6), work("b", 6), QueuedItem("c", 6, 100.0, more=True)),
            [],
            id="a-call-that-was-let-in-is-let-in-whole",
        ),
        pytest.param(
            window(2, *[work("a", 0)] * MAX_QUEUED_ITEMS),
            Submit(work("b", 0)),
            window(2, *[work("a", 0)] * MAX_QUEUED_ITEMS),
            [Refuse(work("b", 0))],
            id="too-many-wait",
        ),
        pytest.param(window(1), Done(7), window(1), [], id="an-answer-nobody-waits-for"),
    ],
)
def test_each_row_of_the_table_holds(
    state: Window[str], event: Submit[str] | Done, after: Window[str], actions: list[Action[str]]
) -> None:
    """At time 5, one event; the next state and the actions are those of the row."""
    found, did = step(state, event, 5.0)
    assert (found.in_flight, found.waiting, did) == (after.in_flight, after.waiting, actions)


def test_a_place_whose_message_is_never_heard_of_again_is_free_after_its_lease() -> None:
    """The lease ends LEASE_GRACE_S after the message's last deadline; a late Done is nothing."""
    state, (sent,) = step(window(0, limit=1), Submit(work("lost", 1, 5.0)), 0.0)
    assert isinstance(sent, Send)
    state, _ = step(state, Submit(work("next", 1, 100.0)), 5.0 + LEASE_GRACE_S - 0.1)
    assert (state.in_flight, len(state.waiting)) == (1, 1)
    state, actions = step(state, Submit(work("more", 1, 100.0)), 5.0 + LEASE_GRACE_S)
    assert actions[0] == Unanswered(sent.message)
    assert [w.item for a in actions if isinstance(a, Send) for w in a.works] == ["next", "more"]
    after, actions = step(state, Done(sent.message), 9.0)
    assert (after._replace(pace=state.pace), actions) == (state, [])
    assert after.pace.answers == 0


def answering(queries: int, seconds: float, messages: int, now: float = 0.0) -> Window[str]:
    """A window of one message in flight whose shard took so long for each of so many messages."""
    state: Window[str] = Window(1, 1000, max_waiting=100_000)
    for number in range(messages):
        state, (sent,) = step(state, Submit(work(str(number), queries, inf)), now)
        assert isinstance(sent, Send)
        now += seconds
        state, _ = step(state, Done(sent.message), now)
    return state


def test_a_call_that_would_wait_past_half_of_its_time_is_refused_at_once() -> None:
    """100 queries take 0.1 s: behind 300 of them 0.7 s are too little, 0.9 s are enough."""
    state = answering(100, 0.1, 20)
    for name in "abc":
        state, _ = step(state, Submit(work(name, 100, 50.0)), 2.0)
    assert state.refuses(100, 2.7, 2.0)
    _, actions = step(state, Submit(work("d", 100, 2.7)), 2.0)
    assert actions == [Refuse(work("d", 100, 2.7))]
    assert not state.refuses(100, 2.9, 2.0)
    _, actions = step(state, Submit(work("d", 100, 2.9)), 2.0)
    assert actions == []


def test_a_further_part_of_a_call_is_never_refused() -> None:
    """What was let in stays whole."""
    state, _ = step(answering(100, 1.0, 20), Submit(work("a", 100, 99.0)), 20.0)
    part = QueuedItem("b", 100, 20.1, more=True)
    after, actions = step(state, Submit(part), 20.0)
    assert (after.waiting, actions) == ((part,), [])


def test_the_first_answers_tell_nothing_of_the_pace() -> None:
    """Eight seconds a message while connections are made do not count; those after do."""
    assert answering(1, 8.0, FIRST_ANSWERS).pace.seconds(1000) == 0.0
    assert answering(1, 0.25, FIRST_ANSWERS + 1).pace.seconds(4) == 1.0


@pytest.mark.parametrize("silence_s", [0.5, 5.0, 5000.0])
def test_a_shard_that_was_silent_is_found_to_be_quick_again(silence_s: float) -> None:
    """Alone in flight, a call is taken whatever the pace; a dozen answers and others wait again."""
    state, now = answering(100, 0.001, 50), 10.0
    state, (sent,) = step(state, Submit(work("lost", 100, inf)), now)
    assert isinstance(sent, Send)
    state, _ = step(state, Done(sent.message, answered=False), now + silence_s)
    now += silence_s
    for _ in range(12):
        state, (sent,) = step(state, Submit(work("next", 100, now + 1.0)), now)
        assert isinstance(sent, Send)
        now += 0.001
        state, _ = step(state, Done(sent.message), now)
    state, _ = step(state, Submit(work("one", 100, now + 1.0)), now)
    assert not state.refuses(100, now + 1.0, now)


def test_refused_and_failed_messages_are_no_pace() -> None:
    """A server that refuses in a microsecond answers nothing."""
    state, now = answering(100, 0.1, 20), 2.0
    quick = state.pace.seconds(100)
    for _ in range(1000):
        state, (sent,) = step(state, Submit(work("a", 100, now + 1.0)), now)
        now += 1e-6
        state, _ = step(state, Done(sent.message, answered=False), now)
    assert state.pace.seconds(100) >= quick


def test_a_shard_whose_servers_are_gone_has_no_pace() -> None:
    """However long nobody is there, a call is told that, and not of seconds of work."""
    state, now = answering(100, 0.1, 20), 2.0
    for _ in range(50):
        state, (sent,) = step(state, Submit(work("lost", 100, now + 2.0)), now)
        now += 0.5
        state, _ = step(state, Done(sent.message, answered=False, gone=True), now)
    state, _ = step(state, Submit(work("lost", 100, now + 2.0)), now)
    assert not state.refuses(100, now + 2.0, now)


# Each event: (time that passes, queries and time allowed of new work, or None for an answer).
events = st.lists(
    st.tuples(
        st.floats(0, 3, width=16),
        st.none() | st.tuples(st.integers(1, 15), st.floats(-1, 6, width=16)),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(events, st.integers(1, 4))
def test_whatever_happens_nothing_is_lost_doubled_or_overtaken(script, limit: int) -> None:
    """Limits are kept, order too; each work is sent or expired once, and none is sent late."""
    state: Window[int] = Window(limit, 10, max_waiting=1000)
    now, submitted = 0.0, []
    sent: list[int] = []
    told: list[int] = []
    for passes, new in script:
        now += passes
        state = state._replace(leases=tuple(Lease(m, inf, q) for m, _, q in state.leases))
        if new is None and state.in_flight == 0:
            continue
        event: Submit[int] | Done = Done(-1) if new is not None else oldest(state)
        if new is not None:
            event = Submit(QueuedItem(len(submitted), new[0], now + new[1]))
            submitted.append(event.work)
        before = state.in_flight - (new is None)
        state, actions = step(state, event, now)
        sends = [a for a in actions if isinstance(a, Send)]
        assert state.in_flight == before + len(sends) <= limit
        assert not state.waiting or state.in_flight == limit
        assert state.queued == sum(w.queries for w in state.waiting)
        for action in actions:
            if isinstance(action, Expire):
                assert action.work.deadline <= now
                told.append(action.work.item)
                continue
            assert all(w.deadline > now for w in action.works)
            assert len(action.works) == 1 or sum(w.queries for w in action.works) <= 10
            sent += [w.item for w in action.works]
        waiting = [w.item for w in state.waiting]
        assert all(w.deadline > now for w in state.waiting)
        assert sorted(sent + told + waiting) == list(range(len(submitted)))
        assert sent == sorted(sent) and waiting == sorted(waiting)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=40), st.integers(1, 4))
def test_what_waits_leaves_once_enough_answers_came(sizes: list[int], limit: int) -> None:
    """After as many answers as there were works, nothing waits and nothing is in flight."""
    state: Window[int] = Window(limit, 10, max_waiting=1000)
    for item, queries in enumerate(sizes):
        state, _ = step(state, Submit(QueuedItem(item, queries, 9.0)), 0.0)
    for _ in sizes:
        if state.in_flight:
            state, _ = step(state, oldest(state), 0.0)
    assert (state.leases, state.waiting, state.queued, state.earliest) == ((), (), 0, inf)


def transcript(script: str) -> str:
    """Runs the commands of a scenario; the text with what really happened.

    Commands: ``window limit=L max_queries=M``, ``submit NAME queries=Q deadline=D``, ``done``,
    ``at T``. What follows ``----`` is the outcome; a blank line ends it.
    """
    out = []
    state: Window[str] = Window(1, 1)
    now = 0.0
    for block in script.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("#"):
            out.append(block)
            continue
        said = []
        commands = lines[: lines.index("----")] if "----" in lines else lines
        for command in commands:
            name, *rest = command.split()
            fields = dict(word.split("=") for word in rest if "=" in word)
            actions: list[Action[str]] = []
            if name == "window":
                state = Window(int(fields["limit"]), int(fields["max_queries"]))
            elif name == "at":
                now = float(rest[0])
            elif name == "submit":
                new = QueuedItem(rest[0], int(fields["queries"]), float(fields["deadline"]))
                state, actions = step(state, Submit(new), now)
            else:
                assert name == "done", command
                state, actions = step(state, oldest(state), now)
            for action in actions:
                if isinstance(action, Send):
                    total = sum(w.queries for w in action.works)
                    said.append(f"send {'+'.join(w.item for w in action.works)} ({total} queries)")
                elif isinstance(action, Expire):
                    said.append(f"expire {action.work.item}")
                elif isinstance(action, Unanswered):
                    said.append("lost one")
        waiting = " ".join(w.item for w in state.waiting) or "nothing"
        said.append(f"in flight {state.in_flight} of {state.limit}; waiting: {waiting}")
        out.append("\n".join([*commands, "----", *said]))
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_the_transcript_of_a_scenario_is_what_happens(path: Path) -> None:
    """With DLM_REWRITE_SCENARIOS=1 the file is written anew: commit only if you understand."""
    found = transcript(path.read_text(encoding="utf-8"))
    if os.environ.get(REWRITE):
        path.write_text(found, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found


def test_there_are_scenarios() -> None:
    """The transcripts are found where they are looked for."""
    assert len(SCENARIOS) >= 2
