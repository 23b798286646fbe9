"""Processes on one port beside one: search rate, and memory of each.

    python tests/benchmarks/processes.py SHARD_SET
        [--processes N --seconds S --rounds R --queries Q]

The set has one shard. Messages are encoded before, Q queries each, and sent as bytes, several in
flight on a connection to each process: what is timed is a server that searches, not a client that
plans. Processes answer on the event loop alone, so each is one core's work; in turns one process
and several are asked. Prints a Markdown table; cells are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import threading
import time
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
    """A connection of its own, and the process it reaches."""

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
        self.instance = reply.instance


def one_each(address: str, processes: int) -> list[Connection]:
    """A connection to each process."""
    found: dict[int, Connection] = {}
    while len(found) < processes:
        made = Connection(address)
        if made.instance in found:
            made.channel.close()
        else:
            found[made.instance] = made
    return list(found.values())


def answered(connections: list[Connection], asked: list[bytes], seconds: float) -> float:
    """Messages answered a second by all processes."""
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


def measure(directory: Path, processes: int, seconds: float, rounds: int, queries: int) -> None:
    """The table."""
    # On the event loop alone, whatever the size.
    os.environ["DLM_SERVER_INLINE_QUERIES"] = "65536"
    rates: dict[int, list[float]] = {1: [], processes: []}
    cores: dict[int, list[float]] = {1: [], processes: []}
    with (
        running_servers([directory]) as one,
        running_servers([directory], processes=processes) as many,
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
            processes: (
                one_each(many[0].endpoint.address, processes),
                [server.process.pid for server in many],
            ),
        }
        for connections, _ in sides.values():
            answered(connections, asked, 1.0)
        for _ in range(rounds):
            for count, (connections, pids) in sides.items():
                before, began = sum(map(cpu_of, pids)), time.monotonic()
                rates[count].append(answered(connections, asked, seconds) * size)
                used = (sum(map(cpu_of, pids)) - before) / (time.monotonic() - began)
                cores[count].append(used)
        memory = [resident(pid) for pid in sides[processes][1]]
    print("| processes | queries a message | queries/s | cores of them | queries/s a core |")
    print("|---|---:|---:|---:|---:|")
    for count in rates:
        rate, used = median(rates[count]), median(cores[count])
        print(f"| {count} | {size:,.0f} | {rate:,.0f} | {used:.2f} | {rate / used:,.0f} |")
    ratio = median(b / a for a, b in zip(rates[1], rates[processes], strict=True))
    print(f"\n{processes} beside one: {ratio:.2f}. Private memory of each, MB: {memory}.")


def main() -> None:
    """As the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=32_000)
    chosen = parser.parse_args()
    measure(chosen.directory, chosen.processes, chosen.seconds, chosen.rounds, chosen.queries)


if __name__ == "__main__":
    main()
    os._exit(0)
