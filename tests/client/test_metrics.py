"""What a client shows of itself to Prometheus."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from client.questions import ask, queries_to, random_queries, submit
from client.scripted import Network
from cluster import WAIT_S, Cluster, until
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.client.cluster_file import Endpoint, FixedEndpoints
from dlm.client.core import Core
from dlm.client.metrics import FAMILIES, STAGES, ClientMetrics, result_of
from dlm.client.modes import Mode
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
    out = {}
    for model_info in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in model_info.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            out[f"{sample.name}{{{labels}}}"] = sample.value
    return out


def test_what_is_asked_is_counted_once(client, files) -> None:
    """By where the answers came from; the sums are those of `Stats`, and every stage took time."""
    utterance = client.utterance()
    for seed in range(5):
        ask(utterance, files.oracle, random_queries(files.oracle, seed, 50))
    now, stats = shown(client), client.stats
    assert now["dlm_client_queries_total{answered_by=local}"] == stats.local_hits > 0
    assert now["dlm_client_queries_total{answered_by=shard}"] == stats.sent_queries > 0
    assert now["dlm_client_queries_total{answered_by=duplicate}"] == stats.duplicates
    assert sum(v for k, v in now.items() if k.startswith("dlm_client_queries_total")) == 250
    assert now["dlm_client_calls_total{result=ok}"] == 5
    assert now["dlm_client_messages_total{result=ok}"] == stats.messages
    assert now["dlm_client_message_queries_sum{}"] == stats.sent_queries
    assert now["dlm_client_coalesced_calls_count{}"] == stats.messages
    assert now["dlm_client_stage_seconds_count{stage=plan}"] == 5
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


def test_a_call_without_a_message_is_a_call(client, files) -> None:
    """Its planning is all that it cost."""
    client.utterance().score([()], [1])
    now = shown(client)
    assert now["dlm_client_calls_total{result=ok}"] == 1
    assert now["dlm_client_stage_seconds_count{stage=plan}"] == 1
    assert now["dlm_client_messages_total{result=ok}"] == 0


def test_calls_that_share_a_message_are_counted_in_it(cluster, connect, files) -> None:
    """One is on its way, two gather behind it: in flight, waiting, and then gathered."""
    network = Network()
    client = connect(cluster, network, window=1)
    utterance = client.utterance()
    queries = queries_to(files, 0)
    with network.held():
        futures = [submit(utterance, queries[:2], 60.0)]
        until(lambda: client._core.load() == {0: (1, 0)})
        futures += [submit(utterance, queries[i : i + 2], 60.0) for i in (1, 2)]
        until(lambda: client._core.load() == {0: (1, 2)})
        now = shown(client)
        assert now["dlm_client_in_flight{shard=0}"] == 1
        assert now["dlm_client_queue_depth{shard=0}"] == 2
    for future in futures:
        future.result(WAIT_S)
    until(lambda: shown(client)["dlm_client_in_flight{shard=0}"] == 0)
    now = shown(client)
    assert now["dlm_client_queue_depth{shard=0}"] == 0
    assert now["dlm_client_coalesced_calls_count{}"] == 2
    assert now["dlm_client_coalesced_calls_sum{}"] == 3
    assert now["dlm_client_coalesced_calls_bucket{le=1}"] == 1
    assert now["dlm_client_calls_total{result=ok}"] == 3


def test_failures_are_counted_by_their_kind(cluster, connect, files) -> None:
    """A damaged reply, a server that is gone, and a caller that gave up."""
    network = Network()
    client = connect(cluster, network)
    utterance = client.utterance()
    queries = queries_to(files, 0)[:3]
    network.change = lambda data: data[:24] + bytes([data[24] ^ 1]) + data[25:]
    with pytest.raises(ProtocolError):
        ask(utterance, files.oracle, queries)
    network.change = lambda _: ShardDown("gone")
    with pytest.raises(ShardDown):
        ask(utterance, files.oracle, queries)
    network.change = None
    with network.held():
        call = submit(utterance, queries, 60.0)
        until(lambda: client._core.load()[0] == (1, 0))
        assert call.cancel()
    until(lambda: sum(client._core.counts.messages.values()) == 3)
    now = shown(client)
    for name in ("protocol_error", "shard_down"):
        assert now[f"dlm_client_calls_total{{result={name}}}"] == 1
        assert now[f"dlm_client_messages_total{{result={name}}}"] == 1
    assert now["dlm_client_calls_total{result=cancelled}"] == 1


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_a_call_that_is_too_late_is_counted_so_and_not_as_given_up(
    cluster, connect, files, face
) -> None:
    """The message is held and its deadline is nobody's but the caller's: DeadlineExceeded, in the
    caller's hands and in what alerts look at. One that its caller cancels is cancelled."""
    network = Network()
    client = connect(cluster, network)
    context, word = queries_to(files, 0)[0]
    before = shown(client)
    with network.held():
        if face == "sync":
            with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
                client.utterance(deadline_s=0.05).score([context], [word])
        else:

            async def ask() -> None:
                utterance = await AsyncClient(client._core).utterance(deadline_s=0.05)
                with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
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


@pytest.mark.parametrize("inline_queries", [0, 256])
def test_servers_count_what_a_stream_brings(files, connect, inline_queries: int) -> None:
    """On the event loop and in threads: the same counts as the client's, and the orders given."""
    with Cluster(files, inline_queries=inline_queries) as cluster:
        client = connect(cluster)
        queries = queries_to(files, 0)[:20]
        ask(client.utterance(), files.oracle, queries)
        ask(client.utterance(), files.oracle, queries[:5])
        metrics = cluster.servers[0].server.service.metrics
        assert metrics.streams == 1
        # A small reply after the first is sent with the next read, which is no stage.
        until(lambda: metrics.write_s.count == (1 if inline_queries else 2))
        assert (metrics.messages, metrics.queries) == (2, 25)
        orders = [files.oracle.score(c, w).matched_order for c, w in queries + queries[:5]]
        assert [int(metrics.matched_orders[order]) for order in range(16)] == [
            orders.count(order) for order in range(16)
        ]
        for stage in ("queue_s", "decode_s", "search_s", "encode_s"):
            assert getattr(metrics, stage).count == 2
            assert getattr(metrics, stage).total > 0
        client.close()
        until(lambda: metrics.streams == 0)


def test_labels_of_errors_are_a_closed_set() -> None:
    """Whatever else happens is `failed`, with nothing of its message."""
    names = {
        ShardDown: "shard_down",
        DeadlineExceeded: "deadline_exceeded",
        Overloaded: "overloaded",
        StaleShardSet: "stale_shard_set",
        ProtocolError: "protocol_error",
        ConfigError: "failed",
        ValueError: "failed",
    }
    assert {kind: result_of(kind("a word")) for kind in names} == names
    assert result_of(None) == "ok"


def test_the_asyncio_face_has_the_same(cluster, cache_dir) -> None:
    """And nothing is registered anywhere by itself."""
    from prometheus_client import REGISTRY

    async def main() -> dict[str, float]:
        config = ClientConfig(deadline_s=20.0, cache_dir=cache_dir)
        async with await AsyncClient.connect(cluster.addresses, config) as client:
            await client.utterance().score([()], [1])
            return shown(client)

    assert asyncio.run(main())["dlm_client_calls_total{result=ok}"] == 1
    names = [metric.name for metric in REGISTRY.collect()]
    assert not [name for name in names if name.startswith("dlm")]


def test_a_registry_takes_one_client(client) -> None:
    """The second would show the same families twice."""
    registry = CollectorRegistry()
    registry.register(client.metrics)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(client.metrics)


def test_a_client_that_never_connected_shows_zeros(cache_dir) -> None:
    """A scrape asks no server."""
    core = Core(FixedEndpoints([Endpoint("127.0.0.1:1")]), ClientConfig(cache_dir=cache_dir))
    now = shown(Client(core))
    assert now["dlm_client_cache_bytes{}"] == 0
    assert now["dlm_client_calls_total{result=ok}"] == 0


def test_threads_lose_no_count() -> None:
    """A hundred thousand calls and messages from eight threads."""
    metrics = ClientMetrics()
    start = threading.Barrier(8)

    def count(_: int) -> None:
        start.wait(WAIT_S)
        for _ in range(12_500):
            metrics.call("ok", 1.0)
            metrics.message("ok", 2, 1, 1.0, 1.0, 1.0, 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert metrics.calls["ok"] == metrics.messages["ok"] == metrics.message_queries.count == 100_000
    assert metrics.stages["plan"].total == metrics.stages["wire"].total == 100_000


def test_a_forked_child_counts_from_zero(client, files) -> None:
    """Its scrapes are another process's."""
    ask(client.utterance(), files.oracle, random_queries(files.oracle, 9, 30))
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        calls = client._core.counts.calls["ok"]
        os.write(writes, f"{calls}".encode())
        os._exit(0)
    os.close(writes)
    assert os.read(reads, 100) == b"0"
    os.close(reads)
    os.waitpid(child, 0)
    assert client._core.counts.calls["ok"] == 1


def test_no_count_is_lost_whoever_counts_at_once() -> None:
    """Callers that plan, the loop that gathers, and what falls back."""
    counts = ClientMetrics()

    def count() -> None:
        for _ in range(2000):
            counts.planned(3, 2, 1)
            counts.sent(0, 0, 1, 0)
            counts.fell_back(5)

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
    assert (now.queries, now.local_hits, now.duplicates, now.bigram_fallback) == (
        24_000,
        16_000,
        16_000,
        40_000,
    )
