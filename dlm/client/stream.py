"""Scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on a stream costs a third of the processor time of a call, on both sides; in return, this
module matches replies to requests, and times them out. While one is in flight, the next takes a
gRPC call of its own on the same connection: see `stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import grpc

from dlm.client.cluster_file import Certificates, Metadata
from dlm.client.config import ClientSecurity
from dlm.client.loop import LoopThread
from dlm.errors import AuthenticationError, DeadlineExceeded, DlmError, ProtocolError, ShardDown
from dlm.logs import EventLog
from dlm.wire import codec, pairs
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.certificates import Contents
from dlm.wire.status import Reason, error_from_refusal, error_from_rpc, reason_of

SERVICE = "dlm.v1.Shard"
MAX_TIMEOUT_US = (1 << 32) - 1
LATE_TOO_SOON_S = 0.02
# A stream that is silent for this long, while messages timed out on it, takes no more: it may stay
# silent as long as its connection lives. Longer than a busy server's handshake, so that the next
# stream is not given up before it is open.
SILENT_S = 5.0
MAX_SILENT = 2
MAX_CALLS = 32  # of one stream: far more messages in flight than a client has by default
FROM_CORE = "Internal error from Core"  # from gRPC's asyncio API

log = EventLog(__name__)

Reply: TypeAlias = Callable[[bytes | None, DlmError | None], None]


class Stream:
    """A call on the running loop, used by one task; `ended` is called when it has ended. Cancel the
    call, not its task, except while it connects: gRPC reports an operation to the loop even if
    nobody waits."""

    def __init__(self, call: Any, ended: Callable[[], object]) -> None:
        self.connected = False
        self._call = call
        self._loop = asyncio.get_running_loop()
        if pairs.AVAILABLE:
            # The public method makes a reference cycle, which keeps gRPC's threads.
            call._cython_call.add_done_callback(ended)
        else:
            call.add_done_callback(lambda _: ended())

    def done(self) -> bool:
        return bool(self._call.done())

    async def connect(self) -> None:
        """Returns once messages can be sent, or the call has ended: then reading says why."""
        with contextlib.suppress(grpc.RpcError):
            await self._call.wait_for_connection()
        self.connected = True

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`; raises the `grpc.RpcError` that ended the call."""
        return await self._call.read()

    async def ask(self, data: bytes) -> Any:
        """Sends a message; returns and raises as `read`, which must not be waiting."""
        if pairs.AVAILABLE:
            call = self._call._cython_call
            if (message := await pairs.send_and_receive(call, data, self._loop)) is not None:
                return message
        else:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._call.write(data)
        return await self._call.read()

    async def end(self) -> None:
        """Ends the call well, after the replies to all messages."""
        await self._call.done_writing()
        await self._call.read()

    def cancel(self) -> None:
        if not pairs.AVAILABLE:
            self._call.cancel()
        elif not self._call.done():
            # The public method also cancels a task of gRPC's that has an operation.
            self._call._cython_call.cancel("cancelled by dlm")


def error_of_call(exc: grpc.RpcError, address: str) -> DlmError:
    """The dlm error for a failed call, with the reason its server gave."""
    error = error_from_rpc(exc, where=address)
    error.__cause__ = exc
    error.reason = reason_of(exc)  # type: ignore[attr-defined]
    return error


def is_lost(exc: grpc.RpcError) -> bool:
    """Whether gRPC lost a stream without knowing why: if a write finds it ended, gRPC does not read
    the status that it ended with."""
    return (
        exc.code() is grpc.StatusCode.INTERNAL
        and reason_of(exc) is None
        and exc.details() == FROM_CORE
    )


def tell(reply: Reply, data: bytes | None, error: DlmError | None) -> None:
    """Calls `reply`; an exception in it must not harm other messages."""
    try:
        reply(data, error)
    except Exception as exc:  # noqa: BLE001 - and its text may contain queries
        log.error("client.reply.failed", extra={"error": type(exc).__name__})


@dataclass(eq=False, slots=True)
class Sent:
    """A message in flight; its bytes are kept, so that it can be sent again after a fork. `alone`
    is the same as a separate call (method, bytes, callback), for messages with metadata (a trace),
    or which a stream lost, to show what is wrong. It is not sent once nobody wants its answer."""

    request: bytes
    deadline: float
    reply: Reply
    alone: tuple[str, bytes, Reply]
    metadata: Metadata = ()
    lost: bool = False
    wanted: bool = True

    def withdraw(self) -> None:
        self.wanted = False

    def drop(self) -> None:
        """Reports that the message was withdrawn and never sent."""
        tell(self.reply, None, DlmError("withdrawn before it was sent"))


class Exchange:
    """One connection to one server; used only on the loop. Calls of Exchange carry its messages:
    one that stays open, and for messages that come while that is busy, others that do not.

    Args
        open_channel  makes the channel, and returns the metadata that a call must carry
        mark          identifies the token in these metadata; never the token itself
        again         called for each message in flight if the server ended the stream, with the
                      mark and whether gRPC lost the status; whether it sends the message again
    Guarantees  `reply` of an accepted message is called once, with the bytes or an error, at the
                deadline at the latest (plus the time that the machine needs to run a thread)
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
        self._call: Callable[[], Any] | None = None  # opens one on the channel
        self._calls: dict[asyncio.Task[None], Stream] = {}
        self._asks = False  # the first call waits for a reply, and cannot send anything else
        self._sent = asyncio.Event()  # wakes the first call
        self._broken: BaseException | None = None  # how one of them ended
        self._opened = self._heard = time.monotonic()  # heard: when anything came, or this
        self._looks = inf  # when deadlines are checked next
        self._answers = False  # whether anything ever came
        self._silent = 0  # messages that timed out since anything came
        self.failure: tuple[float, str] | None = None  # when the server was not reached, and why
        self._task = loop.start(self._run())

    @property
    def load(self) -> int:
        """Messages in flight, and those that timed out since anything came: a stuck server must
        not look idle."""
        return len(self.pending) + self._silent

    def send(self, sent: Sent) -> None:
        """Sends an encoded ScoreRequest, if the stream has not `ended`."""
        now, deadline = time.monotonic(), sent.deadline
        timeout_us = min(max(int((deadline - now) * 1e6), 1), MAX_TIMEOUT_US)
        self._sequence = sequence = self._sequence + 1
        tail = codec.exchange_tail(sequence, timeout_us, int((now - self._opened) * 1e6))
        self.pending[sequence] = sent
        self._outgoing.append((sequence, sent.request + tail))
        if self._asks:
            self._ask_beside()
        else:
            self._sent.set()
        if deadline < self._looks:
            self._looks = deadline
            self._loop.call_at(deadline, self._expire, deadline)

    def end(self, error: DlmError, *, by_server: bool = False, lost: bool = False) -> None:
        """Fails every message in flight with `error`; nothing can be sent any more."""
        refused = by_server and isinstance(error, (AuthenticationError, ShardDown))
        for sent in self.suspend():
            try:
                again = refused and self._again(self.mark, sent, lost)
            except Exception as exc:  # noqa: BLE001 - the other messages must end, too
                log.error("client.retry.failed", extra={"error": type(exc).__name__})
                again = False
            if not again:
                tell(sent.reply, None, error)

    def retire(self) -> None:
        """Takes nothing new; what is in flight is still answered, then the stream is closed."""
        self.ended = True
        self._close_if_done()

    def close(self, error: DlmError) -> None:
        self.end(error)
        self._task.cancel()

    def suspend(self) -> list[Sent]:
        """Takes nothing new, and returns the messages in flight, which can be sent again after a
        fork."""
        self.ended = True
        pending, self.pending = self.pending, {}
        self._outgoing.clear()
        return list(pending.values())

    def _expire(self, planned: float) -> None:
        if self._looks != planned:
            return  # an earlier check was scheduled since, and schedules the next
        now = time.monotonic()
        self._looks = inf  # whatever happens here, the next message schedules a check
        late = [n for n, sent in self.pending.items() if sent.deadline <= now]
        replies = [self.pending.pop(n).reply for n in late]
        self._silent += len(late)
        if self._silent >= MAX_SILENT and now - self._heard >= SILENT_S:
            self.ended = True  # what is in flight is still answered
        # Unwanted messages must not pile up behind a server that does not read.
        while self._outgoing and self._outgoing[0][0] not in self.pending:
            self._outgoing.popleft()
        self._looks = min((sent.deadline for sent in self.pending.values()), default=inf)
        if self._looks < inf:
            self._loop.call_at(self._looks, self._expire, self._looks)
        self._close_if_done()
        over = f"{self.address} did not answer before the deadline; retry, or give a longer one"
        for reply in replies:
            tell(reply, None, DeadlineExceeded(over))

    async def _run(self) -> None:
        try:
            channel, metadata = self._open_channel()
            async with channel:
                method = channel.stream_stream(f"/{SERVICE}/Exchange")
                self._call = partial(method, metadata=metadata)
                try:
                    await asyncio.wait([self._begin(self._call(), self._ask_first)])
                finally:
                    # Nothing may reference the channel once this ends: see `loop.suspend`. Tasks
                    # with an operation are not cancelled: it must end before its loop does.
                    self._call = None
                    for task, stream in self._calls.items():
                        stream.cancel()
                        if not stream.connected:
                            task.cancel()
                    while self._calls:
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.wait(self._calls)
        except asyncio.CancelledError:
            pass
        except Exception as exc:  # noqa: BLE001 - the messages in flight must end
            self._broken = exc
        finally:
            broken, self._broken = self._broken, None  # its traceback references the call
            error, lost = self._error_of(broken)
            self.end(error, by_server=True, lost=lost)

    def _error_of(self, exc: BaseException | None) -> tuple[DlmError, bool]:
        if exc is None:
            return ShardDown(f"the connection to {self.address} was closed"), False
        if isinstance(exc, grpc.RpcError):
            if is_lost(exc):
                return ShardDown(f"{self.address} lost the stream ({FROM_CORE}); retry"), True
            error = error_of_call(exc, self.address)
            if not self._answers and not self.ended and isinstance(error, ShardDown):
                self.failure = time.monotonic(), str(error)
        elif isinstance(exc, DlmError):  # e.g. for bytes that are not a message
            error = exc
        else:
            error = DlmError(
                f"the stream to {self.address} failed: {exc!r}; retry, and report it if it stays"
            )
            error.__cause__ = exc
        return error, False

    # -- calls --------------------------------------------------------------------------------

    def _begin(self, call: Any, work: Callable[..., Any], *args: Any) -> asyncio.Task[None]:
        stream = Stream(call, self._sent.set)
        task: asyncio.Task[None] = asyncio.create_task(work(stream, *args))
        self._calls[task] = stream
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._broken = self._broken or exc
            self._task.cancel()

    async def _ask_first(self, stream: Stream) -> None:
        await stream.connect()
        while True:
            while not (self._outgoing or stream.done()):
                self._sent.clear()
                await self._sent.wait()
            if not self._outgoing:
                self._receive(await stream.read())  # raises what it ended with
            sequence, data = self._outgoing.popleft()
            self._ask_beside()
            if self._wants(sequence):
                self._asks = True
                reply = await stream.ask(data)
                self._asks = False
                self._receive(reply)

    def _ask_beside(self) -> None:
        while self._call is not None and self._outgoing and len(self._calls) < MAX_CALLS:
            self._begin(self._call(), self._ask_some, *self._outgoing.popleft())

    async def _ask_some(self, stream: Stream, sequence: int, data: bytes) -> None:
        await stream.connect()
        while True:
            if self._wants(sequence):
                self._receive(await stream.ask(data))
            if not self._outgoing:
                break
            sequence, data = self._outgoing.popleft()
        await stream.end()

    def _wants(self, sequence: int) -> bool:
        """Whether to send a message; a withdrawn one ends here. Not inlined: a reference in a task
        that waits would keep alive a client that nobody closes."""
        sent = self.pending.get(sequence)
        if sent is None or sent.wanted:
            return sent is not None
        del self.pending[sequence]
        sent.drop()
        self._close_if_done()
        return False

    def _receive(self, data: Any) -> None:
        if data is grpc.aio.EOF:
            raise ShardDown(f"{self.address} ended the stream; retry")
        self._answers = True
        self._heard = time.monotonic()
        self._silent = 0
        message = codec.parse(pb.ScoreReply(), data)
        sent = self.pending.pop(message.sequence, None)
        if sent is not None:
            if message.reason:
                tell(sent.reply, None, self._refusal(message, sent))
            else:
                tell(sent.reply, data, None)
        if self.ended:
            self._close_if_done()

    def _refusal(self, message: pb.ScoreReply, sent: Sent) -> DlmError:
        try:
            codec.check_refusal(message)
        except ProtocolError as exc:
            return exc
        after_ms = message.retry_after_ms
        error = error_from_refusal(
            message.reason, message.message, where=self.address, retry_after_ms=after_ms
        )
        if message.reason == Reason.LATE and time.monotonic() < sent.deadline - LATE_TOO_SOON_S:
            # The server's estimate of our clock is wrong (a machine was paused): a new stream makes
            # a new one. Messages in flight on this one are still answered.
            self.ended = True  # before the caller gets the error, who may send again at once
        if message.reason == Reason.DRAINING:
            # If several servers share the address, a new connection may reach another.
            self.ended = True
        return error

    def _close_if_done(self) -> None:
        if self.ended and not self.pending:
            self._task.cancel()


# -------------------------------------------------------------------------------------------------
# Calls to one server beside its streams, over a channel of its own on the loop: heartbeats,
# descriptions, downloads, and the few messages whose trace is sampled. A call costs three times a
# message on a stream.


MAX_REPLY_BYTES = 64 << 20
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

OpenChannel = Callable[[], grpc.aio.Channel]


def open_channel(
    target: str, security: ClientSecurity, certificates: Certificates | None
) -> grpc.aio.Channel:
    """On the loop: a channel that connects at its first call, which must carry the token. Raises
    ConfigError if a file is missing or unusable."""
    options: tuple[tuple[str, Any], ...]
    options = (*OPTIONS, ("grpc.enable_http_proxy", int(security.use_proxy)))
    if certificates is None:
        return grpc.aio.insecure_channel(target, options=options)
    if security.server_name:
        options = (*options, ("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(*certificates())
    return grpc.aio.secure_channel(target, credentials, options=options)


class SentCall(NamedTuple):
    """A call in flight; `deadline` is on `monotonic`."""

    method: str
    request: bytes
    deadline: float
    metadata: Metadata
    reply: Reply


def closed_error(address: str) -> DlmError:
    return ShardDown(f"the connection to {address} was closed")


def failed(address: str, cause: Exception) -> DlmError:
    if isinstance(cause, DlmError):
        return cause
    if isinstance(cause, grpc.RpcError):
        return error_of_call(cause, address)
    error = DlmError(
        f"{address}: a message could not be sent: {cause!r}; retry, and report it if it stays"
    )
    error.__cause__ = cause
    return error


class Calls:
    """Calls over one channel, which is opened for the first call and ends with the loop at the
    latest, or when a call finds no server and the certificates have changed since.

    Guarantees  `reply` of each call is called once, on the loop, or `suspend` returns the call
    """

    def __init__(
        self, address: str, open_channel: OpenChannel, certificates: Certificates | None
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._certificates = certificates
        self._opened_with: Contents | None = None
        self._out: dict[int, SentCall] = {}
        self._number = 0
        self._unsent: deque[int] = deque()
        self._home: LoopThread | None = None  # the thread of the channel's loop
        self._task: asyncio.Task[None] | None = None
        self._some = asyncio.Event()

    def send(self, home: LoopThread, call: SentCall) -> None:
        self._number += 1
        self._out[self._number] = call
        self._unsent.append(self._number)
        if self._home is home:
            self._some.set()
        else:
            self._home, self._some = home, asyncio.Event()
            self._task = home.start(self._run(home, self._some))

    def suspend(self) -> list[SentCall]:
        """Before a fork: returns the calls in flight, to be sent again after it."""
        out, self._out = list(self._out.values()), {}
        return out

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for call in self.suspend():
            tell(call.reply, None, closed_error(self._address))

    async def _run(self, home: LoopThread, some: asyncio.Event) -> None:
        error = closed_error(self._address)
        methods: dict[str, Any] = {}
        try:
            self._opened_with = self._certificates and self._certificates()
            # Opened here: a loop that ends cancels unstarted tasks, and must leave no channel open.
            async with self._open_channel() as channel:
                while True:
                    while self._unsent:
                        number = self._unsent.popleft()
                        if (call := self._out.get(number)) is not None:
                            if call.method not in methods:
                                methods[call.method] = channel.unary_unary(
                                    f"/{SERVICE}/{call.method}"
                                )
                            home.start(self._ask(methods[call.method], number, call))
                    some.clear()
                    await some.wait()
        except Exception as exc:  # noqa: BLE001 - the calls must end
            error = failed(self._address, exc)
        finally:
            # Nothing may reference the channel once this ends: see `loop.suspend`.
            methods.clear()
            channel = None
            if self._some is some:
                self._home = self._task = None
                for number in self._unsent:
                    if (unsent := self._out.pop(number, None)) is not None:
                        tell(unsent.reply, None, error)
                self._unsent.clear()

    async def _ask(self, method: Any, number: int, call: SentCall) -> None:
        data: bytes | None = None
        error = closed_error(self._address)
        try:
            left_s = max(call.deadline - time.monotonic(), 0.0)
            data = await method(call.request, timeout=left_s, metadata=call.metadata or None)
            if data is None:  # a success for gRPC, but the message's frame was damaged
                error = ProtocolError(f"{self._address}: its reply was damaged in transit; retry")
        except Exception as exc:  # noqa: BLE001 - the caller must be told
            error = failed(self._address, exc)
            if isinstance(error, ShardDown):
                self._end_if_outdated()
        finally:
            if self._out.pop(number, None) is not None:
                tell(call.reply, *((None, error) if data is None else (data, None)))

    def _end_if_outdated(self) -> None:
        """A channel never reads its certificates again: the next call must open another."""
        if (
            self._task is not None
            and self._certificates is not None
            and self._certificates() is not self._opened_with
        ):
            self._task.cancel()
            self._home = self._task = None


class ReceivedFile:
    """A file being received, over a channel of its own: it must not delay heartbeats. The loop
    reads a chunk ahead of `chunks`; the last is empty, with an error unless the server had sent
    all."""

    def __init__(self, address: str, request: bytes, deadline: float, metadata: Metadata) -> None:
        self.chunks: SimpleQueue[tuple[bytes | None, DlmError | None]] = SimpleQueue()
        self._address = address
        self._request, self._deadline, self._metadata = request, deadline, metadata
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: DlmError | None = closed_error(address)  # unless it ends otherwise

    def begin(self, home: LoopThread, open_channel: OpenChannel) -> None:
        if home.ending:  # resumed by whoever wants the file
            self._ended()
        else:
            self._task = home.start(self._run(open_channel))
            # Not in `_run`: of a task that is cancelled before it starts, nothing runs.
            self._task.add_done_callback(self._ended)

    def _ended(self, _: object = None) -> None:
        self.chunks.put((None, self._error))

    def go_on(self) -> None:
        self._more.set()

    def end(self) -> None:
        """On the loop: the reader stops early, which must not keep the server busy; or its
        connection is closed."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, open_channel: OpenChannel) -> None:
        try:
            async with open_channel() as channel:
                call = channel.unary_stream(f"/{SERVICE}/Download")(
                    self._request,
                    timeout=max(self._deadline - time.monotonic(), 0.0),
                    metadata=self._metadata or None,
                )
                while (data := await call.read()) is not grpc.aio.EOF:
                    self.chunks.put((data, None))
                    await self._more.wait()
                    self._more.clear()
                self._error = None
        except Exception as exc:  # noqa: BLE001 - the reader must be told
            self._error = failed(self._address, exc)
        finally:
            call = channel = None
