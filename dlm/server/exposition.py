"""The HTTP pages of a server: /metrics, /load, /healthz and /readyz. They show no queries."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dlm.errors import ConfigError
from dlm.files import NO_DESCRIPTOR
from dlm.logs import EventLog
from dlm.server.config import Access
from dlm.server.health import ServingState
from dlm.server.metrics import Served
from dlm.wire.http import HEAD_BYTES, JSON, Connections, HttpRequest, Response, text

METRICS, LOAD, HEALTHZ, READYZ = "/metrics", "/load", "/healthz", "/readyz"
# Text up to this age, in seconds, is reused, so that any number of scrapes costs only a few per
# cent of a core.
FRESH_S = 0.1
# An event loop that has not run for this long, in seconds, counts as stuck.
STUCK_S = 2.0

logger = EventLog(__name__)

CONNECTIONS = 32
RETRY_S = 0.1  # seconds to wait if no descriptor or no memory is left

Clock = Callable[[], float]


Route: TypeAlias = Callable[[], Awaitable[Response]]


def tcp_socket(host: str, port: int) -> socket.socket:
    """Opens a listening socket; raises `ConfigError` if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigError(
            f"{host}:{port} cannot be bound for metrics: {exc.strerror or exc}. Choose another "
            "metrics_port (--metrics-port), or 0 for none"
        ) from exc


class HttpServer:
    """Answers GET on a listening socket until closed, in its own event loop, one request per
    connection. Keeps one descriptor in reserve, in case the process can open no other."""

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route]) -> None:
        self._socket = listening
        self._routes = routes
        self.connections = Connections(
            self._answer,
            text,
            most=CONNECTIONS,
            fault=lambda exc: logger.error(
                "server.http.failed", exc_info=exc, extra={"error": type(exc).__name__}
            ),
        )
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
        mine = {accepting, *asyncio.all_tasks()} - {asyncio.current_task()}
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
                continue  # any other error means that the client disconnected
            self._loop.create_task(self._talk(connection))

    async def _comes(self) -> None:
        come = asyncio.Event()
        self._loop.add_reader(self._socket, come.set)
        try:
            await come.wait()
        finally:
            self._loop.remove_reader(self._socket)

    async def _accept_in_place_of_spare(self) -> None:
        """Gives up the spare to serve one connection, to its end, when no descriptor is free."""
        self._give_spare()
        try:
            connection, _ = self._socket.accept()
        except OSError:  # another thread took the descriptor first
            await asyncio.sleep(RETRY_S)
        else:
            talking = self._loop.create_task(self._talk(connection, becomes_spare=True))
            await asyncio.wait([talking])

    async def _talk(self, connection: socket.socket, *, becomes_spare: bool = False) -> None:
        with connection:
            connection.setblocking(False)
            streams = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
            await self.connections.talk(*streams)
            if becomes_spare and connection.fileno() >= 0:  # otherwise the client has reset it
                # This is atomic, so no other thread can take the descriptor.
                os.dup2(self._socket.fileno(), connection.fileno(), inheritable=False)
                self._spare = connection.detach()

    async def _answer(self, request: HttpRequest, _: ExitStack) -> Response:
        if request.method not in ("GET", "HEAD"):
            return text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")
        route = self._routes.get(request.path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            return text(HTTPStatus.NOT_FOUND, f"unknown path; try {known}")
        return await route()

    def _give_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def exposition(
    listening: socket.socket,
    collector: Collector,
    state: Callable[[], ServingState],
    loop: asyncio.AbstractEventLoop,
    *,
    load: Callable[[], bytes] = bytes,
    trouble: Callable[[], str] = str,
    clock: Clock = time.monotonic,
) -> HttpServer:
    """Serves the pages of one server process; close the returned object.

    /healthz is 200 while `loop`, which answers messages, is running, and 503 while it is stuck;
    /readyz is 200 only in READY and without trouble. Both report the state.

    Args  listening  a socket of `tcp_socket`
          trouble    why the server is not ready although it answers, or ""
    """
    rendered: dict[str, tuple[float, bytes]] = {}

    def page(path: str, make: Callable[[], bytes], content_type: str) -> Route:
        async def shown() -> Response:
            now = clock()
            if path not in rendered or not 0 <= now - rendered[path][0] < FRESH_S:
                rendered[path] = (now, make())
            return Response(HTTPStatus.OK, rendered[path][1], content_type)

        return shown

    async def healthz() -> Response:
        came_round = asyncio.Event()
        mine = asyncio.get_running_loop()
        try:
            loop.call_soon_threadsafe(mine.call_soon_threadsafe, came_round.set)
            async with asyncio.timeout(STUCK_S):
                await came_round.wait()
        except (TimeoutError, RuntimeError):
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "stuck")
        return text(HTTPStatus.OK, state().name.lower())

    async def readyz() -> Response:
        now, wrong = state(), trouble()
        if now is ServingState.READY and wrong:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: {wrong}")
        status = HTTPStatus.OK if now is ServingState.READY else HTTPStatus.SERVICE_UNAVAILABLE
        return text(status, now.name.lower())

    routes: dict[str, Route] = {
        METRICS: page(METRICS, lambda: generate_latest(collector), CONTENT_TYPE_LATEST),
        LOAD: page(LOAD, load, JSON),
        HEALTHZ: healthz,
        READYZ: readyz,
    }
    return HttpServer(listening, routes)


@contextlib.contextmanager
def starting_exposition(config: Access) -> Iterator[None]:
    """Inside the block, which may last minutes, the metrics port reports a starting server.

    /healthz is 200; the others are 503. ConfigError if the port cannot be bound.
    """
    if not config.metrics_port:
        yield
        return

    async def lives() -> Response:
        return text(HTTPStatus.OK, "starting")

    async def unready() -> Response:
        return text(HTTPStatus.SERVICE_UNAVAILABLE, "starting")

    shown = HttpServer(
        tcp_socket(config.metrics_host, config.metrics_port),
        {METRICS: unready, LOAD: unready, HEALTHZ: lives, READYZ: unready},
    )
    try:
        yield
    finally:
        shown.close()


def load_page(served: Sequence[Served]) -> bytes:
    """The number of queries that this process has answered for each slot, as JSON.

    The page has one object per model, however many slots were queried, so its size is bounded. It
    names slots, which are hashes of word pairs, but no word, no text and no client.
    """
    models = [
        {
            "model": one.model,
            "shard_set": one.shard_set,
            "shard": one.shard,
            "queries": one.metrics.queries,
            "slots": one.metrics.slot_queries.total().tolist(),
        }
        for one in served
    ]
    return json.dumps({"models": models}, separators=(",", ":")).encode() + b"\n"
