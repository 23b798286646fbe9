"""Forking a process that uses gRPC (decoders use process pools).

A child can use gRPC only if no thread was inside it when the process forked. gRPC stops its own
threads for that; the gate keeps ours out. What they do inside never waits for the network.

The gate is reentrant, since a signal handler may fork while its own thread is inside; and waited
for as long as gRPC itself waits, since a process that cannot use gRPC in its child is better than
one that never gets there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_GATE_S = 5.0
_LOOK_AGAIN_S = 0.0005
_gate = threading.RLock()
_local = threading.local()
# Threads of ours that read from a stream: they enter gRPC by themselves, and wait outside of it.
_readers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@contextmanager
def inside() -> Iterator[None]:
    """Around every entry into gRPC."""
    gate = _gate
    with gate:
        yield


def add_reader(thread: threading.Thread) -> None:
    """Makes a fork wait until `thread` is outside of gRPC; it must call `pass_gate` before it goes
    in again."""
    _readers.add(thread)


def pass_gate() -> None:
    """Waits while a fork is being made."""
    with inside():
        pass


def _is_inside(thread: threading.Thread) -> bool:
    """Whether the thread runs code of gRPC now; in a wait, its top frame is threading's."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and f"{os.sep}grpc{os.sep}" in frame.f_code.co_filename


def _before_fork() -> None:
    end = time.monotonic() + _GATE_S
    _local.forks_with = _gate if _gate.acquire(timeout=_GATE_S) else None
    for thread in list(_readers):
        while thread.is_alive() and _is_inside(thread) and time.monotonic() < end:
            time.sleep(_LOOK_AGAIN_S)


def _after_fork_in_parent() -> None:
    gate, _local.forks_with = getattr(_local, "forks_with", None), None
    if gate is not None:
        gate.release()


def _after_fork_in_child() -> None:
    global _gate, _readers
    _gate = threading.RLock()
    _readers = weakref.WeakSet()
    _local.forks_with = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
