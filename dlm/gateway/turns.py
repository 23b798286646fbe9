"""Long work takes turns, so that others' short calls are answered between its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from dlm.server.admission import WORK_AT_ONCE, Release, Turns
from dlm.server.refusals import Refusal
from dlm.wire.status import Reason

T = TypeVar("T")
Left: TypeAlias = Callable[[], float]
# Bytes of a call: it may take more than a few milliseconds to read, let alone to answer.
LARGE = 8 << 10
QUERY_BYTES = 4  # of a call, to guess how many it asks before it is read
# Of a small call. The client cuts the work of larger ones into parts; were many of them at work, a
# short call would wait for a part of each.
SMALL_QUERIES = LARGE // QUERY_BYTES
LARGE_AT_ONCE = 2


class GatewayTurns(Turns):
    """Of the calls of one gateway; on the event loop."""

    def __init__(self) -> None:
        # Of a call with states, a query takes some eight times what it takes a server.
        super().__init__(SMALL_QUERIES, LARGE_AT_ONCE, at_a_look=WORK_AT_ONCE // 8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-gateway")

    async def within(self, left_s: float, work: int) -> Release:
        """`take`, but `Refusal` if the turn has not come in so many seconds."""
        try:
            return await self.take(work, left_s)
        except TimeoutError:
            raise _others_took_it() from None

    async def aside(self, work: Callable[[], T], left_s: float) -> T:
        """What `work` returns, in a thread that does one at a time.

        Args    left_s   seconds in which it must have ended
        Raises  Refusal  too late;  what it raises
        """
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.wait_for(doing, left_s)
        except TimeoutError:
            raise _others_took_it() from None


def countdown(left_s: float) -> Left:
    """Seconds that are left of these, whenever it is called; it raises `Refusal` when none are."""
    until = time.monotonic() + left_s

    def left() -> float:
        found = until - time.monotonic()
        if found <= 0.0:
            raise _others_took_it()
        return found

    return left


def _others_took_it() -> Refusal:
    return Refusal(
        Reason.LATE,
        "the deadline passed while this call waited or was read; allow more time, or ask another "
        "gateway",
    )
