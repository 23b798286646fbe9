"""dlm.gateway.app.serve: gateways as processes, on one port and behind a balancer."""

from __future__ import annotations

import json
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cluster import Cluster, ModelFiles, free_ports, until
from dlm.gateway.answers import SERVICE
from dlm.wire._pb import lm_pb2 as pb
from gateway.gateways import DOORS, Caller, CommandGateway
from server.calls import fetch

# What a caller says to gRPC of several gateways: take turns, and ask another where one is gone.
BALANCED = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ],
}


def test_processes_share_both_ports(files: ModelFiles, tmp_path: Path) -> None:
    """Each answers by each door; nobody meets one before it can answer."""
    ports = free_ports(4)
    line = ("--local", files.directory, "--share-port", "--port", ports[0], "--http-port", ports[1])

    def answered() -> set[tuple[int, str]]:
        """Process and door of each call that was answered."""
        found = set()
        for port in ports[2:]:
            text = fetch(port, "/metrics")[1]
            found |= {
                (port, door)
                for door in ("grpc", "http")
                if f'call="Score",door="{door}",result="ok"' in text
            }
        return found

    def ask() -> None:
        for door in DOORS:
            caller = Caller(gateway, door)
            assert caller("Score", sentences=["a"]).scores
            caller.close()

    with (
        CommandGateway(*line, "--metrics-port", ports[2], cwd=tmp_path, name="one") as gateway,
        CommandGateway(*line, "--metrics-port", ports[3], cwd=tmp_path, name="two") as other,
    ):
        assert gateway.running.port == other.running.port
        while len(answered()) < 4:
            ask()


@pytest.fixture
def balanced(files: ModelFiles, tmp_path: Path) -> Iterator[Any]:
    """Two gateways to the same servers, and a channel that takes turns between them."""
    with Cluster(files) as cluster, ExitStack() as stack:
        line = ("--cluster", cluster.write(tmp_path / "cluster.toml"))
        gateways = [
            stack.enter_context(CommandGateway(*line, cwd=tmp_path, name=f"gateway-{at}"))
            for at in range(2)
        ]
        target = ",".join(f"127.0.0.1:{one.running.port}" for one in gateways)
        options = [("grpc.service_config", json.dumps(BALANCED))]
        yield gateways, stack.enter_context(grpc.insecure_channel(f"ipv4:{target}", options))


@pytest.mark.promise("gateway_exact")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_nobody_notices_that_one_of_two_gateways_ends(
    balanced: Any, files: ModelFiles, number: signal.Signals
) -> None:
    """Beams go on through its end, on states of either, with the oracle's bits."""
    gateways, channel = balanced
    extend = channel.unary_unary(
        f"/{SERVICE}/Extend",
        request_serializer=pb.ExtendRequest.SerializeToString,
        response_deserializer=pb.ExtendReply.FromString,
    )
    vocabulary, words = files.oracle.vocabulary, files.words()
    ended, failures, steps = threading.Event(), [], [0, 0]

    def decode(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not ended.is_set():
                said, states = [vocabulary.begin_id], []
                for _ in range(8):
                    word = int(rng.integers(3, len(words)))
                    reply = extend(pb.ExtendRequest(states=states, word_ids=[word]), timeout=20.0)
                    expected = files.oracle.score(said, word).log10_prob
                    assert np.float32(reply.log10_probs[0]) == np.float32(expected)
                    said, states = [*said, word], list(reply.states)
                    steps[seed] += 1
        except Exception as exc:  # noqa: BLE001 - the test shows it
            failures.append(exc)

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: min(steps) >= 40 or bool(failures))
    if number is signal.SIGKILL:
        gateways[0].kill()
    else:
        assert gateways[0].stop(number) == 0
    after = [count + 40 for count in steps]
    until(lambda: all(map(int.__ge__, steps, after)) or bool(failures))
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
def test_a_gateway_that_can_open_no_more_files_says_so(files: ModelFiles, tmp_path: Path) -> None:
    """Its balancer sends no further callers; it is ready again afterwards, with 200 to spare."""
    (port,) = free_ports(1)
    with CommandGateway("--local", files.directory, "--metrics-port", port, cwd=tmp_path) as one:
        pid = one.ready().process.pid
        limit = 200 + max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        with ExitStack() as held:
            for _ in range(limit):
                place = ("127.0.0.1", one.running.http_port)
                held.enter_context(socket.create_connection(place))
            until(lambda: fetch(port, "/readyz")[0] == 503)
            assert f"{limit} files" in fetch(port, "/readyz")[1]
        until(lambda: fetch(port, "/readyz") == (200, "ready\n"))
