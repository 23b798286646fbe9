"""Forking a process that uses gRPC (decoders use process pools).

A child can use gRPC only if no thread was inside it when the process forked, nor held one of its
locks. gRPC stops its own threads for that; the gate keeps ours out; and streams, whose event loop
gRPC cannot take through a fork, are suspended: ended before it, their channels closed and their
loop stopped, and opened again after it, in the parent. What we do inside the gate never waits for
the network.

The gate is reentrant, since a signal handler may fork while its own thread is inside. A fork waits
for it as long as gRPC itself waits and no longer, since a child that cannot use gRPC is better than
a process that hangs.

When the interpreter ends, the same happens for good.

There is one more lock, numba's, held while a kernel is compiled or loaded on its first run. A child
would wait for it forever, so a fork waits until nobody holds it.
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
    """What lives on the loop."""

    def suspend(self) -> None:
        """Takes back what is in flight; the loop ends next."""

    def resume(self) -> None:
        """In the parent, after the fork: sends it again."""

    def give_up(self, cause: Exception) -> None:
        """No loop can be started: fails what waits for it."""


_open: weakref.WeakSet[Streams] = weakref.WeakSet()
_waking: weakref.WeakSet[Streams] = weakref.WeakSet()  # that a thread is about to resume


@contextmanager
def inside() -> Iterator[None]:
    """Around every entry into gRPC, but on the loop, which a fork waits for by itself."""
    if loop.is_here():
        yield
        return
    gate = _gate
    with gate:
        yield


def add(streams: Streams) -> None:
    """Makes forks suspend `streams`; call it inside the gate, where the first is opened."""
    _open.add(streams)


def wake(streams: Streams) -> None:
    """Starts the loop, and then resumes `streams`; once the gate is free, which is not waited for.
    One thread does, however often this is called meanwhile; where none can be started, they give
    up."""
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
    with kernels.COMPILER:  # waited for here, where it is held, and not while all others stand
        pass
    _local.forks_with = _gate if _gate.acquire(timeout=_GATE_S) else None
    loop.stop(_suspend)
    # Last: the loop may have needed it to get to its end. Whoever has it waits for none of ours.
    kernels.COMPILER.acquire()


def _after_fork_in_parent() -> None:
    kernels.COMPILER.release()
    gate, _local.forks_with = getattr(_local, "forks_with", None), None
    found = list(_open)  # also what was opened while the loop ended
    if gate is not None:
        gate.release()
    if found:
        # In a thread of its own: whoever forks may hold locks that this needs.
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
    except Exception as exc:  # noqa: BLE001 - whoever waits must hear of it
        for streams in found:
            _waking.discard(streams)
            streams.give_up(exc)
        return
    for streams in found:
        _waking.discard(streams)  # first: who comes from here on finds a loop, or wakes it again
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
    """As before a fork, and for good: a thread that is inside gRPC while the interpreter takes
    itself apart may crash it. What still asks, in daemon threads, waits at the gate."""
    _gate.acquire(timeout=_GATE_S)
    loop.stop(_suspend)


_registered = False


def register() -> None:
    """Has forks pass here; to be called once gRPC has a channel, for gRPC registers with its first.

    What was registered last runs first before a fork: our threads must be out of gRPC before it
    stops its own, since one that it stopped may hold a lock that ours, or we, would wait for.
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
