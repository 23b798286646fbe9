"""Spans of calls and of the messages that they cost: real client, real servers, spans in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from client.questions import answers_to, queries_to
from client.scripted import Clients
from cluster import WAIT_S, Cluster, build, until
from dlm.errors import ConfigError, DlmError, ProtocolError
from dlm.tracing import Tracer
from models import random_model
from spans import recorder

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `test` has the SDK")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def exporter():
    """Every span of this process that ended."""
    return recorder()


@pytest.fixture(autouse=True)
def _empty(exporter):
    exporter.clear()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model in two shards."""
    return build(random_model(5, order=4, words=30, per_order=100), tmp_path_factory.mktemp("m"), 2)


@pytest.fixture(scope="module")
def cluster(files):
    """Servers that trace."""
    with Cluster(files, trace=True) as running:
        yield running


@pytest.fixture
def connect(tmp_path):
    """Opens clients."""
    with Clients(tmp_path) as clients:
        yield clients


def spans(exporter, count: int) -> dict[str, list]:
    """Name -> spans, once `count` have ended."""
    until(lambda: len(exporter.get_finished_spans()) >= count)
    found: dict[str, list] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_call_is_a_span_and_each_message_one_below_it(cluster, connect, files, exporter) -> None:
    """With numbers as attributes; the servers' spans are of the same trace."""
    client = connect(cluster, trace=True)
    queries = queries_to(files, 0)[:3] + queries_to(files, 1)[:2] + [((), 1)] * 5
    answers_to(client.utterance(), queries)
    found = spans(exporter, 3)
    (call,) = found["dlm.call"]
    assert dict(call.attributes) == {
        "dlm.queries": 10,
        "dlm.messages": 2,
        "dlm.local_hits_share": 0.5,
        "dlm.result": "ok",
    }
    scores = sorted(found["dlm.score"], key=lambda span: span.attributes["dlm.shard"])
    assert [dict(s.attributes) for s in scores] == [
        {"dlm.shard": 0, "dlm.result": "ok"},
        {"dlm.shard": 1, "dlm.result": "ok"},
    ]
    for score in scores:
        assert score.context.trace_id == call.context.trace_id
        assert score.parent.span_id == call.context.span_id
    assert call.kind.name == "CLIENT"
    assert scores[0].kind.name == "SERVER"


def test_the_callers_own_span_is_above(cluster, connect, files, exporter) -> None:
    """What is current where the call is made."""
    from opentelemetry import trace

    client = connect(cluster, trace=True)
    with trace.get_tracer("decoder").start_as_current_span("utterance") as outer:
        client.utterance().score([()], [1])
    (call,) = spans(exporter, 2)["dlm.call"]
    assert call.parent.span_id == outer.get_span_context().span_id
    assert call.attributes["dlm.local_hits_share"] == 1.0
    assert call.attributes["dlm.messages"] == 0


def test_what_is_not_sampled_makes_no_span_anywhere(cluster, connect, files, exporter) -> None:
    """Neither at the client nor at the server; the scores come all the same."""
    from opentelemetry import trace

    client = connect(cluster, trace=True)
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, True, trace.TraceFlags(0)))
    with trace.use_span(parent):
        answers_to(client.utterance(), queries_to(files, 0)[:3])
    # A second, sampled call shows that whatever the first left behind would be here by now.
    answers_to(client.utterance(), queries_to(files, 0)[:3])
    found = spans(exporter, 2)
    assert {name: len(of) for name, of in found.items()} == {"dlm.call": 1, "dlm.score": 1}


def test_a_failure_is_told_by_its_kind_alone(files, connect, exporter) -> None:
    """No message of an error: it may name what was asked."""
    with Cluster(files, trace=True) as cluster:
        client = connect(cluster, trace=True)
        utterance = client.utterance()

        def fails(*_: object) -> None:
            raise RuntimeError("secret")

        cluster.servers[0].server.service.answerer.score = fails
        with pytest.raises(ProtocolError, match="RuntimeError"):
            answers_to(utterance, queries_to(files, 0)[:1])
        found = spans(exporter, 2)
    (call,) = found["dlm.call"]
    (score,) = found["dlm.score"]
    assert call.attributes["dlm.result"] == "protocol_error"
    assert (call.status.status_code.name, call.status.description) == ("ERROR", "protocol_error")
    assert score.attributes["dlm.result"] == "INTERNAL"
    assert not call.events
    assert not score.events


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("traceparent", "nonsense"),),
        (("traceparent", b"\xff\xfe"),),
        (("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),),
        (("baggage", "word=secret"),),
        (("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-00"),),
    ],
)
def test_metadata_without_a_sampled_context_make_no_span(exporter, metadata) -> None:
    """Whatever a caller sends."""
    assert Tracer("0").proceed("dlm.score", metadata) is None
    assert exporter.get_finished_spans() == ()


def test_a_tracer_that_raises_fails_the_call_and_no_other(
    cluster, connect, files, monkeypatch
) -> None:
    """Its message leaves the window, so that those after it are sent."""
    client = connect(cluster, trace=True)
    utterance, queries = client.utterance(), queries_to(files, 0)[:3]

    def broken(*_: object) -> None:
        raise ValueError("a propagator of the program's own")

    with monkeypatch.context() as patched:
        patched.setattr(Tracer, "metadata", broken)
        with pytest.raises(DlmError, match="propagator"):
            answers_to(utterance, queries)
    answers_to(utterance, queries)
    assert not any(client._core._lanes.outstanding.values())


def test_baggage_does_not_travel(exporter) -> None:
    """It may hold anything."""
    from opentelemetry import baggage, context

    token = context.attach(baggage.set_baggage("word", "secret"))
    try:
        tracer = Tracer("0")
        span = tracer.begin("dlm.call")
        assert span is not None
        assert [key for key, _ in tracer.metadata(span)] == ["traceparent"]
        span.end("ok")
    finally:
        context.detach(token)


def test_nothing_of_opentelemetry_is_imported_unless_asked_for() -> None:
    """Client and server, imported and set up; and without the package, they work."""
    code = """
import sys
from dlm.client import Client, ClientConfig
from dlm.client.core import Core
from dlm.client.cluster_file import FixedEndpoints
import dlm.cli.main, dlm.server.app
Core(FixedEndpoints([]), ClientConfig())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.modules["opentelemetry"] = None
Core(FixedEndpoints([]), ClientConfig())
try:
    Core(FixedEndpoints([]), ClientConfig(trace=True))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{ConfigError.__name__} trace is on")
    assert f"{sys.executable} -m pip install 'opentelemetry-api>=" in done.stdout
