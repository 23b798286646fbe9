"""Two servers of each shard, in processes of their own; one is killed, or stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from client.questions import ask, queries_to, random_queries
from client.scripted import Clients
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, build
from models import random_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model in two shards."""
    model = random_model(11, order=4, words=50, per_order=300)
    return build(model, tmp_path_factory.mktemp("twice"), 2)


@pytest.fixture
def twice(files: ModelFiles) -> Iterator[tuple[Cluster, Cluster]]:
    """Two servers of each shard."""
    made = Cluster(files, kind=ProcessServer), Cluster(files, kind=ProcessServer)
    yield made
    for cluster in made:
        cluster.end()


@pytest.fixture
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """Opens clients; closes them with the test."""
    with Clients(tmp_path_factory.mktemp("cache")) as clients:
        yield clients


def test_no_caller_sees_that_one_of_two_replicas_is_killed(files, twice, connect) -> None:
    """In the midst of traffic, of any shard, and as it comes back."""
    client = connect([a for c in twice for a in c.addresses])
    for seed in range(60):
        if seed == 10:
            twice[0].servers[0].kill()
        if seed == 30:
            twice[1].servers[1].kill()
        ask(client.utterance(), files.oracle, random_queries(files.oracle, seed, 20))
    assert client.stats.retries >= 1


def test_a_stopped_replica_costs_half_of_the_deadline_and_no_answer(files, twice, connect) -> None:
    """It holds its messages until their share of the time is over; the other answers them."""
    client = connect([a for c in twice for a in c.addresses], deadline_s=8.0)
    queries = queries_to(files, 0)
    ask(client.utterance(), files.oracle, queries)
    twice[0].servers[0].pause()
    try:
        # One, and perhaps no more: what its heartbeats tell is known before long.
        until = time.monotonic() + WAIT_S
        while not client.stats.retries and time.monotonic() < until:
            ask(client.utterance(), files.oracle, queries[:5])
        assert client.stats.retries
    finally:
        twice[0].servers[0].resume()
    ask(client.utterance(), files.oracle, queries)
