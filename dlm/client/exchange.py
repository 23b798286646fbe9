"""Scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on an open stream costs a third of a call in processor time, on both sides. What a call
gives for nothing is done here: which reply belongs to which request, and when to stop waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from dlm.client.deadlines import deadlines
from dlm.client.fork import add_reader, inside, pass_gate
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


class Exchange:
    """One stream to one server. Any thread may send; replies come on the stream's own thread.

    Guarantees
        `reply` of a message that was taken is called once: with the bytes, or with an error, at the
        deadline at the latest (give or take what the machine needs to run a thread)
    """

    def __init__(self, channel: grpc.Channel, address: str) -> None:
        self.address = address
        self.pending: dict[int, tuple[float, Reply]] = {}  # by sequence: deadline, and who waits
        self.ended = False
        self._lock = threading.Lock()
        self._sequence = 0
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._opened = time.monotonic()
        self._looks = inf  # when deadlines are looked at next
        with inside():
            self._call = channel.stream_stream(f"/{SERVICE}/Exchange")(
                iter(self._outgoing.get, None)
            )
        reader = threading.Thread(target=self._read, name="dlm-exchange", daemon=True)
        add_reader(reader)
        reader.start()

    def send(self, request: bytes, timeout_s: float, reply: Reply) -> bool:
        """Sends an encoded ScoreRequest; False where the stream has ended, and nothing is sent."""
        now = time.monotonic()
        with self._lock:
            if self.ended:
                return False
            self._sequence += 1
            sequence = self._sequence
            self.pending[sequence] = (now + timeout_s, reply)
            look = now + timeout_s < self._looks
            if look:
                self._looks = now + timeout_s
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
            deadlines().at(now + timeout_s, partial(self._expire, now + timeout_s))
        return True

    def end(self, error: DlmError) -> None:
        """Fails every message in flight with `error`; nothing can be sent any more."""
        with self._lock:
            self.ended = True
            pending, self.pending = self.pending, {}
        self._outgoing.put(None)
        for _, reply in pending.values():
            reply(None, error)

    def _expire(self, planned: float) -> None:
        """Fails what is past its deadline, and comes again for the next."""
        now = time.monotonic()
        with self._lock:
            if self._looks != planned:
                return  # an earlier look was planned since, and plans the next
            late = [s for s, (deadline, _) in self.pending.items() if deadline <= now]
            replies = [self.pending.pop(sequence)[1] for sequence in late]
            self._looks = min((deadline for deadline, _ in self.pending.values()), default=inf)
            looks = self._looks
        if looks < inf:
            deadlines().at(looks, partial(self._expire, looks))
        for reply in replies:
            reply(None, DeadlineExceeded(f"{self.address} gave no answer before the deadline"))

    def _read(self) -> None:
        error: DlmError = ShardDown(f"{self.address} ended the stream; ask again")
        try:
            while True:
                pass_gate()
                try:
                    data = next(self._call)
                except StopIteration:
                    break
                self._receive(data)
        except grpc.RpcError as exc:
            error = error_of_call(exc, self.address)
        except grpc.FutureCancelledError:
            error = ShardDown(f"the connection to {self.address} was closed")
        except DlmError as exc:  # bytes that are no message: nothing after them can be trusted
            error = exc
            with inside():
                self._call.cancel()
        finally:
            self.end(error)

    def _receive(self, data: bytes) -> None:
        """Hands a reply to whoever waits for it; one that came too late goes nowhere."""
        message = codec.parse(pb.ScoreReply(), data)
        with self._lock:
            _, reply = self.pending.pop(message.sequence, (0.0, None))
        if reply is None:
            return
        if not message.reason:
            reply(data, None)
            return
        try:
            codec.check_refusal(message)
        except ProtocolError as exc:
            reply(None, exc)
            return
        error = error_from_refusal(message.reason, message.message, where=self.address)
        error.retry_after_ms = message.retry_after_ms  # type: ignore[attr-defined]
        reply(None, error)
