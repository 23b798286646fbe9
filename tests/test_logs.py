"""What is logged, counted and traced: events with names, and never a word of a query."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from client.questions import queries_to, submit
from client.scripted import Clients, Network
from cluster import WAIT_S, Cluster, build, until
from dlm.cli.serve import JsonLines
from dlm.client.metrics import EVENTS as client_events
from dlm.errors import DlmError, QueryError
from dlm.gateway.events import EVENTS as gateway_events
from dlm.logs import EventLog
from dlm.ngram.query import QueryGroups
from dlm.server.events import EVENTS as server_events
from dlm.server.metrics import Served, ServerCollector
from dlm.wire import codec
from models import PlainModel
from parsed import tree_of
from server.calls import Caller, outcome
from spans import recorder

ROOT = Path(__file__).parents[1]
MARK = "zqxmark"
# No number that a test meets by chance: of a word id that no model has.
MARKED_ID = 3_141_592_653


def is_log_call(node: ast.AST) -> bool:
    """Whether a node logs an event."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("log", "logger")
    )


def template(node: ast.expr) -> str:
    """A name as a pattern: what varies is a word."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def logged(part: str) -> Iterator[tuple[str, set[str]]]:
    """(pattern of the name, fields that stand in the code) of each event that a part logs."""
    for file in sorted((ROOT / "dlm" / part).rglob("*.py")):
        tree = tree_of(file)
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    assigned.setdefault(ast.unparse(name), []).append(value)
        for call in filter(is_log_call, ast.walk(tree)):
            assert isinstance(call, ast.Call)
            first = call.args[0]
            values = assigned[first.id] if isinstance(first, ast.Name) else [first]
            names = [
                template(one)
                for value in values
                for one in (
                    (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
                )
            ]
            (extra,) = (one.value for one in call.keywords if one.arg == "extra")
            found = extra.keys if isinstance(extra, ast.Dict) else []
            fields = {str(key.value) for key in found if isinstance(key, ast.Constant)}
            for name in names:
                assert len(call.args) - 1 == name.count("%s"), f"{name} in {file}"
                yield name, fields


def test_every_event_that_is_logged_is_declared_with_its_fields() -> None:
    """And every declared one is logged: what `dlm explain events` lists is all there is."""
    declared = {**client_events, **server_events, **gateway_events}
    seen: set[str] = set()
    for part in ("client", "server", "gateway"):
        for name, fields in logged(part):
            word = r"[\w*]+"
            pattern = re.compile(re.escape(name).replace("%s", word).replace(re.escape("{}"), word))
            fitting = {one for one in declared if one == name or pattern.fullmatch(one)}
            fitting = fitting or {one for one in declared if fnmatchcase(name, one)}
            assert fitting, f"{name} is not declared in dlm/{part}/events.py"
            seen |= fitting
            if "%s" not in name and "{}" not in name:
                assert all(fields <= set(declared[one].fields) for one in fitting), name
    assert seen == declared.keys()


def test_every_part_logs_events_by_the_one_logger() -> None:
    """A plain logger would print a name and leave its fields out."""
    plain = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "dlm").rglob("*.py"))
        if file.name != "logs.py" and "= logging.getLogger(__name__)" in file.read_text()
    ]
    assert plain == []


def test_an_event_says_its_fields_in_its_line_and_in_its_record() -> None:
    """By a formatter that shows the message alone, and as JSON; `%` and spaces included."""
    shown, log = io.StringIO(), EventLog("dlm.client.somewhere")
    handlers = [logging.StreamHandler(shown), logging.StreamHandler(shown)]
    handlers[1].setFormatter(JsonLines({"address": "context"}))
    for handler in handlers:
        log.logger.addHandler(handler)
    try:
        log.error("client.%s.kept", "token", extra={"error": "50% of\nit", "shard": 3, "to": ""})
    finally:
        for handler in handlers:
            log.logger.removeHandler(handler)
    line, structured = shown.getvalue().splitlines()
    assert line == 'client.token.kept error="50% of\\nit" shard=3 to=""'
    told = json.loads(structured)
    assert (told["event"], told["error"], told["shard"]) == ("client.token.kept", "50% of\nit", 3)
    assert told["address"] == "context"


@pytest.mark.slow
def test_an_application_with_the_default_format_reads_which_server_is_gone_and_why(
    files, tmp_path
) -> None:
    """`logging.basicConfig()` in a decoder: address, state and reason stand in the line."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.getLogger("dlm.client").addHandler(handler)
    try:
        with Cluster(files) as cluster, Clients(tmp_path) as connect:
            utterance = connect(cluster, bigram_fallback=True).utterance()
            address = cluster.addresses[0]
            cluster.servers[0].end()
            logger = "dlm.client.cascade"
            named = f"WARNING:{logger}:client.server.changed address={address} shard=0 "
            until(lambda: named in shown.getvalue())
            assert re.search(
                named + r"before=\w+ after=\w+ reason=(silent|lost|draining)", shown.getvalue()
            )
            queries = queries_to(files, 0)[:2]
            submit(utterance, queries, WAIT_S).result(WAIT_S)
            until(
                lambda: "client.bigram_fallback.started shard=0 error=ShardDown" in shown.getvalue()
            )
    finally:
        logging.getLogger("dlm.client").removeHandler(handler)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model whose words all bear the mark."""
    words = [f"{MARK}{i}" for i in range(12)]
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {
        (word,): (-1.0, -0.5) for word in ["<s>", "</s>", "<unk>", *words]
    }
    for i in range(12):
        a, b, c, d = (words[(i + k) % 12] for k in range(4))
        ngrams |= {(a, b): (-0.5, -0.2), (a, b, c): (-0.4, -0.1), (a, b, c, d): (-0.3, None)}
    return build(PlainModel(4, ngrams), tmp_path_factory.mktemp("marked"), 2)


@pytest.mark.promise("nothing_logged")
def test_no_word_of_a_query_is_logged_counted_or_traced(files, tmp_path, caplog) -> None:
    """At debug level, through answers, refusals, faults inside, and servers that are gone."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `test` has the SDK")
    exporter = recorder()
    caplog.set_level(logging.DEBUG)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [w for w in files.words() if MARK in w]
    with (
        Cluster(files, trace=True, max_queries=64) as cluster,
        Cluster(files.again(1), metrics_port=port) as shown,
        Clients(tmp_path) as connect,
    ):
        network = Network()
        clients = [connect(cluster, trace=True), connect(cluster, network)]
        for client in clients:
            utterance = client.utterance()
            utterance.score_sentences([" ".join(words), f"{MARK}oov {words[0]}"])
            with pytest.raises(QueryError):
                utterance.score([(MARKED_ID, 1)], [1])
        # Refused: an id that is too large, bytes that are nothing, a damaged message.
        manifest = files.manifest
        groups = QueryGroups(
            np.array([2], np.uint8),
            np.array([MARKED_ID, 1], np.uint32),
            np.array([1], np.uint32),
            np.array([1], np.uint32),
            np.array([0], np.uint32),
        )
        data = codec.encode_score_request(manifest.shard_set_bytes, 0, groups)[0]
        caller = Caller(cluster.addresses[0])
        assert outcome(caller.score, data).reason == "ID_OUT_OF_RANGE"
        assert outcome(caller.score, MARK.encode()).reason == "MALFORMED"
        assert outcome(caller.score, data[:-1] + bytes([data[-1] ^ 1])).reason == "CHECKSUM"
        assert outcome(caller.describe, MARK.encode()).reason == "MALFORMED"
        caller.close()
        # A fault inside whose message holds what was asked; at the server, and at the client.
        service = cluster.servers[0].server.service

        def fails(*_: object) -> None:
            raise RuntimeError(f"{MARK} {MARKED_ID}")

        service.answerer.score = fails
        queries = queries_to(files, 0)[:2]
        with pytest.raises(DlmError):
            submit(clients[0].utterance(), queries, WAIT_S).result(WAIT_S)
        del service.answerer.score
        network.instant = RuntimeError(f"{MARK} {MARKED_ID}")
        with pytest.raises(DlmError):
            submit(clients[1].utterance(), queries, WAIT_S).result(WAIT_S)
        connect(shown).utterance().score_sentences([" ".join(words)])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
            counted = reply.read().decode()
        served = Served(
            *(manifest.model, manifest.shard_set, 0, 4, service.metrics, lambda: service.state),
            manifest.shards,
        )
        for collector in (ServerCollector(lambda: [served]), *(c.metrics for c in clients)):
            registry = CollectorRegistry()
            registry.register(collector)
            counted += generate_latest(registry).decode()
        cluster.end()
        with pytest.raises(DlmError):
            submit(clients[0].utterance(), queries, 5.0).result(WAIT_S)
    lines = [JsonLines().format(record) for record in caplog.records]
    spans = [span.to_json() for span in exporter.get_finished_spans()]
    assert any("server.score.failed" in line for line in lines)
    assert any("dlm.call" in span for span in spans)
    assert 'result="ID_OUT_OF_RANGE"' in counted
    for text in [*lines, *spans, counted]:
        assert MARK not in text
        assert str(MARKED_ID) not in text
