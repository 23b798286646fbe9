"""GET over HTTP/1.1, for probes and scrapers, in a separate thread.

Small on purpose: one request per connection, and no body is read. Each connection has `REQUEST_S`
and `HEAD_BYTES`, and beyond `CONNECTIONS` the oldest is closed, so idle ones cannot keep out a
probe. Nothing is logged. One descriptor is kept in reserve, for a process that can open no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from dlm.errors import ConfigError
from dlm.files import NO_DESCRIPTOR
from dlm.logs import EventLog

logger = EventLog(__name__)

CONNECTIONS = 32
HEAD_BYTES = 8192
REQUEST_S = 5.0
RETRY_S = 0.1  # if no descriptor or no memory is left
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


Route: TypeAlias = Callable[[], Awaitable[Response]]


def text(status: HTTPStatus, line: str) -> Response:
    return Response(status, line.encode() + b"\n")


def tcp_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; ConfigError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigError(
            f"{host}:{port} cannot be bound for metrics: {exc.strerror or exc}. Choose another "
            "metrics_port (--metrics-port), or 0 for none"
        ) from exc


class HttpServer:
    """Answers a socket that listens, until closed, on an event loop of its own."""

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route]) -> None:
        self._socket = listening
        self._routes = routes
        self._open: dict[asyncio.Task[None], None] = {}  # oldest first
        self._spare: int | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="dlm-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stop.wait()
        mine = [accepting, *self._open]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        self._give_spare()
        self._socket.close()

    async def _accept(self) -> None:
        self._socket.setblocking(False)
        while True:
            if self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = os.dup(self._socket.fileno())
            await self._comes()
            try:
                connection, _ = self._socket.accept()
            except OSError as exc:
                if exc.errno in NO_DESCRIPTOR:
                    await self._accept_in_place_of_spare()
                elif exc.errno in (errno.ENOMEM, errno.ENOBUFS):
                    await asyncio.sleep(RETRY_S)
                continue  # or it went away
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _comes(self) -> None:
        """Waits for a connection, without using a descriptor for it."""
        come = asyncio.Event()
        self._loop.add_reader(self._socket, come.set)
        try:
            await come.wait()
        finally:
            self._loop.remove_reader(self._socket)

    async def _accept_in_place_of_spare(self) -> None:
        """One connection from its first byte to its last, when no other file can be opened."""
        self._give_spare()
        try:
            connection, _ = self._socket.accept()
        except OSError:  # another thread took the descriptor first
            await asyncio.sleep(RETRY_S)
            return
        try:
            await self._talk(connection)
        finally:
            # From connection to spare in one step, so that no other thread can take it.
            os.dup2(self._socket.fileno(), connection.fileno(), inheritable=False)
            self._spare = connection.detach()

    def _give_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def _answer(self, connection: socket.socket) -> None:
        with connection:
            await self._talk(connection)

    async def _talk(self, connection: socket.socket) -> None:
        """Reads a request and answers it; what the other end does ends this connection alone."""
        connection.setblocking(False)
        # It went away, or dawdled.
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(REQUEST_S):
                head = await self._head(connection)
                if head is not None:
                    await self._loop.sock_sendall(connection, await self._exchange(head))
                    await self._end(connection)

    async def _head(self, connection: socket.socket) -> bytes | None:
        """What comes before the empty line, or more than a head may have; None if it never came."""
        head = b""
        while (end := head.find(b"\r\n\r\n")) < 0 and len(head) <= HEAD_BYTES:
            part = await self._loop.sock_recv(connection, HEAD_BYTES)
            if not part:
                return None
            head += part
        return head[: end + 4] if end >= 0 else head

    async def _end(self, connection: socket.socket) -> None:
        """Until the other end has read the answer: a socket closed on unread bytes resets it."""
        connection.shutdown(socket.SHUT_WR)
        for _ in range(HEAD_BYTES):
            if not await self._loop.sock_recv(connection, HEAD_BYTES):
                return

    async def _exchange(self, head: bytes) -> bytes:
        if len(head) > HEAD_BYTES:
            return _bytes(text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head is too long"))
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _bytes(text(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request"))
        method, path = parts[0], parts[1].split(b"?", 1)[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            return _bytes(text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported"))
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            return _bytes(text(HTTPStatus.NOT_FOUND, f"unknown path; try {known}"))
        try:
            response = await route()
        except Exception as exc:  # noqa: BLE001 - the next request must be answered
            logger.error("server.http.failed", extra={"path": path, "error": type(exc).__name__})
            response = text(HTTPStatus.INTERNAL_SERVER_ERROR, "failed; see the server's log")
        return _bytes(response, with_body=method == b"GET")


def _bytes(response: Response, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")
