"""Servers and clients at a steady load for minutes, then offered several times what they can do.

    python tests/benchmarks/soak.py SHARD_SET [--minutes M --load F] [--over X ...] [--server-cpu C]
        [--local-fallback SMALL_SET] [--cascade ROUNDS]

Starts a real server for each shard of the set in the folder SHARD_SET, and client processes that
ask batches of 50 contexts x 20 words from real text. First the capacity is found: calls/s of a
closed loop. Then calls start when a clock says, whatever became of the ones before, and latency
counts from the planned start: M minutes at F of the capacity, a line each minute; X times the
capacity for 20 s; the capacity once more, from the first second after.

With --server-cpu the servers together get C cores, by a cgroup (version 1; needs its rights), and
clients the rest: else the clients, which share the machine, cannot offer much more than is served.

With --local-fallback the clients have the whole cascade: heartbeats, the bigram fallback, and the
small one of that shard set. The last columns then have the scores that were not the full model's,
the switches of modes so far, how long the host took cores away in all, and the longest time for
which a thread that only sleeps was not woken.

--cascade says what it costs while all is well. In each of so many rounds client processes begin
that have three clients each: with the cascade, without, and without once more, whose difference
is the noise. They take turns of a second and a half, each turn beside one of the client without:
what the machine does meanwhile, and how lucky a process is with its memory, falls on both. The
heartbeats of a client whose turn it is not are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import settings
from benchmarks.serving import BATCHES, WORK, batches, cpu_of
from benchmarks.workload import Mix, from_text
from dlm.client import AsyncClient, ClientConfig
from dlm.client.config.cluster_file import write_cluster_file
from dlm.cluster.processes import running_servers
from dlm.errors import ConfigError, DlmError, Overloaded
from dlm.ngram.query import FULL

CGROUP = Path("/sys/fs/cgroup/cpu/dlm-soak")
TICK_S = 0.001
CLOSED = 0.0  # as a rate: a closed loop


class Generator:
    """Calls of one client process, and what became of them."""

    def __init__(self, client: AsyncClient, decoders: int, deadline_s: float) -> None:
        self._client = client
        self._utterance = client.utterance(deadline_s=deadline_s)
        self._asked = batches(client.utterance())
        self._decoders = decoders
        self._next = os.getpid() % len(self._asked)

    async def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """Calls at `rate` a second, or as fast as they are answered."""
        answered: list[float] = []
        refused: list[float] = []
        errors: Counter[str] = Counter()
        began, processor = time.perf_counter(), time.process_time()
        end = began + seconds
        in_time = other = 0

        async def one(planned: float) -> None:
            nonlocal in_time, other
            self._next += 1
            begun = time.perf_counter()
            try:
                found = await self._utterance.extend(*self._asked[self._next % len(self._asked)])
                other += int(np.count_nonzero(found.source != FULL))
                done = time.perf_counter()
                answered.append(done - planned)
                in_time += done <= end
            except Overloaded:
                refused.append(time.perf_counter() - begun)
            except DlmError as exc:
                errors[type(exc).__name__] += 1

        async def decoder() -> None:
            while time.perf_counter() < end:
                await one(time.perf_counter())

        started = 0
        if rate == CLOSED:
            await asyncio.gather(*[decoder() for _ in range(self._decoders)])
        else:
            tasks: set[asyncio.Task[None]] = set()
            while (now := time.perf_counter()) < end:
                due = int((now - began) * rate)
                while started < due:
                    task = asyncio.create_task(one(began + started / rate))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    started += 1
                await asyncio.sleep(TICK_S)
            if tasks:
                await asyncio.wait(tasks)
        return {
            "offered": len(answered) + len(refused) + errors.total(),
            "in_time": in_time,
            "answered": answered,
            "refused": refused,
            "errors": dict(errors),
            "cpu": time.process_time() - processor,
            "other": other,
            "switches": self._switches(),
        }

    def _switches(self) -> dict[str, int]:
        """So far, by reason."""
        try:
            found = self._client.cascade.switches
        except ConfigError:
            return {}  # it sends no heartbeats
        return {f"{mode} ({why})": times for (mode, why), times in found.items()}


async def generate(cluster: str, decoders: int, deadline_s: float, kinds: list[str]) -> None:
    """A client process: does what each line of its input says, with the client of that number.

    kinds  of each: the local fallback's shard set where it has the cascade, else ""
    """
    config = ClientConfig(deadline_s=deadline_s)
    clients, generators = [], []
    for small in kinds:
        more = (
            replace(config, bigram_fallback=True, local_fallback=Path(small)) if small else config
        )
        clients.append(await AsyncClient.connect(cluster, more))
        generators.append(Generator(clients[-1], decoders, deadline_s))
        await generators[-1].run(CLOSED, 1.0)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, rate, seconds = json.loads(line)
        for client in clients[:number] + clients[number + 1 :]:
            runtime = client._core._runtime
            if runtime.watch is not None:
                runtime.watch.stop()
                runtime.watch = None  # begun anew by the next call
        print(json.dumps(await generators[number].run(rate, seconds)), flush=True)


class Load:
    """The client processes, and the servers they ask."""

    def __init__(self, commands: list[list[str]], servers: list[int]) -> None:
        self._servers = servers
        self._clients = [
            subprocess.Popen(
                [sys.executable, __file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        for client in self._clients:
            assert client.stdout is not None and client.stdout.readline() == "ready\n"

    def end(self) -> None:
        """Kills the clients."""
        for client in self._clients:
            client.kill()
            client.wait()

    def turn(self, number: int) -> tuple[float, float, float]:
        """Goes on for a while; answers a second, and processor seconds of clients and of all, each
        an answer."""
        self._ask(number, CLOSED, 0.3)  # the first heartbeats
        before = sum(map(cpu_of, self._servers)) + sum(cpu_of(c.pid) for c in self._clients)
        said = self._ask(number, CLOSED, TURN_S)
        after = sum(map(cpu_of, self._servers)) + sum(cpu_of(c.pid) for c in self._clients)
        answers = sum(len(s["answered"]) for s in said)
        clients = sum(s["cpu"] for s in said)
        return answers / TURN_S, clients / answers, (after - before) / answers

    def _ask(self, number: int, rate: float, seconds: float) -> list[dict[str, Any]]:
        for client in self._clients:
            assert client.stdin is not None
            client.stdin.write(json.dumps([number, rate / len(self._clients), seconds]) + "\n")
            client.stdin.flush()
        said = []
        for client in self._clients:
            assert client.stdout is not None
            said.append(json.loads(client.stdout.readline()))
        return said

    def run(self, name: str, rate: float, seconds: float) -> float:
        """Prints a line of what happened; returns answers a second."""
        before, began = sum(map(cpu_of, self._servers)), time.monotonic()
        stolen, sleeper = stolen_s(), Sleeper()
        said = self._ask(0, rate, seconds)
        took = time.monotonic() - began
        server_cpu = sum(map(cpu_of, self._servers)) - before
        client_cpu = sum(s["cpu"] for s in said)
        errors: Counter[str] = Counter()
        for one in said:
            errors.update(one["errors"])
        switches: Counter[str] = Counter()
        for one in said:
            switches.update(one["switches"])
        goodput = sum(s["in_time"] for s in said) / seconds
        memory = [resident(pid) for pid in self._servers]
        clients = [resident(client.pid) for client in self._clients]
        cells = [
            name,
            f"{sum(s['offered'] for s in said) / seconds:,.0f}",
            f"{goodput:,.0f}",
            *percentiles([x for s in said for x in s["answered"]], 50, 99, 99.9),
            f"{sum(len(s['refused']) for s in said):,}",
            *percentiles([x for s in said for x in s["refused"]], 50, 99, 100),
            ", ".join(f"{n} {kind}" for kind, n in errors.items()) or "0",
            f"{server_cpu / took:.2f} + {client_cpu / took:.2f}",
            " ".join(f"{m:.0f}" for m in memory),
            " ".join(f"{m:.0f}" for m in clients),
            f"{sum(s['other'] for s in said):,}",
            ", ".join(f"{n} {what}" for what, n in switches.items()) or "0",
            f"{stolen_s() - stolen:.1f} s; {sleeper.end() * 1e3:.0f} ms",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        return float(goodput)


class Sleeper:
    """A thread that sleeps for a hundredth of a second at a time, and how late it was woken."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            slept = time.monotonic()
            time.sleep(0.01)
            self._longest_s = max(self._longest_s, time.monotonic() - slept - 0.01)

    def end(self) -> float:
        """The longest, in seconds."""
        self._ended.set()
        self._thread.join()
        return self._longest_s


def stolen_s() -> float:
    """Seconds of all cores that the host gave to others, since the start."""
    fields = Path("/proc/stat").read_text().split("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def percentiles(times_s: list[float], *places: float) -> list[str]:
    """In milliseconds."""
    if not times_s:
        return ["-"] * len(places)
    return [f"{ms:.1f}" for ms in 1e3 * np.percentile(times_s, places)]


def resident(pid: int) -> float:
    """Private memory of a process in MB: what grows when something leaks."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "Private" in line) / 1e3


@contextlib.contextmanager
def limited(pids: list[int], cores: float) -> Iterator[None]:
    """Gives the processes so many cores together; 0 for no limit."""
    if not cores:
        yield
        return
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "cpu.cfs_period_us").write_text("10000")  # so that no stop is longer
    (CGROUP / "cpu.cfs_quota_us").write_text(str(int(10_000 * cores)))
    for pid in pids:
        (CGROUP / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        (CGROUP / "cpu.cfs_quota_us").write_text("-1")


COLUMNS = (
    "phase | offered/s | in time/s | p50 ms | p99 | p99.9 | refused | p50 ms | p99 | max | errors "
    "| cores: servers + clients | servers MB | clients MB | scores not full | switches so far "
    "| stolen; longest sleep"
)


def measure(chosen: argparse.Namespace) -> None:
    """The table."""
    with running_servers([chosen.directory]) as servers, tempfile.TemporaryDirectory() as scratch:
        os.environ[WORK] = str(Path(scratch) / "batches")
        with Path(os.environ[WORK]).open("wb") as file:
            pickle.dump(from_text(settings.TEXT, Mix(batches=BATCHES, sentences=100)), file)
        cluster = Path(scratch) / "cluster.toml"
        write_cluster_file(cluster, [s.endpoint for s in servers])
        pids = [s.process.pid for s in servers]
        decoders = str(chosen.decoders // chosen.clients)
        command = ["generate", str(cluster), decoders, str(chosen.deadline)]
        if chosen.cascade:
            compare(command, pids, chosen)
            return
        load = Load([[*command, chosen.local_fallback]] * chosen.clients, pids)
        try:
            with limited(pids, chosen.server_cpu):
                print(f"| {COLUMNS} |\n|---|" + "---:|" * COLUMNS.count("|"))
                phases(load, chosen)
        finally:
            load.end()


TURNS = 16  # of each set in a round
TURN_S = 1.5


def compare(command: list[str], pids: list[int], chosen: argparse.Namespace) -> None:
    """What the cascade costs, and what nothing costs."""
    without, *kinds = "without", "with", "without again"
    turns: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for round_number in range(chosen.cascade):
        load = Load([[*command, "", chosen.local_fallback, ""]] * chosen.clients, pids)
        try:
            order = kinds * TURNS
            random.Random(round_number).shuffle(order)
            for turn, kind in enumerate(order):
                pair = [without, kind] if turn % 2 else [kind, without]
                found = {one: load.turn([without, *kinds].index(one)) for one in pair}
                rate, clients, both = (
                    x / y for x, y in zip(found[kind], found[without], strict=True)
                )
                turns[kind].append((rate, clients, both))
        finally:
            load.end()
        print(f"after round {round_number + 1}:")
        for kind, ratios in turns.items():
            tell(kind, ratios)


def tell(kind: str, turns: list[tuple[float, float, float]]) -> None:
    """The mean ratio to the set without (of logarithms), with the interval of 95 %."""
    logs = np.log(turns)
    mean, error = logs.mean(0), 1.96 * logs.std(0, ddof=1) / np.sqrt(len(logs))
    cells = [
        f"{name} {np.exp(m):.3f} ({np.exp(m - e):.3f} to {np.exp(m + e):.3f})"
        for name, m, e in zip(
            ("batches/s", "CPU of clients", "and servers a batch"), mean, error, strict=True
        )
    ]
    print(f"  {kind}, of {len(turns)} turns: " + ", ".join(cells), flush=True)


def phases(load: Load, chosen: argparse.Namespace) -> None:
    """Capacity, the minutes, each overload and the capacity after it."""
    capacity = max(load.run("closed loop", CLOSED, 10.0) for _ in range(2))
    for minute in range(1, chosen.minutes + 1):
        load.run(f"minute {minute}", capacity * chosen.load, 60.0)
    for times in chosen.over:
        load.run(f"{times:g} x capacity", capacity * times, 20.0)
        load.run("second after", CLOSED, 1.0)
        load.run("closed loop", CLOSED, 10.0)


def main() -> None:
    """A client, as its parent asked; else the whole."""
    role, *more = sys.argv[1:] or ["--help"]
    if role == "generate":
        uvloop.run(generate(more[0], int(more[1]), float(more[2]), more[3:]))
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.75, help="of the capacity")
    parser.add_argument("--over", type=float, nargs="*", default=[], help="times the capacity")
    parser.add_argument("--clients", type=int, default=2, help="processes")
    parser.add_argument("--decoders", type=int, default=8, help="that ask in the closed loop")
    parser.add_argument("--deadline", type=float, default=0.5, help="seconds")
    parser.add_argument("--server-cpu", type=float, default=0.0, help="cores for all servers")
    parser.add_argument("--local-fallback", default="", help="shard set of a small model")
    parser.add_argument("--cascade", type=int, default=0, help="rounds, with --local-fallback")
    chosen = parser.parse_args()
    if chosen.cascade and not chosen.local_fallback:
        parser.error("--cascade needs --local-fallback")
    measure(chosen)


if __name__ == "__main__":
    main()
