"""Two servers of each shard, in processes of their own; one is killed, or stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.questions import ask, random_queries
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, until
from faults.load import Load


@pytest.fixture
def twice(files: ModelFiles) -> Iterator[tuple[Cluster, Cluster]]:
    """Two servers of each shard."""
    made = Cluster(files, kind=ProcessServer), Cluster(files, kind=ProcessServer)
    yield made
    for cluster in made:
        cluster.end()


@pytest.mark.promise("replica_killed")
def test_no_caller_sees_that_one_of_two_replicas_is_killed(files, twice, connect) -> None:
    """In the midst of traffic, of any shard, and as it comes back."""
    client = connect([a for c in twice for a in c.addresses])
    for seed in range(60):
        if seed == 10:
            twice[0].servers[0].kill()
        if seed == 30:
            twice[1].servers[1].kill()
        ask(client.utterance(), files.oracle, random_queries(files.oracle, seed, 20))


@pytest.mark.promise("deadline")
@pytest.mark.slow
@pytest.mark.parametrize("hedging", [True, False])
def test_a_stopped_replica_fails_no_call_that_has_a_second(
    files, twice, connect, hedging: bool
) -> None:
    """Also where nothing may be hedged: after half of that second the other replica gets it."""
    addresses = [a for c in twice for a in c.addresses]
    client = connect(addresses, deadline_s=1.0, hedging=hedging)
    stopped = twice[0].servers[0]
    with Load(client, {files.manifest.model: files.oracle}).running() as load:
        load.goes_on(200)  # by now it is known how fast the servers are
        if hedging:
            client._core._lanes.hedging.saved = 0.0
        stopped.pause()
        try:
            # Hedging's bucket fills again with each message, so a hedge may come first.
            until(lambda: client.stats.retries + client.stats.hedges > 0 or bool(load.failed))
            load.goes_on(100)
        finally:
            stopped.resume()
        load.goes_on()


@pytest.mark.promise("rolls")
@pytest.mark.parametrize(
    ("drain_grace_s", "order"),
    [(0.0, (0, 2)), *(pytest.param(s, (0, 2, 0, 2), marks=pytest.mark.slow) for s in (0.0, 3.0))],
)
def test_a_rolling_restart_without_a_pause_loses_no_call(
    files, connect, drain_grace_s: float, order: tuple[int, ...]
) -> None:
    """Each replica gets SIGTERM as soon as the other says that it is ready; also where a server
    refuses from the first moment, as one that was asked twice."""
    servers = [
        ProcessServer(files.directory, index, drain_grace_s=drain_grace_s) for index in (0, 1, 0)
    ]
    try:
        client = connect([server.ready().address for server in servers], deadline_s=30.0)
        oracles = {files.manifest.model: files.oracle}
        with Load(client, oracles).running() as load:
            load.goes_on()
            for index in order:
                old = servers[index]
                old.process.terminate()
                assert old.process.wait(WAIT_S) == 0
                old.end()
                servers[index] = ProcessServer(
                    files.directory, index % 2, old.port, drain_grace_s=drain_grace_s
                ).ready()
            load.goes_on()
    finally:
        for server in servers:
            server.end()
