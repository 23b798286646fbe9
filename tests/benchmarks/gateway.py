"""Batches of 50 states by 20 words through a gateway, beside the Python client and bare echoes;
by a call each (Extend), and on a stream of each caller (ExtendStream).

`python tests/benchmarks/gateway.py` starts two servers of the packaged model, a gateway to them,
and a gRPC server that answers as many bytes at once. The ways take turns, in one run.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from dlm.client import Client, ClientConfig
from dlm.client.config.cluster_file import write_cluster_file
from dlm.cluster.processes import running_servers
from dlm.gateway.answers import SERVICE
from dlm.index.making import build_shard_set
from dlm.wire._pb import lm_pb2 as pb

STATES, WORDS, BATCHES, ROUNDS, THREADS = 50, 20, 40, 10, 8
SENTENCE = b'{"sentences": ["the man went to the house and was not at home"]}'


def echo(pipe: Any, size: int) -> None:
    """A gRPC server whose reply has `size` bytes; sends its port."""
    import grpc

    async def run() -> None:
        async def one(data: bytes, context: Any) -> bytes:
            return bytes(size)

        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(one)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("e", {"e": method}),))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def batches_of(utterance: Any) -> list[tuple[Any, Any, bytes]]:
    """States along the packaged sentences and common words: for the client, and as a request."""
    rng = np.random.default_rng(1)
    text = (files("dlm") / "data" / "demo.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    out = []
    for _ in range(BATCHES):
        chosen = [lines[int(at)] for at in rng.integers(0, len(lines), STATES)]
        contexts = [["<s>", *line[: int(rng.integers(len(line)))]] for line in chosen]
        states = utterance.states_after(contexts)
        words = rng.integers(0, 3000, WORDS).astype(np.uint32)
        request = pb.ExtendRequest(states=states.to_bytes(), word_ids=words.tolist())
        out.append((states, words, request.SerializeToString()))
    return out


def median_ms(calls: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Of each, in milliseconds; they take turns, and the first two rounds do not count."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 2):
        for name, call in calls.items():
            for at in range(BATCHES):
                began = time.perf_counter()
                call(at)
                if number > 1:
                    took[name].append(time.perf_counter() - began)
    return {name: 1000 * statistics.median(times) for name, times in took.items()}


def rate(pool: ThreadPoolExecutor, call: Callable[[int], Any]) -> float:
    """Words scored per second by the callers of a pool."""
    began = time.perf_counter()
    list(pool.map(call, [at % BATCHES for at in range(400)]))
    return 400 * STATES * WORDS / (time.perf_counter() - began)


def streams(port: int, batches: list[tuple[Any, Any, bytes]]) -> Callable[[int], Any]:
    """Asks for a batch on a stream of the calling thread, with a connection of its own."""
    import grpc

    of_thread = threading.local()

    def ask(at: int) -> Any:
        if not hasattr(of_thread, "replies"):
            options = [("grpc.use_local_subchannel_pool", 1)]
            of_thread.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
            of_thread.requests = queue.SimpleQueue()
            method = of_thread.channel.stream_stream(f"/{SERVICE}/ExtendStream")
            of_thread.replies = method(iter(of_thread.requests.get, None))
        of_thread.requests.put(batches[at][2])
        return pb.ExtendReply.FromString(next(of_thread.replies))

    return ask


def measure(folder: Path) -> None:
    """Prints the figures."""
    import grpc

    cluster, ready = folder / "cluster.toml", folder / "ready.json"
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        build_shard_set(arpa, folder / "shards", 2)
    with running_servers([folder / "shards"]) as servers:
        endpoints = [server.endpoint for server in servers]
        write_cluster_file(cluster, endpoints)
        line = [sys.executable, "-m", "dlm", "gateway", "--cluster", str(cluster), "--port", "0"]
        more = ["--http-port", "0", "--ready-file", str(ready), "--log-level", "error"]
        gateway = subprocess.Popen([*line, *more])
        try:
            while not ready.exists():
                assert gateway.poll() is None, "the gateway ended"
                time.sleep(0.1)
            where = json.loads(ready.read_text())
            with Client.connect(cluster, ClientConfig(deadline_s=10)) as client:
                utterance = client.utterance()
                batches = batches_of(utterance)
                channel = grpc.insecure_channel(f"127.0.0.1:{where['port']}")
                extend = channel.unary_unary(f"/{SERVICE}/Extend")
                size = len(extend(batches[0][2]))
                spawn = multiprocessing.get_context("spawn")
                mine, theirs = spawn.Pipe()
                spawn.Process(target=echo, args=(theirs, size), daemon=True).start()
                echoes = grpc.insecure_channel(f"127.0.0.1:{mine.recv()}").unary_unary("/e/e")
                calls: dict[str, Callable[[int], Any]] = {
                    "client": lambda at: utterance.extend(*batches[at][:2]),
                    "gateway": lambda at: pb.ExtendReply.FromString(extend(batches[at][2])),
                    "gateway, stream": streams(where["port"], batches),
                    "echo": lambda at: echoes(batches[at][2]),
                }
                for name, ms in median_ms(calls).items():
                    print(f"{name}: p50 {ms:.2f} ms for {STATES} x {WORDS}")
                pools = {name: ThreadPoolExecutor(THREADS) for name in calls if name != "echo"}
                rates: dict[str, list[float]] = {name: [] for name in pools}
                for _ in range(ROUNDS):
                    for name, pool in pools.items():
                        rates[name].append(rate(pool, calls[name]))
                for name, found in rates.items():
                    print(f"{name}: {statistics.median(found):,.0f} words per second")
            sentence(where["http_port"])
        finally:
            gateway.terminate()
            gateway.wait()


def sentence(port: int) -> None:
    """Prints the time of a sentence by HTTP, with a connection of its own."""
    took = []
    for _ in range(50):
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        head = {"Content-Type": "application/json"}
        connection.request("POST", f"/{SERVICE}/Score", SENTENCE, head)
        assert connection.getresponse().read()
        took.append(time.perf_counter() - began)
        connection.close()
    print(f"a sentence by HTTP: p50 {1000 * statistics.median(took):.2f} ms")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        measure(Path(made))
