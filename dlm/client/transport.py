"""Bytes to a shard server and back: the only place in the client that knows gRPC.

The synchronous gRPC stack carries both faces: its calls complete on gRPC's own threads, so that
threads and event loops can wait for the same call, and it survives fork, which grpc.aio does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

# Read once, when gRPC starts: lets a process that has used a client fork (decoders use pools).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc

from dlm.errors import DlmError, ProtocolError
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
    # A server that comes back is found again within two seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

Reply = Callable[[bytes | None, DlmError | None], None]


class Connection(Protocol):
    """A way to one server. Tests put scripted ones in its place to make the network fail."""

    address: str

    def score(self, request: bytes, timeout_s: float, reply: Reply) -> None:
        """Sends a ScoreRequest; `reply` is called once, on any thread."""

    def describe(self, timeout_s: float) -> pb.DescribeReply:
        """What the server holds, its checksum verified."""

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Iterator[pb.DownloadChunk]:
        """Pieces of a file."""

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """Alive, and in what state; its checksum verified."""

    def close(self) -> None:
        """Lets go of the connection."""


class GrpcConnection:
    """A `Connection` over one gRPC channel, opened at the first call."""

    def __init__(self, address: str) -> None:
        self.address = address
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
        call = self._score.future(request, timeout=timeout_s)

        def finished(done: grpc.Future) -> None:
            try:
                data = done.result()
            except grpc.RpcError as exc:
                reply(None, self._error(exc))
            except grpc.FutureCancelledError as exc:
                reply(None, self._wrap(exc))
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

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Iterator[pb.DownloadChunk]:
        """See `Connection.download`."""
        try:
            for data in self._download(request, timeout=timeout_s):
                yield codec.parse(pb.DownloadChunk(), data)
        except grpc.RpcError as exc:
            raise self._error(exc) from exc

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """See `Connection.heartbeat`."""
        message = codec.parse(
            pb.HeartbeatReply(), self._call(self._heartbeat, request, timeout_s)
        )
        if message.checksum != codec.heartbeat_checksum(message):
            raise ProtocolError(f"{self.address}: the heartbeat was damaged on the way")
        if message.sequence != request.sequence:
            raise ProtocolError(f"{self.address}: the heartbeat answers another one")
        return message

    def close(self) -> None:
        """See `Connection.close`."""
        self._channel.close()

    def _call(self, method: grpc.UnaryUnaryMultiCallable, request: object, timeout_s: float) -> bytes:
        try:
            return bytes(method(request, timeout=timeout_s))
        except grpc.RpcError as exc:
            raise self._error(exc) from exc

    def _error(self, exc: grpc.RpcError) -> DlmError:
        error = error_from_rpc(exc, where=self.address)
        error.__cause__ = exc
        error.reason = reason_of(exc)  # type: ignore[attr-defined]
        return error

    def _wrap(self, exc: Exception) -> DlmError:
        error = ProtocolError(f"{self.address}: the call was cancelled")
        error.__cause__ = exc
        return error
