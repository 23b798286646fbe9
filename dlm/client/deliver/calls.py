"""Calls to one server beside its streams, over a channel of its own on the loop: heartbeats,
descriptions, downloads, and the few messages whose trace is sampled. A call costs three times a
message on a stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc

from dlm.client.config.credentials import Certificates, Metadata
from dlm.client.config.security import ClientSecurity
from dlm.client.deliver.exchange import SERVICE, Reply, error_of_call, tell
from dlm.client.deliver.loop import LoopThread
from dlm.errors import DlmError, ProtocolError, ShardDown
from dlm.wire.certificates import Contents

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
