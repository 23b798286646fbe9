"""Long work takes turns, so that others' short calls are answered between its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeAlias, TypeVar

from dlm.server.refusals import Refusal
from dlm.wire.status import Reason

T = TypeVar("T")
Left: TypeAlias = Callable[[], float]
# Bytes of a call: it may take more than a few milliseconds. The client cuts its work into parts;
# were many of them at work, a short call would wait for a part of each.
LARGE = 8 << 10
LARGE_AT_ONCE = 2


class Turns:
    """Of the calls of one gateway; on the event loop."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-gateway")

    def of(self, size: int, left_s: float) -> AbstractAsyncContextManager[None]:
        """Holds a turn, if a call of `size` bytes needs one.

        Args    left_s   seconds in which it must have come
        Raises  Refusal  too late
        """
        return self._turn(left_s) if size > LARGE else nullcontext()

    @asynccontextmanager
    async def _turn(self, left_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(left_s):
                await self._large.acquire()
        except TimeoutError:
            raise _others_took_it() from None
        try:
            yield
        finally:
            self._large.release()

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
