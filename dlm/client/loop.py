"""The thread whose event loop does the work of a process's clients, with a mailbox for calls from
other threads.

Calls that many threads leave at the same time are delivered together. The mailbox and the timers
outlive a loop: when a fork stops the loop, the next loop runs what is left in them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import heapq
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from math import inf
from typing import Any, TypeAlias, TypeVar

import grpc
import uvloop

from dlm.client import kernels
from dlm.logs import EventLog
from dlm.resources import check_open_files

log = EventLog(__name__)

STOP_S = 5.0
POLLER_S = 0.2
# A signal handler may interrupt the thread that should wake the loop: after this many seconds, the
# next thread wakes it.
WAKE_S = 0.05

T = TypeVar("T")
Posted: TypeAlias = deque[tuple[Callable[..., None], tuple[Any, ...]]]


class Mailbox:
    """Calls that other threads leave for an event loop. The loop is woken once for all calls that
    arrive before it runs them: waking takes longer than most calls."""

    __slots__ = ("_loop", "_posted", "closed", "paused", "woken_until")

    def __init__(self, loop: asyncio.AbstractEventLoop, posted: Posted) -> None:
        self._loop = loop
        self._posted = posted
        self.closed = False
        self.paused = False  # posted calls stay in the mailbox
        self.woken_until = 0.0  # until this time, a thread is waking the loop

    def post(self, call: Callable[..., None], *args: Any) -> bool:
        """From any thread: makes the loop run `call`; False if closed, but the call is kept."""
        self._posted.append((call, args))
        return self.wake()

    def wake(self) -> bool:
        """From any thread: makes the loop run the posted calls; False if the mailbox is closed."""
        if self.closed:
            return False
        now = time.monotonic()
        if now < self.woken_until:
            return True  # the loop is running, or being woken, and runs all posted calls
        self.woken_until = now + WAKE_S
        try:
            self._loop.call_soon_threadsafe(self.run)
        except RuntimeError:
            return False
        return True

    def run(self) -> None:
        """On the loop: runs what was posted."""
        posted = self._posted
        while posted and not self.paused:
            self.woken_until = inf  # calls that are posted from now on are run below
            while posted and not self.paused:
                _try(*posted.popleft())
            self.woken_until = 0.0  # before the last check, so that later posts wake the loop
        self.woken_until = 0.0


class LoopThread:
    """A thread with an event loop. On the loop, `call_at` calls a function at a given time (of
    time.monotonic), to within a millisecond."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self.call_at = self._loop.call_at
        self.mailbox = Mailbox(self._loop, _posted)
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = inf
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop.call_soon(self._begin)
        self.thread = threading.Thread(target=self._run, name="dlm-client", daemon=True)

    def _run(self) -> None:
        _here.loop = True
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self) -> None:
        self.arm()
        self.mailbox.run()

    @property
    def ending(self) -> bool:
        """Whether the loop no longer runs what is posted or started."""
        return self.mailbox.closed

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def arm(self) -> None:
        """On the loop: schedules the first of the process's timers."""
        if not _timers:
            return
        when = _timers[0][0]
        if when < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = when
            self._alarm = self.call_at(when, self._run_timers)

    def _run_timers(self) -> None:
        self._alarm, self._alarm_at = None, inf
        # Half a millisecond early is fine: a loop's clock is no finer than that.
        due = time.monotonic() + 0.0005
        while _timers and _timers[0][0] <= due:
            _, _, call, args = heapq.heappop(_timers)
            _try(call, args)
        self.mailbox.run()  # the thread that should have woken the loop may have been interrupted
        self.arm()

    def stop(self, before: Callable[[], None]) -> None:
        """Calls `before` on the loop, between replies, then cancels all tasks, lets them end, and
        ends the thread. If the loop does not end in time, this thread calls `before`."""

        async def end() -> None:
            before()
            self.mailbox.closed = True
            for task in self._tasks:
                task.cancel()
            # This also waits for gRPC's tasks, which end once ours do. These tasks hold references
            # to objects that `stop` must free.
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=STOP_S)
            self._loop.stop()

        def begin() -> None:
            self._ending = self._loop.create_task(end())

        self.mailbox.paused = True  # threads may post calls faster than the loop runs them
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)
        if is_here():
            # A fork on the loop's thread cannot end the loop, so its child cannot send anything.
            log.error("client.fork.on_loop", extra={"thread": self.thread.name})
        else:
            self.thread.join(STOP_S)
        if self.thread.is_alive():
            before()
        else:
            self._ending = None
            self._loop.close()


def _try(call: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001 - the others that were posted or are due must still run
        log_failure(exc)


def log_failure(error: Exception) -> None:
    with contextlib.suppress(Exception):  # a log handler of the program may raise
        log.error("client.loop.failed", extra={"error": type(error).__name__})


_here = threading.local()
_lock = threading.RLock()  # reentrant, as a signal handler may fork anywhere
_running: LoopThread | None = None
_suspended = False  # True during a fork, and while the interpreter exits
_posted: Posted = deque()
# The timers; only the loop touches them.
_timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
_order = itertools.count()


def running() -> LoopThread:
    assert _running is not None
    return _running


def post(call: Callable[..., None], *args: Any) -> None:
    """From any thread: runs `call` on the loop, after calls posted earlier. During a fork, `post`
    returns at once, and `call` runs after the fork.

    Raises  ConfigError, RuntimeError  the loop could not be started; the next loop runs `call`
    """
    _posted.append((call, args))
    home = _running
    if home is None or not home.mailbox.wake():
        _start()


def leave(call: Callable[..., None], *args: Any) -> bool:
    """Like `post`, but returns False if no loop runs; then no loop has any resource open."""
    home = _running
    if home is None or home.ending:
        return False
    return home.mailbox.post(call, *args)


def leave_for_next(call: Callable[..., None]) -> None:
    """Like `leave`; during a fork, the next loop runs the call."""
    if not leave(call):
        _posted.append((call, ()))


def is_here() -> bool:
    return getattr(_here, "loop", False)  # also true for the thread of a loop that is being stopped


def later(delay_s: float, call: Callable[..., None], *args: Any) -> None:
    """On the loop: runs `call` after `delay_s` seconds. A parent's timers survive a fork."""
    heapq.heappush(_timers, (time.monotonic() + delay_s, next(_order), call, args))
    if _running is not None:
        _running.arm()


def _start() -> None:
    global _running
    with _lock:
        if not (_suspended or (_running is not None and _running.thread.is_alive())):
            check_open_files()  # raises an error; without this, gRPC would abort the process
            _running = LoopThread()  # set before its thread reads it
            try:
                _running.thread.start()
            except RuntimeError:  # no thread can be started
                _running = None
                raise


def aside(work: Callable[[], T], then: Callable[[T | Exception], object]) -> None:
    """Runs `work`, which may block, e.g. to read a file, in a thread of its own, which calls `then`
    with the result or error. If no thread can start, this thread calls `then` with the error."""

    def whole() -> None:
        found: T | Exception
        try:
            found = work()
        except Exception as exc:  # noqa: BLE001 - `then` must get the error
            found = exc
        then(found)

    try:
        threading.Thread(target=whole, name="dlm-aside", daemon=True).start()
    except RuntimeError as exc:
        then(exc)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs the coroutine from `work` on the clients' loop, and waits in this thread, whose signal
    handlers still run. So a program that answers its own callers through clients needs no second
    loop, which gRPC would wake for each event of the clients' loop. A fork cancels the task."""
    ended: Future[T] = Future()

    async def whole() -> T:
        try:
            return await work()
        except (KeyboardInterrupt, SystemExit) as exc:  # these would end the loop
            ended.set_exception(exc)
            raise asyncio.CancelledError from exc

    def tell(task: asyncio.Task[T]) -> None:
        if ended.done():
            pass
        elif task.cancelled():  # perhaps before its first step
            ended.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            ended.set_exception(error)
        else:
            ended.set_result(task.result())

    post(lambda: running().start(whole()).add_done_callback(tell))
    return ended.result()


def suspend(before: Callable[[], None]) -> None:
    """Ends the loop, see `LoopThread.stop`; no loop starts until `resume`."""
    global _running, _suspended
    # A thread that is starting a loop holds the lock. The wait is limited: a child that cannot use
    # gRPC is better than a process that hangs.
    got = _lock.acquire(timeout=STOP_S)
    _suspended = True
    ended = _running
    if got:
        _lock.release()
    if ended is None:
        before()
        return
    ended.stop(before)
    _running = None  # not earlier: tasks of the old loop must not start a new one
    del ended
    # gRPC's own thread for event loops ends with the last channel, which may be in a reference
    # cycle. The thread goes on if the program itself uses grpc.aio, which does not survive forks.
    pollers = [t for t in threading.enumerate() if t.name.endswith("(_poll_wrapper)")]
    if pollers:
        gc.collect()
    for poller in pollers:
        poller.join(POLLER_S)


def resume() -> None:
    """In the parent, after a fork: starts a loop again if calls or timers wait for one."""
    global _suspended
    _suspended = False
    if _posted or _timers:
        try:
            _start()
        except Exception as exc:  # noqa: BLE001 - the next post tries again
            log.error("client.resume.failed", extra={"error": type(exc).__name__})


def _after_fork_in_child() -> None:
    global _here, _lock, _running, _suspended
    _timers.clear()
    _posted.clear()
    _here = threading.local()
    _lock = threading.RLock()
    _running, _suspended = None, False


os.register_at_fork(after_in_child=_after_fork_in_child)


# -------------------------------------------------------------------------------------------------
# A fork (decoders use process pools) needs all threads of the parent to be outside gRPC.
#
# A child can use gRPC only if no thread was inside gRPC, or held one of its locks, when the process
# forked. Only the loop enters gRPC. So a fork suspends the loop: streams end, their channels are
# closed, and the loop stops; afterwards, the parent opens the streams again, and resends the
# messages that were in flight. gRPC stops its own threads only while it has a channel, so an unused
# channel stays open. The loop also stops when the process exits, since a thread inside gRPC may
# crash the interpreter. A fork also waits for the lock that numba holds while it compiles or loads
# a kernel: a child would wait for that lock forever.


TURN_S = 5.0  # longest wait: a child that cannot use gRPC is better than a process that hangs

_turn = threading.RLock()  # held by a thread that forks; reentrant, since a signal handler may fork
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False
_kept: list[grpc.Channel] = []  # also keeps the parent's channels: a child that closes one hangs
_keeps = False  # whether the last of `_kept` belongs to this process


def suspend_at_forks(streams: Any) -> None:
    """Makes forks call `streams.suspend`, which withdraws the messages in flight, and posts a call
    that sends them again. Must be called before the first stream is opened."""
    register_forks()
    _open.add(streams)


def register_forks() -> None:
    """Registers dlm's fork handlers, once. Before a fork, handlers run in reverse order: dlm's,
    then gRPC's, which stop gRPC's threads, even one with a lock that dlm's handlers wait for."""
    global _registered, _keeps
    if not _keeps:
        _keeps = True
        _kept.append(grpc.insecure_channel("localhost:1"))  # makes gRPC register its handlers
    if not _registered:
        _registered = True
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_release_in_child,
        )
        atexit.register(suspend, _suspend)


def _suspend() -> None:
    for streams in list(_open):
        streams.suspend()


def _before_fork() -> None:
    with kernels.COMPILER:  # waits until the lock is free, before other threads are stopped
        pass
    _turn.acquire(timeout=TURN_S)
    suspend(_suspend)
    # Taken last, as the loop may need this lock to end. Its holder does not wait for our locks.
    kernels.COMPILER.acquire()


def _after_fork_in_parent() -> None:
    kernels.COMPILER.release()
    resume()
    with contextlib.suppress(RuntimeError):  # `_turn` may not have been taken in time
        _turn.release()


def _release_in_child() -> None:
    global _open, _turn, _keeps
    _keeps = False
    kernels.COMPILER.release()
    _open, _turn = weakref.WeakSet(), threading.RLock()
