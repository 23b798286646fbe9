"""dlm.wire.pairs: how often gRPC wakes an event loop."""

from __future__ import annotations

import asyncio
import gc
import socket

import grpc

from dlm.wire import pairs

WAKES = 100


def test_one_of_many_wakes_is_left() -> None:
    """gRPC writes a byte for each operation, and waits when their socket is full."""

    async def count() -> int:
        server = grpc.aio.server()
        loop = asyncio.get_running_loop()
        gc.unfreeze()  # what an earlier test froze is not among the objects
        (queue,) = [
            one for one in gc.get_objects() if type(one).__name__ == "PollerCompletionQueue"
        ]
        read, write = [one for one in gc.get_referents(queue) if isinstance(one, socket.socket)]
        with pairs.few_wakes(loop):
            write.send(bytes(WAKES))
            for _ in range(3):
                await asyncio.sleep(0.01)
            try:
                left = len(read.recv(WAKES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                left = 0
        await server.stop(None)
        return left

    assert asyncio.run(count()) <= 1
