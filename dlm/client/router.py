"""Which queries go to which shard: grouping, deduplication, routing, splitting and merging.

Everything here is a function of arrays; nothing waits.

Paper: DLM 3.2.1 (one message a query) and 3.3 (queries that share a context, and queries that share
a server, travel together).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.ngram.query import QueryGroups


@dataclass(frozen=True, slots=True)
class Grouped:
    """Distinct queries grouped by context, and where each original query's answer will stand.

    Shapes   place (Q,) int64: query q is answered at groups.words[place[q]]
    """

    groups: QueryGroups
    place: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a call that goes to one shard.

    Shapes   at (U,) int64: where, among the distinct queries of the call, each of these stands
    """

    shard: int
    groups: QueryGroups
    at: NDArray[np.int64]


def group(
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> Grouped:
    """Groups queries by context and asks each only once; see `kernels.group_queries`."""
    *groups, place = kernels.group_queries(contexts, lengths, counts, words)
    return Grouped(QueryGroups(*groups), place)


def select(groups: QueryGroups, wanted: NDArray[np.bool_]) -> QueryGroups:
    """Some of the queries, in the same order; contexts of which none is wanted are left out.

    Shapes  wanted (Q,)
    """
    counts = np.bincount(
        np.repeat(np.arange(len(groups.word_counts)), groups.word_counts)[wanted],
        minlength=len(groups.word_counts),
    )
    kept = counts > 0
    return QueryGroups(
        groups.context_lengths[kept],
        groups.context_words[np.repeat(kept, groups.context_lengths)],
        counts[kept].astype(np.uint32),
        groups.words[wanted],
    )


def begins(counts: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Where each stretch begins, and the end of the last: (C + 1,)."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def route(
    groups: QueryGroups,
    remote: NDArray[np.bool_],
    slots: NDArray[np.uint16],
    shards: int,
    max_queries: int,
) -> list[Piece]:
    """The messages that ask the `remote` groups, each to the shard that owns it.

    Args
        remote       (C,) bool; contexts of two words or more
        slots        (4096,) uint16: shard of each slot, below `shards`
        max_queries  queries in one message at most; a group too large is split
    """
    edges, lengths, context_words, counts, words, at = kernels.route_groups(
        groups.context_lengths,
        groups.context_words,
        groups.word_counts,
        groups.words,
        remote,
        slots,
        shards,
    )
    pieces = []
    begin = (0, 0, 0)
    for shard, end in enumerate(map(tuple, edges[1:].tolist())):
        if end[0] > begin[0]:
            part = QueryGroups(
                lengths[begin[0] : end[0]],
                context_words[begin[1] : end[1]],
                counts[begin[0] : end[0]],
                words[begin[2] : end[2]],
            )
            places = at[begin[2] : end[2]]
            if end[2] - begin[2] <= max_queries:
                pieces.append(Piece(shard, part, places))
            else:
                for some, first, last in split(part, max_queries):
                    pieces.append(Piece(shard, some, places[first:last]))
        begin = end
    return pieces


def split(groups: QueryGroups, max_queries: int) -> Iterator[tuple[QueryGroups, int, int]]:
    """Cuts groups into messages of at most `max_queries`; yields each with its range of words."""
    total = len(groups.words)
    if total <= max_queries:
        yield groups, 0, total
        return
    word_begin, context_begin = begins(groups.word_counts), begins(groups.context_lengths)
    for begin in range(0, total, max_queries):
        end = min(begin + max_queries, total)
        first = int(np.searchsorted(word_begin, begin, side="right")) - 1
        last = int(np.searchsorted(word_begin, end, side="left"))
        counts = np.minimum(word_begin[first + 1 : last + 1], end) - np.maximum(
            word_begin[first:last], begin
        )
        yield (
            QueryGroups(
                groups.context_lengths[first:last],
                groups.context_words[context_begin[first] : context_begin[last]],
                counts.astype(np.uint32),
                groups.words[begin:end],
            ),
            begin,
            end,
        )


def merge(parts: Sequence[QueryGroups]) -> Grouped:
    """Several groupings as one, contexts and queries that they share asked once.

    `place` runs over the words of the parts, one part after another.
    """
    if len(parts) == 1:
        only = parts[0]
        return Grouped(only, np.arange(len(only.words), dtype=np.int64))
    lengths = np.concatenate([p.context_lengths for p in parts])
    flat = np.concatenate([p.context_words for p in parts])
    counts = np.concatenate([p.word_counts for p in parts])
    words = np.concatenate([p.words for p in parts])
    width = int(lengths.max()) if len(lengths) else 0
    dense = np.zeros((len(lengths), width), np.uint32)
    dense[np.arange(width)[None, :] >= (width - lengths.astype(np.int64))[:, None]] = flat
    return group(dense, lengths, counts, words)
