"""The end of a call, once, and how its caller waits for it: in a thread or on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from dlm.client.deliver.loop import Mailbox
from dlm.logs import EventLog

log = EventLog(__name__)

T = TypeVar("T")


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
        return bool(self._ends)

    def cancelled(self) -> bool:
        return bool(self._ends) and isinstance(self._ends[0][0], CancelledError)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """The error it ended with, None for success; raises `TimeoutError`, `CancelledError`."""
        if not self._ends:
            send_kept()  # of tasks of this thread's event loop, which goes on only after this wait
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
        turn = _turn_of(loop)
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)
                turn.note_woken()

        self.add_done_callback(lambda _: turn.mailbox.post(wake))
        timer = loop.call_later(timeout_s, wake)
        try:
            await woken
        finally:
            timer.cancel()
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


class _Turn:
    """The tasks of an event loop that wait for calls. What those that are woken together ask next
    is sent together, after the last of them or at the end of the loop's turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.mailbox = Mailbox(loop, deque())
        self._woken = 0  # tasks that have not asked since
        self._kept: list[tuple[Callable[[Any], None], Any]] = []

    def note_woken(self) -> None:
        if not self._woken:  # they are in the queue of the next turn: `end` comes after them
            self.loop.call_soon(self.loop.call_soon, self.end)
        self._woken += 1

    def send(self, post: Callable[[T], None], call: T) -> None:
        self._kept.append((post, call))
        self._woken -= 1
        if self._woken <= 0:
            self.end()

    def end(self) -> None:
        kept, self._kept, self._woken = self._kept, [], 0
        for post, call in kept:
            post(call)


_here = threading.local()  # the turn of a thread's event loop


def _turn_of(loop: asyncio.AbstractEventLoop) -> _Turn:
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is None or turn.loop is not loop:
        send_kept()
        turn = _here.turn = _Turn(loop)
    return turn


def send(post: Callable[[T], None], call: T) -> None:
    """Has `post` send a call: now, or with those of other tasks of this thread's event loop."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None and turn.loop.is_running():
        turn.send(post, call)
    else:
        post(call)


def send_kept() -> None:
    """Sends what tasks of this thread's event loop have asked."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None:
        turn.end()
