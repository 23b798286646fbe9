"""dlm.wire.pairs: how often gRPC wakes an event loop, and how soon it hands over calls."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from cluster import WAIT_S
from dlm.wire import pairs

WAKES = 100
GRACE_S = 3.0
Answer = Callable[[bytes, object], Awaitable[bytes]]
asks_ahead = pytest.mark.skipif(
    not hasattr(cygrpc.AioServer, "_make_request_call_future"), reason="gRPC 1.82 asks for one call"
)


async def started(answer: Answer) -> tuple[Any, int]:
    """A server that accepts calls ahead, by a registered method and by a plain one; its port."""
    with pairs.accepting_ahead():
        server = grpc.aio.server()
    method = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_registered_method_handlers("registered", method)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", method),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


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


@asks_ahead
def test_calls_are_accepted_ahead_of_their_server() -> None:
    """In their order, more while they stand in line; a registered method has one of its own."""

    async def test() -> None:
        asked = 3 * pairs.MOST_AHEAD
        began: list[bytes] = []
        most = 0

        async def answer(data: bytes, _: object) -> bytes:
            nonlocal most
            began.append(data)
            most = max(most, accepted._ahead)
            return data

        server, port = await started(answer)
        accepted = server._server
        assert len(accepted._asked) == pairs.LEAST_AHEAD - 1
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for service in ("registered", "plain"):
                call = channel.unary_unary(f"/{service}/Call")
                sent = [b"%d" % number for number in range(asked)]
                assert await asyncio.gather(*(call(data, timeout=WAIT_S) for data in sent)) == sent
            assert most == pairs.MOST_AHEAD
            while accepted._ahead > pairs.LEAST_AHEAD:
                await call(b"", timeout=WAIT_S)
        waiting = len(accepted._asked)
        assert waiting < pairs.MOST_AHEAD and not any(one.done() for one in accepted._asked)
        assert len(began) > 2 * asked
        await server.stop(None)

    asyncio.run(test())


@asks_ahead
def test_calls_that_were_accepted_ahead_are_answered_by_a_server_that_stops() -> None:
    """Within its grace; gRPC ends those that it has not handed over."""

    async def test() -> None:
        async def answer(data: bytes, _: object) -> bytes:
            return data

        server, port = await started(answer)
        accepted = server._server
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/plain/Call")
            calls: list[Any] = []
            while sum(one.done() for one in accepted._asked) < 9:
                if all(one.done() for one in calls):  # they were answered too fast to be seen here
                    calls = [call.future(b"", timeout=WAIT_S) for _ in range(10 * pairs.MOST_AHEAD)]
                await asyncio.sleep(0)
            taken = sum(one.done() for one in accepted._asked)
            await server.stop(GRACE_S)
            codes = [await asyncio.to_thread(one.code) for one in calls]
            assert codes.count(grpc.StatusCode.OK) >= taken

    asyncio.run(test())
