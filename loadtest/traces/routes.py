"""What each request of a trace asks of each server: the client's own planning, without a network.

Low orders answer what they can; the rest falls to slots, and a slot table gives each a server. One
pass over a trace serves every number of servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.client.plan import router
from dlm.client.plan.lowgrams import LowGrams
from dlm.errors import ConfigError
from dlm.index.layout import read_manifest
from dlm.ngram.partition import SLOTS, slots_of
from loadtest.traces.trace import CALLS, EXTEND, Trace


@dataclass(frozen=True, eq=False)
class Routed:
    """Messages of R requests of the trace, were each sent alone, in P pieces.

    asked    (R,)  queries, those that cost no message included
    first    (R + 1,)  where the pieces of a request begin
    server   (P,);  queries  (P,) distinct queries of a piece
    """

    servers: int
    asked: NDArray[np.int64]
    first: NDArray[np.int64]
    server: NDArray[np.int64]
    queries: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Slotted:
    """The same by slot.

    requests  the requests that ask words after contexts, in the trace's order
    asked     (R,);  zero  (R,) queries that the low orders answered
    request   (P,)  of each piece, not descending;  slot, queries  (P,)
    """

    requests: NDArray[np.int64]
    asked: NDArray[np.int64]
    request: NDArray[np.int64]
    slot: NDArray[np.int64]
    queries: NDArray[np.int64]
    zero: NDArray[np.int64]

    def load(self) -> NDArray[np.int64]:
        """(4096,) queries of each slot, by which `balanced_slot_table` balances."""
        return np.bincount(self.slot, self.queries, SLOTS).astype(np.int64)

    def to(self, table: NDArray[np.uint16], servers: int) -> Routed:
        """The pieces of each request put together by server; `table` (4096,): each slot's."""
        key = self.request * servers + table[self.slot]
        pieces, place = np.unique(key, return_inverse=True)
        queries = np.bincount(place, self.queries, len(pieces)).astype(np.int64)
        edges = np.arange(len(self.asked) + 1) * servers
        first = np.searchsorted(pieces, edges).astype(np.int64)
        return Routed(servers, self.asked, first, pieces % servers, queries)


def routes(trace: Trace, shard_set: Path) -> Slotted:
    """Plans every request that asks words after contexts; ConfigError if there is none."""
    grams = LowGrams.open(shard_set, read_manifest(shard_set))
    ids = np.array([grams.vocabulary.id_of(word) for word in trace.table], np.uint32)
    wanted = trace.asks & (trace.call == CALLS.index(EXTEND))
    numbers = np.flatnonzero(wanted)
    if not len(numbers):
        raise ConfigError(
            "the trace has no call of `extend`, only of `context_blocks`; give one that has"
        )
    zero = np.zeros(len(trace), np.int64)
    requests, slots, queries = [], [], []
    for number in numbers.tolist():
        contexts, lengths, counts, words = _arrays(trace, number, ids, grams.manifest.order)
        grouped = router.group(contexts, lengths, counts, words)
        groups = grouped.groups
        _, needs_shard = grams.score(groups)
        sizes = groups.word_counts.astype(np.int64)
        sent = np.repeat(needs_shard, sizes)
        zero[number] = len(words) - int(sent[grouped.place].sum())
        ends = np.cumsum(groups.context_lengths, dtype=np.int64)[needs_shard]
        flat = groups.context_words
        found, place = np.unique(slots_of(flat[ends - 2], flat[ends - 1]), return_inverse=True)
        requests.append(np.full(len(found), number, np.int64))
        slots.append(found.astype(np.int64))
        queries.append(np.bincount(place, sizes[needs_shard], len(found)).astype(np.int64))
    return Slotted(
        numbers,
        np.where(wanted, trace.queries, 0),
        np.concatenate(requests),
        np.concatenate(slots),
        np.concatenate(queries),
        zero,
    )


def _arrays(
    trace: Trace, number: int, ids: NDArray[np.uint32], order: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]:
    """A request as `Utterance.extend` plans it: contexts (K, order - 1), lengths, counts, words."""
    width = order - 1
    first, last = trace.context_begin[number : number + 2].tolist()
    begins = trace.context_word_begin[first : last + 1]
    contexts = np.zeros((last - first, width), np.uint32)
    lengths = np.minimum(np.diff(begins), width).astype(np.uint8)
    for row, (end, length) in enumerate(zip(begins[1:].tolist(), lengths.tolist(), strict=True)):
        if length:
            contexts[row, width - length :] = ids[trace.context_words[end - length : end]]
    rows = trace.row_begin[number : number + 2].tolist()
    edges = trace.row_word_begin[rows[0] : rows[1] + 1]
    words = ids[trace.row_words[edges[0] : edges[-1]]]
    if rows[1] - rows[0] == 1:
        words = np.tile(words, last - first)
    counts = np.full(last - first, len(words) // (last - first), np.uint32)
    return contexts, lengths, counts, words
