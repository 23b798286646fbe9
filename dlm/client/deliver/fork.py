"""Forking a process that uses gRPC (decoders use process pools).

A child can use gRPC only if no thread was inside it, or held one of its locks, when the process
forked. gRPC stops its own threads before a fork; the gate keeps ours out. gRPC cannot take the
streams' event loop through a fork, so streams are suspended: before it they end, their channels are
closed and their loop stops; after it they are opened again, in the parent. Code inside the gate
never waits for the network.

The gate is reentrant, since a signal handler may fork while its own thread is inside. A fork waits
for the gate only as long as gRPC itself waits, since a child that cannot use gRPC is better than a
process that hangs.

When the interpreter exits, the same happens, without resuming.

There is one more lock, numba's, held while a kernel is compiled or loaded on its first run. A child
would wait for it forever, so a fork waits until it is free.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dlm.client.deliver import loop
from dlm.client.plan import kernels
from dlm.logs import EventLog

log = EventLog(__name__)

_GATE_S = 5.0
_gate = threading.RLock()
_local = threading.local()


class Streams(Protocol):
    """An object with streams on the loop."""

    def suspend(self) -> None:
        """Takes back the messages in flight; then the loop ends."""

    def resume(self) -> None:
        """In the parent, after the fork: sends them again."""

    def give_up(self, cause: Exception) -> None:
        """No loop can be started: fails the messages that wait for it."""


_open: weakref.WeakSet[Streams] = weakref.WeakSet()
_waking: weakref.WeakSet[Streams] = weakref.WeakSet()  # about to be resumed by a thread


@contextmanager
def inside() -> Iterator[None]:
    """Wraps every entry into gRPC, except on the loop, for which a fork waits anyway."""
    if loop.is_here():
        yield
        return
    gate = _gate
    with gate:
        yield


def add(streams: Streams) -> None:
    """Makes forks suspend `streams`; call it inside the gate, when the first is opened."""
    _open.add(streams)


def wake(streams: Streams) -> None:
    """Starts the loop and then resumes `streams`, in a thread, once the gate is free. Further calls
    meanwhile start no other thread. If none can be started, `streams` give up."""
    if streams in _waking:
        return
    _waking.add(streams)
    try:
        threading.Thread(target=_resume, args=([streams],), name="dlm-resume", daemon=True).start()
    except RuntimeError as exc:
        _waking.discard(streams)
        streams.give_up(exc)


def _suspend() -> None:
    for streams in list(_open):
        streams.suspend()


def _before_fork() -> None:
    with kernels.COMPILER:  # wait here if it is held, before all other threads are stopped
        pass
    _local.forks_with = _gate if _gate.acquire(timeout=_GATE_S) else None
    loop.stop(_suspend)
    # Last: the loop may need it to end. A thread that holds it does not wait for our locks.
    kernels.COMPILER.acquire()


def _after_fork_in_parent() -> None:
    kernels.COMPILER.release()
    gate, _local.forks_with = getattr(_local, "forks_with", None), None
    found = list(_open)  # including those opened while the loop ended
    if gate is not None:
        gate.release()
    if found:
        # In a separate thread: the thread that forks may hold locks that this needs.
        resuming = threading.Thread(target=_resume, args=(found,), name="dlm-resume", daemon=True)
        try:
            resuming.start()
        except RuntimeError as exc:  # the next message to each starts the loop
            log.error("client.resume.failed", extra={"error": type(exc).__name__})


def _resume(found: list[Streams]) -> None:
    try:
        with inside():
            for streams in found:
                add(streams)  # the next fork may come before they are opened
            loop.running()
    except Exception as exc:  # noqa: BLE001 - the messages that wait must fail
        for streams in found:
            _waking.discard(streams)
            streams.give_up(exc)
        return
    for streams in found:
        _waking.discard(streams)  # first: later callers find a loop, or wake it again
        try:
            streams.resume()
        except Exception as exc:  # noqa: BLE001 - the others must still be resumed
            log.error("client.resume.failed", extra={"error": type(exc).__name__})


def _after_fork_in_child() -> None:
    global _gate, _open, _waking
    kernels.COMPILER.release()
    _gate = threading.RLock()
    _open, _waking = weakref.WeakSet(), weakref.WeakSet()
    _local.forks_with = None


def _at_exit() -> None:
    """As before a fork, but for good: a thread inside gRPC may crash the interpreter while it shuts
    down. Daemon threads that still call wait at the gate."""
    _gate.acquire(timeout=_GATE_S)
    loop.stop(_suspend)


_registered = False


def register() -> None:
    """Registers the handlers; call it once gRPC has a channel, since gRPC registers with its first.

    Before a fork, handlers run in reverse order: our threads must be out of gRPC before it stops
    its own, since a stopped thread may hold a lock for which ours, or we, would wait.
    """
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
        atexit.register(_at_exit)
