"""Authenticates callers and limits each client, in one interceptor before every call.

Without a valid token a call of any method ends here, before a byte of its request is read. With a
token, it counts towards its client's limits until it ends, and it ends when its token is revoked.
"""

from __future__ import annotations

import asyncio
import inspect
import resource
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from dlm.logs import EventLog
from dlm.server.config import Access
from dlm.server.health import HEALTH_SERVICE, SHARD_SERVICE
from dlm.server.metrics import CallCounts
from dlm.server.poller import grpc
from dlm.server.refusals import Refusal
from dlm.server.replies import Replies, Unread
from dlm.server.sets import FileWatcher, follow
from dlm.server.tokens import Tokens, read_tokens
from dlm.wire.certificates import expiry_of, read_certificates
from dlm.wire.ids import is_named
from dlm.wire.status import Reason

logger = EventLog(__name__)

DOWNLOAD = f"/{SHARD_SERVICE}/Download"
HEALTH = frozenset({f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch"})

# One text for all unauthenticated calls: it says what to do, but not why a call was refused.
UNAUTHENTICATED = (
    "this server accepts only calls with a known token in the metadata "
    "`authorization: Bearer TOKEN`; set token_file (or token) on the client"
)

REQUEST_S = 20.0  # time limit for a unary call's message, which usually comes with the call
RETRY_CALLS_MS = 1000  # when a client above its limit of calls may retry
MAX_FILES = 1 << 20
EXPIRY_LOOK_S = 1.0
DAY_S = 24 * 3600
LOG_S = 1.0  # refusals are logged at most once per second, however many there are


def channel_options(
    *, max_message_bytes: int, max_in_flight: int, shares_port: bool
) -> list[tuple[str, int]]:
    """Returns limits on connections and frames, which also hold for unauthenticated peers.

    Args    shares_port  whether other processes share the port (`share_port`); if not, a second
                         server on it fails instead of silently sharing it
    """
    return [
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # 16 KiB of metadata is ten times what calls need.
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        # One connection may have about twice as many calls as fill the server.
        ("grpc.max_concurrent_streams", 2 * max_in_flight + 64),
        # A stream may send this much before it is read: five messages of 16,000 queries. If gRPC
        # measured the network (`bdp_probe`), it would let this grow to megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 512 << 10),
        # These limit all clients' calls that wait for the event loop: above the first limit, gRPC
        # silently cancels some at random. One peer's burst reaches the defaults of 1,000 and 3,000.
        ("grpc.server.max_pending_requests", 1 << 16),
        ("grpc.server.max_pending_requests_hard_limit", 1 << 17),
        # Limit the time to connect, with TLS, to the first HTTP/2 frames; gRPC's default is 120 s.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.settings_timeout", 10_000),
        # Clients may ping an idle connection every 5 s; one that vanished is noticed within 40 s.
        # Connections without a call are closed after ten minutes; clients reconnect by themselves.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
    ]


@dataclass(slots=True, eq=False)
class ClientUsage:
    """One client's open calls.

    name   the token's name, else the certificate's subject, else the address without the port
    calls  calls and streams of every kind, until the client has read their end: unread data is kept
    """

    name: str
    calls: int = 0
    in_flight: int = 0
    downloads: int = 0


@dataclass(slots=True, eq=False)
class Bearer:
    """The caller, identified by its token if one is needed.

    models      what the token covers, as in `Tokens`; changes with the tokens file
    connection  address and port from which the call came
    """

    name: str | None = None
    digest: bytes | None = None
    models: tuple[str, ...] = ()
    connection: str = ""


_caller: ContextVar[ClientUsage | None] = ContextVar("dlm_caller", default=None)
_bearer: ContextVar[Bearer] = ContextVar("dlm_bearer", default=Bearer())  # noqa: B039 - of nobody


def caller() -> ClientUsage | None:
    """The client of the current call; None outside of calls that passed a `Guard`."""
    return _caller.get()


def token_name() -> str:
    """The name of the current call's token, or ""."""
    return _bearer.get().name or ""


def connection() -> str:
    """The address and port of the current call's peer; "" outside of calls."""
    return _bearer.get().connection


def models_named() -> tuple[str, ...]:
    """The models or shard sets that the current call's token covers: the first digits of their
    ids; () for all."""
    return _bearer.get().models


def may_ask(model: str, shard_set: str) -> bool:
    """Whether the current call may use a shard set of this model."""
    named = _bearer.get().models
    return not named or is_named(named, model, shard_set)


def _speaks(client: ClientUsage, bearer: Bearer, peer: str) -> None:
    # Each call runs in a task of its own, whose context ends with it; an HTTP connection has one
    # task for all of its calls, which come one after the other.
    bearer.connection = peer
    _caller.set(client)
    _bearer.set(bearer)


def replies_to(context: Any) -> Replies:
    client = caller()
    return Replies(context, client.name if client is not None else "")


class Certificates:
    """The certificates for handshakes: read and checked once, and again at each `reload`.

    A connection keeps the certificates that it began with; each new handshake uses those read last.
    `context` is for TLS outside gRPC; it cannot drop an authority, so `reload` makes a new one.
    """

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        self._files = {"ca": client_ca, "cert": cert, "key": key}
        self.reload()

    def reload(self) -> None:
        """Reads the files again; if it raises ConfigError, the old content stays."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        content = read_certificates(context, **self._files)
        self._expires = expiry_of(content[2] or b"")
        context.verify_mode = ssl.CERT_REQUIRED if self._files["ca"] else ssl.CERT_NONE
        self._content, self.context = content, context
        self._fresh = True

    def listening(self) -> ssl.SSLContext:
        """The context for a listening socket: each of its handshakes uses the newest `context`."""
        made = _Newest(ssl.PROTOCOL_TLS_SERVER)
        made.certificates = self
        return made

    def days_left(self) -> float:
        """Days until the certificate, or one that signed it, expires."""
        return (self._expires - time.time()) / DAY_S

    def credentials(self) -> Any:
        """The credentials to bind a gRPC port with; each handshake uses what `reload` read last."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._newer,
            require_client_authentication=bool(self._files["ca"]),
        )

    def _newer(self) -> Any:
        """gRPC calls this at each handshake, on its own threads; None means no change."""
        if not self._fresh:
            return None
        self._fresh = False
        return self._configuration()

    def _configuration(self) -> Any:
        """Builds gRPC's form of the files' content. gRPC then starts threads, so call this late."""
        client_ca, key, cert = self._content
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


class _Newest(ssl.SSLContext):
    """Begins each handshake with the newest context. A handshake that changed to it later could
    resume a session of its first context, and a resumed session is not checked again."""

    certificates: Certificates

    def wrap_bio(self, *streams: Any, **more: Any) -> ssl.SSLObject:
        return self.certificates.context.wrap_bio(*streams, **more)


@dataclass(slots=True, eq=False)
class _Call:
    client: ClientUsage
    bearer: Bearer
    task: asyncio.Task[Any]
    revoked: bool = False


Handler = Callable[[Any, Any], Any]


class Credentials:
    """The last usable content of the files that define who may call.

    Raises  ConfigError  a file that config names is unusable
    """

    def __init__(self, config: Access) -> None:
        self.tokens: Tokens | None = None
        self.certificates: Certificates | None = None
        self._path = Path(config.tokens)
        # Each watch begins before its files are read, so that no change in between is missed.
        self.watches: dict[str, FileWatcher] = {}
        if config.tokens:
            self.watches["tokens"] = FileWatcher([self._path])
            self.tokens = read_tokens(self._path)
        if config.tls_cert:
            files = config.tls_cert, config.tls_key, config.tls_client_ca
            self.watches["certificates"] = FileWatcher([Path(name) for name in files if name])
            self.certificates = Certificates(*files)

    def reload(self, what: str) -> None:
        """Reads the files of a watch again; after a ConfigError nothing has changed."""
        if what == "tokens":
            self.tokens = read_tokens(self._path)
        elif self.certificates is not None:
            self.certificates.reload()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Accepts or refuses calls; on the event loop.

    Args  metrics      returns the current counts of the process, including calls by token name
          turn         returns when the current call may be read, or refused
          credentials  the credentials that the process has already read
          now          seconds since 1970, for tokens that expire
    """

    def __init__(
        self,
        config: Access,
        metrics: Callable[[], CallCounts],
        turn: Callable[[], Awaitable[None]],
        credentials: Credentials,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._turn, self._now = config, turn, now
        self._metrics = metrics
        self._credentials = credentials
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[_Call] = set()
        self._open = 0  # open calls, including answers not read yet
        self.half_received = 0
        self._clients: dict[str, ClientUsage] = {}
        self._refusals = 0
        self._logged = -LOG_S

    # ------------------------------------------------------------------- life

    def bind(self, server: Any, address: str) -> int:
        """Binds `address` with TLS or without, as configured; returns the port."""
        certificates = self._credentials.certificates
        if certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, certificates.credentials()))

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(follow(watch, partial(self._reload, what), what=what))
            for what, watch in self._credentials.watches.items()
        ]
        if self._credentials.tokens is not None:
            self._tasks.append(asyncio.create_task(self._expire()))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_LOOK_S)
            if ended := self._end_invalid():
                logger.warning("server.tokens.expired", extra={"calls_ended": ended})

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _reload(self, what: str) -> dict[str, object]:
        self._credentials.reload(what)
        tokens = self._credentials.tokens
        if what != "tokens" or tokens is None:
            return {}
        return {"clients": sorted(set(tokens.names)), "calls_ended": self._end_invalid()}

    def _end_invalid(self) -> int:
        """Ends the calls whose token was removed or has expired, and returns their number. Other
        calls may use the models that their token now allows."""
        tokens = self._credentials.tokens
        good = {} if tokens is None else tokens.valid(self._now())
        ended = 0
        for call in self._calls:
            digest = call.bearer.digest
            if digest is None or call.revoked:
                continue
            if digest in good:
                call.bearer.models = good[digest]
            else:
                call.revoked = True
                call.task.cancel()
                ended += 1
        return ended

    # ---------------------------------------------------------- before a call

    def _known(self, metadata: object) -> Bearer | None:
        tokens = self._credentials.tokens
        if tokens is None:
            return Bearer()
        number = tokens.find(metadata, self._now())
        if number is None:
            return None
        return Bearer(tokens.names[number], tokens.digests[number], tokens.models[number])

    async def hear(self, headers: Iterable[tuple[str, str]], who: str, peer: str) -> Bearer | None:
        """Waits until an HTTP request may be answered or refused; returns what `http` needs.
        `who` identifies a caller without a token; see `_identity`."""
        known = self._known(headers)
        bearer = known or Bearer()
        _speaks(ClientUsage(bearer.name or who), bearer, peer)
        await self._turn()
        return known

    @contextmanager
    def http(self, known: Bearer | None, who: str, peer: str) -> Iterator[None]:
        """A call over HTTP, from its turn until its answer is written; counted like other calls.

        Raises  Refusal  no known token, or the client or the server has too many calls open
        """
        if known is None:
            self._count_stranger(peer)
            raise Refusal(Reason.UNAUTHENTICATED, UNAUTHENTICATED)
        client = self._client(known.name or who)
        refusal = self._full(client, "")
        if refusal is not None:
            self._count_limit(peer, client, refusal)
            raise refusal
        _speaks(client, known, peer)
        self._enter(client, "", known)
        try:
            yield
        finally:
            self._ended(client, "")

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        known = self._known(details.invocation_metadata)
        if known is None:
            if not (self._config.open_health and details.method in HEALTH):
                # A stream handler starts at once; a unary one waits for the request's bytes.
                return grpc.stream_stream_rpc_method_handler(self._refuse)
            known = Bearer()
        handler = await continuation(details)
        return None if handler is None else self._guarded(handler, details.method, known)

    def _guarded(self, handler: Any, method: str, bearer: Bearer) -> grpc.RpcMethodHandler:
        """Makes a handler start before its request is read, so that calls count from the start."""
        codec = handler.request_deserializer, handler.response_serializer

        async def one(requests: Any, context: Any) -> Any:
            work = self._one(handler.unary_unary or handler.stream_unary, handler)
            return await self._run(bearer, method, work, requests, context)

        async def many(requests: Any, context: Any) -> None:
            work = self._many(handler.unary_stream or handler.stream_stream, handler)
            await self._run(bearer, method, work, requests, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(many, *codec)
        return grpc.stream_unary_rpc_method_handler(one, *codec)

    def _one(self, behaviour: Handler, handler: Any) -> Handler:
        async def work(requests: Any, context: Any) -> Any:
            request = requests if handler.request_streaming else await self._first(context)
            return await behaviour(request, context)

        return work

    def _many(self, behaviour: Handler, handler: Any) -> Handler:
        async def work(requests: Any, context: Any) -> None:
            request = requests if handler.request_streaming else await self._first(context)
            replies = behaviour(request, context)
            if inspect.isawaitable(replies):
                await replies
                return
            async with replies_to(context) as written, aclosing(replies):
                async for reply in replies:
                    await written.write(reply)

        return work

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Covers the time until the message of a call arrives."""
        self.half_received += 1
        try:
            yield
        finally:
            self.half_received -= 1

    async def _first(self, context: Any) -> Any:
        self.half_received += 1  # `receiving` does the same, more slowly
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await context.read()
        except TimeoutError:
            request = None
        finally:
            self.half_received -= 1
        if request is None:
            said = f"no request came within {REQUEST_S:g} s; send it as soon as the call begins"
            await Refusal(Reason.LATE, said).abort(context)
        if request is grpc.aio.EOF:
            said = "the call ended without a message; send a request"
            await Refusal(Reason.MALFORMED, said).abort(context)
        return request

    # ------------------------------------------------------------ during a call

    async def _run(
        self, bearer: Bearer, method: str, work: Handler, requests: Any, context: Any
    ) -> Any:
        client = self._client(bearer.name or _identity(context))
        task = asyncio.current_task()
        assert task is not None
        _speaks(client, bearer, context.peer())
        refusal = self._full(client, method)
        if refusal is not None:
            self._count_limit(context.peer(), client, refusal)
            await self._turn()
            await refusal.abort(context)
        call = _Call(client, bearer, task)
        self._calls.add(call)
        context.add_done_callback(partial(self._ended, client, method))
        self._enter(client, method, bearer)
        try:
            await self._turn()
            return await work(requests, context)
        except asyncio.CancelledError:
            if not call.revoked or context.done():
                raise
            task.uncancel()
        except Unread as exc:
            # gRPC has finished the last write, so the client reads again and gets the status.
            await Refusal(Reason.LATE, str(exc)).abort(context)
        finally:
            self._calls.discard(call)
        return await self._refuse(requests, context)

    def _enter(self, client: ClientUsage, method: str, bearer: Bearer) -> None:
        self._open += 1
        client.calls += 1
        client.downloads += method == DOWNLOAD
        if bearer.name is not None:
            self._metrics().clients[bearer.name] += 1

    def _ended(self, client: ClientUsage, method: str, _: Any = None) -> None:
        self._open -= 1
        client.calls -= 1
        client.downloads -= method == DOWNLOAD
        self._forget(client)

    def _client(self, name: str) -> ClientUsage:
        found = self._clients.get(name)
        if found is None:
            found = self._clients[name] = ClientUsage(name)
        return found

    def _forget(self, client: ClientUsage) -> None:
        if not client.calls:
            self._clients.pop(client.name, None)

    def _full(self, client: ClientUsage, method: str) -> Refusal | None:
        config = self._config
        if client.calls >= config.client_streams:
            return Refusal(
                Reason.CLIENT_LIMIT,
                f"this client has {client.calls} calls and streams open, which is its limit. End "
                "some of them, or retry later",
                RETRY_CALLS_MS,
            )
        if method == DOWNLOAD and client.downloads >= config.client_downloads:
            return Refusal(
                Reason.CLIENT_LIMIT,
                f"this client has {client.downloads} downloads running, which is its limit. Retry "
                "later, from the same offset",
                RETRY_CALLS_MS,
            )
        if self._open >= config.max_calls:
            return Refusal(
                Reason.OVERLOADED,
                f"{self._open} calls and streams are open, which is this server's limit. Ask a "
                "replica, or retry later",
                RETRY_CALLS_MS,
            )
        return None

    # --------------------------------------------------------------- refusals

    async def _refuse(self, _: Any, context: Any) -> NoReturn:
        await self._turn()
        self._count_stranger(context.peer())
        await Refusal(Reason.UNAUTHENTICATED, UNAUTHENTICATED).abort(context)

    def _count_stranger(self, peer: str) -> None:
        self._metrics().unauthenticated += 1
        if fields := self._worth_a_line(peer):
            logger.warning("server.unauthenticated", extra=fields)

    def _count_limit(self, peer: str, client: ClientUsage, refusal: Refusal) -> None:
        self._forget(client)
        if refusal.reason is Reason.CLIENT_LIMIT:
            self._metrics().client_limits += 1
        else:
            self._metrics().refusals[refusal.reason] += 1
        if fields := self._worth_a_line(peer):
            logger.warning("server.client.limit", extra=fields | {"client": client.name})

    def _worth_a_line(self, peer: str) -> dict[str, Any]:
        """The log fields for refusals since the last line; empty within LOG_S of that line."""
        self._refusals += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged < LOG_S:
            return {}
        fields = {"peer": peer, "refusals": self._refusals}
        self._logged, self._refusals = now, 0
        return fields


def allow_connections() -> None:
    """Raises this process's limit of open files as far as allowed, so that idle connections of
    one peer leave room for others."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _identity(context: Any) -> str:
    """Identifies a caller without a token, as `HttpRequest.who` does: by its certificate's subject,
    or by its address without the port."""
    subject = context.auth_context().get("x509_subject")
    if subject and subject[0]:
        return str(subject[0].decode("utf-8", "replace"))
    peer = unquote(context.peer())  # "ipv4:10.0.0.1:50060", "ipv6:[::1]:50060"
    return peer if peer.startswith("unix") else peer[5:].rpartition(":")[0].strip("[]")
