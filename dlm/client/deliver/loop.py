"""The thread with the event loop on which a process's clients have their grpc.aio streams.

All streams of all clients share one thread: a message crosses to it once, and messages that many
threads send at the same time cross together.
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
from dlm.resources import check_open_files

log = EventLog(__name__)

STOP_S = 5.0
POLLER_S = 0.2
# A thread that should wake the loop may be interrupted by a signal handler: then the next one does.
WAKE_S = 0.05


class Home(Protocol):
    """Where all of a client's steps run."""

    def is_here(self) -> bool:
        """Whether this thread is it."""

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Only there: calls `call` after `delay_s` seconds, even after a fork."""

    def post(self, call: Callable[[], None]) -> bool:
        """Runs `call` there; from any thread. False if nothing runs there any longer."""


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._woken_until = 0.0  # a thread has woken it, until then at the latest
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self.ending = False  # nothing that is posted or started runs any longer
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self._run, name="dlm-client", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _here.loop = True
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def post(self, call: Callable[[], None]) -> bool:
        """Runs `call` on the loop; from any thread. False if the loop has ended."""
        if self.ending:
            return False
        self._posted.append(call)
        now = time.monotonic()
        if now < self._woken_until:
            return True  # the thread that set it wakes the loop, which then runs everything posted
        self._woken_until = now + WAKE_S
        try:
            self._loop.call_soon_threadsafe(self._run_posted)
        except RuntimeError:
            return False
        return True

    def _run_posted(self) -> None:
        self._woken_until = 0.0  # first: later posts wake the loop again
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
        """On the loop: schedules the first of the process's timers."""
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
        # A millisecond early is fine: a loop's clock is no better.
        due = time.monotonic() + 0.0005
        while _timers and _timers[0][0] <= due:
            _, _, call, args = heapq.heappop(_timers)
            try:
                call(*args)
            except Exception as exc:  # noqa: BLE001 - the others that are due must still run
                log.error("client.loop.failed", extra={"error": type(exc).__name__})
        self.arm()

    def stop(self, before: Callable[[], None] = lambda: None) -> None:
        """Calls `before`, cancels all tasks, lets them end, and ends the thread.

        Args
            before  called on the loop, so between two replies and never within one; called here
                    once more if the loop does not get to it
        """

        async def end() -> None:
            self._run_posted()
            before()
            self.ending = True
            for task in self._tasks:
                task.cancel()
            # Those of gRPC too, which end with ours; they reference what `stop` must free.
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=STOP_S)
            self._run_posted()  # calls posted just before the end
            self._loop.stop()

        def begin() -> None:
            self._ending = self._loop.create_task(end())

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)
        if is_here():
            # The loop cannot end itself, so a child forked here cannot send anything.
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
# The timers; only the loop touches them, and the next loop after a fork continues them.
_timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
_order = itertools.count()


def running() -> LoopThread:
    """The loop of this process, started on first use; call it inside `fork.inside`.

    Raises  ConfigError  the process may open too few files: gRPC would abort it
    """
    global _running
    with _lock:
        if _running is None or not _running.thread.is_alive():
            check_open_files()
            _running = LoopThread()
            if _timers:
                _running.post(_running.arm)
        return _running


def post(call: Callable[[], None]) -> bool:
    """Runs `call` on the loop; does not wait. False if no loop runs, or it is ending."""
    home = _running
    return home is not None and home.thread.is_alive() and home.post(call)


def is_here() -> bool:
    """Whether this is the loop's own thread."""
    return getattr(_here, "loop", False)  # also of a loop that is being stopped


def later(delay_s: float, call: Callable[..., None], *args: Any) -> None:
    """On the loop: runs `call` there after `delay_s` seconds, within a millisecond; even after a
    fork, in the parent."""
    heapq.heappush(_timers, (time.monotonic() + delay_s, next(_order), call, args))
    if _running is not None:
        _running.arm()


def stop(before: Callable[[], None] = lambda: None) -> None:
    """Ends the loop, if one runs; the next use starts another."""
    global _running
    ended = _running
    if ended is None:
        before()
    else:
        ended.stop(before)
        _running = None  # only now: tasks that still run on it must not start another
        del ended
        # gRPC's own thread for event loops ends with the last channel; a reference cycle may hold
        # one. It continues if the program itself uses grpc.aio, which does not survive forks.
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
