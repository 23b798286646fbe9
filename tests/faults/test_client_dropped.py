"""Clients that nobody closes leave nothing behind: no descriptor, no thread."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
from client.questions import assert_equal, random_queries
from cluster import WAIT_S, Cluster, ModelFiles, ProcessServer, until
from dlm.client import AsyncClient, Client, ClientConfig

DROPPED = 20
# What a process may open meanwhile for other reasons.
SPARE = 8


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """A server for each shard."""
    with Cluster(files, kind=ProcessServer) as running:
        yield running


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()


def synchronous(where: list[str], config: ClientConfig, queries: Any, expected: Any) -> None:
    """Uses a client, and drops it."""
    client = Client.connect(where, config)
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    assert_equal(client.utterance().score(contexts, words), expected)


def asynchronous(where: list[str], config: ClientConfig, queries: Any, expected: Any) -> None:
    """The same of the asyncio face."""

    async def use() -> None:
        client = await AsyncClient.connect(where, config)
        contexts, words = [c for c, _ in queries], [w for _, w in queries]
        assert_equal(await client.utterance().score(contexts, words), expected)

    asyncio.run(use())


def copied(where: list[str], config: ClientConfig, queries: Any, expected: Any) -> None:
    """The same of a copy."""
    with Client.connect(where, config) as client:
        frozen = pickle.dumps(client)
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    assert_equal(pickle.loads(frozen).utterance().score(contexts, words), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "beats", [pytest.param(False, marks=pytest.mark.slow), True], ids=["none", "beats"]
)
@pytest.mark.parametrize("use", [synchronous, asynchronous, copied])
def test_clients_that_are_dropped_hold_no_descriptors_and_no_threads(
    files, cluster, tmp_path, use: Callable[..., None], beats: bool
) -> None:
    """Twenty, each of which asked every server."""
    config = ClientConfig(deadline_s=WAIT_S, cache_dir=tmp_path, heartbeats=beats)
    queries = random_queries(files.oracle, 3, 60)
    expected = [files.oracle.score(c, w) for c, w in queries]
    for _ in range(2):
        use(cluster.addresses, config, queries, expected)
    gc.collect()
    most = [have + SPARE for have in held()]
    for _ in range(DROPPED):
        use(cluster.addresses, config, queries, expected)

    def gone() -> bool:
        gc.collect()
        return all(have <= limit for have, limit in zip(held(), most, strict=True))

    until(gone)


DROP_LOCAL = """
import gc, sys
from dlm import Client
from dlm.client.core import LocalScorer
for number in range(20):
    client = Client.local(sys.argv[1])
    if number % 2:
        client.close()
    del client
gc.collect()
print(sum(isinstance(one, LocalScorer) for one in gc.get_objects()))
"""


def test_local_clients_that_are_dropped_leave_nothing(files) -> None:
    """Closed or not, in a process that never asks a server, so that no loop ever runs."""
    done = forked.script(DROP_LOCAL, files.directory)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


# Ends while four threads decode and nobody closes the client. What is registered first is called
# last: just before the interpreter takes itself apart.
ENDS = """
import atexit, sys, threading

@atexit.register
def last():
    print(*(t.name for t in threading.enumerate() if "poll" in t.name or t.name == "dlm-client"))

from dlm import Client, ClientConfig

client = Client.connect(sys.argv[2:], ClientConfig(cache_dir=sys.argv[1]))
utterance = client.utterance()
answered = threading.Semaphore(0)

def decode():
    while True:
        utterance.score_sentences([[5, 6, 7, 8, 9]])
        answered.release()

for _ in range(4):
    threading.Thread(target=decode, daemon=True).start()
for _ in range(40):
    answered.acquire()
"""


@pytest.mark.slow
def test_a_program_that_ends_while_it_decodes_has_no_thread_inside_grpc(cluster, tmp_path) -> None:
    """One would run on while the interpreter takes itself apart. It ends in silence, with 0."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path), *cluster.addresses],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
