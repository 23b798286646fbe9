"""The end of a call, once, for those who wait for it.

Like `concurrent.futures.Future`, but without its condition: a thread that waits there wakes while
the lock is still held by the thread that ends it, and many callers then wake each other twice.
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
    """Success, an error or cancellation, whichever comes first. Thread-safe."""

    __slots__ = ("_callbacks", "_ends", "_gate")

    def __init__(self) -> None:
        # Appending is atomic, so all threads see the same first outcome.
        self._ends: list[list[BaseException | None]] = []
        self._gate = threading.Lock()  # free once it has ended
        self._gate.acquire()
        self._callbacks: deque[Callable[[Ending], object]] = deque()

    def end(self, error: BaseException | None = None) -> bool:
        """Ends it, with success or an error; False if it had ended."""
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
        """Ends it as cancelled; False if it had ended."""
        return not self._ends and self.end(CancelledError())

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._ends)

    def cancelled(self) -> bool:
        """Whether it ended by being cancelled."""
        return bool(self._ends) and isinstance(self._ends[0][0], CancelledError)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """The error it ended with; None for success.

        Raises  TimeoutError, CancelledError
        """
        if not self._ends:
            # A lock does not accept longer waits.
            limit_s = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            if not self._gate.acquire(timeout=limit_s):
                raise TimeoutError
            self._gate.release()  # for the next thread that waits
        error = self._ends[0][0]
        if isinstance(error, CancelledError):
            raise error
        return error

    def result(self, timeout_s: float | None = None) -> None:
        """Waits for it, and raises its error."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    async def wait(self, timeout_s: float) -> bool:
        """Waits on an event loop; returns whether it has ended."""
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
        """Calls `call` when it has ended: now, or in the thread that ends it."""
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
            except Exception as exc:  # noqa: BLE001 - the other callbacks must still run
                log.error("client.callback.failed", extra={"error": type(exc).__name__})
