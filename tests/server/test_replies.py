"""The writer of a stream: order, bounds, and what becomes of replies that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlm.server import replies
from dlm.server.replies import MAX_WAITING, Replies, Unread


class Client:
    """The other end of a stream: reads while `reading` is set, and fails with `fault` if given."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.fault: Exception | None = None
        self.got: list[bytes] = []

    async def write(self, reply: bytes) -> None:
        """As grpc.aio's ServicerContext.write."""
        await self.reading.wait()
        if self.fault is not None:
            raise self.fault
        self.got.append(reply)


def run(test: Callable[[Client, Replies, list[bytes]], Awaitable[None]]) -> None:
    """Runs `test` with a client, its replies, and a list for what is said to be written."""

    async def main() -> None:
        client = Client()
        await test(client, Replies(client), [])

    asyncio.run(main())


def noting(done: list[bytes], reply: bytes) -> Callable[[float], None]:
    """Notes that `reply` is done with."""
    return lambda write_s: done.append(reply)


def test_replies_are_written_in_order_and_told_once() -> None:
    """From several tasks; each is told when it is written, not before."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        for reply in (b"a", b"b", b"c"):
            await out.put(reply, noting(done, reply))
        await asyncio.sleep(0)
        assert (client.got, done) == ([], [])
        client.reading.set()
        assert await out.write(b"d") >= 0.0
        await out.flush()
        assert client.got == [b"a", b"b", b"c", b"d"]
        assert done == [b"a", b"b", b"c"]
        out.close()
        assert len(done) == 3

    run(test)


def test_whoever_does_not_read_is_not_read_either() -> None:
    """The one too many waits until there is room."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        for number in range(MAX_WAITING - 1):
            await out.put(bytes([number]), noting(done, bytes([number])))
        last = asyncio.create_task(out.put(b"last", noting(done, b"last")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not last.done()
        client.reading.set()
        await last
        await out.flush()
        assert client.got[-1] == b"last" and len(done) == MAX_WAITING

    run(test)


def test_a_client_that_reads_nothing_ends_the_stream_and_is_owed_nothing(monkeypatch) -> None:
    """All that waits is let go; so is what comes after."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        await out.put(b"a", noting(done, b"a"))
        with pytest.raises(Unread, match=r"waited 0.01 s"):
            await out.write(b"b")
        assert done == [b"a"]
        for ask in (out.flush(), out.put(b"c", noting(done, b"c"))):
            with pytest.raises(Unread):
                await ask
        assert done == [b"a", b"c"]

    run(test)


def test_a_client_that_went_away_is_owed_nothing(caplog) -> None:
    """Said once in the log, by its kind."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        client.fault = RuntimeError("what was asked")
        client.reading.set()
        await out.put(b"a", noting(done, b"a"))
        await out.flush()
        await out.put(b"b", noting(done, b"b"))
        assert done == [b"a", b"b"]

    with caplog.at_level("INFO", "dlm.server"):
        run(test)
    (said,) = caplog.records
    assert (said.message, said.error) == ("server.reply.undelivered", "RuntimeError")


def test_closing_tells_what_waits_and_whoever_waits() -> None:
    """In the midst of a write, with a put that waits for room."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        for number in range(MAX_WAITING - 1):
            await out.put(bytes([number]), noting(done, bytes([number])))
        last = asyncio.create_task(out.put(b"last", noting(done, b"last")))
        await asyncio.sleep(0)
        out.close()
        await last
        assert len(done) == MAX_WAITING and client.got == []

    run(test)
