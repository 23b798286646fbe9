"""Scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on an open stream costs a third of a call in processor time, on both sides. What a call
gives for nothing is done here: which reply belongs to which request, and when to stop waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from dlm.client.deadlines import deadlines
from dlm.client.fork import inside
from dlm.errors import DeadlineExceeded, DlmError, ProtocolError, ShardDown
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import error_from_refusal, error_from_rpc, reason_of

SERVICE = "dlm.v1.Shard"
MAX_TIMEOUT_US = (1 << 32) - 1

Reply: TypeAlias = Callable[[bytes | None, DlmError | None], None]


def error_of_call(exc: grpc.RpcError, address: str) -> DlmError:
    """The dlm error of a call that failed, with the reason its server gave."""
    error = error_from_rpc(exc, where=address)
    error.__cause__ = exc
    error.reason = reason_of(exc)  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True, slots=True)
class Sent:
    """A message in flight; its bytes are kept, so that it can be sent again after a fork."""

    request: bytes
    deadline: float
    reply: Reply


class Exchange:
    """One stream to one server. Any thread may send; replies come on the stream's own thread.

    Guarantees
        `reply` of a message that was taken is called once: with the bytes, or with an error, at the
        deadline at the latest (give or take what the machine needs to run a thread)
    """

    def __init__(self, channel: grpc.Channel, address: str) -> None:
        self.address = address
        self.pending: dict[int, Sent] = {}  # by sequence
        self.ended = False
        self._lock = threading.RLock()  # reentrant, as a signal handler may fork anywhere
        self._sequence = 0
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._opened = time.monotonic()
        self._looks = inf  # when deadlines are looked at next
        self._reading = True
        with inside():
            self._call = channel.stream_stream(f"/{SERVICE}/Exchange")(
                iter(self._outgoing.get, None)
            )
            self._reader = threading.Thread(target=self._read, name="dlm-exchange", daemon=True)
            self._reader.start()

    def send(self, request: bytes, timeout_s: float, reply: Reply) -> bool:
        """Sends an encoded ScoreRequest; False where the stream has ended, and nothing is sent."""
        now = time.monotonic()
        deadline = now + timeout_s
        with self._lock:
            if self.ended:
                return False
            self._sequence += 1
            sequence = self._sequence
            self.pending[sequence] = Sent(request, deadline, reply)
            look = deadline < self._looks
            if look:
                self._looks = deadline
            # Inside the lock, so that messages leave in the order of their numbers.
            self._outgoing.put(
                request
                + codec.exchange_tail(
                    sequence,
                    min(max(int(timeout_s * 1e6), 1), MAX_TIMEOUT_US),
                    int((now - self._opened) * 1e6),
                )
            )
        if look:
            deadlines().at(deadline, partial(self._expire, deadline))
        return True

    def end(self, error: DlmError) -> None:
        """Fails every message in flight with `error`; nothing can be sent any more."""
        with self._lock:
            self.ended = True
            pending, self.pending = self.pending, {}
        self._outgoing.put(None)
        for sent in pending.values():
            sent.reply(None, error)

    def suspend(self) -> list[Sent]:
        """Begins to end the stream before a fork; returns what was in flight.

        A Score changes nothing, so that it may be asked again.
        """
        with self._lock:
            if self.ended:
                return []
            self.ended = True
            pending, self.pending = self.pending, {}
        self._outgoing.put(None)
        self._call.cancel()
        return list(pending.values())

    def is_inside(self) -> bool:
        """Whether its thread may be inside gRPC."""
        return self._reading and self._reader.is_alive()

    def _expire(self, planned: float) -> None:
        """Fails what is past its deadline, and comes again for the next."""
        now = time.monotonic()
        with self._lock:
            if self._looks != planned:
                return  # an earlier look was planned since, and plans the next
            late = [n for n, sent in self.pending.items() if sent.deadline <= now]
            replies = [self.pending.pop(n).reply for n in late]
            self._looks = min((sent.deadline for sent in self.pending.values()), default=inf)
            looks = self._looks
        if looks < inf:
            deadlines().at(looks, partial(self._expire, looks))
        for reply in replies:
            reply(None, DeadlineExceeded(f"{self.address} gave no answer before the deadline"))

    def _read(self) -> None:
        error: DlmError = ShardDown(f"{self.address} ended the stream; ask again")
        try:
            while True:
                try:
                    data = next(self._call)
                except StopIteration:
                    break
                self._reading = False
                self._receive(data)
                with inside():  # waits while a fork is being made
                    self._reading = True
        except grpc.RpcError as exc:
            error = error_of_call(exc, self.address)
        except grpc.FutureCancelledError:
            error = ShardDown(f"the connection to {self.address} was closed")
        except DlmError as exc:  # bytes that are no message: nothing after them can be trusted
            error = exc
            with inside():
                self._call.cancel()
        finally:
            self._reading = False
            self.end(error)

    def _receive(self, data: bytes) -> None:
        """Hands a reply to whoever waits for it; one that came too late goes nowhere."""
        message = codec.parse(pb.ScoreReply(), data)
        with self._lock:
            sent = self.pending.pop(message.sequence, None)
        if sent is None:
            return
        if not message.reason:
            sent.reply(data, None)
            return
        try:
            codec.check_refusal(message)
        except ProtocolError as exc:
            sent.reply(None, exc)
            return
        error = error_from_refusal(message.reason, message.message, where=self.address)
        error.retry_after_ms = message.retry_after_ms  # type: ignore[attr-defined]
        sent.reply(None, error)
