"""Bytes to a shard server and back: the only place in the client that knows gRPC.

The synchronous gRPC stack carries both faces: its calls complete on gRPC's own threads, so that
threads and event loops can wait for the same call, and it survives fork, which grpc.aio does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

# Read once, when gRPC starts: lets a process that has used a client fork (decoders use pools).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc

from dlm.errors import DlmError, ProtocolError, ShardDown
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import error_from_rpc, reason_of

MAX_REPLY_BYTES = 64 << 20
SERVICE = "dlm.v1.Shard"

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A server that comes back is found again within two seconds. The "min" is how long one attempt
    # may take, whatever its name: a busy server needs more than a moment to shake hands.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),
    # A host that vanished without a word is noticed within 20 s while it is asked something
    # (servers permit a ping every 5 s); only then is the connection made anew.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

Reply = Callable[[bytes | None, DlmError | None], None]
Chunks = Generator[pb.DownloadChunk, None, None]


# A child can use gRPC only if no thread was inside it when the process forked. gRPC stops its own
# threads for that; the gate keeps ours out. What they do inside never waits for the network.
#
# Reentrant, since a signal handler may fork while its own thread is inside; and waited for as long
# as gRPC itself waits, since a process that cannot use gRPC in its child is better than one that
# never gets there.
_gate = threading.RLock()
_GATE_S = 5.0
_threads = threading.local()


def _before_fork() -> None:
    _threads.forks_with = _gate if _gate.acquire(timeout=_GATE_S) else None


def _after_fork_in_parent() -> None:
    gate, _threads.forks_with = getattr(_threads, "forks_with", None), None
    if gate is not None:
        gate.release()


def _after_fork_in_child() -> None:
    global _gate
    _gate = threading.RLock()
    _threads.forks_with = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


@contextmanager
def _inside() -> Iterator[None]:
    """Around every entry into gRPC; no hindrance to gRPC's own threads, which it stops itself."""
    if getattr(_threads, "of_grpc", False):
        yield
    else:
        gate = _gate
        with gate:
            yield


class Connection(Protocol):
    """A way to one server. Tests put scripted ones in its place to make the network fail.

    What goes wrong is a `DlmError`, raised or handed to `reply`; one that a server answered has its
    `reason`.
    """

    address: str

    def score(self, request: bytes, timeout_s: float, reply: Reply) -> None:
        """Sends a ScoreRequest; `reply` is called once, on any thread."""

    def describe(self, timeout_s: float) -> pb.DescribeReply:
        """What the server holds, its checksum verified."""

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Chunks:
        """Pieces of a file."""

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """Alive, and in what state; its checksum verified."""

    def close(self) -> None:
        """Lets go of the connection."""


class GrpcConnection:
    """A `Connection` over one gRPC channel, opened at the first call."""

    def __init__(self, address: str) -> None:
        self.address = address
        with _inside():
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._score = self._channel.unary_unary(f"/{SERVICE}/Score")
        self._describe = self._channel.unary_unary(
            f"/{SERVICE}/Describe",
            request_serializer=pb.DescribeRequest.SerializeToString,
        )
        self._download = self._channel.unary_stream(
            f"/{SERVICE}/Download",
            request_serializer=pb.DownloadRequest.SerializeToString,
        )
        self._heartbeat = self._channel.unary_unary(
            f"/{SERVICE}/Heartbeat",
            request_serializer=pb.HeartbeatRequest.SerializeToString,
        )

    def score(self, request: bytes, timeout_s: float, reply: Reply) -> None:
        """See `Connection.score`."""
        # The thread itself, not its ident: that may belong to one of gRPC's own by then.
        caller, process = threading.current_thread(), os.getpid()
        call = self._start(self._score.future, request, timeout_s)

        def finished(done: grpc.Future) -> None:
            if os.getpid() != process:
                return  # gRPC ends the parent's calls in a forked child; nobody waits there
            if threading.current_thread() is not caller:
                _threads.of_grpc = True
            try:
                data = done.result()
            except grpc.RpcError as exc:
                reply(None, self._error(exc))
            except grpc.FutureCancelledError:
                reply(None, self._closed())
            else:
                reply(data, None)

        call.add_done_callback(finished)

    def describe(self, timeout_s: float) -> pb.DescribeReply:
        """See `Connection.describe`."""
        message = codec.parse(
            pb.DescribeReply(), self._call(self._describe, pb.DescribeRequest(), timeout_s)
        )
        if message.checksum != codec.describe_checksum(message):
            raise ProtocolError(f"{self.address}: the description was damaged on the way")
        return message

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Chunks:
        """See `Connection.download`."""
        call = self._start(self._download, request, timeout_s)
        try:
            for data in call:
                yield codec.parse(pb.DownloadChunk(), data)
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        finally:
            with _inside():
                call.cancel()  # a reader that stops half-way must not keep the server busy

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """See `Connection.heartbeat`."""
        message = codec.parse(pb.HeartbeatReply(), self._call(self._heartbeat, request, timeout_s))
        if message.checksum != codec.heartbeat_checksum(message):
            raise ProtocolError(f"{self.address}: the heartbeat was damaged on the way")
        if message.sequence != request.sequence:
            raise ProtocolError(f"{self.address}: the heartbeat answers another one")
        return message

    def close(self) -> None:
        """See `Connection.close`."""
        with _inside():
            self._channel.close()

    def _start(self, method: Callable[..., Any], request: object, timeout_s: float) -> Any:
        """The call, under way."""
        try:
            with _inside():
                return method(request, timeout=timeout_s)
        except ValueError as exc:
            raise self._closed() from exc

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable, request: object, timeout_s: float
    ) -> bytes:
        # As a future: gRPC's blocking form would wait inside gRPC.
        call = self._start(method.future, request, timeout_s)
        try:
            return bytes(call.result())
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        except grpc.FutureCancelledError as exc:
            raise self._closed() from exc

    def _error(self, exc: grpc.RpcError) -> DlmError:
        error = error_from_rpc(exc, where=self.address)
        error.__cause__ = exc
        error.reason = reason_of(exc)  # type: ignore[attr-defined]
        return error

    def _closed(self) -> DlmError:
        return ShardDown(f"the connection to {self.address} was closed")
