"""The open-loop driver beside a bare gRPC client of the same messages, at a low rate.

    python tests/benchmarks/open_loop.py [TRACE] [--rate R --seconds S --rounds N]

Starts one server of the packaged model, and sends the requests of TRACE that need a message, at
the same planned times, in turns, each in a process of its own, all counting from the planned time:

    bare      shares no code with dlm: a loop over one grpcio stream that sends the recorded bytes
    client    a plain loop that calls `dlm.Client`, without the driver
    async     the same with `dlm.AsyncClient`, on the driver's event loop
    loadtest  the driver

So bare to client is what dlm's client costs, client to async what asyncio adds, and async to
loadtest the driver's own part. Prints percentiles, these ratios, and dlm's stages.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("bare", "client", "async", "loadtest")
PERCENTILES = (10, 50, 95, 99)  # the first also means something on a busy machine


# -- the bare client: nothing above this line or below it in this process imports dlm or loadtest --


def bare(address: str, messages: Path) -> None:
    """Sends the messages of a file when they are due; prints latencies in seconds."""
    import grpc

    due, requests = [], []
    for line in messages.read_text().splitlines():
        at_s, data = line.split()
        due.append(float(at_s))
        requests.append(bytes.fromhex(data))
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def stream() -> Iterator[bytes]:
        while (data := outgoing.get()) is not None:
            yield data

    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        replies = channel.stream_stream("/dlm.v1.Shard/Exchange")(stream())
        for data in requests[:20]:
            outgoing.put(data)
            next(replies)
        start = time.monotonic() + 0.2
        latencies = []
        for at_s, data in zip(due, requests, strict=True):
            time.sleep(max(start + at_s - time.monotonic(), 0.0))
            outgoing.put(data)
            next(replies)
            latencies.append(time.monotonic() - start - at_s)
        outgoing.put(None)
    print(json.dumps(latencies))


def sequenced(request: bytes, number: int) -> bytes:
    """A ScoreRequest with a sequence (field 8, varint): fields may be appended to a message."""
    out, value = bytearray(b"\x40"), number
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    return request + bytes(out) + bytes([value])


# -- the whole ------------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace) -> None:
    """Both, in turns."""
    from dlm.client import Client, ClientConfig
    from dlm.client.api.core import Core
    from dlm.client.config.cluster_file import ClusterToml, FixedEndpoints
    from dlm.client.deliver.transport import GrpcConnection
    from dlm.wire._pb import shard_pb2 as pb
    from loadtest.run.local_cluster import local_cluster
    from loadtest.traces.trace import read_trace

    sent: list[bytes] = []

    class Listening(GrpcConnection):
        """Keeps what it sends."""

        def score(self, request: bytes, *rest: Any, **named: Any) -> None:
            """See `Connection.score`."""
            sent.append(bytes(request))
            super().score(request, *rest, **named)

    trace = read_trace(chosen.trace)
    with local_cluster(None, 1, print) as cluster, tempfile.TemporaryDirectory() as scratch:
        endpoints = ClusterToml(cluster).servers()
        config = ClientConfig(deadline_s=30, cache_dir=Path(scratch))
        asked: list[tuple[int, bytes]] = []
        core = Core(FixedEndpoints(endpoints), config, connect=Listening)
        with Client(core) as client:
            handle = client.utterance()
            for number in np.flatnonzero(trace.queries).tolist():
                one = trace.request(number)
                rows = one.words[0] if len(one.words) == 1 else one.words
                sent.clear()
                handle.extend(handle.states_after(one.contexts), rows)
                if len(sent) == 1:
                    asked.append((number, sent[0]))
        count = int(chosen.rate * chosen.seconds)
        due = (np.arange(count) / chosen.rate).tolist()
        picked = [asked[at % len(asked)] for at in range(count)]
        print(f"{len(asked)} requests of one message each, {count} sent at {chosen.rate:g} /s")
        messages = Path(scratch) / "messages"
        lines = [f"{at} {sequenced(r, n + 1).hex()}\n" for n, (at, (_, r)) in enumerate(
            zip(due, picked, strict=True))]  # fmt: skip
        messages.write_text("".join(lines))
        plan = json.dumps({"due": due, "request": [number for number, _ in picked]})
        rows_of: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
        stages: dict[str, float] = {}
        for _ in range(chosen.rounds):
            for kind in rows_of:
                arguments = [str(messages)] if kind == "bare" else [str(chosen.trace)]
                place = endpoints[0].address if kind == "bare" else str(cluster)
                done = subprocess.run(
                    [sys.executable, __file__, f"--{kind}", place, *arguments],
                    input=plan,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                found = json.loads(done.stdout)
                if kind == "loadtest":
                    stages, found = found["stages"], found["latencies"]
                if chosen.json is not None:
                    with chosen.json.open("a") as file:
                        file.write(json.dumps({"kind": kind, "latencies": found}) + "\n")
                rows_of[kind].append(np.percentile(found, PERCENTILES).tolist())
        connection = GrpcConnection(endpoints[0].address)
        beat = connection.heartbeat(pb.HeartbeatRequest(sequence=1), 10.0)
        connection.close()
        assert beat.refused == 0, f"the server refused {beat.refused} messages"
    print("| ms | " + " | ".join(f"p{at}" for at in PERCENTILES) + " |")
    print("|---|" + "---:|" * len(PERCENTILES))
    best = {kind: [1e3 * median(c) for c in zip(*rows, strict=True)]
            for kind, rows in rows_of.items()}  # fmt: skip
    for kind, cells in best.items():
        print(f"| {kind} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    for above, below in (("client", "bare"), ("async", "client"), ("loadtest", "async")):
        ratios = [a / b for a, b in zip(best[above], best[below], strict=True)]
        print(f"| {above} / {below} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
    print("dlm's client, mean ms: " + ", ".join(f"{n} {1e3 * s:.3f}" for n, s in stages.items()))
    print("the bare client does the stage wire alone")


def driven(cluster: str, trace_file: Path) -> None:
    """The driver's replay of a plan that comes as JSON; prints latencies and stages."""
    import asyncio

    from dlm.client import AsyncClient, ClientConfig
    from loadtest.run.replay import Replay
    from loadtest.run.worker import precise_loop
    from loadtest.traces.schedule import Schedule
    from loadtest.traces.trace import read_trace

    given = json.loads(sys.stdin.read())
    trace = read_trace(trace_file)
    request = np.array(given["request"], np.int32)
    plan = Schedule(np.array(given["due"]), request, np.arange(len(request), dtype=np.int32))

    async def go() -> None:
        async with AsyncClient.connect(cluster, ClientConfig(deadline_s=30)) as client:
            replay = Replay(client, trace, 1e6, lambda record: None)
            replay.prepare(request.tolist())
            warm = Schedule(plan.due_s[:20], request[:20], plan.stream[:20])
            await replay.open_loop(warm, time.monotonic(), float(warm.due_s[-1]))
            records: list[Any] = []
            replay = Replay(client, trace, 1e6, records.append)
            replay.prepare(request.tolist())
            latencies: list[float] = []
            replay.watch = latencies.append
            await replay.open_loop(plan, time.monotonic() + 0.2, float(plan.due_s[-1]))
            stages = {}
            for model_info in client.metrics.collect():
                if model_info.name == "dlm_client_stage_seconds":
                    for sample in model_info.samples:
                        if sample.name.endswith(("_sum", "_count")):
                            both = stages.setdefault(sample.labels["stage"], [0.0, 0.0])
                            both[sample.name.endswith("_count")] = sample.value
            means = {name: total / count for name, (total, count) in stages.items() if count}
            print(json.dumps({"latencies": latencies, "stages": means}))

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(go())


def plain(cluster: str, trace_file: Path, kind: str) -> None:
    """A loop that calls dlm's client when requests of a plan are due, one after the other."""
    import asyncio

    from dlm.client import AsyncClient, Client, ClientConfig
    from loadtest.run.worker import precise_loop
    from loadtest.traces.trace import read_trace

    given, trace = json.loads(sys.stdin.read()), read_trace(trace_file)
    config = ClientConfig(deadline_s=30)
    due, numbers = given["due"], given["request"]
    latencies: list[float] = []

    def prepared(client: Any) -> list[Any]:
        handle, known = client.utterance(), {}
        for number in set(numbers):
            one = trace.request(number)
            rows = [[handle.vocabulary.id_of(word) for word in row] for row in one.words]
            ids = np.array(rows, np.uint32)
            known[number] = (handle.states_after(one.contexts), ids[0] if len(ids) == 1 else ids)
        return [known[number] for number in numbers]

    def count(start: float, at_s: float) -> None:
        latencies.append(time.monotonic() - start - at_s)

    if kind == "client":
        with Client.connect(cluster, config) as client:
            asks = prepared(client)
            for states, words in asks[:20]:
                client.utterance().extend(states, words)
            start = time.monotonic() + 0.2
            for at_s, (states, words) in zip(due, asks, strict=True):
                time.sleep(max(start + at_s - time.monotonic(), 0.0))
                client.utterance().extend(states, words)
                count(start, at_s)
    else:

        async def go() -> None:
            async with AsyncClient.connect(cluster, config) as client:
                asks = prepared(client)
                for states, words in asks[:20]:
                    await client.utterance().extend(states, words)
                start = time.monotonic() + 0.2
                for at_s, (states, words) in zip(due, asks, strict=True):
                    await asyncio.sleep(max(start + at_s - time.monotonic(), 0.0))
                    await client.utterance().extend(states, words)
                    count(start, at_s)

        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(go())
    print(json.dumps(latencies))


def main() -> None:
    """A client, as its parent asked; else the whole."""
    if sys.argv[1:2] == ["--bare"]:
        bare(sys.argv[2], Path(sys.argv[3]))
        return
    if sys.argv[1:2] in (["--client"], ["--async"]):
        plain(sys.argv[2], Path(sys.argv[3]), sys.argv[1][2:])
        return
    if sys.argv[1:2] == ["--loadtest"]:
        driven(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    packaged = ROOT / "loadtest/traces/rescoring.parquet"
    parser.add_argument("trace", type=Path, nargs="?", default=packaged)
    parser.add_argument("--rate", type=float, default=20.0, help="messages per second")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file that all latencies are appended to")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
