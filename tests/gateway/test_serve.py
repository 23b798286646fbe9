"""dlm.gateway.app.serve: gateways as processes, on one port and behind a balancer."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cluster import Cluster, ModelFiles, children, free_ports, until
from dlm.gateway.answers import SERVICE
from dlm.wire._pb import lm_pb2 as pb
from gateway.gateways import DOORS, Caller, CommandGateway

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


def test_workers_share_both_ports(files: ModelFiles, tmp_path: Path) -> None:
    """Each answers by each door; one that dies is replaced, and nobody meets the new one before it
    can answer."""
    (metrics,) = free_ports(1)
    line = ("--local", files.directory, "--workers", 2, "--metrics-port", metrics)

    def answered() -> set[tuple[str, str]]:
        """Worker and door of each call that was answered."""
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer:
            text = answer.read().decode()
        return {
            (worker, door)
            for worker in "01"
            for door in ("grpc", "http")
            if f'call="Score",door="{door}",result="ok",worker="{worker}"' in text
        }

    def ask() -> None:
        for door in DOORS:
            caller = Caller(gateway, door)
            assert caller("Score", sentences=["a"]).scores
            caller.close()

    with CommandGateway(*line, cwd=tmp_path) as gateway:
        assert gateway.running.workers == 2
        while len(answered()) < 4:
            ask()
        before = children(gateway.process.pid)
        started = [
            json.loads(line) for line in gateway.errors.splitlines() if "worker.started" in line
        ]
        ready = gateway.errors.count('"gateway.ready"')
        assert ready >= 2
        os.kill(started[0]["pid"], signal.SIGKILL)
        until(lambda: len({*children(gateway.process.pid)} - {*before}) == 1)

        def is_ready() -> bool:
            ask()  # fails if the new worker takes it before it is ready
            return gateway.errors.count('"gateway.ready"') > ready

        until(is_ready)


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
