"""Servers and client at full load, beside a bare gRPC echo of the same payloads in the same run.

    python tests/benchmarks/serving.py SHARD_SET [--seconds S --rounds R --rows TEXT]

Starts a real server for each shard of the set in the folder SHARD_SET, and as many echo servers
(grpc.aio on uvloop, unary, no work at all); then, in turns, processes of decoders that ask batches
of 50 contexts x 20 words from real text (`workload`), and echo clients with as many calls in
flight, whose payloads are as large as the messages were on average. Messages and queries are those
that the servers counted. Prints a Markdown table; cells are medians over the rounds; R is queries/s
over the echo's messages/s. A second table has the mean time of each stage of a message, by the
metrics of clients and servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import settings
from benchmarks.workload import Mix, Workload, from_text
from dlm.client import AsyncClient, Client, ClientConfig, Phrases, States
from dlm.client.cluster_file import write_cluster_file
from dlm.client.server import Connection
from dlm.cluster.processes import running_servers
from dlm.index.layout import read_manifest
from dlm.wire._pb import shard_pb2 as pb

BATCHES = 400
WORK = "DLM_BENCH_BATCHES"  # set for the processes started here: a file of what they ask
CONTEXTS = 50
CLIENT_STAGES, SERVER_STAGES = "dlm_client_stage_seconds", "dlm_server_stage_seconds"
CLIENT_ORDER = ("plan", "queue", "encode", "wire", "decode")
SERVER_ORDER = ("queue", "decode", "search", "encode", "write")
Batch = tuple[States, np.ndarray]
Stages = dict[str, list[float]]


def asked(vocabulary: Any, order: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batches in ids: contexts (50, order - 1), right-aligned; their lengths; words (50, 20)."""
    with Path(os.environ[WORK]).open("rb") as file:
        work: Workload = pickle.load(file)
    ids = np.array([vocabulary.id_of(w) for w in work.table], np.uint32)
    width = order - 1
    kept = np.minimum(work.context_lengths.astype(int), width)
    ends = np.cumsum(work.context_lengths, dtype=np.int64)
    back = np.arange(width, 0, -1)[None, :]
    used = back <= kept[:, None]
    contexts = np.where(used, ids[work.context_words[np.where(used, ends[:, None] - back, 0)]], 0)
    words = ids[work.words].reshape(len(kept), -1)
    for first in range(0, len(kept), CONTEXTS):
        part = slice(first, first + CONTEXTS)
        lengths = kept[part].astype(np.uint8)
        yield contexts[part].astype(np.uint32), lengths, np.ascontiguousarray(words[part])


def batches(utterance: Any) -> list[Batch]:
    """The batches that a decoder asks, in states and ids of its model."""
    plain = utterance.without_phrases()
    found = [
        (States(plain.model_info, contexts, lengths), words)
        for contexts, lengths, words in asked(plain.vocabulary, plain.order)
    ]
    if utterance.phrases is None:
        return found
    return [(utterance.states_after(states.contexts()), words) for states, words in found]


def phrases_of(vocabulary: Any, count: int) -> Phrases | None:
    """So many phrases of one to three frequent words; None for none."""
    if not count:
        return None
    rng = np.random.default_rng(settings.SEED)
    found: dict[bytes, float] = {}
    while len(found) < count:
        ids = rng.integers(3, 20_000, rng.integers(1, 4))
        found[b" ".join(vocabulary.words[i] for i in ids.tolist())] = 1.0
    return Phrases(found)


def cpu_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(
    times: list[float], began: float, processor: float, stages: Stages | None = None
) -> None:
    """What one client process found, as a line for its parent."""
    print(json.dumps({
        "calls": len(times) / (time.monotonic() - began),
        "p50": float(np.percentile(times, 50)) * 1e3,
        "p99": float(np.percentile(times, 99)) * 1e3,
        "cpu": time.process_time() - processor,
        "stages": stages or {},
    }), flush=True)  # fmt: skip


def stages_of(families: Iterable[Any], name: str) -> Stages:
    """Seconds and messages of each stage, from the metric of that name."""
    found: Stages = {}
    for model_info in families:
        if model_info.name == name:
            for sample in model_info.samples:
                if sample.name.endswith(("_sum", "_count")):
                    both = found.setdefault(sample.labels["stage"], [0.0, 0.0])
                    both[sample.name.endswith("_count")] += sample.value
    return found


def add(total: Stages, more: Stages, sign: int = 1) -> None:
    """total += sign * more"""
    for stage, (seconds, messages) in more.items():
        both = total.setdefault(stage, [0.0, 0.0])
        both[0] += sign * seconds
        both[1] += sign * messages


def wait_for_the_start() -> None:
    """Says that everything is warm, and returns when all others are."""
    print("ready", flush=True)
    sys.stdin.readline()


def decoders_in_threads(
    cluster: str, count: int, seconds: float, apart: int = 37, listed: int = 0
) -> None:
    """A process with `count` decoders on the synchronous face, so many batches apart, each with so
    many phrases."""
    client = Client.connect(cluster, ClientConfig(deadline_s=30))
    phrases = phrases_of(client.vocabulary, listed)
    work = batches(client.utterance(phrases=phrases))
    for batch in work[:30]:
        client.utterance(phrases=phrases).extend(*batch)
    wait_for_the_start()
    began, processor, times = time.monotonic(), time.process_time(), list[float]()

    def decode(number: int) -> None:
        utterance, at = client.utterance(phrases=phrases), number * apart
        while time.monotonic() < began + seconds:
            before = time.perf_counter()
            utterance.extend(*work[at % len(work)])
            times.append(time.perf_counter() - before)
            at += 1

    threads = [threading.Thread(target=decode, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(times, began, processor, stages_of(client.metrics.collect(), CLIENT_STAGES))


async def decoders_in_tasks(cluster: str, count: int, seconds: float) -> None:
    """A process with `count` decoders on the asyncio face."""
    client = await AsyncClient.connect(cluster, ClientConfig(deadline_s=30))
    work = batches(client.utterance())
    for batch in work[:30]:
        await client.utterance().extend(*batch)
    wait_for_the_start()
    began, processor, times = time.monotonic(), time.process_time(), list[float]()

    async def decode(number: int) -> None:
        utterance, at = client.utterance(), number * 37
        while time.monotonic() < began + seconds:
            before = time.perf_counter()
            await utterance.extend(*work[at % len(work)])
            times.append(time.perf_counter() - before)
            at += 1

    await asyncio.gather(*[decode(n) for n in range(count)])
    report(times, began, processor, stages_of(client.metrics.collect(), CLIENT_STAGES))


async def echo_server(size: int) -> None:
    """Answers every call with `size` bytes."""
    reply = os.urandom(size)

    async def answer(_: bytes, __: Any) -> bytes:
        return reply

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("echo.Echo", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def echo_clients(ports: list[str], count: int, size: int, seconds: float) -> None:
    """A process with `count` callers, each with a call to every server at once."""
    request = os.urandom(size)
    options = [("grpc.use_local_subchannel_pool", 1)]
    calls = [
        grpc.aio.insecure_channel(f"127.0.0.1:{p}", options=options).unary_unary("/echo.Echo/Echo")
        for p in ports
    ]
    for call in calls:
        await call(request)
    wait_for_the_start()
    began, processor, times = time.monotonic(), time.process_time(), list[float]()

    async def ask() -> None:
        while time.monotonic() < began + seconds:
            before = time.perf_counter()
            await asyncio.gather(*[call(request) for call in calls])
            times.append(time.perf_counter() - before)

    await asyncio.gather(*[ask() for _ in range(count)])
    report(times, began, processor)


class Turn:
    """One turn of client processes: what they and the servers' processor time say."""

    def __init__(self, commands: list[list[str]], servers: list[int]) -> None:
        me = [sys.executable, __file__]
        processes = [
            subprocess.Popen(me + c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for c in commands
        ]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        before, began = sum(map(cpu_of, servers)), time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = []
        for process in processes:
            assert process.stdout is not None
            said.append(json.loads(process.stdout.readline()))
        self.seconds = time.monotonic() - began
        self.server_cpu = sum(map(cpu_of, servers)) - before
        for process in processes:
            process.kill()
            process.wait()
        self.calls = sum(s["calls"] for s in said)
        self.client_cpu = sum(s["cpu"] for s in said)
        self.p50 = median(s["p50"] for s in said)
        self.p99 = max(s["p99"] for s in said)
        self.stages: Stages = {}
        for one in said:
            add(self.stages, one["stages"])


def counted(addresses: list[str]) -> tuple[int, int]:
    """Messages and distinct queries that the servers have answered."""
    beats = []
    for address in addresses:
        connection = Connection(address)
        beats.append(connection.heartbeat(pb.HeartbeatRequest(sequence=1), 10.0))
        connection.close()
    return sum(b.messages for b in beats), sum(b.queries for b in beats)


def server_stages(ports: list[int]) -> Stages:
    """Of all servers, since their start."""
    found: Stages = {}
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            text = reply.read().decode()
        add(found, stages_of(text_string_to_metric_families(text), SERVER_STAGES))
    return found


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(29400, 60000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError("no ports are free")


LAYOUTS = {
    "8 decoders, 1 process, threads": ("threads", 1, 8),
    "8 decoders, 1 process, same text": ("same", 1, 8),
    "8 decoders, 1 process, asyncio": ("tasks", 1, 8),
    "8 decoders, 2 processes, threads": ("threads", 2, 4),
    "8 decoders, 8 processes": ("threads", 8, 1),
    "1 decoder, synchronous": ("threads", 1, 1),
    "1 decoder, asyncio": ("tasks", 1, 1),
    "1 decoder, 100 phrases": ("phrases-100", 1, 1),
    "1 decoder, 10,000 phrases": ("phrases-10000", 1, 1),
}


def measure(directory: Path, seconds: float, rounds: int, only: str) -> None:
    """The table."""
    manifest = read_manifest(directory)
    size = {"request": 1500, "reply": 2000}
    rows: dict[str, list[dict[str, float]]] = {}
    stages: dict[str, tuple[Stages, Stages]] = {}
    first = free_ports(manifest.shards)
    ports = [first + shard for shard in range(manifest.shards)]
    with (
        running_servers([directory], first_metrics_port=first) as servers,
        tempfile.TemporaryDirectory() as scratch,
    ):
        os.environ[WORK] = str(Path(scratch) / "batches")
        with Path(os.environ[WORK]).open("wb") as file:
            pickle.dump(from_text(settings.TEXT, Mix(batches=BATCHES, sentences=100)), file)
        cluster = Path(scratch) / "cluster.toml"
        endpoints = [s.endpoint for s in servers]
        write_cluster_file(cluster, endpoints)
        addresses = [e.address for e in endpoints]
        pids = [s.process.pid for s in servers]
        for _ in range(rounds):
            for name, (kind, processes, decoders) in LAYOUTS.items():
                if only not in name:
                    continue
                before = counted(addresses)
                client_side, server_side = stages.setdefault(name, ({}, {}))
                add(server_side, server_stages(ports), -1)
                command = [kind, str(cluster), str(decoders), str(seconds)]
                turn = Turn([command] * processes, pids)
                messages, queries = (a - b for a, b in zip(counted(addresses), before, strict=True))
                add(server_side, server_stages(ports))
                add(client_side, turn.stages)
                # 30 batches of each process were to warm up.
                share = turn.calls * turn.seconds / (turn.calls * turn.seconds + 30 * processes)
                messages, queries = messages * share, queries * share
                a_message = queries / messages
                size = {"request": int(4.6 * a_message + 150), "reply": int(7 * a_message + 60)}
                echo = echo_turn(len(endpoints), processes, decoders, size, seconds)
                echoed = echo.calls * len(endpoints)
                rows.setdefault(name, []).append({
                    "messages/s": messages / turn.seconds,
                    "queries per message": a_message,
                    "distinct queries/s": queries / turn.seconds,
                    "queries/s": turn.calls * 1000,
                    "p50 ms": turn.p50,
                    "p99 ms": turn.p99,
                    "client us": turn.client_cpu / messages * 1e6,
                    "server us": turn.server_cpu / messages * 1e6,
                    "echo messages/s": echoed,
                    "R": turn.calls * 1000 / echoed,
                    "of echo": messages / turn.seconds / echoed,
                    "p50 of echo": turn.p50 / echo.p50,
                    "p99 of echo": turn.p99 / echo.p99,
                })  # fmt: skip
    columns = list(next(iter(rows.values()))[0])
    print("| | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name, found in rows.items():
        cells = [median(row[c] for row in found) for c in columns]
        print(
            f"| {name} | "
            + " | ".join(f"{c:,.0f}" if c >= 20 else f"{c:.2f}" for c in cells)
            + " |"
        )
    print("\n| mean us | " + " | ".join(f"client {s}" for s in CLIENT_ORDER) + " | ", end="")
    print(" | ".join(f"server {s}" for s in SERVER_ORDER) + " |")
    print("|---|" + "---:|" * (len(CLIENT_ORDER) + len(SERVER_ORDER)))
    for name, (client_side, server_side) in stages.items():
        means = [client_side[s] for s in CLIENT_ORDER] + [server_side[s] for s in SERVER_ORDER]
        print(f"| {name} | " + " | ".join(f"{1e6 * s / max(n, 1):,.0f}" for s, n in means) + " |")


def echo_turn(
    servers: int, processes: int, callers: int, size: dict[str, int], seconds: float
) -> Turn:
    """The same with echo servers."""
    me = [sys.executable, __file__]
    started = [
        subprocess.Popen(
            [*me, "echo-server", str(size["reply"])], stdout=subprocess.PIPE, text=True
        )
        for _ in range(servers)
    ]
    try:
        ports = [s.stdout.readline().strip() for s in started if s.stdout is not None]
        command = ["echo", ",".join(ports), str(callers), str(size["request"]), str(seconds)]
        return Turn([command] * processes, [s.pid for s in started])
    finally:
        for server in started:
            server.kill()
            server.wait()


def main() -> None:
    """A client or an echo server, as its parent asked; else the whole."""
    role, *more = sys.argv[1:] or ["--help"]
    if role == "threads":
        decoders_in_threads(more[0], int(more[1]), float(more[2]))
    elif role.startswith("phrases-"):
        listed = int(role.partition("-")[2])
        decoders_in_threads(more[0], int(more[1]), float(more[2]), listed=listed)
    elif role == "same":
        decoders_in_threads(more[0], int(more[1]), float(more[2]), apart=0)
    elif role == "tasks":
        uvloop.run(decoders_in_tasks(more[0], int(more[1]), float(more[2])))
    elif role == "echo-server":
        uvloop.run(echo_server(int(more[0])))
    elif role == "echo":
        uvloop.run(echo_clients(more[0].split(","), int(more[1]), int(more[2]), float(more[3])))
    else:
        parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
        parser.add_argument("directory", type=Path)
        parser.add_argument("--seconds", type=float, default=5.0)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--rows", default="", help="only rows whose name contains this")
        chosen = parser.parse_args()
        measure(chosen.directory, chosen.seconds, chosen.rounds, chosen.rows)
        return
    os._exit(0)  # whatever still waits for a server


if __name__ == "__main__":
    main()
