"""Scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on an open stream costs a third of the processor time of a call, on both sides. In return,
this module does what gRPC does for a call: it matches replies to requests, and it stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import grpc

from dlm.client.deliver.loop import LoopThread
from dlm.errors import AuthenticationError, DeadlineExceeded, DlmError, ProtocolError, ShardDown
from dlm.logs import EventLog
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, error_from_refusal, error_from_rpc, reason_of

SERVICE = "dlm.v1.Shard"
MAX_TIMEOUT_US = (1 << 32) - 1
LATE_TOO_SOON_S = 0.02
# A stream from which nothing came for so long, and on which messages ran out meanwhile, takes no
# more: it may never speak again while its connection lives. Longer than a busy server needs to
# shake hands, so that the next one is not given up before it is made.
SILENT_S = 5.0
MAX_SILENT = 2
FROM_CORE = "Internal error from Core"  # gRPC's own words, of its asyncio face

log = EventLog(__name__)

Reply: TypeAlias = Callable[[bytes | None, DlmError | None], None]


def error_of_call(exc: grpc.RpcError, address: str) -> DlmError:
    """The dlm error of a call that failed, with the reason its server gave."""
    error = error_from_rpc(exc, where=address)
    error.__cause__ = exc
    error.reason = reason_of(exc)  # type: ignore[attr-defined]
    return error


def is_lost(exc: grpc.RpcError) -> bool:
    """Whether gRPC could not go on with a stream and does not know why: where a write finds it
    ended, gRPC has no time left for the status that it was ended with."""
    return (
        exc.code() is grpc.StatusCode.INTERNAL
        and reason_of(exc) is None
        and exc.details() == FROM_CORE
    )


def tell(reply: Reply, data: bytes | None, error: DlmError | None) -> None:
    """Calls `reply`; what it raises must harm no other message."""
    try:
        reply(data, error)
    except Exception as exc:  # noqa: BLE001 - and its text may hold what was asked
        log.error("client.reply.failed", extra={"error": type(exc).__name__})


@dataclass(eq=False, slots=True)
class Sent:
    """A message in flight; its bytes are kept, so that it can be sent again after a fork.

    alone   what asks the same in a call of its own: the method, its bytes, and who gets the reply
    wanted  whether anybody waits for its answer
    """

    request: bytes
    deadline: float
    reply: Reply
    alone: tuple[str, bytes, Reply]
    wanted: bool = True

    def withdraw(self) -> None:
        """Nobody wants its answer any more: if it has not left yet, it does not leave."""
        self.wanted = False

    def drop(self) -> None:
        """Reports that the message was withdrawn and never sent."""
        tell(self.reply, None, DlmError("withdrawn before it was sent"))


class Exchange:
    """One stream to one server; the loop alone has it.

    Args
        open_channel  makes the channel, and says what metadata a call must carry
        mark          of the token in these metadata; never the token itself
        again         asked where the server ended the stream: whether it sends a message again that
                      was in flight, given the mark and whether gRPC lost what the stream ended
                      with
    Attributes
        ended  takes nothing new
    Guarantees
        `reply` of a message that was taken is called once: with the bytes, or with an error, at the
        deadline at the latest (give or take what the machine needs to run a thread)
    """

    def __init__(
        self,
        loop: LoopThread,
        open_channel: Callable[[], tuple[Any, Any]],
        address: str,
        mark: bytes = b"",
        again: Callable[[bytes, Sent, bool], bool] = lambda *_: False,
    ) -> None:
        self.address = address
        self.mark = mark
        self._again = again
        self.pending: dict[int, Sent] = {}  # by sequence
        self.ended = False
        self._loop = loop
        self._open_channel = open_channel
        self._sequence = 0
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._writable: asyncio.Event | None = None  # once the stream is being opened
        self._busy = False  # somebody will look at `_outgoing` by himself
        self._opened = self._heard = time.monotonic()  # heard: when anything came, or this
        self._looks = inf  # when deadlines are looked at next
        self._answers = False  # whether anything ever came
        self._silent = 0  # messages that ran out since anything came
        self.failure: tuple[float, str] | None = None  # when nobody was found there, and what it is
        self._task = loop.start(self._run())

    @property
    def load(self) -> int:
        """Messages in flight, and those that ran out since anything came: a server may be stuck
        while its connection lives, and must not look idle for that."""
        return len(self.pending) + self._silent

    def send(self, sent: Sent) -> None:
        """Sends an encoded ScoreRequest, if the stream has not `ended`."""
        now, deadline = time.monotonic(), sent.deadline
        timeout_us = min(max(int((deadline - now) * 1e6), 1), MAX_TIMEOUT_US)
        self._sequence = sequence = self._sequence + 1
        tail = codec.exchange_tail(sequence, timeout_us, int((now - self._opened) * 1e6))
        self.pending[sequence] = sent
        self._outgoing.append((sequence, sent.request + tail))
        if self._writable is not None and not self._busy:
            self._writable.set()
        if deadline < self._looks:
            self._looks = deadline
            self._loop.call_at(deadline, self._expire, deadline)

    def end(self, error: DlmError, *, by_server: bool = False, lost: bool = False) -> None:
        """Fails every message in flight with `error`; nothing can be sent any more."""
        refused = by_server and isinstance(error, (AuthenticationError, ShardDown))
        for sent in self.suspend():
            try:
                again = refused and self._again(self.mark, sent, lost)
            except Exception as exc:  # noqa: BLE001 - the others must be ended, too
                log.error("client.again.failed", extra={"error": type(exc).__name__})
                again = False
            if not again:
                tell(sent.reply, None, error)

    def retire(self) -> None:
        """Takes nothing new; what is in flight is still answered, then the stream is closed."""
        self.ended = True
        self._close_if_done()

    def close(self, error: DlmError) -> None:
        """As `end`, and closes the stream."""
        self.end(error)
        self._task.cancel()

    def suspend(self) -> list[Sent]:
        """Takes nothing new, and gives back what was in flight: a Score changes nothing, so that it
        may be asked again after a fork."""
        self.ended = True
        pending, self.pending = self.pending, {}
        self._outgoing.clear()
        return list(pending.values())

    def _expire(self, planned: float) -> None:
        """Fails what is past its deadline, and comes again for the next."""
        if self._looks != planned:
            return  # an earlier look was planned since, and plans the next
        now = time.monotonic()
        self._looks = inf  # whatever happens here, the next message plans a look
        late = [n for n, sent in self.pending.items() if sent.deadline <= now]
        replies = [self.pending.pop(n).reply for n in late]
        self._silent += len(late)
        if self._silent >= MAX_SILENT and now - self._heard >= SILENT_S:
            self.ended = True  # what is in flight is still answered
        # What nobody waits for must not pile up behind a server that does not read.
        while self._outgoing and self._outgoing[0][0] not in self.pending:
            self._outgoing.popleft()
        self._looks = min((sent.deadline for sent in self.pending.values()), default=inf)
        if self._looks < inf:
            self._loop.call_at(self._looks, self._expire, self._looks)
        self._close_if_done()
        for reply in replies:
            tell(
                reply, None, DeadlineExceeded(f"{self.address} did not answer before the deadline")
            )

    async def _run(self) -> None:
        error: DlmError = ShardDown(f"{self.address} ended the stream; retry")
        lost = False
        try:
            channel, metadata = self._open_channel()
            async with channel:
                call = channel.stream_stream(f"/{SERVICE}/Exchange")(metadata=metadata)
                writer = asyncio.create_task(self._write(call))
                try:
                    while (data := await call.read()) is not grpc.aio.EOF:
                        if self._hear(data):
                            # Nothing is to be read before this has left; and to wake the writer
                            # would take another turn of the loop.
                            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                                await self._drain(call)  # a failure shows where the stream is read
                        if self.ended:
                            self._close_if_done()
                finally:
                    # Nothing may hold the channel once this ends: see `loop.stop`.
                    writer.cancel()
                    await asyncio.wait([writer])
        except grpc.RpcError as exc:
            error = error_of_call(exc, self.address)
            if lost := is_lost(exc):
                error = ShardDown(f"{self.address} lost the stream ({FROM_CORE}); retry")
            elif not self._answers and not self.ended and isinstance(error, ShardDown):
                self.failure = time.monotonic(), str(error)
        except DlmError as exc:  # bytes that are no message: nothing after them can be trusted
            error = exc
        except asyncio.CancelledError:
            error = ShardDown(f"the connection to {self.address} was closed")
        except Exception as exc:  # noqa: BLE001 - whoever waits must be told
            error = DlmError(f"the stream to {self.address} failed: {exc!r}")
            error.__cause__ = exc
        finally:
            self.end(error, by_server=True, lost=lost)

    async def _write(self, call: Any) -> None:
        """Sends what there is, until it is cancelled with the stream, and not before: a stream that
        takes nothing new still answers what it took. Its failures show where it is read."""
        self._writable = asyncio.Event()
        try:
            while True:
                if not self._busy:
                    await self._drain(call)
                self._writable.clear()
                await self._writable.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        finally:
            call.cancel()

    async def _drain(self, call: Any) -> None:
        """Sends what there is; one at a time does."""
        self._busy = True
        try:
            while self._outgoing:
                sequence, data = self._outgoing.popleft()
                if self._wants(sequence):
                    await call.write(data)
        finally:
            self._busy = False

    def _hear(self, data: bytes) -> bool:
        """Takes a reply; whether the next message, which it made room for, is the only one now."""
        if self._busy:
            self._receive(data)
            return False
        self._busy = True  # what is sent meanwhile wakes nobody
        try:
            self._receive(data)
        finally:
            self._busy = False
        if len(self._outgoing) == len(self.pending) == 1:
            return True
        if self._outgoing and self._writable is not None:
            self._writable.set()
        return False

    def _wants(self, sequence: int) -> bool:
        """Whether a message is to be sent; one that was withdrawn ends here. Its own function: what
        the writer held while it waits would keep a client that nobody closes."""
        sent = self.pending.get(sequence)
        if sent is None or sent.wanted:
            return sent is not None
        del self.pending[sequence]
        sent.drop()
        self._close_if_done()
        return False

    def _receive(self, data: bytes) -> None:
        """Hands a reply to whoever waits for it; one that came too late goes nowhere."""
        self._answers = True
        self._heard = time.monotonic()
        self._silent = 0
        message = codec.parse(pb.ScoreReply(), data)
        sent = self.pending.pop(message.sequence, None)
        if sent is None:
            return
        if not message.reason:
            tell(sent.reply, data, None)
            return
        try:
            codec.check_refusal(message)
        except ProtocolError as exc:
            tell(sent.reply, None, exc)
            return
        after_ms = message.retry_after_ms
        error = error_from_refusal(
            message.reason, message.message, where=self.address, retry_after_ms=after_ms
        )
        if message.reason == Reason.LATE and time.monotonic() < sent.deadline - LATE_TOO_SOON_S:
            # The server's idea of our clock is wrong (a machine was paused): a new stream, a new
            # idea. What is in flight on this one is still answered.
            self.ended = True  # before the caller is told, who may send the next at once
        if message.reason == Reason.DRAINING:
            # Behind an address with several servers a new connection meets another.
            self.ended = True
        tell(sent.reply, None, error)

    def _close_if_done(self) -> None:
        if self.ended and not self.pending:
            self._task.cancel()
