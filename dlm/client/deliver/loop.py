"""The thread of a process that its clients' streams live on: an event loop for grpc.aio.

One thread for all streams of all clients: a message crosses to it once, whoever sends it, and what
many threads send at once crosses together.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import uvloop

from dlm.logs import EventLog

log = EventLog(__name__)

STOP_S = 5.0
POLLER_S = 0.2
# Whoever was to wake the loop may have been cut off by a signal's handler: then the next does.
WAKE_S = 0.05


class Steps(Protocol):
    """Carries out steps on the loop, one after another."""

    def carry_out(self, step: Callable[..., None], *args: Any) -> None:
        """A step, from any thread: at once where this is the loop, or soon."""

    def later(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """On the loop: one in so many seconds."""


class Home(Protocol):
    """Where all of a client's steps run."""

    def is_here(self) -> bool:
        """Whether this thread is it."""

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """There: calls `call` in so many seconds, after a fork too."""

    def post(self, call: Callable[[], None]) -> bool:
        """Has `call` run there; from any thread. False where nothing runs there any more."""


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._woken_until = 0.0  # somebody has woken it, until then at the latest
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self.ending = False  # nothing that is posted or started runs any more
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self._run, name="dlm-client", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _here.loop = True
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def post(self, call: Callable[[], None]) -> bool:
        """Has `call` run on the loop; from any thread. False where the loop has ended."""
        if self.ending:
            return False
        self._posted.append(call)
        now = time.monotonic()
        if now < self._woken_until:
            return True  # whoever set it wakes the loop, which then runs all that was posted
        self._woken_until = now + WAKE_S
        try:
            self._loop.call_soon_threadsafe(self._run_posted)
        except RuntimeError:
            return False
        return True

    def _run_posted(self) -> None:
        self._woken_until = 0.0  # first: what is posted from here on wakes the loop again
        while self._posted:
            try:
                self._posted.popleft()()
            except Exception as exc:  # noqa: BLE001 - the others that were posted must still run
                log.error("client.loop.failed", extra={"error": type(exc).__name__})

    def is_here(self) -> bool:
        """Whether this thread is it."""
        return threading.get_ident() == self.thread.ident

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """On the loop: runs `work`, which ends with the loop at the latest."""
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """On the loop: calls `call` at `when` by time.monotonic, give or take a millisecond."""
        self._loop.call_at(when, call, *args)

    def arm(self) -> None:
        """On the loop: has the first of the process's timers run when it is due."""
        if not _timers:
            return
        when = _timers[0][0]
        if when < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = when
            self._alarm = self._loop.call_at(when, self._run_timers)

    def _run_timers(self) -> None:
        self._alarm, self._alarm_at = None, float("inf")
        # A millisecond early is early enough: that is how well a loop keeps time.
        due = time.monotonic() + 0.0005
        while _timers and _timers[0][0] <= due:
            _, _, call, args = heapq.heappop(_timers)
            try:
                call(*args)
            except Exception as exc:  # noqa: BLE001 - the others that are due must still run
                log.error("client.loop.failed", extra={"error": type(exc).__name__})
        self.arm()

    def stop(self, before: Callable[[], None] = lambda: None) -> None:
        """Calls `before`, cancels what runs, lets it end, and ends the thread.

        Args
            before  called on the loop, so between two replies and never within one; here once
                    more where the loop does not come to it
        """

        async def end() -> None:
            self._run_posted()
            before()
            self.ending = True
            for task in self._tasks:
                task.cancel()
            # Those of gRPC too, which end with ours; they hold what `stop` wants gone.
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=STOP_S)
            self._run_posted()  # what was posted just before the end
            self._loop.stop()

        def begin() -> None:
            self._ending = self._loop.create_task(end())

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)
        if is_here():
            # It cannot end itself, so what is forked here cannot ask.
            log.error("client.fork.on_loop", extra={"thread": self.thread.name})
        else:
            self.thread.join(STOP_S)
        if self.thread.is_alive():
            before()
        else:
            self._ending = None
            self._loop.close()


_here = threading.local()
_lock = threading.RLock()
_running: LoopThread | None = None
# What is to run later; only the loop touches it, and the loop that follows after a fork goes on.
_timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
_order = itertools.count()


def running() -> LoopThread:
    """The loop of this process, started when first asked for; ask inside `fork.inside`."""
    global _running
    with _lock:
        if _running is None or not _running.thread.is_alive():
            _running = LoopThread()
            if _timers:
                _running.post(_running.arm)
        return _running


def post(call: Callable[[], None]) -> bool:
    """Has `call` run on the loop; waits for nothing. False where no loop runs, or it ends."""
    home = _running
    return home is not None and home.thread.is_alive() and home.post(call)


def is_here() -> bool:
    """Whether this is the loop's own thread."""
    return getattr(_here, "loop", False)  # that of one that is being stopped, too


def later(delay_s: float, call: Callable[..., None], *args: Any) -> None:
    """On the loop: has `call` run there in so many seconds, give or take a millisecond; after a
    fork too, in the parent."""
    heapq.heappush(_timers, (time.monotonic() + delay_s, next(_order), call, args))
    if _running is not None:
        _running.arm()


def stop(before: Callable[[], None] = lambda: None) -> None:
    """Ends the loop, if one runs; the next that asks starts another."""
    global _running
    ended = _running
    if ended is None:
        before()
    else:
        ended.stop(before)
        _running = None  # only now: what still runs on it must start no other
        del ended
        # gRPC's own thread for event loops ends with the last channel; a cycle may hold one. It
        # goes on where the program uses grpc.aio by itself, which gRPC does not take through forks.
        pollers = [t for t in threading.enumerate() if t.name.endswith("(_poll_wrapper)")]
        if pollers:
            gc.collect()
        for poller in pollers:
            poller.join(POLLER_S)


def _after_fork_in_child() -> None:
    global _here, _lock, _running
    _timers.clear()
    _here = threading.local()
    _lock = threading.RLock()
    _running = None


os.register_at_fork(after_in_child=_after_fork_in_child)
