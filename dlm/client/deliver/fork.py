"""What a fork needs (decoders use process pools): that no thread of the parent is inside gRPC.

A child can use gRPC only if no thread was inside it, or held one of its locks, when the process
forked. Only the loop enters gRPC. So a fork suspends it: streams end, their channels are closed,
and the loop stops; after it, the parent opens them again, and sends again what was in flight. gRPC
stops its own threads only while it has a channel, so one that is never used stays open. At exit the
same happens, without resuming: a thread inside gRPC may crash the interpreter. A fork also waits
for numba's lock, held while a kernel is compiled or loaded, for which a child would wait forever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import Protocol

import grpc

from dlm.client.deliver import loop
from dlm.client.plan import kernels


class Streams(Protocol):
    """An object with streams on the loop."""

    def suspend(self) -> None:
        """Takes back the messages in flight, and posts a call that sends them again, before the
        loop ends."""


TURN_S = 5.0  # a child that cannot use gRPC is better than a process that hangs

_turn = threading.RLock()  # of threads that fork; reentrant, since a signal handler may fork
_open: weakref.WeakSet[Streams] = weakref.WeakSet()
_registered = False
_kept: list[grpc.Channel] = []  # a parent's, too: to close it in a child would wait for threads
_keeps = False  # the last of them is this process's


def add(streams: Streams) -> None:
    """Makes forks suspend `streams`; call it before the first is opened."""
    register()
    _open.add(streams)


def register() -> None:
    """Registers the handlers, once. Before a fork, they run in reverse order, ours before
    gRPC's: it would stop its threads while one may hold a lock for which ours waits."""
    global _registered, _keeps
    if not _keeps:
        _keeps = True
        _kept.append(grpc.insecure_channel("localhost:1"))  # gRPC registers its own with the first
    if not _registered:
        _registered = True
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
        atexit.register(loop.suspend, _suspend)


def _suspend() -> None:
    for streams in list(_open):
        streams.suspend()


def _before_fork() -> None:
    with kernels.COMPILER:  # wait here if it is held, before all other threads are stopped
        pass
    _turn.acquire(timeout=TURN_S)
    loop.suspend(_suspend)
    # Last: the loop may need it to end. A thread that holds it does not wait for our locks.
    kernels.COMPILER.acquire()


def _after_fork_in_parent() -> None:
    kernels.COMPILER.release()
    loop.resume()
    with contextlib.suppress(RuntimeError):  # another thread has it for long
        _turn.release()


def _after_fork_in_child() -> None:
    global _open, _turn, _keeps
    _keeps = False
    kernels.COMPILER.release()
    _open, _turn = weakref.WeakSet(), threading.RLock()
