"""Two worker processes on one shard beside one: search rate, and memory of the second.

    python tests/benchmarks/workers.py SHARD_SET [--seconds S --rounds R --queries Q]

The set has one shard. Messages are encoded before, Q queries each, and sent as bytes, several in
flight on a connection to each worker: what is timed is a server that searches, not a client that
plans. Workers answer on the event loop alone, so each is one core's work; in turns one server of
one worker and one of two are asked. Prints a Markdown table; cells are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import settings
from benchmarks.serving import BATCHES, WORK, cpu_of
from benchmarks.serving import asked as batches_in_ids
from benchmarks.soak import resident
from benchmarks.workload import Mix, from_text
from dlm.cluster.processes import running_servers
from dlm.index.search.local import LocalModel
from dlm.ngram.query import QueryGroups
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

IN_FLIGHT = 2  # of a connection: one is searched, one is on its way


def messages(directory: Path, queries: int) -> list[bytes]:
    """Encoded requests of some so many queries each."""
    model = LocalModel.open(directory)
    out: list[bytes] = []
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for contexts, lengths, words in batches_in_ids(model.vocabulary, model.manifest.order):
        long = lengths >= 2  # the low orders answer others
        width = contexts.shape[1]
        used = np.arange(width) >= width - lengths[:, None].astype(int)
        parts.append((lengths[long], contexts[long][used[long]], words[long]))
        if sum(words.size for _, _, words in parts) >= queries:
            lengths, contexts, words = (np.concatenate(p) for p in zip(*parts, strict=True))
            counts = np.full(len(lengths), words.shape[1], np.uint32)
            groups = QueryGroups(lengths, contexts, counts, words.ravel())
            out.append(codec.encode_score_request(model.manifest.shard_set_bytes, 0, groups)[0])
            parts = []
    return out


class Connection:
    """A connection of its own, and the worker it reaches."""

    def __init__(self, address: str) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
        ]
        self.channel = grpc.insecure_channel(address, options=options)
        name = "/dlm.v1.Shard/"
        self.score = self.channel.unary_unary(name + "Score")
        beat = self.channel.unary_unary(name + "Heartbeat")
        reply = pb.HeartbeatReply.FromString(
            beat(pb.HeartbeatRequest(sequence=1).SerializeToString(), wait_for_ready=True)
        )
        self.worker = reply.worker


def one_each(address: str, workers: int) -> list[Connection]:
    """A connection to each worker."""
    found: dict[int, Connection] = {}
    while len(found) < workers:
        made = Connection(address)
        if made.worker in found:
            made.channel.close()
        else:
            found[made.worker] = made
    return list(found.values())


def answered(connections: list[Connection], asked: list[bytes], seconds: float) -> float:
    """Messages answered a second by all workers."""
    done = [0] * (len(connections) * IN_FLIGHT)
    end = time.monotonic() + seconds

    def ask(number: int, connection: Connection) -> None:
        at = number * 7
        while time.monotonic() < end:
            connection.score(asked[at % len(asked)])
            at += 1
            done[number] += 1

    threads = [
        threading.Thread(target=ask, args=(n, connections[n // IN_FLIGHT]))
        for n in range(len(done))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / seconds


def children(pid: int) -> Iterator[int]:
    """Processes started by one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def measure(directory: Path, seconds: float, rounds: int, queries: int) -> None:
    """The table."""
    # On the event loop alone, whatever the size.
    os.environ["DLM_SERVER_INLINE_QUERIES"] = "65536"
    rates: dict[int, list[float]] = {1: [], 2: []}
    cores: dict[int, list[float]] = {1: [], 2: []}
    with (
        running_servers([directory]) as one,
        running_servers([directory], workers=2) as two,
        tempfile.TemporaryDirectory() as scratch,
    ):
        os.environ[WORK] = str(Path(scratch) / "batches")
        with Path(os.environ[WORK]).open("wb") as file:
            pickle.dump(from_text(settings.TEXT, Mix(batches=BATCHES, sentences=100)), file)
        asked = messages(directory, queries)
        size = np.mean([len(codec.decode_score_request(a, max_queries=1 << 20).groups.words)
                        for a in asked])  # fmt: skip
        sides = {
            1: (one_each(one[0].endpoint.address, 1), [one[0].process.pid]),
            2: (one_each(two[0].endpoint.address, 2), list(children(two[0].process.pid))),
        }
        for connections, _ in sides.values():
            answered(connections, asked, 1.0)
        for _ in range(rounds):
            for workers, (connections, pids) in sides.items():
                before, began = sum(map(cpu_of, pids)), time.monotonic()
                rates[workers].append(answered(connections, asked, seconds) * size)
                used = (sum(map(cpu_of, pids)) - before) / (time.monotonic() - began)
                cores[workers].append(used)
        memory = [resident(pid) for pid in sides[2][1]]
    print("| workers | queries a message | queries/s | cores of the workers | queries/s a core |")
    print("|---|---:|---:|---:|---:|")
    for workers in rates:
        rate, used = median(rates[workers]), median(cores[workers])
        print(f"| {workers} | {size:,.0f} | {rate:,.0f} | {used:.2f} | {rate / used:,.0f} |")
    ratio = median(b / a for a, b in zip(rates[1], rates[2], strict=True))
    print(f"\nTwo beside one: {ratio:.2f}. Private memory of each, MB: {memory}.")


def main() -> None:
    """As the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=32_000)
    chosen = parser.parse_args()
    measure(chosen.directory, chosen.seconds, chosen.rounds, chosen.queries)


if __name__ == "__main__":
    main()
    os._exit(0)
