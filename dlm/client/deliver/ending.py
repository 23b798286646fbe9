"""How a call ends, once, for whoever waits for it.

What `concurrent.futures.Future` does for threads, without its condition: whoever waits there wakes
while the lock is still held by the one who ends it, and many callers then wake each other twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError

from dlm.logs import EventLog

log = EventLog(__name__)


class Ending:
    """Success, an error, or cancelled; the first of them counts. Any thread may do anything."""

    __slots__ = ("_callbacks", "_ends", "_gate")

    def __init__(self) -> None:
        # Appending is one step, so that the first is the same for every thread.
        self._ends: list[list[BaseException | None]] = []
        self._gate = threading.Lock()  # free once it has ended
        self._gate.acquire()
        self._callbacks: deque[Callable[[Ending], object]] = deque()

    def end(self, error: BaseException | None = None) -> bool:
        """Ends it, well or with an error; False where it had ended."""
        mine = [error]
        self._ends.append(mine)
        if self._ends[0] is not mine:
            return False
        try:
            self._gate.release()
        finally:
            if self._callbacks:
                self._call_back()
        return True

    def cancel(self) -> bool:
        """Nobody waits for it any more; False where it had ended."""
        return not self._ends and self.end(CancelledError())

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._ends)

    def cancelled(self) -> bool:
        """Whether it ended by being cancelled."""
        return bool(self._ends) and isinstance(self._ends[0][0], CancelledError)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What it ended with, if not well.

        Raises  TimeoutError, CancelledError
        """
        if not self._ends:
            # A lock takes no longer waits than these.
            limit_s = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            if not self._gate.acquire(timeout=limit_s):
                raise TimeoutError
            self._gate.release()  # for the next who waits
        error = self._ends[0][0]
        if isinstance(error, CancelledError):
            raise error
        return error

    def result(self, timeout_s: float | None = None) -> None:
        """Waits for it, and raises what it ended with."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    async def wait(self, timeout_s: float) -> bool:
        """Waits on an event loop; whether it has ended."""
        if self._ends:
            return True
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def tell(_: Ending) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        await asyncio.wait([woken], timeout=timeout_s)
        return bool(self._ends)

    def add_done_callback(self, call: Callable[[Ending], object]) -> None:
        """Has `call` called once it has ended: now, or by whoever ends it."""
        self._callbacks.append(call)
        if self._ends:
            self._call_back()

    def _call_back(self) -> None:
        while True:
            try:
                call = self._callbacks.popleft()
            except IndexError:
                return
            try:
                call(self)
            except Exception as exc:  # noqa: BLE001 - the others must be told
                log.error("client.callback.failed", extra={"error": type(exc).__name__})
