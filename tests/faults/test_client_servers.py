"""Servers that stall, die, come back and move; and a client that forks meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
from client.questions import ask, assert_equal, queries_to, random_queries, save_queries, submit
from client.scripted import Clients, free
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, until
from dlm.client import Client
from dlm.errors import DeadlineExceeded, ShardDown, UnavailableError


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """A process for each shard; a test that ends one starts another in its place."""
    with Cluster(files, kind=ProcessServer) as running:
        yield running


def answers_again(client: Client, files: ModelFiles, queries) -> bool:
    """Whether the client answers now; rightly, if so."""
    try:
        ask(client.utterance(), files.oracle, queries, deadline_s=2.0)
    except UnavailableError:
        return False
    return True


@pytest.mark.promise("deadline")
def test_a_stopped_server_costs_its_callers_the_deadline_and_no_more(
    files, cluster, connect
) -> None:
    """DeadlineExceeded in time, the other shard answers on; then right answers again."""
    client = connect(cluster, window=2)
    silent, alive = queries_to(files, 0), queries_to(files, 1)
    ask(client.utterance(), files.oracle, silent + alive)
    cluster.servers[0].pause()
    try:
        for _ in range(4):  # more than the window holds
            with pytest.raises(DeadlineExceeded):
                ask(client.utterance(), files.oracle, silent, deadline_s=0.3)
        ask(client.utterance(), files.oracle, alive, deadline_s=WAIT_S)
        # A full window and a queue behind it: all are told, and neither leaks.
        utterance = client.utterance()
        futures = [submit(utterance, [query], 0.4) for query in silent[:20]]
        for future in futures:
            assert isinstance(future.exception(WAIT_S), DeadlineExceeded)
        until(lambda: free(client))
    finally:
        cluster.servers[0].resume()
    until(lambda: answers_again(client, files, silent + alive))
    until(lambda: free(client))


def test_a_server_that_takes_connections_and_is_silent_is_late_not_down(
    files, cluster, connect, tmp_path
) -> None:
    """A new connection to a stopped server: its handshake is waited for as long as the call may."""
    silent, alive = queries_to(files, 0), queries_to(files, 1)
    cluster.servers[0].pause()
    try:
        client = connect(cluster.write(tmp_path / "cluster.toml"), connect_s=0.5)
        ask(client.utterance(), files.oracle, alive)
        with pytest.raises(DeadlineExceeded):
            ask(client.utterance(), files.oracle, silent, deadline_s=0.5)
    finally:
        cluster.servers[0].resume()
    until(lambda: answers_again(client, files, silent + alive))


def test_a_killed_server_is_told_at_once_and_found_again_at_its_port(
    files, cluster, connect
) -> None:
    """ShardDown long before the deadline; the same client answers once the server is back."""
    client = connect(cluster)
    utterance = client.utterance()
    dead, alive = queries_to(files, 0), queries_to(files, 1)
    ask(client.utterance(), files.oracle, dead + alive)
    port = cluster.servers[0].port
    cluster.servers[0].end()
    begun = time.monotonic()
    with pytest.raises(ShardDown) as caught:
        utterance.score([c for c, _ in dead], [w for _, w in dead], deadline_s=WAIT_S)
    assert re.fullmatch(
        rf"shard 0 of shard set [0-9a-f]{{32}}: .* \(127\.0\.0\.1:{port}\) "
        rf".*: .*{port}.*`dlm status`.*",
        str(caught.value),
    )
    assert time.monotonic() - begun < WAIT_S / 2
    ask(client.utterance(), files.oracle, alive)
    # Some queries of the call are answered, one is not: the call fails as a whole.
    with pytest.raises(ShardDown):
        ask(client.utterance(), files.oracle, dead + alive)
    cluster.servers[0] = ProcessServer(files.directory, 0, port).ready()
    until(lambda: answers_again(client, files, dead + alive))
    answers = utterance.score([c for c, _ in dead], [w for _, w in dead])
    assert_equal(answers, [files.oracle.score(c, w) for c, w in dead])


def test_a_server_that_moved_is_found_through_the_cluster_file(
    files, cluster, connect, tmp_path
) -> None:
    """cluster.toml is written anew; the same client reads it without being opened again."""
    path = cluster.write(tmp_path / "cluster.toml")
    client = connect(path)
    dead, alive = queries_to(files, 1), queries_to(files, 0)
    ask(client.utterance(), files.oracle, dead + alive)
    cluster.servers[1].end()
    with pytest.raises(ShardDown):
        ask(client.utterance(), files.oracle, dead)
    cluster.servers[1] = ProcessServer(files.directory, 1).ready()
    cluster.write(path)
    until(lambda: answers_again(client, files, dead + alive))


@pytest.mark.parametrize("listed", ["addresses", "cluster.toml"])
def test_a_client_connects_while_a_shard_is_down(
    files, cluster, connect, tmp_path, listed: str
) -> None:
    """Queries of that shard fail, all others are answered; when it comes, so are these."""
    dead, alive = queries_to(files, 0), queries_to(files, 1)
    port = cluster.servers[0].port
    where = cluster.addresses if listed == "addresses" else cluster.write(tmp_path / "cluster.toml")
    found = f".*127.0.0.1:{port}"  # cluster.toml still names it
    if listed == "addresses":
        found = "no known server"
    cluster.servers[0].end()
    client = connect(where)
    ask(client.utterance(), files.oracle, alive)
    looked = client.stats.refreshes
    for _ in range(50):
        with pytest.raises(ShardDown, match=f"^shard 0 of shard set .*: {found}.*`dlm status`"):
            ask(client.utterance(), files.oracle, dead)
    assert client.stats.refreshes - looked < 10  # the servers are not asked for every failure
    ask(client.utterance(), files.oracle, alive)
    cluster.servers[0] = ProcessServer(files.directory, 0, port).ready()
    until(lambda: answers_again(client, files, dead + alive))


def test_a_client_with_an_empty_cache_starts_from_whichever_shard_answers(
    files, cluster, tmp_path
) -> None:
    """Shard 0 is down; the low orders come from another server."""
    port = cluster.servers[0].port
    addresses = cluster.addresses
    cluster.servers[0].end()
    try:
        with Clients(tmp_path / "cold") as cold:
            ask(cold(addresses).utterance(), files.oracle, queries_to(files, 1))
    finally:
        cluster.servers[0] = ProcessServer(files.directory, 0, port).ready()


FORKING = """
import multiprocessing, os, pickle, sys, threading
from pathlib import Path
from dlm.client import Client, ClientConfig
from dlm.client.config import HeartbeatConfig

contexts, words, bits = pickle.loads(Path(sys.argv[1]).read_bytes())
config = ClientConfig(
    deadline_s=30,
    cache_dir=Path(sys.argv[2]),
    heartbeats=sys.argv[3] == "beats",
    heartbeat_config=HeartbeatConfig(interval_s=0.01, timeout_s=10.0),
)
client = Client.connect(sys.argv[4:], config)
utterance = client.utterance()

def right(_=None):
    return utterance.score(contexts, words).log10_prob.tobytes() == bits

def work(stop):
    while not stop.is_set():
        if not right():
            os._exit(3)

assert right()
stop = threading.Event()
threads = [threading.Thread(target=work, args=(stop,), daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
asked = client.stats.messages
for _ in range(3):
    child = os.fork()
    if child == 0:
        fresh = client.stats.messages == 0
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if right() else 1)
        both = right() and os.waitpid(grandchild, 0)[1] == 0
        client.close()
        os._exit(0 if both and fresh else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    assert right()
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(pool.map(right, range(8)))
stop.set()
for thread in threads:
    thread.join()
assert right() and client.stats.messages > asked
client.close()
print("done")
"""


@pytest.mark.promise("shared_clients")
@pytest.mark.parametrize("heartbeats", ["beats", pytest.param("none", marks=pytest.mark.slow)])
def test_a_client_survives_fork_while_calls_are_in_flight(
    files, cluster, connect, tmp_path: Path, heartbeats: str
) -> None:
    """Threads ask without end, heartbeats go out a hundred times a second; children, a grandchild
    and a pool get right answers, so do they."""
    queries = random_queries(files.oracle, 40, 60)
    save_queries(tmp_path / "queries", files.oracle, queries)
    given = (tmp_path / "queries", tmp_path / "cache", heartbeats, *cluster.addresses)
    process = forked.script(FORKING, *given)
    assert (process.stdout, process.returncode, process.stderr) == ("done\n", 0, "")
