"""A gRPC call of many messages each way, of which each is sent with the operation that receives its
reply (`wire/pairs.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from dlm.wire import pairs


class Stream:
    """A call on the running loop, used by one task; `ended` is called when it has ended.

    Cancel the call, not its task, except while it connects: gRPC reports an operation to the loop
    even if nobody waits for it any longer.
    """

    def __init__(self, call: Any, ended: Callable[[], object]) -> None:
        self.connected = False
        self._call = call
        self._loop = asyncio.get_running_loop()
        if pairs.AVAILABLE:
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
        if pairs.AVAILABLE:
            call = self._call._cython_call
            if (message := await pairs.send_and_receive(call, data, self._loop)) is not None:
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
        if not pairs.AVAILABLE:
            self._call.cancel()
        elif not self._call.done():
            # The public method also cancels a task of gRPC's that has an operation.
            self._call._cython_call.cancel("cancelled by dlm")
