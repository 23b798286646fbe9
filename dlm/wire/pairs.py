"""Reduces grpc.aio's work per operation, by means that are not public in gRPC.

gRPC reports each operation by a byte from its own thread to the loop. If a message and its reply
are one operation, the loop of the client or the server wakes once instead of twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from grpc._cython import cygrpc

_NAMES = "ExecuteBatchError", "ReceiveMessageOperation", "SendMessageOperation", "execute_batch"
# False for a version of gRPC that lacks these internals.
AVAILABLE = all(hasattr(cygrpc, name) for name in _NAMES)
_NO_FLAGS = 0
MOST_WAKES = 1024
_QUEUE = "PollerCompletionQueue"
# How many calls to ask of gRPC ahead of time: at least one to wait for, and one to reveal a flood.
LEAST_AHEAD, MOST_AHEAD = 2, 64


def call_of(context: Any) -> Any:
    """Returns a servicer context's call, for `send_and_receive`; None for other contexts.

    The context has the call in a field that only the garbage collector can see.
    """
    if not AVAILABLE:
        return None
    referents = gc.get_referents(context)
    return next((one for one in referents if type(one).__name__ == "RPCState"), None)


async def send_and_receive(call: Any, message: bytes, loop: asyncio.AbstractEventLoop) -> Any:
    """Sends `message`, and returns the next message; None if the call or the peer's stream ended.

    Waits until the peer has read `message` and sent another; until then gRPC sends nothing else.
    """
    receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    both = cygrpc.SendMessageOperation(message, _NO_FLAGS), receive
    with contextlib.suppress(cygrpc.ExecuteBatchError):
        await cygrpc.execute_batch(call, both, loop)
    return receive.message()


def ask(
    call: Any,
    message: bytes,
    loop: asyncio.AbstractEventLoop,
    came: Callable[[asyncio.Future[Any], Any], None],
) -> asyncio.Future[Any]:
    """Like `send_and_receive`, but begins at once, without a task. Returns a future; on the
    loop, `came` then gets the future and the next message, or None as in `send_and_receive`."""
    receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    both = cygrpc.SendMessageOperation(message, _NO_FLAGS), receive
    batch = cygrpc.execute_batch(call, both, loop)
    try:
        begun: asyncio.Future[Any] = batch.send(None)  # the operation to wait for
    except (StopIteration, cygrpc.ExecuteBatchError):
        begun = loop.create_future()
        begun.set_result(None)

    def ended(_: object) -> None:
        try:  # noqa: SIM105 - `suppress` takes as long as the rest
            batch.send(None)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it ended
            pass
        came(begun, receive.message())

    begun.add_done_callback(ended)
    return begun


def when_ended(call: Any, ended: Callable[[], object]) -> None:
    """Registers `ended`, which is called when a client's call has ended."""
    if AVAILABLE:
        # The public method makes a reference cycle, which keeps gRPC's threads alive.
        call._cython_call.add_done_callback(ended)
    else:
        call.add_done_callback(lambda _: ended())


def cancel(call: Any) -> None:
    """Cancels a client's call, but not the task that waits for its operation, since gRPC still
    reports the operation to the loop."""
    if not AVAILABLE:
        call.cancel()
    elif not call.done():
        # The public method also cancels a task of gRPC that waits for an operation.
        call._cython_call.cancel("cancelled by dlm")


class _AheadServer(cygrpc.AioServer):  # type: ignore[misc]
    """Makes gRPC hand over calls as they arrive. gRPC's own server asks for a call, waits until
    gRPC's thread has woken the loop, and asks for the next, so the calls of a flood would queue in
    gRPC before their callers are known."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._asked: deque[asyncio.Task[Any]] = deque()  # in the order in which they end
        self._ahead = LEAST_AHEAD

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:  # a few methods have a queue of their own
            return super()._make_request_call_future(method)
        if self._asked and self._asked[0].done():  # calls are waiting
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
        else:  # ask for one call fewer, since asking takes work
            self._ahead = max(self._ahead - 1, LEAST_AHEAD)
        while len(self._asked) < self._ahead:
            task = super()._make_request_call_future(method)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asked.append(task)
        return self._asked.popleft()

    async def shutdown(self, grace: float | None) -> None:
        # Each call that waits begins within two turns of the loop, and then has the grace period.
        for _ in range(3 * MOST_AHEAD):
            if not any(one.done() for one in self._asked):
                break
            await asyncio.sleep(0)
        self._asked.clear()  # gRPC's shutdown waits until nobody holds a call
        await super().shutdown(grace)


@contextlib.contextmanager
def accepting_ahead() -> Iterator[None]:
    """Inside the block, new servers of grpc.aio ask for many calls ahead; with a version of gRPC
    that lacks the method replaced here, nothing changes."""
    usual = cygrpc.AioServer
    cygrpc.AioServer = _AheadServer
    try:
        yield
    finally:
        cygrpc.AioServer = usual


@contextlib.contextmanager
def few_wakes(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Removes all but the last of the bytes by which gRPC wakes this loop.

    If many operations end together, gRPC reports all of them when the loop takes the first byte;
    each further byte wakes the loop for nothing. About 280 bytes fit in the socket: beyond that,
    gRPC's thread waits until a byte is taken, and reads nothing from the network.
    """
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    queues = [getattr(target, "__self__", None) for target in targets]
    queue: Any = next((one for one in queues if type(one).__name__ == _QUEUE), None)
    sockets = [one for one in gc.get_referents(queue) if isinstance(one, socket.socket)]
    if not hasattr(queue, "_handle_events") or len(sockets) != 2:
        yield
        return
    wakes, waking = sockets
    report = functools.partial(queue._handle_events, loop)  # reads one byte, then reports

    def take() -> None:
        """All loops of a process share the socket; each reports all operations, whoever owns them.

        So another loop may take bytes at any time; a byte is then put back, to wake a loop again.
        """
        removed = b""
        with contextlib.suppress(BlockingIOError):
            waiting = wakes.recv(MOST_WAKES, socket.MSG_PEEK)
            if len(waiting) > 1:
                removed = wakes.recv(len(waiting) - 1)
        try:
            report()
        except BlockingIOError:
            if removed:
                waking.send(removed[:1])
        except Exception:  # e.g. a closed loop; the operations still waiting need a wake
            waking.send(b"\0")
            raise

    loop.add_reader(wakes, take)
    try:
        yield
    finally:
        loop.add_reader(wakes, report)
