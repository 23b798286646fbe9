"""What a server shows over HTTP: /metrics, /load, /healthz and /readyz. Numbers only, no text.

Processes that share a port each show theirs on a unix socket, and one more process joins them
(`serve_joined`). A dead or stuck worker is left out and never fails a scrape. If all are, the
scrape says why (`dlm_server_not_ready`) or fails, since an empty one would raise no alert.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dlm.errors import ConfigError
from dlm.files import scratch_folder
from dlm.logs import EventLog
from dlm.server.config import Access
from dlm.server.health import ServingState
from dlm.server.http import JSON, HttpServer, Response, Route, get, tcp_socket, text, unix_socket
from dlm.server.metrics import Served
from dlm.server.process import Cause

logger = EventLog(__name__)

TROUBLE = "dlm_server_not_ready"
_NO_LABELS: Mapping[str, str] = MappingProxyType({})
METRICS, LOAD, HEALTHZ, READYZ = "/metrics", "/load", "/healthz", "/readyz"
# However many scrapes come, they may cost only a few per cent of a core: text of this age is
# reused. Seconds.
FRESH_S = 0.1
# A loop that has not run for this long counts as stuck. Seconds.
STUCK_S = 2.0
# Time for a worker to answer a scrape. Seconds; scrapers wait 10 by default.
WORKER_S = 3.0  # above STUCK_S, so that a stuck loop is reported as such
WORKER_BYTES = 16 << 20

Clock = Callable[[], float]


def worker_socket(folder: Path, worker: int) -> Path:
    return folder / f"metrics-{worker}.sock"


def worker_exposition(
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

    Args  listening  a socket of `http.tcp_socket` or `http.unix_socket`
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


def joined_exposition(
    listening: socket.socket,
    sockets: Mapping[int, Path],
    *,
    labels: Mapping[str, str] = _NO_LABELS,
    trouble: Callable[[], str] = str,
    clock: Clock = time.monotonic,
) -> HttpServer:
    """Shows several worker processes as one; close what is returned.

    /metrics is 200 while a worker answers, or if `trouble` says why none does; then it has
    `dlm_server_not_ready` for each worker, dead or not. Otherwise it is 503. /load is the sum over
    all workers, and 503 unless each answers: a part would look like little load. /readyz and
    /healthz are 200 while one worker's is: the port then answers, and the supervisor replaces dead
    workers.

    Args  sockets  worker -> its unix socket (`worker_socket`), which may not exist
          labels   of metrics of a whole process, except the worker
    """
    rendered: tuple[float, bytes] | None = None
    one_at_a_time = asyncio.Lock()

    async def metrics() -> Response:
        nonlocal rendered
        async with one_at_a_time:
            now = clock()
            if rendered is None or not 0 <= now - rendered[0] < FRESH_S:
                texts = {
                    worker: answer.body.decode("utf-8", "replace")
                    for worker, answer in (await _ask_all(sockets, METRICS)).items()
                    if answer.status == HTTPStatus.OK
                }
                families = join(texts)
                if trouble():
                    families = _with_damage(families, sorted(sockets), labels)
                if not families:
                    return text(HTTPStatus.SERVICE_UNAVAILABLE, "no worker answers")
                body = generate_latest(_Families(families))
                rendered = (clock(), body)  # from now: asking may have taken long
            return Response(HTTPStatus.OK, rendered[1], CONTENT_TYPE_LATEST)

    async def load() -> Response:
        async with one_at_a_time:
            answers = await _ask_all(sockets, LOAD)
        if any(w not in answers or answers[w].status != HTTPStatus.OK for w in sockets):
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "not every worker answers")
        return Response(HTTPStatus.OK, joined_load(a.body for a in answers.values()), JSON)

    async def probe(target: str) -> Response:
        answers = await _ask_all(sockets, target)
        said = {w: a.body.decode("latin-1").strip() for w, a in answers.items()}
        lines = [f"worker {w}: {said.get(w, 'no answer')}" for w in sorted(sockets)]
        fine = any(answer.status == HTTPStatus.OK for answer in answers.values())
        if target == READYZ and (wrong := trouble()):
            lines, fine = [f"not ready: {wrong}"], False
        status = HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE
        return text(status, "\n".join(lines))

    routes: dict[str, Route] = {
        METRICS: metrics,
        LOAD: load,
        HEALTHZ: lambda: probe(HEALTHZ),
        READYZ: lambda: probe(READYZ),
    }
    return HttpServer(listening, routes)


def serve_joined(
    listening: socket.socket,
    sockets: Mapping[int, Path],
    trouble: Callable[[], str] = str,
    labels: Mapping[str, str] = _NO_LABELS,
) -> None:
    """`joined_exposition` as a whole process, until SIGTERM or SIGINT.

    A child of the supervisor, which must have no threads. Bind `listening` before the fork.
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in the server's thread too
    server = joined_exposition(listening, sockets, labels=labels, trouble=trouble)
    signal.sigwait(ends)
    server.close()


def join(texts: Mapping[int, str]) -> list[Metric]:
    """The families of several workers as one list, each family once.

    Args        texts  worker -> its /metrics; one that cannot be read is left out
    Guarantees  every sample has the label `worker`; samples of a worker keep their order
    """
    families: dict[str, Metric] = {}
    for worker, exposed in sorted(texts.items()):
        try:
            parsed = list(text_string_to_metric_families(exposed))
        except (ValueError, KeyError, IndexError) as exc:
            logger.warning(
                "server.metrics.unread", extra={"worker": worker, "error": type(exc).__name__}
            )
            continue
        for family in parsed:
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {"worker": str(worker), **sample.labels}
                joined.samples.append(sample._replace(labels=labels))
    return list(families.values())


def _with_damage(
    families: list[Metric], workers: Iterable[int], labels: Mapping[str, str]
) -> list[Metric]:
    """The families, with the damaged file as the trouble of each worker that shows nothing."""
    others = [family for family in families if family.name != TROUBLE]
    found = next((family for family in families if family.name == TROUBLE), None)
    shown = {sample.labels["worker"] for sample in found.samples} if found else set()
    joined = Metric(TROUBLE, found.documentation if found else "Causes.", "gauge")
    joined.samples = list(found.samples) if found else []
    for worker in map(str, workers):
        if worker not in shown:
            cause = Cause.DAMAGED_FILE.value
            joined.add_sample(TROUBLE, {**labels, "worker": worker, "cause": cause}, 1)
    return [*others, joined]


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """The socket for the metrics of all workers, and one for each worker's own.

    sockets  a worker's successor takes over its socket
    ways     paths that lead to them, in this process and its children
    """

    listening: socket.socket
    sockets: dict[int, socket.socket]
    ways: dict[int, Path]

    def keep_own(self, worker: int | None) -> None:
        for other, shown in self.sockets.items():
            if other != worker:
                shown.close()


@contextlib.contextmanager
def worker_sockets(config: Access) -> Iterator[WorkerSockets | None]:
    """The port, bound, and an unnamed socket for each worker; None if metrics are off."""
    if not config.metrics_port:
        yield None
        return
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(tcp_socket(config.metrics_host, config.metrics_port))
        sockets: dict[int, socket.socket] = {}
        ways: dict[int, Path] = {}
        try:
            with scratch_folder(None, "dlm-metrics") as folder:
                for worker in range(config.workers):
                    path = worker_socket(folder, worker)
                    sockets[worker] = stack.enter_context(unix_socket(path))
                    way = os.open(path, os.O_PATH)
                    stack.callback(os.close, way)
                    ways[worker] = Path(f"/proc/self/fd/{way}")
        except OSError as exc:
            raise ConfigError(f"cannot create sockets for the workers' metrics: {exc}") from exc
        yield WorkerSockets(listening, sockets, ways)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _ask_all(sockets: Mapping[int, Path], target: str) -> dict[int, Response]:
    async def ask(path: Path) -> Response | None:
        try:
            async with asyncio.timeout(WORKER_S):
                return await get(path, target, WORKER_BYTES)
        except (TimeoutError, OSError, ValueError):
            return None

    workers = list(sockets)
    answers = await asyncio.gather(*(ask(sockets[worker]) for worker in workers))
    return {w: a for w, a in zip(workers, answers, strict=True) if a is not None}


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


def joined_load(pages: Iterable[bytes]) -> bytes:
    """One page of the pages of several workers: their sum, by model."""
    found: dict[str, dict[str, Any]] = {}
    for page in pages:
        for one in json.loads(page)["models"]:
            same = found.setdefault(one["shard_set"], one)
            if same is not one:
                same["queries"] += one["queries"]
                same["slots"] = [a + b for a, b in zip(same["slots"], one["slots"], strict=True)]
    return _text(found.values())


def _text(models: Iterable[dict[str, Any]]) -> bytes:
    return json.dumps({"models": list(models)}, separators=(",", ":")).encode() + b"\n"
