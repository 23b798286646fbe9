"""Gets scores over a stream that stays open: dlm.v1.Shard/Exchange (proto/README.md).

A message on a stream costs a third of the processor time of a call, on both sides; in return, this
module must match replies to requests and handle timeouts. While one message is in flight, the next
one uses another stream on the same connection.
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
from typing import Any, TypeAlias

import grpc

from dlm.client import loop
from dlm.client.cluster_file import Metadata, certificates_of, read_token
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
# A stream that was silent for this long while messages timed out on it gets no further messages, as
# it may stay silent while its connection lives. The time exceeds a busy server's handshake, so that
# the next stream is not given up before it is open.
SILENT_S = 5.0
MAX_SILENT = 2
MAX_CALLS = 32  # per connection: far more messages than are in flight on one by default
MOST_FREE = 1  # idle calls to keep open: servers limit open calls, but opening one takes time
# Files of tokens and certificates are read again every LOOK_S while they are used. If a file system
# stalls, callers wait for at most LOOK_WAIT_S.
LOOK_S = 1.0
LOOK_WAIT_S = 0.1
FROM_CORE = "Internal error from Core"  # an error text of gRPC's asyncio API

log = EventLog(__name__)

Reply: TypeAlias = Callable[[bytes | None, DlmError | None], None]


def error_of_call(exc: grpc.RpcError, address: str) -> DlmError:
    """The dlm error for a failed call, with the reason its server gave."""
    error = error_from_rpc(exc, where=address)
    error.__cause__ = exc
    error.reason = reason_of(exc)  # type: ignore[attr-defined]
    return error


def is_lost(exc: grpc.RpcError) -> bool:
    """Whether gRPC lost a stream without learning why: if a write finds that the stream has ended,
    gRPC does not read the stream's status."""
    return (
        exc.code() is grpc.StatusCode.INTERNAL
        and reason_of(exc) is None
        and exc.details() == FROM_CORE
    )


def closed_error(address: str) -> DlmError:
    return ShardDown(f"the connection to {address} was closed")


def failed(address: str, cause: Exception) -> DlmError:
    if isinstance(cause, DlmError):
        return cause
    if isinstance(cause, grpc.RpcError):
        return error_of_call(cause, address)
    error = DlmError(
        f"a message to {address} could not be sent: {cause!r}; retry, and report the error if it "
        "persists"
    )
    error.__cause__ = cause
    return error


class NotSent(DlmError):
    """A message was withdrawn before it was sent."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request to a server; it keeps its bytes, so that it can be sent again after a fork.

    carried  the part that a stream carries; None if the request is sent as a separate call
    unpack   turns the reply of a stream into the reply of a separate call; may raise DlmError
    wanted   whether anybody still wants the answer; if not, the request is not sent
    """

    method: str
    request: bytes
    deadline: float  # a time of `monotonic`
    reply: Reply  # called once, on the loop, with bytes or an error
    metadata: Metadata = ()
    carried: bytes | None = None
    unpack: Callable[[bytes], bytes] | None = None
    wanted: bool = True

    def withdraw(self) -> None:
        self.wanted = False

    def drop(self) -> None:
        """Reports that the request was withdrawn and never sent."""
        self.end(None, NotSent())

    def end(self, data: bytes | None, error: DlmError | None = None) -> None:
        """Calls `reply`; an exception in it must not harm other messages."""
        try:
            self.reply(data, error)
        except Exception as exc:  # noqa: BLE001 - the error's text may contain queries
            log.error("client.reply.failed", extra={"error": type(exc).__name__})

    def answer(self, data: bytes) -> None:
        """Ends the request with the reply of a stream."""
        try:
            found = data if self.unpack is None else self.unpack(data)
        except DlmError as exc:
            self.end(None, exc)
        else:
            self.end(found)


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

REFUSED = (AuthenticationError, ShardDown)  # errors that another token may prevent


class SecurityFiles:
    """Keeps the latest content of a connection's token and certificate files; opens channels. The
    files are read in a thread, since the loop must not wait for a file system that stalls. The
    first read blocks, and raises ConfigError if a file is missing or unusable."""

    def __init__(self, target: str, security: ClientSecurity) -> None:
        self._target, self._security = target, security
        self._certificates_now, self._token = certificates_of(security), read_token(security)
        self._has_files = bool(security.ca or security.token_file)
        self._as_of = time.monotonic()
        self.token_changed = -inf
        self.certificates, self.metadata = self._read()
        # the read in progress, on the loop:
        self._looking: asyncio.Future[None] | None = None
        self._begun = 0.0

    def _read(self) -> tuple[Contents | None, Metadata]:
        certificates = self._certificates_now and self._certificates_now()
        return certificates, self._token() if self._token else ()

    def look(self, since: float) -> asyncio.Future[None] | None:
        """Starts or joins a read of the files; returns None if the content is recent enough."""
        if not self._has_files or self._as_of >= since:
            return None
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_future()
            self._begun = time.monotonic()
            loop.aside(self._read, partial(loop.leave, self._take, self._looking, self._begun))
        return self._looking

    async def read(self, age_s: float = LOOK_S) -> None:
        """Reads the files again if the known content is older than `age_s`."""
        since = time.monotonic() - age_s
        while (looking := self.look(since)) is not None:
            left_s = max(self._begun + LOOK_WAIT_S - time.monotonic(), 0.0)
            done, _ = await asyncio.wait([looking], timeout=left_s)
            if not done:
                break

    def _take(
        self,
        looking: asyncio.Future[None],
        begun: float,
        found: tuple[Contents | None, Metadata] | Exception,
    ) -> None:
        if looking is self._looking:
            self._looking = None
        if not isinstance(found, Exception):
            if found[1] != self.metadata:
                self.token_changed = time.monotonic()
            self.certificates, self.metadata = found
        self._as_of = begun
        looking.set_result(None)

    def suspend(self) -> None:
        """Before a fork: keeps the next loop from waiting for a read that this one began."""
        self._looking = None

    def open_channel(self) -> grpc.aio.Channel:
        """Opens a channel, which connects at its first call; each call must carry the token."""
        security = self._security
        options: tuple[tuple[str, Any], ...]
        options = (*OPTIONS, ("grpc.enable_http_proxy", int(security.use_proxy)))
        if self.certificates is None:
            return grpc.aio.insecure_channel(self._target, options=options)
        if security.server_name:
            options = (*options, ("grpc.ssl_target_name_override", security.server_name))
        credentials = grpc.ssl_channel_credentials(*self.certificates)
        return grpc.aio.secure_channel(self._target, credentials, options=options)


class Exchange:
    """One connection to one server; used only on the loop. Messages travel on calls of Exchange,
    one at a time on each call; one idle call stays open.

    Args
        again  called for each message in flight if the server ended the stream; its arguments say
               whether the token differs from the stream's, and whether gRPC lost the status;
               returns whether it sends the message again
    Guarantees  each accepted message ends once, with the bytes or an error, at the deadline at the
                latest (plus the time that the machine needs to run a thread)
    """

    def __init__(
        self,
        home: LoopThread,
        security: SecurityFiles,
        address: str,
        again: Callable[[Ask, bool, bool], bool],
    ) -> None:
        self.address = address
        self.metadata = security.metadata  # the metadata of its calls, with the token
        self._again = again
        self.pending: dict[int, Ask] = {}  # messages by sequence number
        self.ended = False
        self._home, self._loop = home, asyncio.get_running_loop()
        self._security = security
        self._sequence = 0
        self._outgoing: deque[int] = deque()
        self._open: Callable[[], Any] | None = None  # makes a call on the channel
        # A task or an operation of gRPC -> the open call that it works on.
        self._at_work: dict[asyncio.Future[Any], Any] = {}
        self._connecting: set[asyncio.Task[None] | None] = set()  # tasks that wait for a connection
        self._free: dict[int, Any] = {}  # open calls that have nothing to do, by their `id`
        self._broken: BaseException | None = None  # the first error that ended a call
        self._opened = self._heard = time.monotonic()  # `_heard` is when a reply last came
        self._looks = inf  # when deadlines are checked next
        self._answers = False  # whether anything was ever received
        self._silent = 0  # messages that timed out since the last reply
        self.failure: tuple[float, str] | None = None  # when the server was not reached, and why
        self._task = home.start(self._run())

    @property
    def load(self) -> int:
        """The number of messages in flight, or timed out since the last reply: a stuck server must
        not look idle."""
        return len(self.pending) + self._silent

    def send(self, ask: Ask) -> None:
        """Sends a message; the stream must not have `ended`."""
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
        """Fails every message in flight with `error`; nothing more can be sent."""
        refused = by_server and isinstance(error, REFUSED)
        changed = self.metadata != self._security.metadata
        for ask in self.suspend():
            try:
                again = refused and self._again(ask, changed, lost)
            except Exception as exc:  # noqa: BLE001 - the other messages must end, too
                log.error("client.retry.failed", extra={"error": type(exc).__name__})
                again = False
            if not again:
                ask.end(None, error)

    def retire(self) -> None:
        """Accepts no further messages; closes the stream once those in flight are answered."""
        self.ended = True
        self._close_if_done()

    def close(self, error: DlmError) -> None:
        self.end(error)
        self._task.cancel()

    def suspend(self) -> list[Ask]:
        """Accepts no further messages; returns those in flight, to be sent again after a fork."""
        self.ended = True
        pending, self.pending = self.pending, {}
        self._outgoing.clear()
        return list(pending.values())

    def _expire(self, planned: float) -> None:
        if self._looks != planned:
            return  # an earlier check was scheduled, which schedules the next one
        now = time.monotonic()
        self._looks = inf  # if this check fails, the next message schedules one
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
        over = (
            f"{self.address} did not answer before the deadline; retry, or give a longer deadline"
        )
        for ask in late:
            ask.end(None, DeadlineExceeded(over))

    async def _run(self) -> None:
        try:
            await self._security.read()
            self.metadata = self._security.metadata
            async with self._security.open_channel() as channel:
                self._open = partial(
                    channel.stream_stream(f"/{SERVICE}/Exchange"), metadata=self.metadata
                )
                try:
                    self._begin(self._open())
                    await self._loop.create_future()  # waits until `_task` is cancelled
                finally:
                    # Nothing may reference the channel once this ends: see `loop.suspend`. Tasks
                    # with an operation are not cancelled: the operation must end before its loop.
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
            broken, self._broken = self._broken, None  # the traceback references the call
            error, lost = self._error_of(broken)
            del broken
            self.ended = True
            if self.pending and isinstance(error, REFUSED):
                with contextlib.suppress(asyncio.CancelledError):
                    await self._security.read(0.0)
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
                f"the stream to {self.address} failed: {exc!r}; retry, and report the error if it "
                "persists"
            )
            error.__cause__ = exc
        return error, False

    # -- calls --------------------------------------------------------------------------------

    def _begin(self, call: Any) -> None:
        pairs.when_ended(call, partial(self._note_end, id(call)))
        self._connecting.add(self._work(call, self._connect(call)))

    def _open_more(self) -> None:
        """Opens a call for each message that waits."""
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
        self._open_more()  # the task that ended no longer counts towards MAX_CALLS

    def _break(self, exc: BaseException) -> None:
        self._broken = self._broken or exc
        self._task.cancel()

    async def _connect(self, call: Any) -> None:
        """Waits until a call is connected or has ended, and then uses it, or reads why it ended."""
        with contextlib.suppress(grpc.RpcError):
            await call.wait_for_connection()
        self._connecting.discard(asyncio.current_task())
        self._next(call)

    def _next(self, call: Any) -> None:
        """Sends the next message on an idle call."""
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
        # The server gets the remaining time, since the message may have waited for a call.
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
            self._next(call)  # first, so that messages that this reply triggers can use the call
            self._receive(data, sequence)
        except Exception as exc:  # noqa: BLE001 - the other messages must end
            self._break(exc)

    def _note_end(self, which: int) -> None:
        call = self._free.pop(which, None)
        if call is not None:
            self._work(call, self._read(call))

    async def _read(self, call: Any) -> None:
        """Reads a reply, or raises the error with which the call ended."""
        self._receive(await call.read())

    async def _close(self, call: Any) -> None:
        """Ends a call normally, after the replies to all messages."""
        await call.done_writing()
        await call.read()

    def _wants(self, sequence: int) -> bool:
        """Returns whether to send a message; ends a message that was withdrawn."""
        ask = self.pending.get(sequence)
        if ask is None or ask.wanted:
            return ask is not None
        del self.pending[sequence]
        ask.drop()
        self._close_if_done()
        return False

    def _receive(self, data: Any, sequence: int = 0) -> None:
        # `sequence` is the number of the message that the call carries.
        if data is grpc.aio.EOF:
            raise ShardDown(f"{self.address} ended the stream; retry")
        self._answers = True
        self._heard = time.monotonic()
        self._silent = 0
        message = codec.parse(pb.ScoreReply(), data)
        if message.sequence != sequence:  # a call carries one message at a time
            raise ProtocolError(
                f"{self.address} replied to message {message.sequence}; expected a reply to "
                f"message {sequence}"
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
            # a new estimate. Messages in flight on this stream are still answered.
            self.ended = True  # set first, since a caller may send again once it has the error
        if message.reason == Reason.DRAINING:
            # If several servers share the address, a new connection may reach another server.
            self.ended = True
        return error

    def _close_if_done(self) -> None:
        if self.ended and not self.pending:
            self._task.cancel()
