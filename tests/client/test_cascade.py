"""The cascade carried out: a client over real servers that go and come back."""

from __future__ import annotations

import logging
import pickle
import threading
from pathlib import Path

import pytest

import forked
from client.questions import answers_to, assert_each_is_of_its_model, random_queries
from client.scripted import Network, free
from client.test_bigram_fallback import ask
from cluster import Cluster, ModelFiles, ProcessServer, build, until
from dlm.client import Client, ClientConfig, cascade
from dlm.client.client import open_local_fallback
from dlm.client.cluster_file import Endpoint, write_cluster_file
from dlm.client.config import FailoverConfig, HeartbeatConfig
from dlm.client.health import Liveness, Mode
from dlm.errors import (
    ConfigError,
    ModelMismatch,
    ModelSwitched,
    Overloaded,
    QueryError,
    ShardDown,
    ShardFormatError,
)
from dlm.index.search import kernels
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK
from models import random_model

# Quick enough for a test; nothing depends on their being so.
QUICK = {
    "heartbeat_config": HeartbeatConfig(interval_s=0.05, timeout_s=0.5, slow_floor_s=10.0),
    "failover_config": FailoverConfig(wait_s=0.1, max_wait_s=0.5, probe_s=0.05, stable_s=0.0),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Another model, with other words and ids."""
    model = random_model(11, order=3, words=40, per_order=100)
    return build(model, tmp_path_factory.mktemp("local_fallback"), 1)


def mode_is(client: Client, mode: Mode) -> bool:
    """Whether the client's new utterances go there."""
    return client.cascade.mode is mode


def fail(client: Client, network: Network, queries) -> None:
    """Until the client has had enough of it."""
    network.instant = ShardDown("gone")
    handle = client.utterance()
    assert handle.model_info.kind == "full"
    until(lambda: len(answers_to(handle, queries)) < 0 or mode_is(client, Mode.LOCAL_FALLBACK))


@pytest.mark.promise("local_fallback")
def test_new_utterances_go_to_the_small_model_and_come_back(
    cluster, connect, files, small, caplog, network
) -> None:
    """Every score is the oracle's of the model that it names, on the way there and back."""
    caplog.set_level(logging.INFO, "dlm.client")
    client = connect(cluster.addresses, network, local_fallback=small.directory, **QUICK)
    queries = random_queries(files.oracle, 5, 200)
    first = client.utterance()
    assert first.model_info.kind == "full"
    assert ask(client, queries).source is None
    assert (client.cascade.reason, client.cascade.local_fallback) == ("", True)
    fail(client, network, queries)
    assert client.cascade.reason == "failures"

    # What began on the full model ends on its low orders, without any message.
    answers = answers_to(first, queries)
    assert_each_is_of_its_model(files, queries, answers)
    assert set(answers.source.tolist()) == {FULL, BIGRAM_FALLBACK}

    # What is new is scored by the local fallback, by its own words.
    second = client.utterance()
    assert (second.model_info.kind, second.model_info.model) == (
        "local_fallback",
        small.manifest.model,
    )
    words = small.words()[3:20]
    (score,) = second.score_sentences([" ".join(words)])
    expected = small.oracle.score_sentence([w.encode() for w in words])
    assert score.token_log10_prob.tolist() == [float(e.log10_prob) for e in expected]
    assert set(score.token_source.tolist()) == {LOCAL_FALLBACK}
    assert set(second.extend([second.begin()], words).source.reshape(-1).tolist()) == {
        LOCAL_FALLBACK
    }

    # Their states never meet.
    with pytest.raises(ModelMismatch, match="local_fallback model"):
        first.extend([second.begin()], [1])
    with pytest.raises(ModelMismatch, match="full model"):
        second.extend([first.begin()], [1])

    network.instant = None
    until(lambda: mode_is(client, Mode.FULL))
    assert client.utterance().model_info == first.model_info
    again = answers_to(first, queries)
    assert again.source is None
    assert client.cascade.switches == {
        (Mode.LOCAL_FALLBACK, "failures"): 1,
        (Mode.FULL, "recovered"): 1,
    }
    assert client.cascade.reason == "recovered"
    gone, came = [r for r in caplog.records if getattr(r, "event", "") == "client.mode.changed"]
    assert (gone.to, gone.reason, gone.slow_shards) == ("local_fallback", "failures", [])
    assert gone.messages >= gone.failed >= 5
    assert (came.to, came.reason) == ("full", "recovered")


@pytest.mark.promise("local_fallback")
@pytest.mark.parametrize(
    ("every", "switches"),
    [(1250, {}), (800, {(Mode.LOCAL_FALLBACK, "failures"): 1})],
    ids=["0.08 %", "0.125 %"],
)
def test_more_than_a_thousandth_of_the_messages_is_too_many(
    every: int,
    switches: dict[tuple[Mode, str], int],
    cluster,
    connect,
    files,
    small,
    monkeypatch: pytest.MonkeyPatch,
    network: Network,
) -> None:
    """The paper's rule (DLM 3.4); until then what fails is partial, message for message."""
    # On a machine that gives this process no time all messages count all the same, none is late.
    monkeypatch.setattr(cascade, "STOOD_STILL_S", 1e9)
    failover_config = FailoverConfig(min_failures=1, window_s=3600.0, wait_s=60.0, max_wait_s=60.0)
    heartbeat_config = HeartbeatConfig(timeout_s=10.0, slow_floor_s=10.0)
    client = connect(
        cluster.addresses,
        network,
        local_fallback=small.directory,
        failover_config=failover_config,
        heartbeat_config=heartbeat_config,
        deadline_s=60.0,
    )
    handle = client.utterance()
    queries = random_queries(files.oracle, 5, 300)
    ask(client, queries)

    def goes_to_a_shard(query) -> bool:
        sent = len(network.requests)
        answers_to(handle, [query])
        return len(network.requests) > sent

    query = next(one for one in queries if goes_to_a_shard(one))
    sent, real = len(network.requests), network.take
    failed: list[int] = []

    def take(address, request, send) -> None:
        if (len(network.requests) + len(failed) - sent + 1) % every:
            real(address, request, send)
        else:
            failed.append(1)
            raise Overloaded("busy")

    network.take = take  # type: ignore[method-assign]
    partial = 0
    while not failed:
        answers = answers_to(handle, [query])
        partial += answers.source is not None
    messages = len(network.requests) + len(failed)
    until(lambda: client.cascade.switches == switches and client.cascade.messages in (0, messages))
    assert partial == len(failed) == 1
    if not switches:
        assert (client.cascade.messages, client.cascade.failed) == (messages, 1)


def test_while_on_the_small_model_probes_alone_are_sent(cluster, connect, files, small) -> None:
    """One utterance's worth to each shard at a time, and none while one is out."""
    network = Network()
    settings = {**QUICK, "failover_config": FailoverConfig(wait_s=0.05, probe_s=0.05, probes=1000)}
    client = connect(cluster.addresses, network, local_fallback=small.directory, **settings)
    queries = random_queries(files.oracle, 5, 200)
    held = client.utterance()
    fail(client, network, queries)
    network.instant = None
    until(lambda: free(client))
    before = len(network.requests)
    for _ in range(5):
        answers_to(held, queries)
        client.utterance().score_sentences(["a b c"])
    until(lambda: len(network.requests) >= before + 6)
    for _, request in network.requests[before:]:
        assert request.groups.word_counts.tolist() == [5] * 8
        assert request.groups.context_lengths.tolist() == [2] * 8
    assert mode_is(client, Mode.LOCAL_FALLBACK)


@pytest.mark.promise("one_model_per_utterance")
def test_a_handle_that_rescores_is_told_of_the_switch(cluster, connect, files, small) -> None:
    """Its next call raises, until the full model is back; other utterances go on."""
    network = Network()
    client = connect(cluster.addresses, network, local_fallback=small.directory, **QUICK)
    queries = random_queries(files.oracle, 5, 100)
    handle = client.utterance(on_switch="rescore")
    assert len(handle.score([(1, 2)], [3])) == 1
    fail(client, network, queries)
    with pytest.raises(ModelSwitched, match="new utterance"):
        handle.score([(1, 2)], [3])
    rescoring = client.utterance(on_switch="rescore")
    assert rescoring.model_info.kind == "local_fallback"
    assert len(rescoring.score([(1, 2)], [3])) == 1
    network.instant = None
    until(lambda: mode_is(client, Mode.FULL))
    assert len(handle.score([(1, 2)], [3])) == 1
    assert len(rescoring.score([(1, 2)], [3])) == 1  # it ends where it began
    with pytest.raises(QueryError, match="'finish' or 'rescore'"):
        client.utterance(on_switch="mix")


@pytest.mark.promise("local_fallback")
@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_client_that_finds_no_server_begins_on_the_small_model(
    files, small, cache_dir, tmp_path, copied: bool
) -> None:
    """And goes over to the full one when servers come, wherever cluster.toml says by then; so does
    a copy: a process pool may be filled while servers fail."""
    listing = tmp_path / "cluster.toml"
    config = ClientConfig(
        cache_dir=cache_dir, local_fallback=small.directory, connect_s=1.0, **QUICK
    )
    data = b""
    if copied:
        with Cluster(files) as cluster, Client.connect(cluster.write(listing), config) as first:
            data = pickle.dumps(first)
    listing.write_text('[[server]]\naddress = "127.0.0.1:9"\nshard = 0\n')
    with pickle.loads(data) if copied else Client.connect(listing, config) as client:
        assert client.utterance().model_info.kind == "local_fallback"
        assert client.cascade.mode is Mode.LOCAL_FALLBACK
        (score,) = client.utterance().score_sentences(["a b"])
        assert set(score.token_source.tolist()) == {LOCAL_FALLBACK}
        with Cluster(files) as cluster:
            cluster.write(listing)
            until(lambda: mode_is(client, Mode.FULL))
            queries = random_queries(files.oracle, 5, 100)
            assert ask(client, queries, deadline_s=20.0).source is None


@pytest.mark.slow
def test_servers_that_are_gone_are_known_by_their_heartbeats(connect, files, caplog) -> None:
    """And found again; nobody waits for them meanwhile where there is a bigram fallback."""
    caplog.set_level(logging.INFO, "dlm.client")
    with Cluster(files) as cluster:
        client = connect(cluster, bigram_fallback=True, **QUICK)
        until(lambda: [s.health for s in client.cascade.servers] == [Liveness.UP] * 3)
        assert [s.shard for s in client.cascade.servers] == [0, 1, 2]
        assert all(s.ready for s in client.cascade.servers)
        assert all(s.delay_s is not None for s in client.cascade.servers)
        port = cluster.ports[1]
        cluster.servers[1].end()
        until(lambda: client.cascade.servers[1].health is Liveness.DOWN)
        assert [s.ready for s in client.cascade.servers] == [True, False, True]
        assert not client.cascade.local_fallback
        queries = random_queries(files.oracle, 5, 300)
        before = client.stats
        answers = ask(client, queries)
        assert_each_is_of_its_model(files, queries, answers)
        after = client.stats
        assert after.failed == before.failed  # none was sent there
        with Cluster(files, ports=[0, port, 0]):
            until(lambda: client.cascade.servers[1].health is Liveness.UP)
            until(lambda: ask(client, queries).source is None)
    told = [
        (r.shard, r.before, r.after)
        for r in caplog.records
        if getattr(r, "event", "") == "client.server.changed"
    ]
    assert (1, "suspect", "down") in told and (1, "down", "up") in told


def test_a_client_without_fallbacks_sends_no_heartbeats_unless_told(cluster, connect) -> None:
    """And says so when asked how its servers are."""
    quiet = connect(cluster)
    with pytest.raises(ConfigError, match="heartbeats=True"):
        _ = quiet.cascade
    told = connect(cluster, heartbeats=True, **QUICK)
    until(lambda: all(s.health is Liveness.UP for s in told.cascade.servers))
    with pytest.raises(ConfigError, match=r"client\.heartbeats is False.*local fallback"):
        ClientConfig(local_fallback=Path("somewhere"), heartbeats=False)


def test_a_small_model_that_cannot_be_read_is_refused_at_once(
    cluster, connect, small, tmp_path
) -> None:
    """Not when it is needed."""
    with pytest.raises(ConfigError, match="absent"):
        connect(cluster, local_fallback=tmp_path / "absent")
    (tmp_path / "demo.arpa").write_text("\\data\\")
    with pytest.raises(ConfigError, match=r"demo\.arpa is a file"):
        connect(cluster, local_fallback=tmp_path / "demo.arpa")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardFormatError):
        connect(cluster, local_fallback=tmp_path / "empty")


def test_a_client_with_partial_takes_the_small_model_that_cluster_toml_names(
    cluster, connect, files, small, tmp_path
) -> None:
    """Unless the program names one; and a client that wants the model's own scores takes none."""
    endpoints = [Endpoint(address) for address in cluster.addresses]
    path = tmp_path / "cluster.toml"
    write_cluster_file(path, endpoints, local_fallback=small.directory)
    plain = connect(path)
    assert plain._fallback is None
    quiet = connect(path, bigram_fallback=True, heartbeats=False)
    assert quiet._fallback is None
    decoder = connect(path, bigram_fallback=True, **QUICK)
    assert decoder._fallback.local_model.manifest.shard_set == small.manifest.shard_set
    copied = pickle.loads(pickle.dumps(decoder))
    assert copied._fallback.local_model.manifest.shard_set == small.manifest.shard_set
    copied.close()
    own = connect(path, local_fallback=files.directory, **QUICK)
    assert own._fallback.local_model.manifest.shard_set == files.manifest.shard_set


FORKING = """
import multiprocessing, sys, time
from dlm.client import Client, ClientConfig, loop
from dlm.client.config import HeartbeatConfig
from dlm.client.health import Mode
from dlm.client.config import FailoverConfig
from dlm.errors import ShardDown

def until(true):
    begun = time.monotonic()
    while not true():
        assert time.monotonic() < begun + 60
        time.sleep(0.01)

def scored():
    (score,) = client.utterance().score_sentences(["a b c"])
    return client.utterance().model_info.kind, sorted(set(score.token_source.tolist()))

config = ClientConfig(
    deadline_s=20.0,
    cache_dir=sys.argv[1],
    local_fallback=sys.argv[2],
    heartbeat_config=HeartbeatConfig(interval_s=0.05, timeout_s=5.0, slow_floor_s=10.0),
    failover_config=FailoverConfig(wait_s=0.1, max_wait_s=0.5, probe_s=0.05, min_failures=3,
    stable_s=0.0),
)
client = Client.connect(sys.argv[3:], config)
assert scored() == ("full", [0])
watch = client._core.watch()
for _ in range(5):
    loop.post(watch.count, True)
until(lambda: watch.mode is Mode.LOCAL_FALLBACK)

def worker(_):
    first = scored()
    until(lambda: client.cascade.mode is Mode.FULL)
    return first, scored(), all(s.health == "up" for s in client.cascade.servers)

with multiprocessing.get_context("fork").Pool(2) as pool:
    for found in pool.map(worker, range(2), chunksize=1):
        assert found == (("local_fallback", [2]), ("full", [0]), True), found
until(lambda: client.cascade.mode is Mode.FULL)
assert scored() == ("full", [0])
client.close()
print("done")
"""


def test_a_forked_worker_goes_on_in_its_parents_mode_and_comes_back_by_itself(
    files, small, tmp_path
) -> None:
    """With heartbeats and probes of its own."""
    with Cluster(files, kind=ProcessServer) as cluster:
        done = forked.script(FORKING, tmp_path, small.directory, *cluster.addresses)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    told = {"client.mode.changed", "client.server.changed"}  # on stderr without a log of its own
    assert {line.split()[0] for line in done.stderr.splitlines()} <= told


def test_deadlines_that_no_network_could_keep_are_no_failures_of_servers(
    cluster, connect, files, small, network
) -> None:
    """The callers' own: however many are late, nobody else goes over to the local fallback."""
    client = connect(cluster.addresses, network, local_fallback=small.directory, **QUICK)
    queries = random_queries(files.oracle, 5, 100)
    handle = client.utterance()
    answers_to(handle, queries)
    for fair, mode in ((False, Mode.FULL), (True, Mode.LOCAL_FALLBACK)):
        with network.held():
            for _ in range(20):
                answers_to(handle, queries, deadline_s=0.1 if fair else 0.001)
            if fair:
                until(lambda: mode_is(client, Mode.LOCAL_FALLBACK))
        assert client.cascade.mode is mode


def test_failures_are_counted_though_there_is_no_small_model(cluster, connect, files) -> None:
    """And nothing follows from them."""
    network = Network()
    client = connect(cluster.addresses, network, bigram_fallback=True, **QUICK)
    queries = random_queries(files.oracle, 5, 100)
    ask(client, queries)
    network.instant = ShardDown("gone")
    until(lambda: len(ask(client, queries)) > 0 and client.cascade.failed > 10)
    assert client.cascade.mode is Mode.FULL and client.cascade.switches == {}


def test_whatever_arrays_come_the_small_model_compiles_nothing(small) -> None:
    """Slices of states are arrays of another kind; a call would stand still for seconds."""
    utterance = Client(open_local_fallback(small.directory)).utterance()
    before = len(kernels.score_lengths.signatures)
    extension = utterance.extend([utterance.begin()] * 4, [1, 2, 3, 4])
    whole = utterance.extend(extension.states, [5])
    sliced = utterance.extend(extension.states[:, ::2], [5])
    assert (sliced.log10_prob == whole.log10_prob.reshape(4, 4)[:, ::2].reshape(-1, 1)).all()
    assert len(kernels.score_lengths.signatures) == before


def test_the_heartbeats_of_a_client_take_no_thread(cluster, connect) -> None:
    """They come and go on the loop, of two clients in a process as of one."""
    before = {thread.name.split("_")[0] for thread in threading.enumerate()}
    clients = [connect(cluster, heartbeats=True, **QUICK) for _ in range(2)]
    for client in clients:
        until(lambda: all(s.health is Liveness.UP for s in client.cascade.servers))  # noqa: B023
    now = {thread.name.split("_")[0] for thread in threading.enumerate()}
    assert now - before <= {"dlm-client", "dlm-refresh", "dlm-fetch", "dlm-download"}
