"""What grpc.aio does for each operation, done less often; it has no public methods for that.

It reports each operation by a byte from its own thread to the loop. As one operation, a message of
a stream and its reply wake the loop of a client once, not twice, and that of a server, too.
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
# False for a version of gRPC that is built otherwise.
AVAILABLE = all(hasattr(cygrpc, name) for name in _NAMES)
_NO_FLAGS = 0
MOST_WAKES = 1024
_QUEUE = "PollerCompletionQueue"
# Calls of which gRPC is asked at once: one that is waited for, and those that show a flood.
LEAST_AHEAD, MOST_AHEAD = 2, 64


def call_of(context: Any) -> Any:
    """What `send_and_receive` takes, of a servicer context; None if it is of another kind.

    The context has it in a field that only the garbage collector can see.
    """
    if not AVAILABLE:
        return None
    referents = gc.get_referents(context)
    return next((one for one in referents if type(one).__name__ == "RPCState"), None)


async def send_and_receive(call: Any, message: bytes, loop: asyncio.AbstractEventLoop) -> Any:
    """The next message once `message` is sent, too; None if the call or the peer's part has ended.

    Meanwhile gRPC sends nothing else. It waits as long as the peer does not read, or sends nothing.
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
    """As `send_and_receive`, but begins at once, without a task; on the loop, `came` is called with
    the future that is returned here, and with what that returns."""
    receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    both = cygrpc.SendMessageOperation(message, _NO_FLAGS), receive
    batch = cygrpc.execute_batch(call, both, loop)
    try:
        begun: asyncio.Future[Any] = batch.send(None)  # what it waits for
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
    """Has `ended` called when a call of a client has ended."""
    if AVAILABLE:
        # The public method makes a reference cycle, which keeps gRPC's threads.
        call._cython_call.add_done_callback(ended)
    else:
        call.add_done_callback(lambda _: ended())


def cancel(call: Any) -> None:
    """Cancels a call of a client. Not its task: gRPC reports an operation to the loop even if
    nobody waits."""
    if not AVAILABLE:
        call.cancel()
    elif not call.done():
        # The public method also cancels a task of gRPC's that has an operation.
        call._cython_call.cancel("cancelled by dlm")


class _AheadServer(cygrpc.AioServer):  # type: ignore[misc]
    """Has gRPC hand over calls as they come. Its own server asks for one, waits until its thread
    has woken the loop, and asks for the next: the calls of a flood stand in line in gRPC, before
    anybody knows whose they are."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._asked: deque[asyncio.Task[Any]] = deque()  # in the order in which they end
        self._ahead = LEAST_AHEAD

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:  # one of a few that have a line of their own
            return super()._make_request_call_future(method)
        if self._asked and self._asked[0].done():  # calls stand in line
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
        else:  # one less, as each takes work to ask for
            self._ahead = max(self._ahead - 1, LEAST_AHEAD)
        while len(self._asked) < self._ahead:
            task = super()._make_request_call_future(method)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asked.append(task)
        return self._asked.popleft()

    async def shutdown(self, grace: float | None) -> None:
        # Each of these begins within two looks of the loop, and then has the grace.
        for _ in range(3 * sum(one.done() for one in self._asked)):
            await asyncio.sleep(0)
        self._asked.clear()  # gRPC waits until nobody holds a call
        await super().shutdown(grace)


@contextlib.contextmanager
def accepting_ahead() -> Iterator[None]:
    """Servers of grpc.aio that are made meanwhile ask for many calls at once; for a version that is
    built otherwise, nothing changes."""
    usual = cygrpc.AioServer
    cygrpc.AioServer = _AheadServer
    try:
        yield
    finally:
        cygrpc.AioServer = usual


@contextlib.contextmanager
def few_wakes(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Removes bytes by which gRPC wakes this loop, but for the last.

    Of many operations at once gRPC reports all when the loop takes the first byte; each further one
    wakes it for nothing. Some 280 fit their socket: beyond that gRPC's thread waits, and reads
    nothing from the network either, until one is taken.
    """
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    queues = [getattr(target, "__self__", None) for target in targets]
    queue: Any = next((one for one in queues if type(one).__name__ == _QUEUE), None)
    sockets = [one for one in gc.get_referents(queue) if isinstance(one, socket.socket)]
    if not hasattr(queue, "_handle_events") or len(sockets) != 2:
        yield
        return
    wakes, waking = sockets
    report = functools.partial(queue._handle_events, loop)  # it takes a byte first

    def take() -> None:
        """All loops of a process share the socket; each reports what is there, for whichever loop.

        So another may take bytes at any time, and what one of them leaves has to wake one again.
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
        except Exception:  # such as a loop that has closed: the others' operations wait behind it
            waking.send(b"\0")
            raise

    loop.add_reader(wakes, take)
    try:
        yield
    finally:
        loop.add_reader(wakes, report)
