"""dlm.gateway.turns: what a call waits for, and for how long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster import WAIT_S
from dlm.gateway.turns import LARGE_AT_ONCE, SMALL_QUERIES, GatewayTurns, countdown
from dlm.server.refusals import Refusal
from dlm.wire.status import Reason


def test_a_call_whose_turn_does_not_come_in_time_is_late() -> None:
    """And holds nothing up."""

    async def ask() -> None:
        turns = GatewayTurns()
        held = [await turns.within(WAIT_S, SMALL_QUERIES + 1) for _ in range(LARGE_AT_ONCE)]
        with pytest.raises(Refusal) as refused:
            await turns.within(0.01, SMALL_QUERIES + 1)
        assert refused.value.reason is Reason.LATE
        held[0]()
        await turns.within(WAIT_S, SMALL_QUERIES + 1)

    asyncio.run(ask())


def test_work_aside_leaves_the_loop_to_others() -> None:
    """One at a time; what waits longer than its caller is refused, and never done."""
    begun, go_on = [], threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        go_on.wait(WAIT_S)
        return number

    async def ask() -> None:
        turns = GatewayTurns()
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
