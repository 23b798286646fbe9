"""When the shards of a set are asked together: rows of the rule, on a moved clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from dlm.client.after import LEAST_S
from dlm.client.queue import AGAIN, MAX_QUEUED_ITEMS, Queue, Round

USUAL_S = 0.02


@dataclass
class Work:
    """What waits."""

    queries: int = 1
    deadline: float = 100.0


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
        queue.submit(Work())
        number, _ = queue.take(now) or pytest.fail("it is idle")
        queue.done(number, now + took_s)
        queue.round.answered(callers, now + took_s)
        now += took_s
        for seconds in later:
            queue.round.asked(now + seconds)
        now += max(later, default=0.0)
    queue.submit(Work())
    return queue


def test_what_is_asked_meanwhile_waits_for_messages_to_other_shards_but_not_longer_than_usual() -> (
    None
):
    """A call waits for its slowest shard, and a stall holds up no other call."""
    first, second = shards()
    first.submit(Work())
    assert (first.due(), second.due()) == (-inf, inf)
    number, _ = first.take(1.0) or pytest.fail("it is idle")
    second.submit(Work())
    assert second.due() == 1.0 + USUAL_S
    assert second.take(1.0 + USUAL_S)
    first.done(number, 1.1)
    assert first.round.under_way == 1


@pytest.mark.parametrize(("end", "ends"), [("done", True), ("drop", True), ("", False)])
def test_a_round_is_over_when_its_last_message_has_ended_however(end: str, ends: bool) -> None:
    """Whatever it shows of the pace; and once, though two may end it."""
    first, second = shards()
    first.submit(Work())
    number, _ = first.take(1.0) or pytest.fail("it is idle")
    second.submit(Work())
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
    first.submit(Work())
    assert first.take(1.0)
    second.submit(Work(deadline=1.0 + USUAL_S / 2))
    assert second.due() <= 1.0
    for _ in range(MAX_QUEUED_ITEMS):
        second.submit(Work(0))
    assert second.refuses(1, 100.0, 1.0)
