"""dlm.wire.pairs: how often gRPC wakes an event loop, and how soon it hands over calls."""

from __future__ import annotations

import asyncio
import gc
import socket

import grpc

from cluster import WAIT_S
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


def test_calls_are_accepted_ahead_of_their_server() -> None:
    """As many as come, in their order; a registered method has a line of its own."""

    async def test() -> None:
        with pairs.accepting_ahead():
            server = grpc.aio.server()
        began: list[bytes] = []
        asked = 3 * pairs.ACCEPTED_AHEAD

        async def answer(data: bytes, _: object) -> bytes:
            began.append(data)
            return data

        method = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_registered_method_handlers("registered", method)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", method),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for service in ("registered", "plain"):
                call = channel.unary_unary(f"/{service}/Call")
                sent = [b"%d" % number for number in range(asked)]
                assert await asyncio.gather(*(call(data, timeout=WAIT_S) for data in sent)) == sent
        waiting = server._server._asked
        assert len(waiting) == pairs.ACCEPTED_AHEAD - 1 and not any(one.done() for one in waiting)
        assert len(began) == 2 * asked
        await server.stop(None)

    asyncio.run(test())
