"""The writer of a stream: order, bounds, and what becomes of replies that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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


@pytest.fixture
def client() -> Client:
    """The other end of `out`."""
    return Client()


@pytest.fixture
def out(client: Client) -> Replies:
    """What is tested."""
    return Replies(client)


@pytest.fixture
def done() -> list[bytes]:
    """What is said to be written."""
    return []


def noting(done: list[bytes], reply: bytes) -> Callable[[float], None]:
    """Notes that `reply` is done with."""
    return lambda write_s: done.append(reply)


async def turns() -> None:
    """Lets all others go on as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_replies_are_written_in_order_and_told_once(client, out, done) -> None:
    """From several tasks; each is told when it is written, not before."""
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


async def test_whoever_does_not_read_is_not_read_either(client, out, done) -> None:
    """The one too many waits until there is room."""
    for number in range(MAX_WAITING - 1):
        await out.put(bytes([number]), noting(done, bytes([number])))
    last = asyncio.create_task(out.put(b"last", noting(done, b"last")))
    await turns()
    assert not last.done()
    client.reading.set()
    await last
    await out.flush()
    assert client.got[-1] == b"last" and len(done) == MAX_WAITING


async def test_a_handler_that_waits_for_the_next_message_learns_that_nobody_reads(
    client, out, done, monkeypatch
) -> None:
    """Once what gRPC has begun to write is read, as it takes no status before that."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

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


async def test_a_handler_that_is_ended_by_others_too_is_cancelled(
    client, out, done, monkeypatch
) -> None:
    """By gRPC, whose client went away, in the moment when its time was over."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

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


async def test_a_reply_waits_for_its_turn_and_its_client_no_longer_than_it_may(
    client, out, done, monkeypatch
) -> None:
    """Five at once to a client that takes one now and then: a whole queue of them does not hold
    what they count as for five times as long."""
    monkeypatch.setattr(replies, "WRITE_S", 0.05)

    async def read_now_and_then(reply: bytes) -> None:
        await asyncio.sleep(0.04)
        client.got.append(reply)

    client.write = read_now_and_then  # type: ignore[method-assign]
    ended = await asyncio.gather(*(out.write(bytes([n])) for n in range(5)), return_exceptions=True)
    assert len(client.got) <= 1
    assert sum(isinstance(one, Unread) for one in ended) >= 4


async def test_a_stream_with_nothing_to_write_has_no_timer(client, out, done, monkeypatch) -> None:
    """One while it is busy, which looks once more and goes; the next reply has its own time."""
    monkeypatch.setattr(replies, "WRITE_S", 0.02)

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


async def test_a_client_that_went_away_is_owed_nothing(client, out, done, caplog) -> None:
    """Said once in the log, by its kind."""
    with caplog.at_level("INFO", "dlm.server"):
        client.fault = RuntimeError("what was asked")
        client.reading.set()
        await out.put(b"a", noting(done, b"a"))
        await out.flush()
        await out.put(b"b", noting(done, b"b"))
        assert done == [b"a", b"b"]
    (said,) = caplog.records
    assert (said.event, said.error) == ("server.reply.undelivered", "RuntimeError")


async def test_a_handler_whose_client_went_away_ends_as_one_that_was_cancelled(
    client, out, done
) -> None:
    """Though it came to its end by itself: gRPC is to send no status."""
    client.fault = RuntimeError("gone")
    client.reading.set()
    with pytest.raises(asyncio.CancelledError):
        async with out:
            await out.put(b"a", noting(done, b"a"))
            await out.flush()
    assert done == [b"a"]


async def test_a_client_that_reads_nothing_and_then_goes_away_is_sent_no_status(
    client, out, done, monkeypatch
) -> None:
    """The write that was begun fails; gRPC would refuse a status, which has no reader either."""
    monkeypatch.setattr(replies, "WRITE_S", 0.01)

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


async def test_closing_tells_what_waits_and_whoever_waits(client, out, done) -> None:
    """In the midst of a write, with a put that waits for room."""
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
