"""Bytes to a shard server and back.

Scores travel on streams that stay open (`exchange`), on an event loop in a thread; rare calls use
gRPC's synchronous stack. Both survive forks (`fork`).

Sending a score never waits here: it does not enter gRPC, whose gate may be held for long, as by a
fork. A stream that is not open yet is opened on the loop, and the message waits for it.

This file exceeds 500 lines: both ways to a server share a connection, its credentials and forks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

import grpc

from dlm.client.config.credentials import Metadata, certificates_of, read_token
from dlm.client.config.security import PLAIN, ClientSecurity
from dlm.client.deliver import fork, loop
from dlm.client.deliver.after import Alone, GiveUp, after_stream
from dlm.client.deliver.beats import Beats, SentBeat
from dlm.client.deliver.channels import open_aio_channel, open_channel
from dlm.client.deliver.exchange import SERVICE, Exchange, Reply, Sent, error_of_call, tell
from dlm.client.deliver.fork import inside
from dlm.client.health.cascade import BeatReply
from dlm.errors import DeadlineExceeded, DlmError, ProtocolError, ShardDown
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.secret import digest

MAX_REPLY_BYTES = 64 << 20
# Pause before a server that was not reached is tried again: each attempt costs a connection, and
# beside another live connection a message, too.
PAUSE_S = 0.1
PAUSE_BESIDE_S = 2.0
# The token's file is checked this often while messages are sent; a check costs microseconds.
TOKEN_LOOK_S = 0.25
# A call that gRPC has not ended this long after its deadline is considered lost.
END_S = 5.0
# A new token is used for new streams at once, but open ones stay for this long: servers reread
# their own files within a second, and one that does not know it yet still knows the old one.
TOKEN_SETTLE_S = 2.0

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A server that comes back is found again within two seconds. Despite its name, "min" is the
    # time allowed for one attempt: a handshake with a busy server takes a while.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),
    # A host that vanished silently is noticed within 20 s while messages are sent (servers permit a
    # ping every 5 s); only then is a new connection made.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

Chunks = Generator[pb.DownloadChunk, None, None]
Withdraw = Callable[[], None]
Post = Callable[..., Withdraw | None]  # `Connection.score` or `Connection.context_block`


class Connection(Protocol):
    """A connection to one server. Tests replace it with scripted ones to make the network fail.

    Failures are a `DlmError`, raised or passed to `reply`; one that a server sent has its `reason`.
    """

    address: str

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw | None:
        """Sends a ScoreRequest; `reply` is called once, on any thread.

        Args
            metadata  the trace context for the server; usually empty
        Returns
            a function that withdraws the request: if it was not sent yet, it is not sent. `reply`
            is still called. None if requests cannot be withdrawn
        """

    def context_block(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw | None:
        """Sends a ContextBlockRequest in the same way."""

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """The server's shards of `shard_set`, or of its default; the checksum is verified."""

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Chunks:
        """The chunks of a file."""

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """Whether the server is alive, and its state; the checksum is verified."""

    def heartbeat_later(
        self, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """On the loop: the same, without waiting; `reply` is called once, on any thread."""

    def close(self) -> None:
        """Closes the connection."""


Connect = Callable[[str], Connection]  # makes one to an address


def _mark(token: Metadata) -> bytes:
    """A mark that distinguishes tokens without showing them."""
    return digest(repr(token).encode())


class GrpcConnection:
    """A `Connection` over its own gRPC channels, opened when they are needed.

    Args
        streams  most Exchange streams, each over its own channel: workers that share a port share
                 the load by connections. The second is opened when the first is busy.
        security  TLS and the token, see `ClientSecurity`
    """

    def __init__(self, address: str, streams: int = 1, *, security: ClientSecurity = PLAIN) -> None:
        self.address = address
        # Checked once: a name that later resolves to another machine is not looked up again.
        self._target = security.target(address)
        self._security = security
        self._token = read_token(security)
        self._certificates = certificates_of(security)
        self._most = streams
        self._closed = False
        self._streams: list[Exchange | None] = [None]  # of the loop, as the next
        self._retired: list[Exchange] = []  # with a token that is no longer the file's
        self._mark_seen = self._mark()
        self._token_looked = self._token_changed = time.monotonic()
        self._held: deque[Sent] = deque()  # to be sent once there is a stream
        self._beats = Beats(address, self._open_for_beats)  # of the loop
        self._held_beats: list[SentBeat] = []  # to be sent again after a fork
        self._opening = threading.RLock()  # reentrant, as a signal handler may fork anywhere
        self._channel: grpc.Channel | None = None
        self._methods: dict[str, Callable[..., Any]] = {}

    def _open(self) -> dict[str, Callable[..., Any]]:
        """Functions that start the rare calls, by name; the first opens their channel.

        Call it inside the gate.
        """
        with self._opening:
            if self._closed:
                raise self._closed_error()
            if not self._methods:
                channel = open_channel(
                    self._target, OPTIONS, self._security, self._token, self._certificates
                )
                self._channel = channel
                fork.register()
                loop.running()
                describe, download, beat = (
                    kind.SerializeToString
                    for kind in (pb.DescribeRequest, pb.DownloadRequest, pb.HeartbeatRequest)
                )
                at = f"/{SERVICE}"
                # As futures: gRPC's blocking form would wait inside gRPC.
                self._methods = {
                    "Score": channel.unary_unary(f"{at}/Score").future,
                    "ContextBlock": channel.unary_unary(f"{at}/ContextBlock").future,
                    "Describe": channel.unary_unary(f"{at}/Describe", describe).future,
                    "Download": channel.unary_stream(f"{at}/Download", download),
                    "Heartbeat": channel.unary_unary(f"{at}/Heartbeat", beat).future,
                }
            return self._methods

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        """See `Connection.score`."""
        deadline = time.monotonic() + timeout_s
        sent = Sent(request, deadline, reply, ("Score", request, reply))
        self._post(sent, metadata)
        return sent.withdraw

    def context_block(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> Withdraw:
        """See `Connection.context_block`."""

        def unpacked(data: bytes | None, error: DlmError | None) -> None:
            try:
                found = None if data is None else codec.carried_block_reply(data)
            except DlmError as exc:
                reply(None, exc)
            else:
                reply(found, error)

        deadline = time.monotonic() + timeout_s
        carried = codec.carry_block_request(request)
        alone = ("ContextBlock", request, reply)
        sent = Sent(carried, deadline, unpacked, alone)
        self._post(sent, metadata)
        return sent.withdraw

    def _post(self, sent: Sent, metadata: Metadata) -> None:
        if self._closed:
            raise self._closed_error()
        if metadata:
            arguments = (sent, metadata)
            threading.Thread(target=self._send_alone, args=arguments, daemon=True).start()
        elif not loop.is_here():
            self._held.append(sent)
            if not loop.post(self._send_held):
                fork.wake(self)
        elif (stream := self._stream()) is not None:
            stream.send(sent)
        else:
            self._held.append(sent)

    def _send_held(self) -> None:
        """On the loop."""
        while self._held:
            sent = self._held.popleft()
            if not sent.wanted:
                sent.drop()
                continue
            try:
                stream = self._stream()
            except Exception as exc:  # noqa: BLE001 - those that wait must get it
                tell(sent.reply, None, self._unsent(exc))
                continue
            if stream is None:
                self._held.appendleft(sent)
                return
            stream.send(sent)

    def _unsent(self, cause: Exception) -> DlmError:
        if isinstance(cause, DlmError):
            return cause
        error = DlmError(f"{self.address}: a message could not be sent: {cause!r}")
        error.__cause__ = cause
        return error

    def _send_alone(self, sent: Sent, metadata: Metadata) -> None:
        """Sends a message as a separate call, since a stream's metadata are sent when it opens.

        For the few messages whose trace is sampled: it costs three times a message on a stream.
        """
        method, request, reply = sent.alone
        try:
            data = self._call(method, request, sent.deadline - time.monotonic(), metadata)
        except Exception as exc:  # noqa: BLE001 - those that wait must get it
            reply(None, self._unsent(exc))
        else:
            reply(data, None)

    def _stream(self) -> Exchange | None:
        """On the loop: the stream with the least load; None if the loop is ending for a fork, after
        which held messages are sent."""
        first = self._streams[0]
        if (
            first is not None
            and not (first.ended or self._token)
            and (self._most == 1 or not first.load)
        ):
            return first
        if self._closed:
            raise self._closed_error()
        now = time.monotonic()
        self._retire_old(now)
        lives = any(stream is not None and not stream.ended for stream in self._streams)
        pause = PAUSE_BESIDE_S if lives else PAUSE_S
        best, fewest = -1, 0
        failed = ""
        for i, stream in enumerate(self._streams):
            load = 0
            if stream is not None and not stream.ended:
                load = stream.load
            elif stream is not None and stream.failure is not None:
                when, what = stream.failure
                if now < when + pause:
                    failed = what
                    continue
            if best < 0 or load < fewest:
                best, fewest = i, load
        if best < 0:
            raise ShardDown(failed)
        if fewest and not failed and len(self._streams) < self._most:
            self._streams.append(None)
            best = len(self._streams) - 1
        found = self._streams[best]
        if found is not None and not found.ended:
            return found
        self._open()  # gRPC's own part in forks comes before ours
        fork.add(self)
        home = loop.running()
        if home.ending:
            return None
        if found is not None:
            self._retire(found)  # takes nothing new, but may still answer
        token = self._token() if self._token else ()
        found = Exchange(
            home,
            lambda: self._open_for_loop(token),
            self.address,
            _mark(token),
            self._ask_again,
        )
        self._streams[best] = found
        return found

    def _retire(self, stream: Exchange) -> None:
        self._retired = [old for old in (*self._retired, stream) if old.pending]

    def _open_for_loop(self, token: Metadata) -> tuple[grpc.aio.Channel, Metadata]:
        return self._open_for_beats(), token

    def _open_for_beats(self) -> grpc.aio.Channel:
        return open_aio_channel(self._target, OPTIONS, self._security, self._certificates)

    def _retire_old(self, now: float) -> None:
        """Retires streams whose token is no longer in its file: the server ends them when that
        token is removed."""
        if self._token is None or now < self._token_looked + TOKEN_LOOK_S:
            return
        self._token_looked = now
        found = self._mark()
        if found != self._mark_seen:
            self._mark_seen, self._token_changed = found, now
        if now < self._token_changed + TOKEN_SETTLE_S:
            return
        for stream in self._streams:
            if stream is not None and not stream.ended and stream.mark != found:
                stream.retire()
                self._retire(stream)

    def _mark(self) -> bytes:
        return _mark(self._token() if self._token else ())

    def _ask_again(self, mark: bytes, sent: Sent, lost: bool) -> bool:
        """Whether it sends a message again after the server ended its stream."""
        left_s = sent.deadline - time.monotonic()
        how = after_stream(sent.wanted, left_s, changed=self._mark() != mark, lost=lost)
        if isinstance(how, GiveUp):
            return False
        if isinstance(how, Alone):
            threading.Thread(target=self._send_alone, args=(sent, ()), daemon=True).start()
            return True
        try:
            self._post(sent, ())
        except DlmError:
            return False
        return True

    def _all_streams(self) -> list[Exchange]:
        return [*self._retired, *(s for s in self._streams if s is not None)]

    def suspend(self) -> None:
        """See `fork.Streams`."""
        for stream in self._all_streams():
            self._held += stream.suspend()
        self._held_beats += self._beats.suspend()

    def resume(self) -> None:
        """See `fork.Streams`: sends the messages that were in flight."""
        loop.post(self._send_held)  # if False, the loop is ending for another fork
        loop.post(self._send_beats)

    def give_up(self, cause: Exception) -> None:
        """See `fork.Streams`."""
        while self._held:
            try:
                sent = self._held.popleft()
            except IndexError:  # another thread was quicker
                return
            tell(sent.reply, None, self._unsent(cause))
        held, self._held_beats = self._held_beats, []
        for beat in held:
            tell(beat.reply, None, self._unsent(cause))

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """See `Connection.describe`."""
        request = pb.DescribeRequest(shard_set=shard_set)
        message = codec.parse(pb.DescribeReply(), self._call("Describe", request, timeout_s))
        if message.checksum != codec.describe_checksum(message):
            raise ProtocolError(f"{self.address}: its description was damaged in transit")
        return message

    def download(self, request: pb.DownloadRequest, timeout_s: float) -> Chunks:
        """See `Connection.download`."""
        call = self._start("Download", request, timeout_s)
        try:
            for data in call:
                yield codec.parse(pb.DownloadChunk(), data)
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        finally:
            with inside():
                call.cancel()  # a reader that stops early must not keep the server busy

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """See `Connection.heartbeat`."""
        return self._read_beat(request, self._call("Heartbeat", request, timeout_s))

    def heartbeat_later(
        self, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """See `Connection.heartbeat_later`."""

        def came(data: bytes | None, error: DlmError | None) -> None:
            if data is None:
                reply(None, error)
                return
            try:
                found = self._read_beat(request, data)
            except DlmError as exc:
                reply(None, exc)
            else:
                reply(found, None)

        token = self._token() if self._token else ()
        deadline = time.monotonic() + timeout_s
        self._held_beats.append(SentBeat(request.SerializeToString(), deadline, token, came))
        self._send_beats()

    def _send_beats(self) -> None:
        """On the loop."""
        home = loop.running()
        while self._held_beats and not home.ending:  # otherwise after the fork
            beat = self._held_beats.pop()
            try:
                self._open()  # gRPC's own part in forks comes before ours
                fork.add(self)
                self._beats.send(home, beat)
            except Exception as exc:  # noqa: BLE001 - those that wait must get it
                tell(beat.reply, None, self._unsent(exc))

    def _read_beat(self, request: pb.HeartbeatRequest, data: bytes) -> pb.HeartbeatReply:
        message = codec.parse(pb.HeartbeatReply(), data)
        if message.checksum != codec.heartbeat_checksum(message):
            raise ProtocolError(f"{self.address}: its heartbeat reply was damaged in transit")
        if message.sequence != request.sequence:
            raise ProtocolError(f"{self.address}: its heartbeat reply belongs to another heartbeat")
        return message

    def close(self) -> None:
        """See `Connection.close`."""
        self._closed = True
        with inside(), self._opening:
            if self._channel is not None:
                self._channel.close()
        loop.post(self._close_streams)  # if False, the loop has ended, and these with it
        self.give_up(self._closed_error())

    def _close_streams(self) -> None:
        """On the loop."""
        for stream in self._all_streams():
            stream.close(self._closed_error())
        self._beats.close()

    def _start(
        self,
        method: str,
        request: object,
        timeout_s: float,
        metadata: Metadata = (),
    ) -> Any:
        """The call, in progress."""
        try:
            with inside():
                return self._open()[method](request, timeout=timeout_s, metadata=metadata or None)
        except ValueError as exc:
            raise self._closed_error() from exc
        except RuntimeError as exc:
            # No thread can be started, so gRPC would no longer notice replies on this channel.
            with self._opening:
                self._methods = {}
            raise self._unsent(exc) from exc

    def _call(
        self,
        method: str,
        request: object,
        timeout_s: float,
        metadata: Metadata = (),
    ) -> bytes:
        call = self._start(method, request, timeout_s, metadata)
        try:
            # It ends at its deadline, unless gRPC's thread for it has ended.
            return self._bytes(call.result(timeout_s + END_S))
        except grpc.FutureTimeoutError as exc:
            with inside():
                call.cancel()
            raise DeadlineExceeded(f"{self.address} did not answer before the deadline") from exc
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        except grpc.FutureCancelledError as exc:
            raise self._closed_error() from exc

    def _bytes(self, data: Any) -> bytes:
        if data is None:  # a success for gRPC, but the message's frame was damaged
            raise ProtocolError(f"{self.address} answered without a message")
        return bytes(data)

    def _error(self, exc: grpc.RpcError) -> DlmError:
        return error_of_call(exc, self.address)

    def _closed_error(self) -> DlmError:
        return ShardDown(f"the connection to {self.address} was closed")
