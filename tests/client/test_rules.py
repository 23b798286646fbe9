"""The rules of a message: when it is sent, and what is done after something happened to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from client import scenarios
from dlm.client.rules import (
    AGAIN,
    LEAST_S,
    MAX_PAUSE_S,
    MAX_QUEUED_ITEMS,
    Again,
    Alone,
    Decision,
    Done,
    Elsewhere,
    Failed,
    GiveUp,
    Heard,
    Late,
    Later,
    Look,
    Looked,
    Move,
    NotYet,
    Outcome,
    Queue,
    Round,
    after,
    after_call,
    after_file,
    after_files,
    after_stream,
)
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    QueryError,
    ShardDown,
    StaleShardSet,
)
from dlm.wire.status import Reason, error_from_refusal


@dataclass(frozen=True)
class Work:
    """What waits."""

    item: Any
    queries: int = 1
    deadline: float = 100.0
    more: bool = False


class Driver:
    """A lane, driven as the loop does; what was sent, in messages, and what was too late."""

    def __init__(self, limit: int = 1, max_queries: int = 10, usual_s: float = inf) -> None:
        self.lane: Queue[Work] = Queue(limit, max_queries, usual_s)
        self.sent: list[list[Any]] = []
        self.late: list[Any] = []
        self.refused: list[Any] = []

    def look(self, now: float) -> bool:
        """Sends what may leave; whether anything did."""
        before = len(self.sent)
        self.late += [work.item for work in self.lane.expire(now)]
        while (taken := self.lane.take(now)) is not None:
            _, works = taken
            assert all(work.deadline > now for work in works)
            assert len(works) == 1 or sum(w.queries for w in works) <= self.lane.max_queries
            self.sent.append([work.item for work in works])
        return len(self.sent) > before

    def submit(self, work: Work, now: float = 0.0) -> bool:
        """New work."""
        if work.deadline <= now:
            self.late.append(work.item)
        elif not work.more and self.lane.refuses(work.queries, work.deadline, now):
            self.refused.append(work.item)
        else:
            self.lane.submit(work)
        return self.look(now)

    def done(self, now: float = 0.0, **how: bool) -> bool:
        """The oldest message in flight comes back."""
        oldest = next(iter(self.lane.in_flight))
        assert self.lane.done(oldest, now, **how) and not self.lane.done(oldest, now)  # ends once
        return self.look(now)

    @property
    def waiting(self) -> list[Any]:
        """What waits."""
        return [work.item for work in self.lane.waiting]


@pytest.mark.parametrize(("works", "queries"), [(1, 4 * 4096), (4096, 0)])
def test_too_much_that_waits_is_refused_but_for_what_was_let_in(works: int, queries: int) -> None:
    """By queries, or by how many wait, however small; what was let in stays whole."""
    driver = Driver()
    driver.submit(Work(0))
    for _ in range(works):
        driver.lane.submit(Work("a", queries))
    driver.submit(Work("b"))
    driver.submit(Work("c", 1, more=True))
    assert (driver.refused, driver.waiting[-1]) == (["b"], "c")


def answering(queries: int, seconds: float, messages: int) -> Driver:
    """A lane of one message in flight whose shard took so long for each of so many messages."""
    driver, now = Driver(1, 1000), 0.0
    for number in range(messages):
        driver.submit(Work(number, queries, inf), now)
        now += seconds
        driver.done(now)
    return driver


def test_a_call_that_would_wait_past_half_of_its_time_is_refused_at_once() -> None:
    """100 queries take 10 ms: behind 300 of them 70 ms are too little, 90 ms are enough."""
    driver = answering(400, 0.04, 20)
    for name in "abc":
        driver.submit(Work(name, 100, 50.0), 0.8)
    driver.submit(Work("d", 100, 0.87), 0.8)
    assert driver.refused == ["d"]
    driver.submit(Work("d", 100, 0.89), 0.8)
    assert driver.refused == ["d"] and driver.waiting[-1] == "d"


def test_the_first_answers_tell_nothing_of_the_pace() -> None:
    """Eight seconds a message while connections are made do not count; those after do."""
    assert answering(400, 8.0, 8).lane.pace.seconds(1000) == 0.0
    assert answering(400, 0.25, 9).lane.pace.seconds(1600) == 1.0


def test_small_messages_do_not_make_a_large_call_seem_long() -> None:
    """A message of five queries takes little less than one of hundreds."""
    driver = answering(5, 0.002, 50)
    driver.submit(Work("small", 5, inf), 0.1)
    assert not driver.lane.refuses(7500, 2.1, 0.1)


@pytest.mark.parametrize("silence_s", [0.5, 5.0, 5000.0])
def test_a_shard_that_was_silent_is_found_to_be_quick_again(silence_s: float) -> None:
    """Alone in flight, a call is taken whatever the pace; a dozen answers and others wait again."""
    driver, now = answering(100, 0.001, 50), 10.0
    driver.submit(Work("lost", 100, inf), now)
    now += silence_s
    driver.done(now, answered=False)
    for _ in range(12):
        assert driver.submit(Work("next", 100, now + 1.0), now)
        now += 0.001
        driver.done(now)
    driver.submit(Work("one", 100, now + 1.0), now)
    assert not driver.lane.refuses(100, now + 1.0, now)


@pytest.mark.parametrize(("gone", "messages", "each_s"), [(False, 1000, 1e-6), (True, 50, 0.5)])
def test_what_nobody_answered_is_no_pace(gone: bool, messages: int, each_s: float) -> None:
    """A server that refuses in a microsecond answers nothing. However long nobody is there, a call
    is told that, and not of seconds of work."""
    driver, now = answering(100, 0.1, 20), 2.0
    quick = driver.lane.pace.seconds(100)
    for _ in range(messages):
        driver.submit(Work("lost", 100, now + 2.0), now)
        now += each_s
        driver.done(now, answered=False, gone=gone)
    assert gone or driver.lane.pace.seconds(100) >= quick
    driver.submit(Work("lost", 100, now + 2.0), now)
    assert not gone or not driver.lane.refuses(100, now + 2.0, now)


# Each event: (time that passes, queries and time allowed of new work, or None for an answer).
events = st.lists(
    st.tuples(
        st.floats(0, 3, width=16),
        st.none() | st.tuples(st.integers(1, 15), st.floats(-1, 6, width=16)),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(events, st.integers(1, 4), st.sampled_from([0.0, 1.0, inf]))
def test_whatever_happens_nothing_is_lost_doubled_or_overtaken(
    script, limit: int, usual_s: float
) -> None:
    """Limits are kept, order too; each work is sent or told once, and none is sent late."""
    driver, now, submitted = Driver(limit, usual_s=usual_s), 0.0, 0
    lane = driver.lane
    for passes, new in script:
        now += passes
        if new is not None:
            lane_work = Work(submitted, new[0], now + new[1], more=True)
            submitted += 1
            driver.submit(lane_work, now)
        elif lane.in_flight:
            driver.done(now)
        assert len(lane.in_flight) <= limit
        assert not lane.waiting or lane.in_flight
        assert lane.queued == sum(w.queries for w in lane.waiting)
        assert lane.asked == sum(lane.in_flight.values())
        assert lane.earliest <= min((w.deadline for w in lane.waiting), default=inf)
        sent = [item for message in driver.sent for item in message]
        assert sorted(sent + driver.late + driver.waiting) == list(range(submitted))
        assert sent == sorted(sent) and driver.waiting == sorted(driver.waiting)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=40), st.integers(1, 4))
def test_what_waits_leaves_once_enough_answers_came(sizes: list[int], limit: int) -> None:
    """After as many answers as there were works, nothing waits and nothing is in flight."""
    driver = Driver(limit)
    for item, queries in enumerate(sizes):
        driver.submit(Work(item, queries, 9.0))
    for _ in sizes:
        if driver.lane.in_flight:
            driver.done()
    lane = driver.lane
    assert lane.idle and (lane.queued, lane.asked, lane.earliest) == (0, 0, inf)


@pytest.mark.parametrize("path", scenarios.named("lane", at_least=2), ids=lambda p: p.stem)
def test_the_transcript_of_a_scenario_is_what_happens(path: Path) -> None:
    """Commands: ``lane limit=L max_queries=M usual=S``, ``submit NAME queries=Q deadline=D``,
    ``done``, ``at T``."""
    driver, now = Driver(), 0.0

    def outcome(commands: list[str]) -> list[str]:
        nonlocal driver, now
        said = []
        for command in commands:
            name, *rest = command.split()
            fields = dict(word.split("=") for word in rest if "=" in word)
            driver.sent, driver.late = [], []
            if name == "lane":
                usual_s = float(fields.get("usual", "inf"))
                driver = Driver(int(fields["limit"]), int(fields["max_queries"]), usual_s)
            elif name == "at":
                now = float(rest[0])
                driver.look(now)
            elif name == "submit":
                work = Work(rest[0], int(fields["queries"]), float(fields["deadline"]))
                driver.submit(work, now)
            else:
                assert name == "done", command
                driver.done(now)
            said += [f"expire {item}" for item in driver.late]
            said += [f"send {'+'.join(items)}" for items in driver.sent]
        waiting = " ".join(driver.waiting) or "nothing"
        lane = driver.lane
        return [*said, f"in flight {len(lane.in_flight)} of {lane.limit}; waiting: {waiting}"]

    scenarios.check(path, outcome)


USUAL_S = 0.02


def shards(count: int = 2) -> list[Queue]:
    """The queues of a set's shards."""
    both = Round()
    return [Queue(4, 10, USUAL_S, both) for _ in range(count)]


def answered(callers: int, took_s: float, came_s: list[float]) -> Queue:
    """A shard that has answered so many callers, who ask again so many seconds later; then again
    so many, of whom none has asked yet: it is `took_s` later."""
    (queue,) = shards(1)
    now = 0.0
    for later in (came_s, []):
        queue.submit(Work("a"))
        number, _ = queue.take(now) or pytest.fail("it is idle")
        queue.done(number, now + took_s)
        queue.round.answered(callers, now + took_s)
        now += took_s
        for seconds in later:
            queue.round.asked(now + seconds)
        now += max(later, default=0.0)
    queue.submit(Work("a"))
    return queue


def test_what_is_asked_meanwhile_waits_for_messages_to_other_shards_but_not_longer_than_usual() -> (
    None
):
    """A call waits for its slowest shard, and a stall holds up no other call."""
    first, second = shards()
    first.submit(Work("a"))
    assert (first.due(), second.due()) == (-inf, inf)
    number, _ = first.take(1.0) or pytest.fail("it is idle")
    second.submit(Work("a"))
    assert second.due() == 1.0 + USUAL_S
    assert second.take(1.0 + USUAL_S)
    first.done(number, 1.1)
    assert first.round.under_way == 1


@pytest.mark.parametrize(("end", "ends"), [("done", True), ("drop", True), ("", False)])
def test_a_round_is_over_when_its_last_message_has_ended_however(end: str, ends: bool) -> None:
    """Whatever it shows of the pace; and once, though two may end it."""
    first, second = shards()
    first.submit(Work("a"))
    number, _ = first.take(1.0) or pytest.fail("it is idle")
    second.submit(Work("a"))
    for _ in range(2 * bool(end)):
        first.drop(number) if end == "drop" else first.done(number, 1.01)
    assert (second.due() == -inf) is ends
    assert first.round.under_way == 1 - ends


@pytest.mark.parametrize(
    ("callers", "took_s", "came_s", "waits_s"),
    [
        (3, 0.001, [0.0002, 0.001, 0.0029], AGAIN * 0.001),
        (3, 0.001, [0.0002, 0.001, 0.0031], 0.0),  # one came late
        (3, 0.001, [0.0002, 0.001], 0.0),  # or not at all
        (3, 0.001, [0.0002, 0.001, 0.001, 0.001], AGAIN * 0.001),  # or others came, too
        (1, 1.0, [0.004], LEAST_S),
        (1, 1.0, [0.006], 0.0),
    ],
)
def test_callers_are_waited_for_if_all_asked_again_in_time_when_they_were_answered_last(
    callers: int, took_s: float, came_s: list[float], waits_s: float
) -> None:
    """So that their messages are one; and no longer once all of them have asked."""
    queue = answered(callers, took_s, came_s)
    now = 2 * took_s + max(came_s)
    assert max(queue.due(), now) == pytest.approx(now + waits_s)
    for _ in range(callers):
        queue.round.asked(now)
    assert queue.due() == -inf


def test_nothing_is_held_past_its_deadline_and_not_more_than_may_wait() -> None:
    """Of an idle shard, while messages to another are under way."""
    first, second = shards()
    first.submit(Work("a"))
    assert first.take(1.0)
    second.submit(Work("a", deadline=1.0 + USUAL_S / 2))
    assert second.due() <= 1.0
    for _ in range(MAX_QUEUED_ITEMS):
        second.submit(Work("a", 0))
    assert second.refuses(1, 100.0, 1.0)


NOBODY: frozenset[str] = frozenset()


@dataclass
class Message:
    """A message to a shard of two servers, sent to the first at 0 and due at 1."""

    ended: bool = False
    deadline: float = 1.0
    rounds: int = 0
    taken_over: bool = False
    out: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=lambda: ["a"])
    untried: set[str] = field(default_factory=lambda: {"b"})


def failed(error: DlmError, **more: Any) -> Failed:
    """Tokens are left, all servers are in their places, and the last look was just now."""
    return Failed(error, **{"retries": 1.0, "moving": False, "due": False, "closed": False, **more})


def late(**more: Any) -> Late:
    """Sent at 0, wanted by 1; hedging is on, and all servers are well."""
    settings: dict[str, Any] = {
        "since": 0.0,
        "until": 1.0,
        "hedges": 1.0,
        "avoided": NOBODY,
        "slow": NOBODY,
        "all_slow": False,
        "heard": {"b": Heard(0.01)},
        "closed": False,
        **more,
    }
    known: Mapping[str, Heard] = settings["heard"]

    def heard(others: Set[str]) -> Mapping[str, Heard]:
        return {address: known[address] for address in others}

    return Late(**{**settings, "heard": heard})


MOVING = error_from_refusal(Reason.DRAINING, "stops", where="a")
MOVING.reason = Reason.DRAINING  # type: ignore[attr-defined]
EVERY = {"tried": ["a", "b"], "untried": set[str]()}  # was asked in vain
HAS_IT = {"out": ["a"]}


@pytest.mark.parametrize(
    ("outcome", "message", "expected"),
    [
        (failed(ShardDown()), {}, Elsewhere(limited=True)),
        (failed(DeadlineExceeded()), {}, Elsewhere(limited=True)),
        (failed(Overloaded()), {}, Elsewhere(limited=True)),
        (failed(ProtocolError()), {}, Elsewhere(limited=True)),
        (failed(AuthenticationError()), {}, Elsewhere(limited=True)),
        (failed(ShardDown()), {"tried": ["a", "c"]}, GiveUp()),  # once
        (failed(ShardDown(), retries=0.9), {}, GiveUp()),
        (failed(ShardDown()), {"deadline": 0.5}, GiveUp()),
        (failed(ShardDown(), closed=True, due=True), {}, GiveUp()),
        (failed(QueryError(), due=True), {}, GiveUp()),
        (failed(DlmError("no memory"), due=True), {}, GiveUp()),
        (failed(MOVING, retries=0.0), {"tried": ["a", "c"]}, Elsewhere()),  # as many as there are
        (failed(MOVING, moving=True), EVERY, Later(0.05)),
        (failed(ShardDown(), moving=True), {**EVERY, "rounds": 1}, Later(0.1)),
        (failed(ShardDown(), moving=True), {**EVERY, "rounds": 9}, Later(MAX_PAUSE_S)),
        (failed(ShardDown(), moving=True), {**EVERY, "deadline": 0.52}, GiveUp()),
        (failed(DeadlineExceeded(), moving=True), EVERY, GiveUp()),  # silent, not rolled
        (failed(StaleShardSet()), {"tried": ["a", "c"]}, Look()),
        (failed(ShardDown(), due=True), EVERY, Look()),
        (failed(ShardDown(), due=True), {"tried": ["a", "c"]}, GiveUp(look=True)),
        (failed(DeadlineExceeded(), due=True), EVERY, GiveUp(look=True)),
        (failed(ShardDown()), {**HAS_IT, **EVERY}, Done()),
        (failed(ShardDown()), HAS_IT, NotYet(0.75)),  # a third may get it
        (Looked(stale=False, same=True, wanted=True), {}, Elsewhere()),
        (Looked(stale=False, same=True, wanted=True), EVERY, GiveUp()),
        (Looked(stale=False, same=False, wanted=True), {}, Move()),
        (Looked(stale=False, same=False, wanted=False), {}, GiveUp()),
        (Looked(stale=True, same=True, wanted=True), {}, Move()),
        (late(), HAS_IT, Elsewhere(hedge=True, limited=True)),
        (late(), {"out": ["a", "b"]}, Done()),
        (late(), {**HAS_IT, "deadline": 0.5}, Done()),
        (late(closed=True), HAS_IT, Done()),
        (late(hedges=0.0), HAS_IT, Elsewhere(["b"])),  # half of its time is over
        (late(hedges=0.0), {**HAS_IT, "taken_over": True}, Done()),
        (late(hedges=0.0, until=1.5), HAS_IT, NotYet(0.75)),
        (late(avoided={"b"}), HAS_IT, NotYet(0.75)),
        (late(slow={"b"}), HAS_IT, Elsewhere(["b"])),
        (late(all_slow=True, heard={"b": Heard(2.0)}), HAS_IT, NotYet(0.75)),
        (late(hedges=0.0, until=0.5 + LEAST_S, heard={"b": Heard(2.0)}), HAS_IT, None),
        (late(), {**HAS_IT, **EVERY}, NotYet(0.75)),
    ],
)
def test_one_table_says_what_is_done(
    outcome: Outcome, message: dict[str, Any], expected: Decision | None
) -> None:
    """At 0.5; and nothing is done about a message that has ended."""
    standing = Message(**message)
    found = after(outcome, standing, 0.5)
    if expected is None:  # nobody may take over: soon, but not at once
        expected = NotYet(0.5 + LEAST_S)
    assert found == expected and type(found) is type(expected)
    assert isinstance(after(outcome, replace(standing, ended=True), 0.5), Done)


BUSY = Overloaded("too many downloads")


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        # A message of a stream that ended is sent again with another token, or alone where nobody
        # knows why it ended.
        (partial(after_stream, True, 1.0, changed=True, lost=False), Elsewhere()),
        (partial(after_stream, True, 0.0, changed=True, lost=True), Elsewhere()),
        (partial(after_stream, True, 1.0, changed=False, lost=True), Alone()),
        (partial(after_stream, True, 0.0, changed=False, lost=True), GiveUp()),
        (partial(after_stream, True, 1.0, changed=False, lost=False), GiveUp()),
        (partial(after_stream, False, 1.0, changed=True, lost=True), GiveUp()),
        # A new utterance moves to the model that replaced its own, unless its caller has anything
        # of the old one, another call needs it, or no time is left.
        (partial(after_call, False, 1, 1.0), Move()),
        (partial(after_call, True, 1, 1.0), GiveUp()),
        (partial(after_call, False, 2, 1.0), GiveUp()),
        (partial(after_call, False, 1, 0.0), GiveUp()),
        # A server is asked for a file once more if it broke, or its beginning was another's.
        (partial(after_file, 1, wrong=False, resumed=False), Again()),
        (partial(after_file, 1, wrong=True, resumed=True), Again()),
        (partial(after_file, 1, wrong=True, resumed=False), Elsewhere()),
        (partial(after_file, 2, wrong=False, resumed=True), Elsewhere()),
        (partial(after_file, 2, wrong=True, resumed=True), Elsewhere()),
        # All servers are asked for it once more after a pause, if that helps and leaves time.
        (partial(after_files, BUSY, 0.5, 2.0), Later(0.5)),
        (partial(after_files, BUSY, 0.5, 0.5), GiveUp()),
        (partial(after_files, StaleShardSet("another model"), 0.5, 2.0), GiveUp()),
    ],
)
def test_what_is_done_about_streams_utterances_and_files(
    ask: Callable[[], Any], expected: Decision | Alone | Again
) -> None:
    """Each by a table of its own."""
    found = ask()
    assert found == expected and type(found) is type(expected)
