"""What a client shows of itself to Prometheus."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from client.questions import answers_to, ask, assert_equal, queries_to, random_queries
from client.scripted import Network, load
from cluster import WAIT_S, until
from dlm.client import AsyncClient, Client
from dlm.client.health import Mode
from dlm.client.metrics import FAMILIES, STAGES, ClientMetrics, result_of
from dlm.client.stream import NotSent
from dlm.errors import (
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
)


def shown(client: Client | AsyncClient) -> dict[str, float]:
    """name{label=value} -> number, as an application's own registry shows it."""
    registry = CollectorRegistry()
    registry.register(client.metrics)
    return {
        f"{one.name}{{{','.join(f'{k}={v}' for k, v in one.labels.items())}}}": one.value
        for metric in text_string_to_metric_families(generate_latest(registry).decode())
        for one in metric.samples
    }


def test_what_is_asked_is_counted_once(client, files) -> None:
    """By where the answers came from; the sums are those of `Stats`, and every stage took time. A
    call without a message is a call, whose planning is all that it cost; a client that has not
    connected shows zeros, since a scrape asks no server."""
    before = shown(pickle.loads(pickle.dumps(client)))
    assert before["dlm_client_cache_bytes{}"] == before["dlm_client_calls_total{result=ok}"] == 0
    utterance = client.utterance()
    utterance.score([()], [1])
    now = shown(client)
    assert now["dlm_client_calls_total{result=ok}"] == 1
    assert now["dlm_client_stage_seconds_count{stage=plan}"] == 1
    assert now["dlm_client_messages_total{result=ok}"] == 0
    for seed in range(5):
        ask(utterance, files.oracle, random_queries(files.oracle, seed, 50))
    now, stats = shown(client), client.stats
    assert now["dlm_client_queries_total{answered_by=local}"] == stats.local_hits > 0
    assert now["dlm_client_queries_total{answered_by=shard}"] == stats.sent_queries > 0
    assert now["dlm_client_queries_total{answered_by=duplicate}"] == stats.duplicates
    assert sum(v for k, v in now.items() if k.startswith("dlm_client_queries_total")) == 251
    assert now["dlm_client_calls_total{result=ok}"] == 6
    assert now["dlm_client_messages_total{result=ok}"] == stats.messages
    assert now["dlm_client_message_queries_sum{}"] == stats.sent_queries
    assert now["dlm_client_coalesced_calls_count{}"] == stats.messages
    assert now["dlm_client_stage_seconds_count{stage=plan}"] == 6
    for stage in STAGES[1:]:
        assert now[f"dlm_client_stage_seconds_count{{stage={stage}}}"] == stats.messages
        assert now[f"dlm_client_stage_seconds_sum{{stage={stage}}}"] > 0
    cached = sum(files.manifest.file(kind).bytes for kind in ("vocabulary", "low_orders"))
    assert now["dlm_client_cache_bytes{}"] == cached


def test_the_families_are_those_that_are_declared(cluster, connect, files) -> None:
    """Names and labels, in the text that Prometheus reads; of a client that sends heartbeats."""
    client = connect(cluster, heartbeats=True)
    client._core.watch().switches[Mode.LOCAL_FALLBACK, "failures"] += 1
    ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
    registry = CollectorRegistry()
    registry.register(client.metrics)
    found: dict[str, set[str]] = {}
    for model_info in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in model_info.samples:
            name = model_info.name if model_info.type == "histogram" else sample.name
            found.setdefault(name, set()).update(sample.labels)
    assert found == {name: set(one.labels) for name, one in FAMILIES.items()}


def test_whether_there_is_a_small_model_is_shown(cluster, connect, files) -> None:
    """Of a client without it nothing else tells that it would stay with bigram-fallback scores."""
    assert shown(connect(cluster, bigram_fallback=True))["dlm_client_local_fallback{}"] == 0
    assert (
        shown(connect(cluster, local_fallback=files.directory))["dlm_client_local_fallback{}"] == 1
    )


def test_what_gathers_behind_a_full_window_leaves_in_one_message(cluster, connect, files) -> None:
    """Five utterances ask while one message is held: one more message, no query in it twice. In
    flight, waiting, and then gathered, it is counted."""
    network = Network()
    client = connect(cluster.addresses, network, window=1)
    first, *rest = queries_to(files, 0)[:8]
    asked = [[first], *[rest[:5]] * 4, [*rest, first]]
    before = cluster.messages()
    pool = ThreadPoolExecutor(len(asked))
    with network.held():
        futures = []
        for waiting, queries in enumerate(asked):
            futures.append(pool.submit(answers_to, client.utterance(), queries))
            until(lambda waiting=waiting: load(client) == {0: (1, waiting)})
        assert len(network.requests) == 1
    for future, queries in zip(futures, asked, strict=True):
        assert_equal(future.result(WAIT_S), [files.oracle.score(c, w) for c, w in queries])
    assert cluster.messages() - before == 2
    assert [len(request.groups.words) for _, request in network.requests] == [1, 8]
    assert client.stats.duplicates == 4 * 5 + 8 - 8
    until(lambda: load(client) == {0: (0, 0)})
    now = shown(client)
    assert now["dlm_client_coalesced_calls_count{}"] == 2
    assert now["dlm_client_coalesced_calls_sum{}"] == 6
    assert now["dlm_client_coalesced_calls_bucket{le=1}"] == 1
    assert now["dlm_client_calls_total{result=ok}"] == 6


def test_failures_are_counted_by_their_kind(cluster, connect, files, network) -> None:
    """A damaged reply, and a server that is gone."""
    client = connect(cluster, network)
    for kind, change in (
        (ProtocolError, lambda data: data[:24] + bytes([data[24] ^ 1]) + data[25:]),
        (ShardDown, lambda _: ShardDown("gone")),
    ):
        network.change = change
        with pytest.raises(kind):
            ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
    now = shown(client)
    for name in ("protocol_error", "shard_down"):
        assert now[f"dlm_client_calls_total{{result={name}}}"] == 1
        assert now[f"dlm_client_messages_total{{result={name}}}"] == 1


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_a_call_that_is_too_late_is_counted_so_and_not_as_given_up(
    cluster, connect, files, face, network
) -> None:
    """The message is held and its deadline is nobody's but the caller's: DeadlineExceeded, in the
    caller's hands and in what alerts look at. One that its caller cancels is cancelled."""
    client = connect(cluster, network)
    context, word = queries_to(files, 0)[0]
    before = shown(client)
    with network.held():
        if face == "sync":
            with pytest.raises(DeadlineExceeded):
                client.utterance(deadline_s=0.05).score([context], [word])
        else:

            async def ask() -> None:
                utterance = await AsyncClient(client._core).utterance(deadline_s=0.05)
                with pytest.raises(DeadlineExceeded):
                    await utterance.score([context], [word])
                task = asyncio.create_task(utterance.score([context], [word], deadline_s=WAIT_S))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            asyncio.run(ask())
        now = shown(client)
        key = "dlm_client_calls_total{result=%s}"
        assert now[key % "deadline_exceeded"] == before.get(key % "deadline_exceeded", 0) + 1
        cancelled = now.get(key % "cancelled", 0) - before.get(key % "cancelled", 0)
        assert cancelled == (face == "asyncio")


def test_labels_of_errors_are_a_closed_set() -> None:
    """Whatever else happens is `failed`, with nothing of its message."""
    kinds = ShardDown, DeadlineExceeded, Overloaded, StaleShardSet, ProtocolError
    names = "shard_down", "deadline_exceeded", "overloaded", "stale_shard_set", "protocol_error"
    assert tuple(result_of(kind("a word")) for kind in kinds) == names
    assert {result_of(kind("a word")) for kind in (ConfigError, ValueError)} == {"failed"}
    assert result_of(None) == "ok"


def test_a_registry_takes_one_client(client) -> None:
    """The second would show the same families twice; and none is registered by itself."""
    assert not [one for one in REGISTRY.collect() if one.name.startswith("dlm")]
    registry = CollectorRegistry()
    registry.register(client.metrics)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(client.metrics)


@pytest.mark.parametrize("local", [False, True])
def test_a_forked_child_counts_from_zero(client, files, local: bool) -> None:
    """Its scrapes are another process's; also of a client without servers."""
    client = Client.local(files.directory) if local else client
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 9, 30))
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        counted = [value for name, value in shown(client).items() if "_total{" in name]
        os.write(writes, f"{sum(counted):g}".encode())
        os._exit(0)
    os.close(writes)
    assert os.read(reads, 100) == b"0"
    os.close(reads)
    os.waitpid(child, 0)
    assert client.stats.queries == 30


def test_no_count_is_lost_whoever_counts_at_once() -> None:
    """Callers that plan, the loop that gathers, and what falls back or ends, from four threads."""
    counts = ClientMetrics()

    def count() -> None:
        for _ in range(2000):
            counts.planned(3, 2, 1)
            counts.fell_back(5)
            counts.call("ok", 1.0)
            counts.message("ok", 0, 2, 1, 1, 8, 8, (1.0, 1.0, 1.0, 1.0))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    now = counts.now()
    found = (now.queries, now.local_hits, now.duplicates, now.bigram_fallback)
    assert found == (24_000, 16_000, 16_000, 40_000)
    assert counts.calls["ok"] == counts.messages["ok"] == counts.message_queries.count == 8000
    assert counts.stages["plan"].total == counts.stages["wire"].total == 8000


def test_a_call_is_counted_before_its_caller_goes_on(cluster, connect, files) -> None:
    """And so is its message."""
    client = connect(cluster)
    utterance, queries = client.utterance(), queries_to(files, 0)[:1]
    for number in range(1, 101):
        ask(utterance, files.oracle, queries)
        now = shown(client)
        assert now["dlm_client_calls_total{result=ok}"] == number
        assert now["dlm_client_messages_total{result=ok}"] == client.stats.messages == number


def test_a_message_that_was_withdrawn_before_it_was_sent_is_not_counted(
    cluster, connect, files, network
) -> None:
    """Its bytes never left."""
    client = connect(cluster.addresses, network)
    network.instant = NotSent()
    with pytest.raises(NotSent):
        ask(client.utterance(), files.oracle, queries_to(files, 0)[:1])
    assert (client.stats.messages, client.stats.sent_queries, client.stats.bytes_sent) == (0, 0, 0)


def test_a_client_without_servers_shows_its_queries(files) -> None:
    """As those of a local model."""
    with Client.local(files.directory) as client:
        ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
        now = shown(client)
    assert now["dlm_client_queries_total{answered_by=local_fallback}"] == 3
    assert now["dlm_client_calls_total{result=ok}"] == 1
