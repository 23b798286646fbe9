"""dlm.gateway.turns: long work waits for its turn, short calls do not wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster import WAIT_S
from dlm.gateway.turns import LARGE, LARGE_AT_ONCE, Turns, countdown
from dlm.server.refusals import Refusal
from dlm.wire.status import Reason


def test_few_large_calls_are_at_work_at_once() -> None:
    """The others wait until one has ended, or their time is over; a short one waits for none."""

    async def ask() -> None:
        turns = Turns()
        most = asyncio.Event()
        at_work: list[int] = []

        async def large(number: int) -> None:
            async with turns.of(LARGE + 1, WAIT_S):
                at_work.append(number)
                await most.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(3 * LARGE_AT_ONCE):
                group.create_task(large(number))
            await asyncio.sleep(0)  # they begin
            with pytest.raises(Refusal) as refused:
                async with turns.of(LARGE + 1, 0.01):
                    pass
            assert refused.value.reason is Reason.LATE
            assert len(at_work) == LARGE_AT_ONCE
            async with turns.of(LARGE, 0.0):
                most.set()
        assert at_work == list(range(3 * LARGE_AT_ONCE))

    asyncio.run(ask())


def test_work_aside_leaves_the_loop_to_others() -> None:
    """One at a time; what waits longer than its caller is refused, and never done."""
    begun, go_on = [], threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        go_on.wait(WAIT_S)
        return number

    async def ask() -> None:
        turns = Turns()
        first = asyncio.create_task(turns.aside(lambda: work(1), WAIT_S))
        await asyncio.sleep(0)  # it begins
        with pytest.raises(Refusal) as refused:
            await turns.aside(lambda: work(2), 0.01)
        assert refused.value.reason is Reason.LATE
        go_on.set()
        assert await first == 1
        assert await turns.aside(lambda: work(3), WAIT_S) == 3

    asyncio.run(ask())
    assert begun == [1, 3]


def test_no_time_left_is_too_late() -> None:
    """What has no time is late, never a wrong request."""
    with pytest.raises(Refusal) as refused:
        countdown(0.0)()
    assert refused.value.reason is Reason.LATE
