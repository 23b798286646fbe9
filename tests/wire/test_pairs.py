"""dlm.wire.pairs: how often gRPC wakes an event loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from typing import Any

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


def test_what_ends_for_a_closed_loop_holds_up_no_other() -> None:
    """All loops of a process share gRPC's queue of events, and here both end in one wake."""

    async def call(address: str, timeout_s: float, begun: threading.Event) -> Any:
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = channel.unary_unary("/a/b")(b"", timeout=timeout_s)
            await asyncio.sleep(0.01)
            begun.set()
            return await waiting.code()

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        server = grpc.aio.server()
        with socket.create_server(("127.0.0.1", 0)) as silent, pairs.few_wakes(loop):
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            ours = asyncio.create_task(call(address, 0.4, threading.Event()))
            await asyncio.sleep(0.01)
            begun = threading.Event()
            other = asyncio.new_event_loop()
            task = other.create_task(call(address, 0.2, begun))
            threading.Thread(target=other.run_forever).start()
            assert begun.wait(60)
            other.call_soon_threadsafe(other.stop)
            while other.is_running():
                time.sleep(0.001)
            other.close()
            time.sleep(0.6)
            code = await asyncio.wait_for(ours, 20)
        await server.stop(None)
        del task
        return code

    assert asyncio.run(run()) is grpc.StatusCode.DEADLINE_EXCEEDED
