"""The lane of a shard: rows of its table, what must always hold, and transcripts to read."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client import scenarios
from dlm.client.queue import Queue


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


def test_refused_and_failed_messages_are_no_pace() -> None:
    """A server that refuses in a microsecond answers nothing."""
    driver, now = answering(100, 0.1, 20), 2.0
    quick = driver.lane.pace.seconds(100)
    for _ in range(1000):
        driver.submit(Work("a", 100, now + 1.0), now)
        now += 1e-6
        driver.done(now, answered=False)
    assert driver.lane.pace.seconds(100) >= quick


def test_a_shard_whose_servers_are_gone_has_no_pace() -> None:
    """However long nobody is there, a call is told that, and not of seconds of work."""
    driver, now = answering(100, 0.1, 20), 2.0
    for _ in range(50):
        driver.submit(Work("lost", 100, now + 2.0), now)
        now += 0.5
        driver.done(now, answered=False, gone=True)
    driver.submit(Work("lost", 100, now + 2.0), now)
    assert not driver.lane.refuses(100, now + 2.0, now)


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
