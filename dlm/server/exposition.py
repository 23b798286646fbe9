"""What a server shows over HTTP: /metrics, /load, /healthz and /readyz. Numbers only, no text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dlm.logs import EventLog
from dlm.server.config import Access
from dlm.server.health import ServingState
from dlm.server.http import JSON, HttpServer, Response, Route, tcp_socket, text
from dlm.server.metrics import Served

logger = EventLog(__name__)

METRICS, LOAD, HEALTHZ, READYZ = "/metrics", "/load", "/healthz", "/readyz"
# However many scrapes come, they may cost only a few per cent of a core: text of this age is
# reused. Seconds.
FRESH_S = 0.1
# A loop that has not run for this long counts as stuck. Seconds.
STUCK_S = 2.0

Clock = Callable[[], float]


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
    """Shows one server process; close what is returned.

    /healthz is 200 while `loop`, which answers messages, is running, and 503 while it is stuck;
    /readyz is 200 only in READY and without trouble. Both report the state.

    Args  listening  a socket of `http.tcp_socket`
          load       the page /load
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
    """Meanwhile, the metrics port says that the server is starting, which may take minutes.

    /healthz is 200; the others are 503. ConfigError if the port cannot be bound.
    """
    if not config.metrics_port:
        yield
        return

    def says(status: HTTPStatus) -> Route:
        async def route() -> Response:
            return text(status, "starting")

        return route

    unready = says(HTTPStatus.SERVICE_UNAVAILABLE)
    shown = HttpServer(
        tcp_socket(config.metrics_host, config.metrics_port),
        {METRICS: unready, LOAD: unready, HEALTHZ: says(HTTPStatus.OK), READYZ: unready},
    )
    try:
        yield
    finally:
        shown.close()


def load_page(served: Sequence[Served]) -> bytes:
    """How many queries this process has answered for each slot, as JSON.

    It has one object per model, whatever the number of slots that were asked, so its size is
    bounded. It names slots, which are hashes of word pairs; no word, no text and no client.
    """
    return _text(
        {
            "model": one.model,
            "shard_set": one.shard_set,
            "shard": one.shard,
            "queries": one.metrics.queries,
            "slots": one.metrics.slot_queries.total().tolist(),
        }
        for one in served
    )


def _text(models: Iterable[dict[str, Any]]) -> bytes:
    return json.dumps({"models": list(models)}, separators=(",", ":")).encode() + b"\n"
