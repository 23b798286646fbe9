"""A client chooses among the models of the servers; and servers of several processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator

import pytest

from client.questions import assert_equal, random_queries
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, ThreadServer, until
from dlm.client import AsyncClient, Client, ClientConfig
from dlm.errors import ConfigError, DlmError, FamilyMismatch
from dlm.index.shard import Shard


@pytest.fixture(scope="module")
def both(files: ModelFiles, other_files: ModelFiles) -> Iterator[list[str]]:
    """Addresses of servers that hold two models: three shards of the first, two of the second."""
    servers = [
        ThreadServer(
            [
                Shard.open(one.directory, index)
                for one in (other_files, files)
                if index < one.manifest.shards
            ]
        )
        for index in range(3)
    ]
    try:
        yield [server.ready().address for server in servers]
    finally:
        for server in servers:
            server.end()


@pytest.fixture
def config(cache_dir) -> ClientConfig:
    """With time for a busy machine."""
    return ClientConfig(deadline_s=30.0, cache_dir=cache_dir)


def check(client: Client, files: ModelFiles) -> None:
    """Fails unless the client's answers are those of the model."""
    assert client.manifest.shard_set == files.manifest.shard_set
    queries = random_queries(files.oracle, 3, 200)
    answers = client.utterance().score([c for c, _ in queries], [w for _, w in queries])
    assert_equal(answers, [files.oracle.score(c, w) for c, w in queries])


def answers_again(client: Client, files: ModelFiles) -> bool:
    """Whether all servers are found again; what they say is checked."""
    try:
        check(client, files)
    except DlmError:
        return False
    return True


def test_each_client_asks_the_model_that_it_was_given(files, other_files, both, config) -> None:
    """Side by side, on the same servers; a copy by pickle asks the same."""
    for one in (files, other_files):
        with Client.connect(both, config, model=one.manifest.model[:8]) as client:
            check(client, one)
            with pickle.loads(pickle.dumps(client)) as copied:
                check(copied, one)


def test_without_a_name_the_set_of_most_shards_is_asked(files, both, config) -> None:
    """Three shards against two, though the two are the servers' default."""
    with Client.connect(both, config) as client:
        check(client, files)


def test_the_asyncio_face_chooses_too(other_files, both, config) -> None:
    """The same argument."""

    async def main() -> str:
        async with await AsyncClient.connect(
            both, config, model=other_files.manifest.shard_set
        ) as client:
            return client.manifest.shard_set

    assert asyncio.run(main()) == other_files.manifest.shard_set


def test_states_of_one_model_are_refused_by_the_other(files, other_files, both, config) -> None:
    """Though the same servers would answer both."""
    with (
        Client.connect(both, config, model=files.manifest.model) as one,
        Client.connect(both, config, model=other_files.manifest.model) as other,
    ):
        state = one.utterance().begin()
        with pytest.raises(FamilyMismatch):
            other.utterance().extend([state], [1])


@pytest.mark.parametrize("model", ["000000", "no model"])
def test_a_model_that_is_not_there_is_told_at_once(both, config, model) -> None:
    """Not at the first query."""
    with pytest.raises(ConfigError):
        Client.connect(both, config, model=model)


def test_killed_workers_cost_answers_but_make_none_wrong(files, config) -> None:
    """kill -9, one worker after the other, while a client asks: an answer is the oracle's or a
    `DlmError`, and in the end all are there again."""
    queries = random_queries(files.oracle, 4, 100)
    expected = [files.oracle.score(c, w) for c, w in queries]
    with (
        Cluster(files, kind=ProcessServer, workers=2) as cluster,
        Client.connect(cluster.addresses, config) as client,
    ):
        answered = kills = 0
        end = time.monotonic() + WAIT_S
        while answered < 25:
            assert time.monotonic() < end
            if answered == 5 * kills + 2:
                os.kill(cluster.servers[kills % 3].workers()[0], signal.SIGKILL)
                kills += 1
            try:
                answers = client.utterance().score([c for c, _ in queries], [w for _, w in queries])
            except DlmError:
                continue
            assert_equal(answers, expected)
            answered += 1
        assert kills == 5
        until(lambda: answers_again(client, files))
