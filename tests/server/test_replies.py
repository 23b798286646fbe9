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


async def turns() -> None:
    """Lets all others go on as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


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
        await out.close()
        assert len(done) == 3

    run(test)


def test_whoever_does_not_read_is_not_read_either() -> None:
    """The one too many waits until there is room."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        for number in range(MAX_WAITING - 1):
            await out.put(bytes([number]), noting(done, bytes([number])))
        last = asyncio.create_task(out.put(b"last", noting(done, b"last")))
        await turns()
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


def test_a_handler_that_waits_for_the_next_message_learns_that_nobody_reads(monkeypatch) -> None:
    """Once what gRPC has begun to write is read, as it takes no status before that."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        async def handle() -> None:
            async with out:
                await out.put(b"a", noting(done, b"a"))
                await out.put(b"b", noting(done, b"b"))
                await asyncio.Event().wait()

        handler = asyncio.create_task(handle())
        while not done:
            await asyncio.sleep(0.001)
        assert done == [b"a", b"b"]
        await turns()
        assert not handler.done()
        client.reading.set()
        with pytest.raises(Unread):
            await handler
        assert client.got == [b"a"] and handler.cancelling() == 0

    run(test)


def test_a_handler_that_is_ended_by_others_too_is_cancelled(monkeypatch) -> None:
    """By gRPC, whose client went away, in the moment when its time was over."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        async def handle() -> None:
            async with out:
                await out.put(b"a", lambda write_s: handler.cancel() and None)
                await asyncio.Event().wait()

        handler = asyncio.create_task(handle())
        while not handler.cancelling():
            await asyncio.sleep(0.001)
        client.reading.set()
        with pytest.raises(asyncio.CancelledError):
            await handler

    run(test)


def test_a_reply_waits_for_its_turn_and_its_client_no_longer_than_it_may(monkeypatch) -> None:
    """Five at once to a client that takes one now and then: a whole queue of them does not hold
    what they count as for five times as long."""
    monkeypatch.setattr(replies, "WRITE_S", 0.05)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        async def read_now_and_then(reply: bytes) -> None:
            await asyncio.sleep(0.04)
            client.got.append(reply)

        client.write = read_now_and_then  # type: ignore[method-assign]
        ended = await asyncio.gather(
            *(out.write(bytes([n])) for n in range(5)), return_exceptions=True
        )
        assert len(client.got) <= 1
        assert sum(isinstance(one, Unread) for one in ended) >= 4

    run(test)


def test_a_stream_with_nothing_to_write_has_no_timer(monkeypatch) -> None:
    """One while it is busy, which looks once more and goes; the next reply has its own time."""
    monkeypatch.setattr(replies, "WRITE_S", 0.02)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        client.reading.set()
        await out.write(b"a")
        timer = out._timer
        assert timer is not None
        await out.write(b"b")
        assert out._timer is timer
        while out._timer is not None:
            await asyncio.sleep(0.001)
        client.reading.clear()
        with pytest.raises(Unread):
            await out.write(b"c")
        assert client.got == [b"a", b"b"]

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
    assert (said.event, said.error) == ("server.reply.undelivered", "RuntimeError")


def test_a_handler_whose_client_went_away_ends_as_one_that_was_cancelled() -> None:
    """Though it came to its end by itself: gRPC is to send no status."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        client.fault = RuntimeError("gone")
        client.reading.set()
        with pytest.raises(asyncio.CancelledError):
            async with out:
                await out.put(b"a", noting(done, b"a"))
                await out.flush()
        assert done == [b"a"]

    run(test)


def test_a_client_that_reads_nothing_and_then_goes_away_is_sent_no_status(monkeypatch) -> None:
    """The write that was begun fails; gRPC would refuse a status, which has no reader either."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        async def handler() -> None:
            async with out:
                await out.put(b"a", noting(done, b"a"))
                await asyncio.Event().wait()

        handling = asyncio.create_task(handler())
        while not done:
            await asyncio.sleep(0.001)
        client.fault = RuntimeError("gone")
        client.reading.set()
        with pytest.raises(asyncio.CancelledError):
            await handling

    run(test)


def test_closing_tells_what_waits_and_whoever_waits() -> None:
    """In the midst of a write, with a put that waits for room."""

    async def test(client: Client, out: Replies, done: list[bytes]) -> None:
        for number in range(MAX_WAITING - 1):
            await out.put(bytes([number]), noting(done, bytes([number])))
        last = asyncio.create_task(out.put(b"last", noting(done, b"last")))
        await asyncio.sleep(0)
        closing = asyncio.create_task(out.close())
        await last
        assert len(done) == MAX_WAITING and client.got == []
        await turns()
        assert not closing.done()  # gRPC takes no status yet
        client.reading.set()
        await closing
        assert client.got == [b"\0"] and len(done) == MAX_WAITING

    run(test)
