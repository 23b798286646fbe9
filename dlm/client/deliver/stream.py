"""A gRPC call of many messages each way, of which each is sent with the operation that receives its
reply.

grpc.aio reports each write as it does each reply: by a byte from its own thread to the loop. gRPC
also takes both as one operation, and reports it when the reply has come: so a message wakes the
loop once, not twice. grpc.aio has no public method for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from grpc._cython import cygrpc

_NAMES = "ExecuteBatchError", "ReceiveMessageOperation", "SendMessageOperation", "execute_batch"
# False for a version of gRPC that is built otherwise: then they are two operations.
PAIRS = all(hasattr(cygrpc, name) for name in _NAMES)
_NO_FLAGS = 0


class Stream:
    """A call on the running loop, used by one task; `ended` is called when it has ended.

    Cancel the call, not its task, except while it connects: gRPC reports an operation to the loop
    even if nobody waits for it any longer.
    """

    def __init__(self, call: Any, ended: Callable[[], object]) -> None:
        self.connected = False
        self._call = call
        self._loop = asyncio.get_running_loop()
        if PAIRS:
            # The public method makes a reference cycle, which keeps gRPC's threads.
            call._cython_call.add_done_callback(ended)
        else:
            call.add_done_callback(lambda _: ended())

    def done(self) -> bool:
        return bool(self._call.done())

    async def connect(self) -> None:
        """Returns once messages can be sent, or the call has ended: then reading says why."""
        with contextlib.suppress(grpc.RpcError):
            await self._call.wait_for_connection()
        self.connected = True

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`; raises the `grpc.RpcError` that the call ended
        with."""
        return await self._call.read()

    async def ask(self, data: bytes) -> Any:
        """Sends a message; returns and raises as `read`, which must not be waiting."""
        if PAIRS:
            receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
            both = cygrpc.SendMessageOperation(data, _NO_FLAGS), receive
            with contextlib.suppress(cygrpc.ExecuteBatchError):
                await cygrpc.execute_batch(self._call._cython_call, both, self._loop)
                if (message := receive.message()) is not None:
                    return message
        else:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._call.write(data)
        return await self._call.read()

    async def end(self) -> None:
        """Ends the call well, after the replies to all messages."""
        await self._call.done_writing()
        await self._call.read()

    def cancel(self) -> None:
        if not PAIRS:
            self._call.cancel()
        elif not self._call.done():
            # The public method also cancels a task of gRPC's that has an operation.
            self._call._cython_call.cancel("cancelled by dlm")
