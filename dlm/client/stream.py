"""Scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on a stream costs a third of the processor time of a call, on both sides; in return, this
module matches replies to requests, and times them out. While one is in flight, the next takes
another gRPC call on the same connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, TypeAlias

import grpc

from dlm.client.cluster_file import Certificates, Metadata
from dlm.client.config import ClientSecurity
from dlm.client.loop import LoopThread, is_here
from dlm.errors import AuthenticationError, DeadlineExceeded, DlmError, ProtocolError, ShardDown
from dlm.logs import EventLog
from dlm.wire import codec, pairs
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.certificates import Contents
from dlm.wire.status import Reason, error_from_refusal, error_from_rpc, reason_of

SERVICE = "dlm.v1.Shard"
MAX_TIMEOUT_US = (1 << 32) - 1
LATE_TOO_SOON_S = 0.02
# A stream takes no more once it was silent for this long while messages timed out on it: it may
# stay silent as long as its connection lives. Longer than a busy server's handshake, so that the
# next stream is not given up before it is open.
SILENT_S = 5.0
MAX_SILENT = 2
MAX_CALLS = 32  # of one stream: far more messages in flight than a client has by default
MOST_FREE = 1  # calls that stay open: a server counts them, and to begin one takes its time
FROM_CORE = "Internal error from Core"  # from gRPC's asyncio API

log = EventLog(__name__)

Reply: TypeAlias = Callable[[bytes | None, DlmError | None], None]


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


class NotSent(DlmError):
    """A message was withdrawn before it was sent."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request to a server; its bytes are kept, so that it can be sent again after a fork.

    carried  what a stream carries of it; None: it goes as a call of its own
    unpack   what its reply on a stream is, as the reply of such a call; may raise DlmError
    wanted   it is not sent once nobody wants its answer
    """

    method: str
    request: bytes
    deadline: float  # on `monotonic`
    reply: Reply  # called once, on the loop, with bytes or an error
    metadata: Metadata = ()
    carried: bytes | None = None
    unpack: Callable[[bytes], bytes] | None = None
    wanted: bool = True

    def withdraw(self) -> None:
        self.wanted = False

    def drop(self) -> None:
        """Reports that it was withdrawn and never sent."""
        self.end(None, NotSent())

    def end(self, data: bytes | None, error: DlmError | None = None) -> None:
        """Calls `reply`; an exception in it must not harm other messages."""
        try:
            self.reply(data, error)
        except Exception as exc:  # noqa: BLE001 - and its text may contain queries
            log.error("client.reply.failed", extra={"error": type(exc).__name__})

    def answer(self, data: bytes) -> None:
        """Ends it with the reply of a stream."""
        try:
            found = data if self.unpack is None else self.unpack(data)
        except DlmError as exc:
            self.end(None, exc)
        else:
            self.end(found)


class Exchange:
    """One connection to one server; used only on the loop. Calls of Exchange carry its messages,
    each one at a time; one stays open when it has nothing to do.

    Args
        open_channel  makes the channel, and returns the metadata that a call must carry
        mark          identifies the token in these metadata; never the token itself
        again         called for each message in flight if the server ended the stream, with the
                      mark and whether gRPC lost the status; whether it sends the message again
    Guarantees  each accepted message ends once, with the bytes or an error, at the deadline at the
                latest (plus the time that the machine needs to run a thread)
    """

    def __init__(
        self,
        home: LoopThread,
        open_channel: Callable[[], tuple[Any, Any]],
        address: str,
        mark: bytes = b"",
        again: Callable[[bytes, Ask, bool], bool] = lambda *_: False,
    ) -> None:
        self.address = address
        self.mark = mark
        self._again = again
        self.pending: dict[int, Ask] = {}  # by sequence
        self.ended = False
        self._home, self._loop = home, asyncio.get_running_loop()
        self._open_channel = open_channel
        self._sequence = 0
        self._outgoing: deque[int] = deque()
        self._open: Callable[[], Any] | None = None  # makes a call on the channel
        # What is done with calls that are open: a task, or an operation of gRPC's.
        self._at_work: dict[asyncio.Future[Any], Any] = {}
        self._connecting: set[asyncio.Task[None] | None] = set()  # of these
        self._free: dict[int, Any] = {}  # open calls that have nothing to do, by their `id`
        self._broken: BaseException | None = None  # how one of them ended
        self._opened = self._heard = time.monotonic()  # heard: when anything came, or this
        self._looks = inf  # when deadlines are checked next
        self._answers = False  # whether anything ever came
        self._silent = 0  # messages that timed out since anything came
        self.failure: tuple[float, str] | None = None  # when the server was not reached, and why
        self._task = home.start(self._run())

    @property
    def load(self) -> int:
        """Messages in flight, and those that timed out since anything came: a stuck server must
        not look idle."""
        return len(self.pending) + self._silent

    def send(self, ask: Ask) -> None:
        """Sends a message, if the stream has not `ended`."""
        deadline = ask.deadline
        self._sequence += 1
        self.pending[self._sequence] = ask
        self._outgoing.append(self._sequence)
        if self._free:
            self._next(self._free.popitem()[1])
        else:
            self._open_more()
        if deadline < self._looks:
            self._looks = deadline
            self._home.call_at(deadline, self._expire, deadline)

    def end(self, error: DlmError, *, by_server: bool = False, lost: bool = False) -> None:
        """Fails every message in flight with `error`; nothing can be sent any more."""
        refused = by_server and isinstance(error, (AuthenticationError, ShardDown))
        for ask in self.suspend():
            try:
                again = refused and self._again(self.mark, ask, lost)
            except Exception as exc:  # noqa: BLE001 - the other messages must end, too
                log.error("client.retry.failed", extra={"error": type(exc).__name__})
                again = False
            if not again:
                ask.end(None, error)

    def retire(self) -> None:
        """Takes nothing new; what is in flight is still answered, then the stream is closed."""
        self.ended = True
        self._close_if_done()

    def close(self, error: DlmError) -> None:
        self.end(error)
        self._task.cancel()

    def suspend(self) -> list[Ask]:
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
        late = [self.pending.pop(n) for n, a in list(self.pending.items()) if a.deadline <= now]
        self._silent += len(late)
        if self._silent >= MAX_SILENT and now - self._heard >= SILENT_S:
            self.ended = True  # what is in flight is still answered
        # Unwanted messages must not pile up behind a server that does not read.
        while self._outgoing and self._outgoing[0] not in self.pending:
            self._outgoing.popleft()
        self._looks = min((ask.deadline for ask in self.pending.values()), default=inf)
        if self._looks < inf:
            self._home.call_at(self._looks, self._expire, self._looks)
        self._close_if_done()
        over = f"{self.address} did not answer before the deadline; retry, or give a longer one"
        for ask in late:
            ask.end(None, DeadlineExceeded(over))

    async def _run(self) -> None:
        try:
            channel, metadata = self._open_channel()
            async with channel:
                self._open = partial(
                    channel.stream_stream(f"/{SERVICE}/Exchange"), metadata=metadata
                )
                try:
                    self._begin(self._open())
                    await self._loop.create_future()  # until it is cancelled
                finally:
                    # Nothing may reference the channel once this ends: see `loop.suspend`. Tasks
                    # with an operation are not cancelled: it must end before its loop does.
                    self._open = None
                    for call in (*self._free.values(), *self._at_work.values()):
                        pairs.cancel(call)
                    call = None
                    self._free.clear()
                    for task in filter(None, self._connecting):
                        task.cancel()
                    while self._at_work:
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.wait(self._at_work)
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

    def _begin(self, call: Any) -> None:
        pairs.when_ended(call, partial(self._note_end, id(call)))
        self._connecting.add(self._work(call, self._connect(call)))

    def _open_more(self) -> None:
        """Each message that waits gets a call that connects."""
        while self._open is not None and len(self._connecting) < len(self._outgoing):
            if len(self._at_work) >= MAX_CALLS:
                break
            self._begin(self._open())

    def _work(self, call: Any, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._at_work[task] = call
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[None]) -> None:
        del self._at_work[task]
        self._connecting.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._break(exc)
        self._open_more()  # it counted among those at work

    def _break(self, exc: BaseException) -> None:
        self._broken = self._broken or exc
        self._task.cancel()

    async def _connect(self, call: Any) -> None:
        """Goes on once messages can be sent, or the call has ended: then reading says why."""
        with contextlib.suppress(grpc.RpcError):
            await call.wait_for_connection()
        self._connecting.discard(asyncio.current_task())
        self._next(call)

    def _next(self, call: Any) -> None:
        """Sends the next message on a call that has nothing to do."""
        while self._outgoing and not call.done():
            sequence = self._outgoing.popleft()
            if self._wants(sequence):
                data = self._bytes_of(sequence)
                if pairs.AVAILABLE:
                    came = partial(self._came, call, sequence)
                    work = pairs.ask(call._cython_call, data, self._loop, came)
                    self._at_work[work] = call
                else:
                    self._work(call, self._ask_publicly(call, sequence, data))
                self._open_more()
                return
        if call.done():
            self._work(call, self._read(call))
        elif self._open is not None and len(self._free) < MOST_FREE:
            self._free[id(call)] = call
        else:
            self._work(call, self._close(call))

    def _bytes_of(self, sequence: int) -> bytes:
        ask, now = self.pending[sequence], time.monotonic()
        assert ask.carried is not None
        # What is left now: it may have waited for a call.
        timeout_us = min(max(int((ask.deadline - now) * 1e6), 1), MAX_TIMEOUT_US)
        sent_us = int((now - self._opened) * 1e6)
        return ask.carried + codec.exchange_tail(sequence, timeout_us, sent_us)

    async def _ask_publicly(self, call: Any, sequence: int, data: bytes) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(data)
        self._receive(await call.read(), sequence)
        self._next(call)

    def _came(
        self, call: Any, sequence: int, work: asyncio.Future[Any], data: bytes | None
    ) -> None:
        del self._at_work[work]
        if data is None:  # the call has ended
            self._work(call, self._read(call))
            return
        try:
            self._next(call)  # first: what the reply lets out may take this call
            self._receive(data, sequence)
        except Exception as exc:  # noqa: BLE001 - the other messages must end
            self._break(exc)

    def _note_end(self, which: int) -> None:
        call = self._free.pop(which, None)
        if call is not None:
            self._work(call, self._read(call))

    async def _read(self, call: Any) -> None:
        """Raises what a call ended with."""
        self._receive(await call.read())

    async def _close(self, call: Any) -> None:
        """Ends a call well, after the replies to all messages."""
        await call.done_writing()
        await call.read()

    def _wants(self, sequence: int) -> bool:
        """Whether to send a message; a withdrawn one ends here."""
        ask = self.pending.get(sequence)
        if ask is None or ask.wanted:
            return ask is not None
        del self.pending[sequence]
        ask.drop()
        self._close_if_done()
        return False

    def _receive(self, data: Any, sequence: int = 0) -> None:
        # The number is that of the message which the call carries.
        if data is grpc.aio.EOF:
            raise ShardDown(f"{self.address} ended the stream; retry")
        self._answers = True
        self._heard = time.monotonic()
        self._silent = 0
        message = codec.parse(pb.ScoreReply(), data)
        if message.sequence != sequence:  # then the true one would be unread until the next is sent
            raise ProtocolError(
                f"{self.address} sent a reply to message {message.sequence}; expected {sequence}"
            )
        ask = self.pending.pop(sequence, None)
        if ask is not None and message.reason:
            ask.end(None, self._refusal(message, ask))
        elif ask is not None:
            ask.answer(data)
        if self.ended:
            self._close_if_done()

    def _refusal(self, message: pb.ScoreReply, ask: Ask) -> DlmError:
        try:
            codec.check_refusal(message)
        except ProtocolError as exc:
            return exc
        after_ms = message.retry_after_ms
        error = error_from_refusal(
            message.reason, message.message, where=self.address, retry_after_ms=after_ms
        )
        if message.reason == Reason.LATE and time.monotonic() < ask.deadline - LATE_TOO_SOON_S:
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
    """Calls over one channel, which is opened for the first, and closed before a fork, or when a
    call finds no server and the certificates have changed since. On the loop.

    Guarantees  each call ends once, or `suspend` returns it
    """

    def __init__(
        self, address: str, open_channel: OpenChannel, certificates: Certificates | None
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._certificates = certificates
        self._opened_with: Contents | None = None
        self._out: set[Ask] = set()
        self._channel: grpc.aio.Channel | None = None
        self._closing: asyncio.Future[None] | None = None  # somebody must hold it

    def send(self, home: LoopThread, ask: Ask, metadata: Metadata) -> None:
        if self._channel is None:
            self._opened_with = self._certificates and self._certificates()
            self._channel = self._open_channel()
        method = self._channel.unary_unary(f"/{SERVICE}/{ask.method}")
        self._out.add(ask)
        home.start(self._ask(method, ask, metadata))

    def suspend(self) -> list[Ask]:
        """Before a fork: returns the calls in flight, to be sent again after it."""
        out, self._out = list(self._out), set()
        self._close()
        return out

    def close(self) -> None:
        for ask in self.suspend():
            ask.end(None, closed_error(self._address))

    def _close(self) -> None:
        """A channel never reads its certificates again: the next call opens another."""
        channel, self._channel = self._channel, None
        if channel is not None and is_here():
            self._closing = asyncio.ensure_future(channel.close())

    async def _ask(self, method: Any, ask: Ask, metadata: Metadata) -> None:
        data: bytes | None = None
        error = closed_error(self._address)
        try:
            left_s = max(ask.deadline - time.monotonic(), 0.0)
            data = await method(ask.request, timeout=left_s, metadata=metadata or None)
            if data is None:  # a success for gRPC, but the message's frame was damaged
                error = ProtocolError(f"{self._address}: its reply was damaged in transit; retry")
        except Exception as exc:  # noqa: BLE001 - the caller must be told
            error = failed(self._address, exc)
            changed = self._certificates is not None and (
                self._certificates() is not self._opened_with
            )
            if isinstance(error, ShardDown) and changed:
                self._close()
        finally:
            method = None  # it references the channel
            if ask in self._out:
                self._out.remove(ask)
                ask.end(data, None if data is not None else error)


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
