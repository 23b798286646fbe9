"""Plans calls: decides which queries go to which shard. No function here waits.

Paper: DLM 3.2.1 (one message per query) and 3.3 (queries that share a context, and queries that
share a server, travel together).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.client.health import Topology
from dlm.errors import DlmError, QueryError, ShardFormatError, StaleShardSet
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.search.shard import LowOrders, open_vocabulary
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.ngram.vocab import Vocabulary

# -------------------------------------------------------------------------------------------------
# The low orders on the client: the 1- and 2-grams and the vocabulary, mapped from a folder.
#
# They answer all queries that need no shard. If no shard answers another query in time, they serve
# as the bigram fallback, which is the order-2 reduction of the same model: P(w | v), normalised
# like any model. Without the shard, nobody knows how much context still matters, so the state after
# the word is not minimised.
#
# Paper: DLM 3.1 (caching) and 3.4 ("if the message times out, we estimate the probability locally
# using the cached 2-grams"). A flag per 2-gram saves more messages: see shards/FORMAT.md, "Stored".


@dataclass(frozen=True, eq=False)
class LowGrams:
    """Vocabulary and low orders of one shard set, mapped from `directory`."""

    directory: Path
    manifest: Manifest
    low: LowOrders
    vocabulary: Vocabulary

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> LowGrams:
        """Maps a complete folder; raises `ShardFormatError` if it is not complete."""
        found = layout.read_manifest(directory)
        if found.shard_set != manifest.shard_set:
            raise ShardFormatError(
                f"{directory} holds shard set {found.shard_set}; expected {manifest.shard_set}"
            )
        low = LowOrders.open(directory, manifest)
        return cls(directory, manifest, low, open_vocabulary(directory, manifest))


@dataclass(frozen=True, eq=False)
class WordsAlone(LowGrams):
    """The vocabulary of a model that runs in this process and has no separate low orders."""

    low: None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A shard set, the addresses of its servers, and its low orders."""

    topology: Topology
    grams: LowGrams

    @cached_property
    def model(self) -> str:
        """The id of the model, which is the same for all shardings of the model."""
        return self.topology.manifest.model

    @cached_property
    def shard_set(self) -> str:
        return self.topology.manifest.shard_set

    @property
    def low_bytes(self) -> int:
        manifest = self.topology.manifest
        return sum(manifest.file(kind).bytes for kind in ("vocabulary", "low_orders"))

    @cached_property
    def replicated(self) -> bool:
        return any(len(addresses) > 1 for addresses in self.topology.addresses.values())


def check_queries(
    order: int,
    size: int,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> None:
    """Raises `QueryError` unless shapes agree, lengths are below `order` and ids below `size`."""
    width = max(order - 1, 0)
    rows = len(contexts)
    if contexts.shape != (rows, width) or lengths.shape != (rows,) or counts.shape != (rows,):
        raise QueryError(
            f"contexts has shape {contexts.shape}, lengths {lengths.shape}, counts "
            f"{counts.shape}; expected ({rows}, {width}), and ({rows},) for the others"
        )
    if words.ndim != 1 or int(counts.sum(dtype=np.uint64)) != len(words):
        raise QueryError(
            f"the sum of counts is {int(counts.sum(dtype=np.uint64))}, but words has shape "
            f"{words.shape}; expected shape (sum of counts,)"
        )
    if rows and int(lengths.max()) > width:
        raise QueryError(f"a context has {int(lengths.max())} words; expected at most {width}")
    for ids in (contexts, words):
        if ids.size and int(ids.max()) >= size:
            raise QueryError(f"word id {int(ids.max())} is out of range; ids are below {size}")


QUIET_S = (
    10.0  # after this long without a bigram-fallback score, an answered message ends an outage
)


class Outage(NamedTuple):
    """A period in which the bigram fallback gave scores, from time `began` to time `last`.

    queries  number of queries that the bigram fallback answered
    error    kind of the error in the period's log line
    """

    began: float
    last: float
    queries: int
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.last - self.began

    def extended(self, queries: int, now: float) -> Outage:
        return self._replace(last=now, queries=self.queries + queries)

    def lasts(self, error: DlmError) -> bool:
        """Whether the outage is permanent: servers are back, but lack the utterance's model."""
        return isinstance(error, StaleShardSet) and self.error != StaleShardSet.__name__

    def is_over(self, now: float) -> bool:
        """Whether an answered message ends the outage: it does if the bigram fallback gave
        no scores for `QUIET_S`, so that the log has one line at the start and one at the end."""
        return now - self.last >= QUIET_S


def allows_fallback(error: DlmError) -> bool:
    """Whether the bigram fallback may answer after `error`: it may unless the caller is at fault.

    The caller is not at fault if a server has another model, sends invalid data or rejects this
    client, or if anything else in this process keeps a message from being answered.
    """
    return not isinstance(error, QueryError)


# With more contexts than this, the search for repeated contexts takes longer than regaining the
# GIL, so it releases the GIL.
MANY_CONTEXTS = 2000


class Piece(NamedTuple):
    """The part of a call that one message carries to one shard.

    Shapes   at (U,) int64: indices, among the call's distinct queries, of the piece's queries
    """

    shard: int
    groups: QueryGroups
    at: NDArray[np.int64]


class CallPlan(NamedTuple):
    """A call's distinct queries: the answers from the low orders, and what shards must answer.

    The first five fields are as `kernels.plan` returns them; `known` is (3, U) uint8.
    at      (n,) int64: indices of the distinct queries that go to shards, ordered as in `pieces`
    pieces  the messages' contents, ordered by shard
    """

    shard_asked: int
    place: NDArray[np.int64]
    low: NDArray[np.float32]
    log10_prob: NDArray[np.float32]
    known: NDArray[np.uint8]
    at: NDArray[np.int64]
    pieces: list[Piece]


def plan(
    grams: LowGrams,
    manifest: Manifest,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
    max_queries: int,
    *,
    blocks: bool = False,
) -> CallPlan:
    """Checks a call and plans it; shapes as in `kernels.group_queries`, with W = order - 1.

    Args
        grams     the low orders of the model; `manifest` is the shard set whose slots are used
        max_queries  maximum queries in a piece; larger groups are split
        blocks       see `kernels.plan`
    Raises  QueryError  if shapes do not agree, or if a length or an id is out of range
    """
    order, size = manifest.order, manifest.vocabulary_size
    rows = len(lengths)
    fits = contexts.shape == (rows, max(order - 1, 0)) and counts.shape == (rows,)
    if fits and lengths.ndim == 1 and words.ndim == 1:
        (valid, shard_asked, place, low, log10_prob, known, *routed) = kernels.plan(
            grams.low.view,
            order,
            size,
            *map(np.ascontiguousarray, (contexts, lengths, counts, words)),
            manifest.slots,
            manifest.shards,
            blocks,
        )
        if valid:
            pieces = pieces_of(routed, max_queries)
            return CallPlan(shard_asked, place, low, log10_prob, known, routed[-1], pieces)
    check_queries(order, size, contexts, lengths, counts, words)
    raise QueryError(
        "lengths, counts or ids changed during the call; pass arrays that no other thread changes"
    )


def route(
    groups: QueryGroups, slots: NDArray[np.uint16], shards: int, max_queries: int
) -> list[Piece]:
    """Splits `groups` into pieces, each with the contexts that one shard owns.

    Args
        groups       the queries that shards must answer
        slots        (4096,) uint16: number of each slot's shard, below `shards`
        max_queries  maximum number of queries in a message; larger groups are split
    """
    needs_shard = np.ones(len(groups.word_counts), np.uint8)
    routed = kernels.route_groups(
        groups.context_lengths,
        groups.context_words,
        groups.pairs,
        groups.word_counts,
        groups.words,
        needs_shard,
        slots,
        shards,
    )
    return pieces_of(routed, max_queries)


def pieces_of(routed: Sequence[NDArray[Any]], max_queries: int) -> list[Piece]:
    edges, lengths, context_words, counts, words, pairs, at = routed
    pieces = []
    (c, w, q), *ends = edges.tolist()
    for shard, (c_end, w_end, q_end) in enumerate(ends):
        if c_end > c:
            part = QueryGroups(
                lengths[c:c_end], context_words[w:w_end], counts[c:c_end], words[q:q_end],
                pairs[c:c_end],
            )  # fmt: skip
            places = at[q:q_end]
            if q_end - q <= max_queries:
                pieces.append(Piece(shard, part, places))
            else:
                for some, first, last in split(part, max_queries):
                    pieces.append(Piece(shard, some, places[first:last]))
        c, w, q = c_end, w_end, q_end
    return pieces


def begins(counts: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Returns the start of each run of `counts` items, and the end of the last run: (C + 1,)."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def split(groups: QueryGroups, max_queries: int) -> Iterator[tuple[QueryGroups, int, int]]:
    """Splits a shard's groups into messages of at most `max_queries` queries; yields the groups and
    the word range of each message."""
    assert groups.pairs is not None
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
                groups.pairs[first:last],
            ),
            begin,
            end,
        )


def gather(parts: Sequence[QueryGroups]) -> tuple[QueryGroups, NDArray[np.int64] | None]:
    """Merges groups for one shard, so that each context and query occurs once. Also returns the
    index of each query in the result, (Q,); None if no two parts share a context, as is usual."""
    if len(parts) == 1:
        return parts[0], None
    # Joined as bytes, since NumPy would release the GIL to join arrays, and regaining it is slow.
    joined = (
        np.frombuffer(b"".join([p.context_lengths.data for p in parts]), np.uint8),
        np.frombuffer(b"".join([p.context_words.data for p in parts]), np.uint32),
        np.frombuffer(b"".join([p.pairs.data for p in parts if p.pairs is not None]), np.uint32),
        np.frombuffer(b"".join([p.word_counts.data for p in parts]), np.uint32),
        np.frombuffer(b"".join([p.words.data for p in parts]), np.uint32),
    )
    if len(joined[0]) > MANY_CONTEXTS:
        shared, *groups, place = kernels.regroup_large(*joined)
    elif shared := kernels.repeats(*joined[:2]):
        *groups, place = kernels.regroup(*joined)
    if shared:
        return QueryGroups(*groups), place
    lengths, context_words, pairs, counts, words = joined
    return QueryGroups(lengths, context_words, counts, words, pairs), None


# Size of a probe: contexts per shard and words per context, as for one position of an utterance.
PROBE_CONTEXTS, PROBE_WORDS = 8, 5
_DRAWN = 1 << 14


def probe_queries(manifest: Manifest) -> QueryGroups:
    """Draws random queries for every shard; a shard must answer its queries whatever it stores.

    The result is empty if the model's order is 2 or less, and may lack shards with very few slots.
    """
    none = np.zeros(0, np.uint32)
    if manifest.order <= 2 or not manifest.pairs:
        return QueryGroups(none.astype(np.uint8), none, none, none, none)
    rng = np.random.default_rng()
    pairs = rng.integers(0, manifest.vocabulary_size, (_DRAWN, 2), dtype=np.uint32)
    shard = manifest.slots[slots_of(pairs[:, 0], pairs[:, 1])]
    chosen = [np.flatnonzero(shard == s)[:PROBE_CONTEXTS] for s in range(manifest.shards)]
    contexts = pairs[np.concatenate(chosen)]
    words = rng.integers(0, manifest.vocabulary_size, len(contexts) * PROBE_WORDS, dtype=np.uint32)
    return QueryGroups(
        np.full(len(contexts), 2, np.uint8),
        contexts.reshape(-1),
        np.full(len(contexts), PROBE_WORDS, np.uint32),
        words,
        rng.integers(0, manifest.pairs, len(contexts), dtype=np.uint32),
    )
