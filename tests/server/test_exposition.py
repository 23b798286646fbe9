"""/metrics, /healthz and /readyz."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from cluster import WAIT_S, free_ports, until
from dlm.errors import ConfigError
from dlm.ngram.partition import SLOTS, slots_of
from dlm.server.answers import orders_of
from dlm.server.app import serve
from dlm.server.config import ServerConfig
from dlm.server.exposition import (
    CONNECTIONS,
    HEALTHZ,
    LOAD,
    METRICS,
    READYZ,
    HttpServer,
    exposition,
    tcp_socket,
)
from dlm.server.health import Event, ServingState
from dlm.server.metrics import FAMILIES, Served, ServerCollector, ServerMetrics
from dlm.server.process import Process
from dlm.wire.http import HEAD_BYTES, Response
from dlm.wire.status import Reason
from http2 import PREFACE, SETTINGS, frame
from server.calls import Caller, fetch, outcome

Sample = dict[str, float]


def samples(body: str) -> Sample:
    """name{label=value,...} -> number, of a /metrics text; without the labels all servers share."""
    out = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = ",".join(
                f"{k}={v}"
                for k, v in sample.labels.items()
                if k not in ("model", "shard_set", "shard")
            )
            out[f"{sample.name}{{{labels}}}"] = sample.value
    return out


def raw(port: int, data: bytes) -> bytes:
    """All that comes back for `data`."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall(data)
        out = b""
        while part := connection.recv(65536):
            out += part
        return out


def served(metrics: ServerMetrics, state: ServingState = ServingState.READY) -> Served:
    """A shard of a model of order 3."""
    return Served("a" * 32, "b" * 32, 2, 3, metrics, lambda: state, 4)


def test_the_counts_of_real_requests_are_shown(gated, sharded) -> None:
    """Answers and refusals of a server, scraped; the sums are those of what was asked."""
    port = free_ports(1)[0]
    _, server, caller = gated(metrics_port=port)
    rng = np.random.default_rng(3)
    asked = [sharded.questions.ask(rng, 0) for _ in range(3)]
    for one in asked:
        sharded.questions.verify(0, one, outcome(caller.score, one.data).data)
    wrong = sharded.questions.ask(rng, 1)
    assert outcome(caller.score, wrong.data).reason is Reason.WRONG_SHARD
    status, body = fetch(port, "/metrics")
    assert status == 200
    shown = samples(body)
    queries = sum(len(one.queries) for one in asked)
    assert shown["dlm_server_requests_total{result=ok}"] == 3
    assert shown["dlm_server_requests_total{result=WRONG_SHARD}"] == 1
    assert shown["dlm_server_queries_total{}"] == queries
    assert shown["dlm_server_batch_queries_sum{}"] == queries
    assert shown["dlm_server_batch_queries_count{}"] == 3
    expected = np.zeros(5, int)
    for one in asked:
        for context, word in one.queries:
            order = sharded.questions.oracle.score(context, word).matched_order
            expected[order if order > 2 else 0] += 1
    for order in (0, 3, 4):
        assert shown[f"dlm_server_matched_order_total{{order={order}}}"] == expected[order]
    assert "dlm_server_matched_order_total{order=5}" not in shown
    for stage in ("queue", "decode", "search", "encode"):
        assert shown[f"dlm_server_stage_seconds_count{{stage={stage}}}"] == 3
        assert shown[f"dlm_server_stage_seconds_sum{{stage={stage}}}"] > 0
    assert shown["dlm_server_state{state=ready}"] == 1
    assert shown["dlm_server_state{state=draining}"] == 0
    assert shown["dlm_server_shards{}"] == sharded.manifest.shards
    assert shown["dlm_server_memory_bytes{}"] > 1 << 20
    manifest = sharded.manifest
    labels = f'model="{manifest.model[:12]}",shard="0",shard_set="{manifest.shard_set[:12]}"'
    assert f"dlm_server_queries_total{{{labels}}} {queries}.0" in body
    assert caller.beat().refused == 1
    server.end()
    with pytest.raises(OSError):
        fetch(port, "/metrics")


def test_the_load_of_each_slot_is_on_one_page(gated, sharded) -> None:
    """The queries by the slot of their context; what the warm-up asks is not counted."""
    port = free_ports(1)[0]
    _, _, caller = gated(metrics_port=port)
    rng = np.random.default_rng(3)
    asked = [sharded.questions.ask(rng, 0) for _ in range(3)]
    expected = [0] * SLOTS
    for one in asked:
        assert outcome(caller.score, one.data).data
        for context, _ in one.queries:
            expected[int(slots_of(*np.array(context[-2:], np.uint32)))] += 1
    status, body = fetch(port, LOAD)
    manifest = sharded.manifest
    ids = {"model": manifest.model, "shard_set": manifest.shard_set, "shard": 0}
    assert status == 200
    assert json.loads(body)["models"] == [{**ids, "queries": sum(expected), "slots": expected}]
    assert len(body) < 100_000


def test_probes_follow_the_state(gated, sharded, monkeypatch) -> None:
    """/readyz is 503 while it warms and drains; /healthz is 200 as long as the loop turns."""
    port = free_ports(1)[0]
    shard, server, caller = gated(open_gate=False, wait=False, metrics_port=port, inline_queries=0)
    assert fetch(port, "/readyz") == (503, "warming\n")
    assert fetch(port, "/healthz") == (200, "warming\n")
    shard.gate.set()
    server.ready()
    assert fetch(port, "/readyz") == (200, "ready\n")
    held, reached = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        held.wait(WAIT_S)

    server.server._loop.call_soon_threadsafe(hold)
    assert reached.wait(WAIT_S)
    monkeypatch.setattr("dlm.server.exposition.STUCK_S", 0.05)
    assert fetch(port, "/healthz") == (503, "stuck\n")
    monkeypatch.setattr("dlm.server.exposition.STUCK_S", WAIT_S)
    held.set()
    assert fetch(port, "/healthz")[0] == 200
    shard.gate.clear()
    asked = sharded.questions.ask(np.random.default_rng(1), 0).data
    waiting = caller.score.future(asked, timeout=WAIT_S)
    until(lambda: server.server.service.metrics.in_flight == 1)
    server.post(Event.STOP)
    until(lambda: fetch(port, "/readyz") == (503, "draining\n"))  # before the port closes
    shard.gate.set()
    assert waiting.result()


def test_probes_are_answered_before_the_kernels_are_compiled(sharded, monkeypatch) -> None:
    """The server lives and is not ready; then it gives the port back."""
    port = free_ports(1)[0]
    seen = {}

    def compiling() -> None:
        seen.update({path: fetch(port, path) for path in (HEALTHZ, READYZ, METRICS)})
        raise ConfigError("as if the compiler failed")

    monkeypatch.setattr("dlm.server.app.compile_kernels", compiling)
    with pytest.raises(ConfigError, match="compiler"):
        serve(ServerConfig(metrics_port=port), [sharded.directory], 0)
    assert seen == {
        HEALTHZ: (200, "starting\n"),
        READYZ: (503, "starting\n"),
        METRICS: (503, "starting\n"),
    }
    tcp_socket("127.0.0.1", port).close()


@pytest.fixture
def shown() -> Iterator[tuple[HttpServer, ServerMetrics]]:
    """An endpoint over counts that the test changes."""
    metrics = ServerMetrics()
    loop = asyncio.new_event_loop()
    process = Process(certificate_days=lambda: 20.0)
    collector = ServerCollector(lambda: [served(metrics)], process)
    server = exposition(
        tcp_socket("127.0.0.1", 0), collector, lambda: ServingState.READY, loop, clock=lambda: 0.0
    )
    yield server, metrics
    server.close()
    loop.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
        (b"GET /metrics?name=x HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 2 * HEAD_BYTES + b"\r\n\r\n", b"431"),
    ],
)
def test_what_is_no_scrape_is_refused(shown, data: bytes, status: bytes) -> None:
    """By a status; the next request is answered."""
    assert raw(shown[0].port, data).split(b" ")[1] == status
    assert fetch(shown[0].port, "/metrics")[0] == 200


def test_whatever_comes_to_this_port_scores_are_answered(gated, sharded) -> None:
    """While connections say nothing, or nonsense without an end."""
    port = free_ports(1)[0]
    _, _, caller = gated(metrics_port=port)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS)]
    for i, connection in enumerate(held):
        if i % 2:
            with contextlib.suppress(OSError):  # closed by now, being one too many
                connection.sendall(os.urandom(HEAD_BYTES + 100))
    rng = np.random.default_rng(8)
    for _ in range(10):
        asked = sharded.questions.ask(rng, 0)
        sharded.questions.verify(0, asked, outcome(caller.score, asked.data).data)
    for connection in held:
        connection.close()

    def scraped() -> bool:
        try:
            return fetch(port, "/metrics")[0] == 200
        except OSError:  # those that are closed may not be counted out yet
            return False

    until(scraped)


def reset(connection: socket.socket) -> None:
    """Ends it as a process that died does, with what it was sent unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_whatever_connections_do_nothing_is_written_to_standard_error(start, sharded) -> None:
    """A real server: half requests, resets, garbage, too many at once, and open ones at its end."""
    port = free_ports(1)[0]
    server = start(0, metrics_port=port).ready()

    def connect(data: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        with contextlib.suppress(OSError):
            made.sendall(data)
        return made

    good = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    for data in (b"", good[:8], good, os.urandom(3 * HEAD_BYTES)):
        for end in (socket.socket.close, reset):
            end(connect(data))
        half = connect(data)
        half.shutdown(socket.SHUT_WR)
        half.close()
    held = [connect(b"GET /") for _ in range(3 * CONNECTIONS)]
    until(lambda: fetch(port, "/readyz") == (200, "ready\n"))
    server.process.terminate()
    assert server.wait() == 0
    for connection in held:
        connection.close()
    events = [line for line in server.errors.splitlines() if "INFO:dlm." not in line]
    assert events == []


@pytest.mark.promise("not_ready")
@pytest.mark.slow
def test_a_server_that_can_open_no_more_files_says_so(start, sharded) -> None:
    """In the log once, on the metrics port, and to health checks; and is ready again afterwards."""
    port, limit = free_ports(1)[0], 80
    server = start(0, metrics_port=port, open_files=limit).ready()
    with contextlib.closing(Caller(server.address)) as caller, contextlib.ExitStack() as stack:
        check = caller.channel.unary_unary("/grpc.health.v1.Health/Check")
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        assert check(b"", timeout=WAIT_S) == serving
        place = (server.notice["host"], server.notice["port"])
        for _ in range(limit):
            opened = stack.enter_context(socket.create_connection(place))
            opened.sendall(PREFACE + frame(SETTINGS))
        says = f"not ready: {limit} files"
        until(lambda: fetch(port, "/readyz")[0] == 503)
        assert fetch(port, "/readyz")[1].startswith(says)
        assert "LimitNOFILE" in fetch(port, "/readyz")[1]
        shown = samples(fetch(port, "/metrics")[1])
        assert shown["dlm_server_not_ready{cause=open_files}"] == 1
        assert shown["dlm_server_max_files{}"] == limit
        assert shown["dlm_server_open_files{}"] >= limit - 2
        until(lambda: check(b"", timeout=WAIT_S) == not_serving)
        caller.beat()  # who is connected is answered
    until(lambda: fetch(port, "/readyz") == (200, "ready\n"))
    assert samples(fetch(port, "/metrics")[1])["dlm_server_not_ready{cause=open_files}"] == 0
    assert server.errors.count("server.open_files.exhausted") == 1
    assert server.errors.count("server.open_files.recovered") == 1
    assert "Traceback" not in server.errors
    server.process.terminate()
    assert server.wait() == 0


def test_a_server_takes_as_many_files_as_it_may_have(start) -> None:
    """The soft limit of a shell, mostly 1,024, is raised to the hard one when it starts."""
    port = free_ports(1)[0]
    start(0, metrics_port=port, open_files=(64, 512)).ready()
    assert samples(fetch(port, "/metrics")[1])["dlm_server_max_files{}"] == 512


def test_text_is_made_once_for_scrapes_that_come_together(shown) -> None:
    """The clock stands still here, so what is counted since does not show yet."""
    server, metrics = shown
    first = fetch(server.port, "/metrics")[1]
    metrics.refusals[Reason.LATE] += 1
    assert fetch(server.port, "/metrics")[1] == first


def test_a_failing_route_is_an_error_of_one_request() -> None:
    """Its message stays inside."""

    async def fails() -> Response:
        raise ValueError("secret")

    server = HttpServer(tcp_socket("127.0.0.1", 0), {"/": fails})
    status, body = fetch(server.port, "/")
    assert status == 500
    assert "secret" not in body
    assert fetch(server.port, "/")[0] == 500
    server.close()


def test_histograms_are_cumulative_and_end_with_the_count() -> None:
    """A value on a bound lies inside its bucket."""
    metrics = ServerMetrics()
    orders = np.array([1, 3, 3], np.uint8)
    for queries in (1, 2, 3, 100_000):
        metrics.answered(queries, orders_of(orders[:queries]), 1e-5, 0.0, 9.0, 0.0)
    registry = CollectorRegistry()
    registry.register(ServerCollector(lambda: [served(metrics)], Process()))
    labels = {"model": "a" * 12, "shard_set": "b" * 12, "shard": "2"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, {**labels, **more})

    batch = "dlm_server_batch_queries_bucket"
    assert [value(batch, le=le) for le in ("1", "2", "4", "65536", "+Inf")] == [1, 2, 3, 3, 4]
    seconds = "dlm_server_stage_seconds_bucket"
    assert value(seconds, stage="queue", le="5e-06") == 0
    assert value(seconds, stage="queue", le="1e-05") == 4
    assert value(seconds, stage="search", le="2.5") == 0
    assert value("dlm_server_stage_seconds_count", stage="search") == 4
    assert math.isclose(value("dlm_server_stage_seconds_sum", stage="search") or 0, 36)
    assert value("dlm_server_matched_order_total", order="3") == 1 + 2 + 2


def test_the_families_are_those_that_are_declared(shown) -> None:
    """Names and labels, in the text that Prometheus reads."""
    shown[1].refusals[Reason.LATE] += 1
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(fetch(shown[0].port, "/metrics")[1]):
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            found.setdefault(name, set()).update(sample.labels)
    assert found == {name: set(one.labels) for name, one in FAMILIES.items()}


def test_two_models_on_one_port_are_told_apart() -> None:
    """Counts by model; what belongs to the process once, under the default."""
    one, two = ServerMetrics(messages=1), ServerMetrics(messages=2)
    models = [served(one), Served("c" * 32, "d" * 32, 0, 5, two, lambda: ServingState.READY, 1)]
    families = {m.name: m for m in ServerCollector(lambda: models).collect()}
    ok = [s for s in families["dlm_server_requests"].samples if s.labels["result"] == "ok"]
    assert {s.labels["model"]: s.value for s in ok} == {"a" * 12: 1, "c" * 12: 2}
    assert [s.labels["model"] for s in families["dlm_server_memory_bytes"].samples] == ["a" * 12]
    default = families["dlm_server_default"].samples
    assert {s.labels["model"]: s.value for s in default} == {"a" * 12: 1, "c" * 12: 0}


def test_a_connection_that_no_memory_is_left_for_is_accepted_later_and_costs_no_core():
    """Linux raises it for as long as that is so, at once each time."""
    tries: list[float] = []

    class Listening(socket.socket):
        """Without memory for its first connection, three times."""

        def accept(self) -> tuple[socket.socket, object]:
            tries.append(time.monotonic())
            if len(tries) <= 3:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return super().accept()

    listening = Listening(fileno=tcp_socket("127.0.0.1", 0).detach())
    server = HttpServer(listening, {})
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/none", timeout=60)
    finally:
        server.close()
    assert len(tries) == 4
    assert min(b - a for a, b in pairwise(tries)) >= 0.05
