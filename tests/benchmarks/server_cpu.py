"""What a message costs a server's process, without gRPC: CPU time of `Exchange` beside its search.

    python tests/benchmarks/server_cpu.py SHARD_SET [--sizes 232,692,1850] [--rounds 15]

Messages as a client sends them, made from real text (`workload`): contexts of shard 0, 20 words
asked of each. A stream in this process hands them to the handler one by one and drops the replies.
Of each message the least time over the rounds counts, since whatever else runs only adds; a cell is
the mean over the messages. The search is the kernel alone, called with arrays that are at hand.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import settings
from benchmarks.workload import Mix, from_text
from dlm.index.search.shard import Shard, ShardSet, run_kernel
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.server.config import ServerConfig
from dlm.server.health import ServingState
from dlm.server.models import Models
from dlm.server.service import ShardService
from dlm.wire import codec

WORDS = 20  # asked of a context


def groups_of_shard(shards: ShardSet, batches: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Contexts that a client asks shard 0 about, low orders left out, and the words of each."""
    work = from_text(settings.TEXT, Mix(lines=40_000, batches=batches, sentences=1))
    ids = np.array([shards.vocabulary.id_of(word) for word in work.table], np.uint32)
    order = shards.manifest.order
    ends = np.cumsum(work.context_lengths, dtype=np.int64).tolist()
    contexts = [
        ids[work.context_words[end - min(length, order - 1) : end]]
        for end, length in zip(ends, work.context_lengths.tolist(), strict=True)
    ]
    words = ids[work.words].reshape(len(contexts), WORDS)
    asked = pack(contexts, words)
    _, needs_shard = run_kernel(shards.low.view, order, asked)
    chosen = [
        i
        for i in np.flatnonzero(needs_shard).tolist()
        if shards.manifest.slots[slots_of(contexts[i][-2:-1], contexts[i][-1:])[0]] == 0
    ]
    return [contexts[i] for i in chosen], words[chosen]


def pack(contexts: list[np.ndarray], words: np.ndarray) -> QueryGroups:
    """Contexts with the words of each, as one message has them."""
    return QueryGroups(
        np.array([len(context) for context in contexts], np.uint8),
        np.concatenate(contexts).astype(np.uint32),
        np.full(len(contexts), WORDS, np.uint32),
        np.ascontiguousarray(words).reshape(-1).astype(np.uint32),
    )


def messages(shards: ShardSet, size: int, contexts: list[np.ndarray], words: np.ndarray) -> Any:
    """Messages of `size` queries: the last context of each asks fewer words."""
    each = -(-size // WORDS)
    made = []
    for first in range(0, len(contexts) - each + 1, each):
        groups = pack(contexts[first : first + each], words[first : first + each])
        groups.word_counts[-1] -= each * WORDS - size
        groups = QueryGroups(
            groups.context_lengths, groups.context_words, groups.word_counts, groups.words[:size]
        )
        data, _ = codec.encode_score_request(shards.manifest.shard_set_bytes, 0, groups)
        made.append((groups, data + codec.exchange_tail(len(made) + 1, 30_000_000, 1)))
    return made


class Stream:
    """What a handler is given of a call: it reads `data` and writes to nobody.

    Attributes
        times  CPU seconds of the thread when each message was asked for, and at the end
    """

    def __init__(self, data: list[bytes]) -> None:
        self._left, self.times, self.replies = iter(data), list[float](), 0

    async def read(self) -> Any:
        """The next message."""
        await asyncio.sleep(0)  # as gRPC, whose replies and requests come by way of the loop
        self.times.append(time.thread_time())
        return next(self._left, grpc.aio.EOF)

    async def write(self, _: bytes) -> None:
        """Drops a reply."""
        await asyncio.sleep(0)
        self.replies += 1


def search_times(shard: Shard, asked: list[QueryGroups]) -> list[float]:
    """CPU seconds before each search, and after the last."""
    times = [time.thread_time()]
    for groups in asked:
        run_kernel(shard.view, shard.order, groups, check_ids=False)
        times.append(time.thread_time())
    return times


async def measure(directory: Path, sizes: list[int], rounds: int) -> None:
    """Prints a table."""
    shards = ShardSet.open(directory)
    shard = shards.shards[0]
    contexts, words = groups_of_shard(shards, 1_000)
    service = ShardService(shard, ServerConfig(inline_queries=1 << 16))
    service.admission.state = ServingState.READY
    exchange = Models([service]).exchange
    asked = {size: messages(shards, size, contexts, words) for size in sizes}
    least: dict[tuple[int, str], NDArray[np.float64]] = {}
    for _, size in itertools.product(range(rounds), sizes):
        stream = Stream([data for _, data in asked[size]])
        await exchange(None, stream)
        assert stream.replies == len(asked[size])
        searched = search_times(shard, [groups for groups, _ in asked[size]])
        for name, times in (("message", stream.times), ("search", searched)):
            us = np.diff(times) * 1e6
            least[size, name] = np.minimum(least.get((size, name), us), us)
    assert not service.metrics.refused_total
    service.close()
    print("| queries | message µs | search µs | beside it |\n|---:|---:|---:|---:|")
    for size in sizes:
        whole, part = least[size, "message"].mean(), least[size, "search"].mean()
        print(f"| {size:,} | {whole:.1f} | {part:.1f} | {whole - part:.1f} |")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shard_set", type=Path)
    parser.add_argument("--sizes", default="232,692,1850")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    asyncio.run(measure(given.shard_set, sizes, given.rounds))


if __name__ == "__main__":
    main()
