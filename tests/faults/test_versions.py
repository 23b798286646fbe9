"""This version and the one before, side by side: clients of both ask servers of both while the
servers of one are replaced by those of the other.

`DLM_VERSION_BEFORE` is the Python of an environment that holds the version before; `.ci/run` makes
it from the commit that `golden/before.txt` names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from client.questions import random_queries, save_queries
from cluster import WAIT_S, ModelFiles, build, free_ports, until
from dlm.client.cluster_file import Endpoint, write_cluster_file
from models import random_model

BEFORE = os.environ.get("DLM_VERSION_BEFORE", "")
SHARDS, REPLICAS = 2, 2

# A decoder: it asks again and again, compares bits, and prints at its end what became of its calls.
DECODER = """
import json, pickle, signal, sys, time
from pathlib import Path
import dlm
from dlm.client import Client, ClientConfig
contexts, words, expected = pickle.loads(Path(sys.argv[2]).read_bytes())
ending = []
signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
told = {"version": dlm.__version__, "calls": 0, "wrong": 0, "failed": []}
with Client.connect(sys.argv[1], ClientConfig(cache_dir=sys.argv[3], deadline_s=60.0)) as client:
    while not ending:
        time.sleep(0.01)  # servers start beside it
        try:
            answers = client.utterance().score(contexts, words)
            told["calls"] += 1
            told["wrong"] += answers.log10_prob.tobytes() != expected
            if told["calls"] == 1:
                print("asks", flush=True)
        except Exception as exc:
            told["failed"].append(repr(exc))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model in two shards, written by this version."""
    model = random_model(7, order=4, words=60, per_order=400)
    return build(model, tmp_path_factory.mktemp("versions"), SHARDS)


def environ(python: str) -> dict[str, str]:
    """Of an installed version: it must not see the code of this checkout."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return kept if python == BEFORE else dict(os.environ)


class Servers:
    """A server per shard and replica, each of either version, at an address that stays."""

    def __init__(self, files: ModelFiles, folder: Path) -> None:
        self.files, self.folder = files, folder
        self.ports = free_ports(SHARDS * REPLICAS)
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.cluster = folder / "cluster.toml"
        write_cluster_file(self.cluster, [Endpoint(f"127.0.0.1:{port}") for port in self.ports])

    def start(self, place: int, python: str) -> None:
        """Starts one by the command, and waits until it is ready."""
        ready = self.folder / f"{place}.json"
        ready.unlink(missing_ok=True)
        line = ["serve", self.files.directory, "--shard", place % SHARDS, "--port"]
        line += [self.ports[place], "--ready-file", ready]
        self.running[place] = process = subprocess.Popen(
            [python, "-m", "dlm", *map(str, line)],
            cwd=self.folder,
            env={**environ(python), "DLM_SERVER_DRAIN_GRACE_S": "0.2"},
            stderr=subprocess.DEVNULL,
        )
        until(ready.exists, process)

    def stop(self, place: int) -> None:
        """As an operator does; it drains."""
        process = self.running[place]
        process.terminate()
        assert process.wait(WAIT_S) == 0

    def end(self, place: int) -> None:
        """At once."""
        self.running[place].kill()
        self.running[place].wait()


@contextmanager
def decoding(python: str, servers: Servers, queries: Path) -> Iterator[subprocess.Popen[str]]:
    """A decoder of a version, which has asked once."""
    cache = servers.folder / Path(python).parent.parent.name
    process = subprocess.Popen(
        [python, "-c", DECODER, servers.cluster, queries, cache],
        cwd=servers.folder,
        env=environ(python),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "asks\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not BEFORE, reason="DLM_VERSION_BEFORE names no Python of the version before")
def test_servers_are_upgraded_and_taken_back_one_by_one_under_clients_of_both_versions(
    files: ModelFiles, tmp_path: Path
) -> None:
    """No call fails, and every score has the model's bits."""
    queries = tmp_path / "queries"
    save_queries(queries, files.oracle, random_queries(files.oracle, 5, 100))
    servers = Servers(files, tmp_path)
    both = (BEFORE, sys.executable)
    with ExitStack() as stack:
        for place in range(SHARDS * REPLICAS):
            servers.start(place, BEFORE)
            stack.callback(servers.end, place)
        decoders = [stack.enter_context(decoding(one, servers, queries)) for one in both]
        for python in (sys.executable, BEFORE):
            for place in range(SHARDS * REPLICAS):
                servers.stop(place)
                servers.start(place, python)
        for decoder in decoders:
            decoder.send_signal(signal.SIGTERM)
        told = [json.loads(one.communicate(timeout=WAIT_S)[0]) for one in decoders]
    for one in told:
        assert one["calls"] > 100
        assert (one["wrong"], one["failed"]) == (0, [])
    assert told[0]["version"] != told[1]["version"]
