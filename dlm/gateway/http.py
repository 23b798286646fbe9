"""The HTTP/1.1 interface: POST of JSON, and the page and the contract for browsers.

A call is the unary form of the Connect protocol: POST /dlm.v1.LanguageModel/METHOD with
`application/json` (or `application/proto`), its deadline in `Connect-Timeout-Ms`; an error is
{"code", "message", "reason"} with the status of its code. No path leads to a file, and no page of
another origin may read an answer, even if that origin's name was made to point here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from google.protobuf import json_format

from dlm.gateway.answers import SERVICE, Left, T
from dlm.gateway.calls import CALLS, LARGE, Dispatcher, GatewayTurns, countdown
from dlm.gateway.metrics import GatewayMetrics
from dlm.logs import EventLog
from dlm.server.config import is_loopback
from dlm.server.health import ServingState
from dlm.server.refusals import LOAD_REASONS, Refusal
from dlm.server.security import Certificates, Guard
from dlm.wire.http import (
    BODY_S,
    HEAD_BYTES,
    HEAD_S,
    JSON,
    BadRequest,
    Connections,
    HttpRequest,
    Response,
)
from dlm.wire.status import CODE_OF, REASON_KEY, Reason, plain

logger = EventLog(__name__)

DOOR = "http"
PROTO = "application/proto"
RETRY_AFTER_S = 1  # the header takes whole seconds only
# The HTTP statuses of the Connect protocol's error codes.
STATUS_OF = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "resource_exhausted": 429,
    "internal": 500,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
CODE_OF_STATUS = {
    403: "permission_denied",
    404: "unimplemented",
    405: "unimplemented",
    500: "internal",
}

_BASE64 = re.compile(r"([A-Za-z0-9+/_-]+={0,2})?")


class HttpDoor:
    """Answers connections on the running loop; `pages` has what GET returns, by path."""

    def __init__(
        self,
        calls: Dispatcher,
        guard: Guard,
        metrics: GatewayMetrics,
        pages: Mapping[str, Response],
    ) -> None:
        self._calls, self._guard, self._pages = calls, guard, pages
        config = calls.config
        # Another site could make its own name point to this machine, so that its page could read
        # the answers.
        self._only_own_names = is_loopback(config.host) and not (
            config.tokens or config.tls_cert or config.insecure
        )
        self._connections = Connections(
            self.answer,
            _plain_error,
            most=config.max_connections,
            body_bytes=config.max_message_bytes,
            keeps=lambda: calls.admission.phase.state is not ServingState.DRAINING,
            fault=lambda exc: logger.error(
                "gateway.http.failed", exc_info=exc, extra={"error": type(exc).__name__}
            ),
        )
        metrics.connections = self._connections.open
        self._server: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, tls: Certificates | None, *, shares_port: bool = False
    ) -> int:
        """Listens, and returns the port; raises OSError if the port cannot be bound."""
        more: dict[str, Any] = {}
        if tls is not None:
            more = {"ssl": tls.listening(), "ssl_handshake_timeout": HEAD_S}
        if shares_port:
            more["reuse_port"] = True
        self._server = await asyncio.start_server(
            self._connections.talk, host, port, limit=HEAD_BYTES, backlog=1024, **more
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._connections.close()

    async def answer(self, request: HttpRequest, held: ExitStack) -> Response:
        """Answers a request; `held` is closed once the answer is written."""
        bearer = await self._guard.hear(request.headers, request.who, request.peer)
        if self._only_own_names and not _is_own_name(request.header("host")):
            return _plain_error(
                403,
                "without tokens, this gateway takes calls from this machine only; expected an "
                "IP address or localhost in the Host header. Let a proxy set it, or use --tokens",
            )
        service, _, call = request.path.removeprefix("/").partition("/")
        is_call = service == SERVICE and call in CALLS
        if request.method in ("GET", "HEAD") and not is_call:
            page = self._pages.get(request.path)
            return page or _plain_error(404, "unknown path; try /openapi.json")
        if not is_call:
            known = ", ".join(f"/{SERVICE}/{name}" for name in CALLS)
            return _plain_error(404, f"unknown path; expected POST to {known}")
        if request.method != "POST":
            answer = _plain_error(405, "expected the method POST")
            return replace(answer, headers=(("Allow", "POST"),))
        kind = request.header("content-type").partition(";")[0].strip().lower()
        if kind not in (JSON, PROTO):
            return _plain_error(415, f"expected Content-Type: {JSON}")
        if request.header("content-encoding") not in ("", "identity"):
            return _plain_error(415, "expected a body that is not compressed")
        try:
            held.enter_context(self._guard.http(bearer, request.who, request.peer))
            return await self._call(call, kind, request, held)
        except Refusal as refusal:
            return _refused(refusal)

    async def _call(self, call: str, kind: str, request: HttpRequest, held: ExitStack) -> Response:
        asked_s = _timeout_s(request.header("connect-timeout-ms"))
        left = None if asked_s is None else countdown(asked_s)
        try:
            with self._guard.receiving():
                data = await request.body()
        except BadRequest as exc:
            raise Refusal(
                Reason.MALFORMED,
                "the body is incomplete, or its chunks are malformed; send the whole call again",
            ) from exc
        except TimeoutError as exc:
            raise Refusal(
                Reason.LATE,
                f"the body did not arrive within {BODY_S:g} seconds; send the call again, or a "
                "shorter one",
            ) from exc
        if data is None:
            most = self._calls.config.max_message_bytes
            raise Refusal(
                Reason.TOO_MANY_QUERIES,
                f"the body exceeds {most} bytes; split it into several calls",
            )
        form = None if kind == PROTO else Json(self._calls.turns)
        reply = await self._calls.answer(
            call, data, form, door=DOOR, left_s=left and left(), metadata=request.headers, held=held
        )
        return Response(200, reply, kind)


class Json:
    """The `Form` of JSON: converts messages from and to JSON, large ones in a thread."""

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


def _is_own_name(host: str) -> bool:
    """Whether a Host header has an IP address or localhost, or is empty: HTTP/1.0 callers may omit
    the header, but browsers never do."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("", "localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _from_json(data: bytes, message: Any) -> Any:
    """Reads a message from a JSON body; raises ParseError or ValueError if the body is invalid."""
    json_format.Parse(data, message, max_recursion_depth=16)
    names = [one.name for one in message.DESCRIPTOR.fields if one.type == one.TYPE_BYTES]
    given = json.loads(data) if names else {}
    for name in names:
        value = given.get(name)
        for one in value if isinstance(value, list) else [value]:
            # `Parse` skips characters outside base64, so some text would become empty.
            if isinstance(one, str) and not _BASE64.fullmatch(one):
                raise ValueError(f"{name} has characters that are not base64")
    return message


def _timeout_s(value: str) -> float | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise Refusal(
            Reason.MALFORMED,
            "Connect-Timeout-Ms is not a number of milliseconds; expected at most 10 digits",
        )
    return int(value) / 1000


def _plain_error(status: int, message: str) -> Response:
    code = CODE_OF_STATUS.get(status, "invalid_argument")
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


# With this policy, browsers fetch from this site only, run no inline script, never frame the page.
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
    folder = resources.files("dlm.gateway") / "page"
    found = {
        path: Response(200, (folder / name).read_bytes(), kind, HEADERS)
        for path, (name, kind) in FILES.items()
    }
    contract = resources.files("dlm.wire._pb") / "lm.openapi.json"
    return {**found, "/openapi.json": Response(200, contract.read_bytes(), JSON)}
