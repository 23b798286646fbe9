"""Several server processes on one port: whatever supervises them starts and ends each alone."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from cluster import WAIT_S, free_ports, until
from dlm.errors import ConfigError
from dlm.server.app import serve
from dlm.server.config import ServerConfig
from server.calls import Caller

MIB = 1 << 20


@contextlib.contextmanager
def one_of_each(address: str, processes: int) -> Iterator[list[Caller]]:
    """A connection to each process: the system deals them out, so some are made in vain."""
    made: list[Caller] = []
    found: dict[int, Caller] = {}
    try:
        while len(found) < processes:
            assert len(made) < 200
            made.append(Caller(address))
            found.setdefault(made[-1].beat().instance, made[-1])
        yield list(found.values())
    finally:
        for caller in made:
            caller.close()


@pytest.mark.promise("hung_or_dead")
def test_processes_on_a_port_answer_each_for_itself(sharded, start):
    """Each knows how many there are. One is killed: the other answers whoever connects anew; one
    that is started in its place is found by the same address."""
    (port,) = free_ports(1)
    one, two = (start(0, port=port, share_port=True).ready() for _ in range(2))
    rng = np.random.default_rng(1)
    with one_of_each(one.address, 2) as callers:
        for caller in callers:
            asked = sharded.questions.ask(rng, 0, 60)
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
            until(lambda found=caller: found.beat().processes == 2)
            assert (caller.beat().alike, caller.beat().messages) == (2, 1)
            assert 0 < caller.beat().memory_bytes < 200 * MIB
    one.kill()
    asked = sharded.questions.ask(rng, 0, 60)
    for _ in range(5):
        with contextlib.closing(Caller(two.address)) as caller:
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    start(0, port=port, share_port=True).ready()
    with one_of_each(two.address, 2):
        assert two.stop(signal.SIGTERM) == 0


def test_a_process_of_another_shard_on_a_port_is_not_alike(start):
    """Whoever is asked: a roll-out does not take it for one that has loaded the set."""
    (port,) = free_ports(1)
    one, _ = (start(shard, port=port, share_port=True).ready() for shard in (0, 1))
    with one_of_each(one.address, 2) as callers:
        for caller in callers:
            until(lambda found=caller: found.beat().processes == 2)
            assert caller.beat().alike == 1


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (False, True)])
def test_a_second_server_on_a_port_that_is_not_shared_is_refused(sharded, start, first, second):
    """Both must agree to it."""
    (port,) = free_ports(1)
    start(0, port=port, share_port=first).ready()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*another process"):
        serve(ServerConfig(port=port, share_port=second), [sharded.directory], 0)


def test_a_port_for_metrics_that_is_taken_ends_the_start(start):
    """Before anything is compiled, with the setting that it comes from."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(0, metrics_port=taken.getsockname()[1])
        assert server.wait() != 0
    assert "--metrics-port" in server.errors


@pytest.mark.promise("not_ready")
def test_a_file_cut_off_under_a_server_is_named_when_it_starts_again(sharded, start, tmp_path):
    """It dies of the page that is gone; whatever starts it again gets the reason."""
    folder = tmp_path / "shards"
    shutil.copytree(sharded.directory, folder)
    server = start(0, folder).ready()
    path = folder / sharded.manifest.file("shard", 0).name
    with path.open("rb+") as file:
        file.truncate(4096)
    rng = np.random.default_rng(2)
    with contextlib.closing(Caller(server.address)) as caller, contextlib.suppress(grpc.RpcError):
        for _ in range(100):
            asked = sharded.questions.ask(rng, 0, 60)
            caller.score(asked.data, timeout=WAIT_S)
    assert server.wait() == -signal.SIGBUS
    again = start(0, folder)
    assert again.wait() == 1
    assert path.name in again.errors
