"""One small sharded model for all tests of the server, its oracle, and its servers."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import forked
from cluster import WAIT_S, ProcessServer, ThreadServer
from dlm.index.making import build_shard_set
from dlm.index.search.shard import Shard
from dlm.ngram.backoff import DictModel
from models import random_model
from server.calls import Asked, Caller, GatedShard, Questions

SHARDS = 3


def is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's tells of a fault of ours: not of a handler that ended with the loop
    of its server, nor of an answer whose client went away with it unread."""
    if not record.name.startswith("grpc") or record.levelno < logging.ERROR:
        return False
    error = record.exc_info[1] if record.exc_info else None
    gone = str(error).startswith('Failed "execute_batch"')  # begun, and not refused at once
    return not gone and not isinstance(error, asyncio.CancelledError)


@pytest.fixture(autouse=True)
def grpc_is_content(caplog):
    """gRPC logs what a handler did wrong (a status in the midst of a write) and goes on."""
    yield
    times = ("setup", "call", "teardown")
    said = [record for when in times for record in caplog.get_records(when) if is_ours(record)]
    assert not said


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Servers in this process look at their files often, and fork what reads shard sets; those in
    processes of their own do both as for users."""
    started = SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr("dlm.server.child.subprocess", started)
    for name in ("app.POLL_S", "sets.POLL_S", "security.EXPIRY_LOOK_S"):
        monkeypatch.setattr(f"dlm.server.{name}", 0.02)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`directory`, `manifest` and `questions` of a random model of order 4, suffixes missing."""
    folder: Path = tmp_path_factory.mktemp("served")
    model = random_model(seed=7, order=4, words=60, per_order=400)
    arpa = model.write(folder / "model.arpa")
    manifest = build_shard_set(arpa, folder / "shards", SHARDS)
    questions = Questions(folder / "shards", manifest, DictModel.from_arpa(arpa))
    return SimpleNamespace(directory=folder / "shards", manifest=manifest, questions=questions)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same of another model, of order 3, in two shards."""
    folder: Path = tmp_path_factory.mktemp("other")
    arpa = random_model(seed=8, order=3, words=40, per_order=200).write(folder / "model.arpa")
    manifest = build_shard_set(arpa, folder / "shards", 2)
    questions = Questions(folder / "shards", manifest, DictModel.from_arpa(arpa))
    return SimpleNamespace(directory=folder / "shards", manifest=manifest, questions=questions)


@pytest.fixture
def asked(sharded) -> Asked:
    """A message to shard 0."""
    return sharded.questions.ask(np.random.default_rng(1), 0)


@pytest.fixture(scope="session")
def servers(sharded):
    """A real server process for each shard."""
    started = [ProcessServer(sharded.directory, i) for i in range(SHARDS)]
    try:
        yield [server.ready() for server in started]
    finally:
        for server in started:
            server.end()


@pytest.fixture(scope="session")
def callers(servers):
    """A connection to each of `servers`."""
    made = [Caller(server.address) for server in servers]
    yield made
    for caller in made:
        caller.close()


@pytest.fixture
def start(sharded):
    """Starts a server process for a shard; ends it with the test."""
    started = []

    def begin(index: int = 0, directory: Path | list[Path] | None = None, **more) -> ProcessServer:
        started.append(ProcessServer(directory or sharded.directory, index, **more))
        return started[-1]

    yield begin
    for server in started:
        server.end()


@pytest.fixture
def gated(sharded):
    """Makes a server in a thread over shard 0 with a gate: (shard, server, caller)."""
    made = []

    def begin(*, open_gate: bool = True, wait: bool = True, **config):
        shard = GatedShard(Shard.open(sharded.directory, 0))
        if not open_gate:
            shard.gate.clear()
        server = ThreadServer(shard, own_loop=True, **config)
        if wait:
            server.ready()
        else:  # the warm-up begins once the port is bound
            assert shard.entered.acquire(timeout=WAIT_S)
        caller = Caller(server.address)
        made.append((shard, server, caller))
        return made[-1]

    yield begin
    for shard, server, caller in made:
        shard.gate.set()
        caller.close()
        server.end(at_once=True)
