"""The door by HTTP/1.1: POST of JSON, and what a browser gets: the page, and the contract.

A call is the unary form of the Connect protocol: POST /dlm.v1.LanguageModel/METHOD with
`application/json` (or `application/proto`), its deadline in `Connect-Timeout-Ms`; an error is
{"code", "message", "reason"} with the status of its code. h11 reads and writes HTTP; this file says
how much and how long. No path leads to a file, and no page of another origin may read an answer,
nor of one whose name was made to lead here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import h11
from google.protobuf import json_format

from dlm.gateway.answers import SERVICE, Left, T
from dlm.gateway.calls import CALLS, LARGE, Dispatcher, GatewayTurns, countdown
from dlm.gateway.metrics import GatewayMetrics
from dlm.logs import EventLog
from dlm.server.config import is_loopback
from dlm.server.health import ServingState
from dlm.server.http import JSON, Response
from dlm.server.refusals import LOAD_REASONS, Refusal
from dlm.server.security import Guard
from dlm.wire.certificates import subject_of
from dlm.wire.status import CODE_OF, REASON_KEY, Reason, plain

logger = EventLog(__name__)

DOOR = "http"
PROTO = "application/proto"
VERSIONS = (b"1.0", b"1.1")
HEAD_BYTES = 16 << 10
READ_BYTES = 64 << 10
HEAD_S = 10.0  # for the head of a request, from its first byte or from connecting
IDLE_S = 75.0  # between two requests of one connection
BODY_S = 20.0  # for a body
WRITE_S = 10.0  # for a client to read its answer
LINGER_S = 2.0  # for a client to notice that its request was refused unread
LINGER_READS = 256  # of READ_BYTES, thrown away meanwhile
RETRY_AFTER_S = 1  # HTTP has no finer unit
# Of the Connect protocol.
STATUS_OF = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "resource_exhausted": 429,
    "internal": 500,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
ALWAYS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


Body: TypeAlias = Callable[[], Awaitable[bytes | None]]

_BASE64 = re.compile(r"([A-Za-z0-9+/_-]+={0,2})?")


class HttpDoor:
    """Answers connections on the running loop, one request of each at a time.

    Args  pages  path -> what GET returns
    """

    def __init__(
        self,
        calls: Dispatcher,
        guard: Guard,
        metrics: GatewayMetrics,
        pages: Mapping[str, Response],
    ) -> None:
        self._calls, self._guard, self._metrics = calls, guard, metrics
        self._pages = pages
        config = calls.config
        # A page of another site may give its own name the address of this machine, and then reads
        # what it gets from that name.
        self._only_own_names = is_loopback(config.host) and not (
            config.tokens or config.tls_cert or config.insecure
        )
        self._idle: dict[asyncio.Task[Any], None] = {}  # those between requests, oldest first
        self._open: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, shares_port: bool = False
    ) -> int:
        """Listens; returns the port. OSError if it cannot be bound."""
        more: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HEAD_S}
        if shares_port:
            more["reuse_port"] = True
        self._server = await asyncio.start_server(
            self._connected, host, port, limit=READ_BYTES, backlog=1024, **more
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    # -------------------------------------------------------------- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._metrics.connections += 1
        if len(self._open) > self._calls.config.max_connections and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.cancel()
        try:
            await _Connection(self, reader, writer, task).talk()
        except (TimeoutError, OSError, asyncio.CancelledError, h11.RemoteProtocolError):
            pass  # it dawdled, went away, broke the protocol, or had to make room
        except Exception as exc:  # noqa: BLE001 - the next connection must be answered
            logger.error("gateway.http.failed", extra={"error": type(exc).__name__})
        finally:
            self._idle.pop(task, None)
            self._open.discard(task)
            self._metrics.connections -= 1
            writer.transport.abort()

    # ----------------------------------------------------------------- requests

    async def answer(
        self, request: Any, caller: tuple[str, str], body: Body, held: contextlib.ExitStack
    ) -> Response:
        """The answer to a request whose body `body()` reads; `held` is closed once it is
        written."""
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in request.headers]
        bearer = await self._guard.hear(headers, *caller)
        fields = dict(headers)
        if self._only_own_names and not _is_own_name(fields.get("host", "")):
            return _plain_error(
                403,
                "permission_denied",
                "this gateway takes calls from this machine alone, without tokens; expected its "
                "address or localhost in the header Host. Let a proxy send that, or use --tokens",
            )
        path = request.target.split(b"?", 1)[0].decode("latin-1")
        service, _, call = path.removeprefix("/").partition("/")
        is_call = service == SERVICE and call in CALLS
        if request.method in (b"GET", b"HEAD") and not is_call:
            page = self._pages.get(path)
            return page or _plain_error(404, "unimplemented", "unknown path; try /openapi.json")
        if not is_call:
            known = ", ".join(f"/{SERVICE}/{name}" for name in CALLS)
            return _plain_error(404, "unimplemented", f"unknown path; expected POST to {known}")
        if request.method != b"POST":
            answer = _plain_error(405, "unimplemented", "expected the method POST")
            return replace(answer, headers=(("Allow", "POST"),))
        kind = fields.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (JSON, PROTO):
            return _plain_error(415, "invalid_argument", f"expected Content-Type: {JSON}")
        if fields.get("content-encoding", "identity") != "identity":
            return _plain_error(415, "unimplemented", "expected a body that is not compressed")
        try:
            held.enter_context(self._guard.http(bearer, *caller))
            return await self._call(call, kind, headers, body, held)
        except Refusal as refusal:
            return _refused(refusal)

    async def _call(
        self, call: str, kind: str, headers: Any, body: Body, held: contextlib.ExitStack
    ) -> Response:
        asked_s = _timeout_s(dict(headers).get("connect-timeout-ms"))
        left = None if asked_s is None else countdown(asked_s)
        data = await body()
        if data is None:
            most = self._calls.config.max_message_bytes
            raise Refusal(
                Reason.TOO_MANY_QUERIES,
                f"the body is larger than expected: at most {most} bytes. Make several calls",
            )
        form = None if kind == PROTO else Json(self._calls.turns)
        reply = await self._calls.answer(
            call, data, form, door=DOOR, left_s=left and left(), metadata=headers, held=held
        )
        return Response(200, reply, kind)


class Json:
    """Messages as JSON; see `Form`. Much of it is read and written in a thread."""

    def __init__(self, turns: GatewayTurns) -> None:
        self._turns = turns

    async def read(self, kind: Any, data: bytes, left: Left) -> Any:
        try:
            if data.lstrip()[:1] != b"{":  # an empty list would pass for an empty object
                raise ValueError("expected an object, {...}")
            return await self._convert(partial(_from_json, data, kind()), len(data), left)
        except (json_format.ParseError, ValueError, RecursionError) as exc:
            raise Refusal(
                Reason.MALFORMED,
                f"the body is not the JSON of a dlm.v1.{kind.__name__}: {plain(str(exc))}",
            ) from exc

    async def write(self, kind: Any, reply: bytes, left: Left) -> bytes:
        write = partial(
            json_format.MessageToJson,
            kind.FromString(reply),
            indent=None,
            always_print_fields_with_no_presence=True,
        )
        text: str = await self._convert(write, len(reply), left)
        return text.encode()

    async def _convert(self, work: Callable[[], T], size: int, left: Left) -> T:
        return await self._turns.aside(work, size, left()) if size > LARGE else work()


class _Connection:
    """One connection, request after request."""

    def __init__(
        self,
        door: HttpDoor,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[Any],
    ) -> None:
        self._door, self._reader, self._writer, self._task = door, reader, writer, task
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._announced = 0  # bytes of the body, if the request says so
        writer.transport.set_write_buffer_limits(0)  # a drain waits until all is written
        address, port = (writer.get_extra_info("peername") or ("", 0))[:2]
        subject = subject_of(writer.get_extra_info("peercert"))
        self._caller = subject or address, f"{address}:{port}"

    async def talk(self) -> None:
        wait_s = HEAD_S
        while True:
            self._door._idle[self._task] = None
            request = await self._head(wait_s)
            self._door._idle.pop(self._task, None)
            if request is None:
                return
            self._announced = int(dict(request.headers).get(b"content-length", b"0"))
            with contextlib.ExitStack() as held:
                answer = await self._door.answer(request, self._caller, self._body, held)
                goes_on = await self._write(request, answer)
            if not goes_on:
                await self._linger()
                return
            wait_s = IDLE_S

    async def _head(self, wait_s: float) -> Any:
        """The next request; None if the other end closes. The first byte must come in `wait_s`
        seconds, the rest within HEAD_S of it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(wait_s) as limit:
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(READ_BYTES))
                    soon = loop.time() + HEAD_S
                    if (when := limit.when()) is None or when > soon:
                        limit.reschedule(soon)
                if isinstance(event, h11.Request):
                    if event.http_version not in VERSIONS:
                        raise h11.RemoteProtocolError("another version", error_status_hint=505)
                    # What stands in between may go by the other one, and see another next request.
                    if {b"content-length", b"transfer-encoding"} <= {k for k, _ in event.headers}:
                        raise h11.RemoteProtocolError("two lengths")
        except h11.RemoteProtocolError as exc:
            status = exc.error_status_hint
            await self._write(
                None, _plain_error(status, "invalid_argument", "this is not an HTTP/1.1 request")
            )
            await self._linger()
            raise
        return event if isinstance(event, h11.Request) else None

    async def _body(self) -> bytes | None:
        """The body; None if it is larger than allowed, whether it says so or not.

        Raises  Refusal  it is cut off, or takes too long
        """
        most = self._door._calls.config.max_message_bytes
        if self._announced > most:
            return None
        try:
            async with asyncio.timeout(BODY_S):
                return await self._whole_body(most)
        except h11.RemoteProtocolError as exc:
            raise Refusal(
                Reason.MALFORMED,
                "the body is cut off, or its chunks are wrong; send the whole call again",
            ) from exc
        except TimeoutError as exc:
            raise Refusal(
                Reason.LATE,
                f"the body did not come within {BODY_S:g} seconds; send the call again, or a "
                "shorter one",
            ) from exc

    async def _whole_body(self, most: int) -> bytes | None:
        parts, size = [], 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    self._writer.write(self._http.send(go_on))
                self._http.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                if size > most:
                    return None
            else:
                return b"".join(parts)

    async def _write(self, request: Any, answer: Response) -> bool:
        """Writes a response; returns whether the connection goes on."""
        if request is not None and self._http.their_state is h11.SEND_BODY:
            with contextlib.suppress(h11.RemoteProtocolError):
                self._http.next_event()  # an empty body counts as read
        drains = self._door._calls.admission.phase.state is ServingState.DRAINING
        goes_on = request is not None and self._http.their_state is h11.DONE and not drains
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            *ALWAYS,
            *answer.headers,
            *(() if goes_on else (("Connection", "close"),)),
        ]
        sent = (
            self._http.send(
                h11.Response(
                    status_code=answer.status,
                    headers=headers,
                    reason=HTTPStatus(answer.status).phrase,
                )
            )
            or b""
        )
        if request is None or request.method != b"HEAD":
            sent += self._http.send(h11.Data(answer.body)) or b""
        sent += self._http.send(h11.EndOfMessage()) or b""
        async with asyncio.timeout(WRITE_S):
            self._writer.write(sent)
            await self._writer.drain()
        if goes_on and self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def _linger(self) -> None:
        """Until the other end has read the answer: a socket closed on unread bytes resets it."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                for _ in range(LINGER_READS):
                    if not await self._reader.read(READ_BYTES):
                        return


def _is_own_name(host: str) -> bool:
    """Whether a header Host has an address, or the name that every machine gives itself; a caller
    by HTTP/1.0 may leave it out, a browser never does."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("", "localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _from_json(data: bytes, message: Any) -> Any:
    """The message of a body; ParseError or ValueError if it is none."""
    json_format.Parse(data, message, max_recursion_depth=16)
    names = [one.name for one in message.DESCRIPTOR.fields if one.type == one.TYPE_BYTES]
    given = json.loads(data) if names else {}
    for name in names:
        value = given.get(name)
        for one in value if isinstance(value, list) else [value]:
            # Signs that base64 lacks are skipped by `Parse`: nothing would be left of some text.
            if isinstance(one, str) and not _BASE64.fullmatch(one):
                raise ValueError(f"{name} has characters that base64 lacks")
    return message


def _timeout_s(value: str | None) -> float | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise Refusal(
            Reason.MALFORMED,
            "Connect-Timeout-Ms is not a number of milliseconds; expected at most 10 digits",
        )
    return int(value) / 1000


def _plain_error(status: int, code: str, message: str) -> Response:
    body = json.dumps({"code": code, "message": message}).encode()
    return Response(status, body, JSON)


def _refused(refusal: Refusal) -> Response:
    code = CODE_OF[refusal.reason].name.lower()
    facts = {"code": code, "message": refusal.message, "reason": refusal.reason.value}
    headers = [(REASON_KEY, refusal.reason.value)]
    if refusal.reason in LOAD_REASONS:
        headers.append(("Retry-After", str(RETRY_AFTER_S)))
    if refusal.reason is Reason.UNAUTHENTICATED:
        headers.append(("WWW-Authenticate", "Bearer"))
    return Response(STATUS_OF[code], json.dumps(facts).encode(), JSON, tuple(headers))


# A browser fetches nothing from elsewhere, runs no script in the page, and shows it in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


def pages() -> dict[str, Response]:
    """Path -> the answer, read once."""
    folder = resources.files("dlm.gateway") / "page"
    found = {
        path: Response(200, (folder / name).read_bytes(), kind, HEADERS)
        for path, (name, kind) in FILES.items()
    }
    contract = resources.files("dlm.wire._pb") / "lm.openapi.json"
    return {**found, "/openapi.json": Response(200, contract.read_bytes(), JSON)}
