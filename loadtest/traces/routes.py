"""Counts the queries that each request of a trace sends to each server, as the client plans them.

Low orders answer what they can; other queries belong to slots, and a slot table gives each slot a
server. One pass over a trace is enough for every number of servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.client.kernels import group_queries
from dlm.client.router import LowGrams
from dlm.errors import ConfigError
from dlm.index.layout import read_manifest
from dlm.index.search.shard import run_kernel
from dlm.ngram.partition import SLOTS, slots_of
from dlm.ngram.query import QueryGroups
from dlm.ngram.vocab import Vocabulary
from loadtest.traces.trace import CALLS, EXTEND, Trace


@dataclass(frozen=True, eq=False)
class Routed:
    """The P messages of R requests of the trace, if each request were sent alone.

    asked    (R,)  queries, including those that need no message
    first    (R + 1,)  where the messages of a request begin
    server   (P,) server of each message;  queries  (P,) number of distinct queries in it
    """

    servers: int
    asked: NDArray[np.int64]
    first: NDArray[np.int64]
    server: NDArray[np.int64]
    queries: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Slotted:
    """Like `Routed`, by slot.

    requests  the requests for words after contexts, in the trace's order
    asked     (R,)  as in `Routed`
    request   (P,)  the request of each piece, not descending;  slot, queries  (P,)  of each piece
    """

    requests: NDArray[np.int64]
    asked: NDArray[np.int64]
    request: NDArray[np.int64]
    slot: NDArray[np.int64]
    queries: NDArray[np.int64]

    def load(self) -> NDArray[np.int64]:
        """Returns the number of queries to each slot, (4096,), for `balanced_slot_table`."""
        return np.bincount(self.slot, self.queries, SLOTS).astype(np.int64)

    def to(self, table: NDArray[np.uint16], servers: int) -> Routed:
        """Merges the pieces of each request by server; `table` (4096,) has each slot's server."""
        key = self.request * servers + table[self.slot]
        pieces, place = np.unique(key, return_inverse=True)
        queries = np.bincount(place, self.queries, len(pieces)).astype(np.int64)
        edges = np.arange(len(self.asked) + 1) * servers
        first = np.searchsorted(pieces, edges).astype(np.int64)
        return Routed(servers, self.asked, first, pieces % servers, queries)


def routes(trace: Trace, shard_set: Path) -> Slotted:
    """Plans every request for words after contexts; ConfigError if there is none."""
    grams = LowGrams.open(shard_set, read_manifest(shard_set))
    wanted = trace.asks & (trace.call == CALLS.index(EXTEND))
    numbers = np.flatnonzero(wanted)
    if not len(numbers):
        raise ConfigError(
            "the trace has no call to `extend`, only to `context_blocks`; give a trace with calls "
            "to `extend`"
        )
    requests, slots, queries = [], [], []
    for number, contexts, lengths, words in extends(trace, grams.vocabulary, grams.manifest.order):
        asked = np.tile(words, (len(contexts) // len(words), 1)).reshape(-1)
        counts = np.full(len(contexts), words.shape[1], np.uint32)
        groups = QueryGroups(*group_queries(contexts, lengths, counts, asked)[:-1])
        needs_shard = run_kernel(grams.low.view, grams.manifest.order, groups)[1].astype(np.bool_)
        ends = np.cumsum(groups.context_lengths, dtype=np.int64)[needs_shard]
        pairs = slots_of(groups.context_words[ends - 2], groups.context_words[ends - 1])
        found, place = np.unique(pairs, return_inverse=True)
        requests.append(np.full(len(found), number, np.int64))
        slots.append(found.astype(np.int64))
        sizes = groups.word_counts[needs_shard].astype(np.int64)
        queries.append(np.bincount(place, sizes, len(found)).astype(np.int64))
    return Slotted(
        numbers,
        np.where(wanted, trace.queries, 0),
        np.concatenate(requests),
        np.concatenate(slots),
        np.concatenate(queries),
    )


def extends(
    trace: Trace, vocabulary: Vocabulary, order: int
) -> Iterator[tuple[int, NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32]]]:
    """Yields calls of `extend`, in a model's ids: request number; contexts (K, order - 1), of which
    the last `lengths` (K,) words count; and words (1, W) for every context, or (K, W)."""
    ids = np.array([vocabulary.id_of(word) for word in trace.table], np.uint32)
    context_words, row_words = ids[trace.context_words], ids[trace.row_words]
    width = order - 1
    column = np.arange(width) - width
    for number in np.flatnonzero(trace.asks & (trace.call == CALLS.index(EXTEND))).tolist():
        first, end = trace.context_begin[number : number + 2].tolist()
        ends = trace.context_word_begin[first + 1 : end + 1]
        lengths = np.minimum(ends - trace.context_word_begin[first:end], width)
        contexts = np.zeros((end - first, width), np.uint32)
        has = -column <= lengths[:, None]
        contexts[has] = context_words[(ends[:, None] + column)[has]]
        first, end = trace.row_begin[number : number + 2].tolist()
        words = row_words[trace.row_word_begin[first] : trace.row_word_begin[end]]
        yield number, contexts, lengths.astype(np.uint8), words.reshape(end - first, -1)
