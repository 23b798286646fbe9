"""Turns a parsed message into the bytes of its reply: reads, checks, searches and encodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ProtocolError
from dlm.index.layout import MAX_ORDER
from dlm.index.search.shard import FoundBlocks, Shard
from dlm.ngram.partition import SLOTS
from dlm.ngram.query import QueryGroups
from dlm.server import kernels
from dlm.server.metrics import SlotQueries
from dlm.server.refusals import Refusal, of_fault, too_late
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason

_NOTHING = np.zeros(0, np.uint32)
RequireSame: TypeAlias = Callable[[bytes, int], None]


class Answered(NamedTuple):
    """A reply and its counts; `by_order` (16,) counts its queries by matched order."""

    data: bytes
    queries: int
    by_order: NDArray[np.int64]
    begun: float
    decode_s: float
    search_s: float
    encode_s: float
    blocks: int = 0  # contexts whose stored words the reply holds


@dataclass(frozen=True, slots=True)
class Located:
    """A valid ContextBlock, and the place of its answer."""

    request: codec.BlockRequest
    found: FoundBlocks

    @property
    def size(self) -> int:
        return self.found.words + len(self.request.context_lengths)


class Answerer:
    """Gives one shard's complete, correct answers, or raises `Refusal` with the first fault in the
    order of proto/README.md. Any thread may use it.

    Args  most_queries  limit per message;  clock  monotonic seconds, also the clock of `late`
          require_same  raises `Refusal` if a message names another shard set or shard
    """

    def __init__(
        self,
        shard: Shard,
        most_queries: int,
        require_same: RequireSame,
        clock: Callable[[], float],
        slot_queries: SlotQueries | None = None,
    ) -> None:
        self._slot_queries = slot_queries or SlotQueries()
        self._shard, self._most, self._clock = shard, most_queries, clock
        self._require_same = require_same
        self._shard_set, self._slots = shard.manifest.shard_set_bytes, shard.manifest.slots

    # ------------------------------------------------------------------------ Score

    def score(self, message: pb.ScoreRequest, late: float | None) -> Answered:
        """The reply to `message`, if it can be started before `late`."""
        begun = self._begin(late)
        try:
            request = codec.open_score_request(message, max_queries=self._most)
        except ProtocolError as exc:
            raise of_fault(exc) from exc
        return self._search(request, begun, self._slot_queries.own())

    def _search(
        self, request: codec.ScoreRequest, begun: float, by_slot: NDArray[np.int64]
    ) -> Answered:
        asked, decoded = request.groups, time.perf_counter()
        answers = None
        mine = request.shard_set == self._shard_set and request.shard == self._shard.index
        if mine and asked.pairs is not None:
            answers = self._shard.score_owned(
                asked.context_lengths, asked.context_words, asked.pairs, asked.word_counts,
                asked.words, by_slot,
            )  # fmt: skip
        if answers is None:
            raise self._fault_of(request)
        packed, by_order = answers
        searched = time.perf_counter()
        data = codec.encode_score_reply(request, packed)
        encode_s = time.perf_counter() - searched
        return Answered(
            data, len(asked.words), by_order, begun, decoded - begun, searched - decoded, encode_s
        )

    def _begin(self, late: float | None) -> float:
        if late is not None and self._clock() >= late:
            raise too_late()
        return time.perf_counter()

    def _fault_of(self, request: codec.ScoreRequest) -> Exception:
        try:
            codec.check_counts(request.groups)
            codec.check_pairs(request.groups.pairs, len(request.groups.context_lengths))
            self._require_same(request.shard_set, request.shard)
            self.check(request.groups)
        except ProtocolError as exc:
            return of_fault(exc)
        except Refusal as refusal:
            return refusal
        return AssertionError(
            "one check rejected a message that another accepted. This is a bug in dlm; report it"
        )

    def check(self, groups: QueryGroups) -> None:
        """Raises `Refusal` unless `groups` is valid and the shard owns every context in it."""
        shard = self._shard
        assert groups.pairs is not None
        fault, place = kernels.check(
            groups.context_lengths,
            groups.context_words,
            groups.pairs,
            shard.order,
            shard.vocabulary_size,
            shard.manifest.pairs,
            self._slots,
            shard.index,
        )
        if fault != kernels.FINE:
            raise _refusal(fault, place, groups, shard)

    # ----------------------------------------------------------------- ContextBlock

    def locate(self, message: pb.ScoreRequest | bytes) -> Located:
        """Locates the answer to a ContextBlock, alone or in a stream; raises `Refusal`."""
        try:
            if isinstance(message, bytes):
                request = codec.decode_block_request(message, max_queries=self._most)
            else:
                request = codec.read_carried_block_request(message, max_queries=self._most)
        except ProtocolError as exc:
            raise of_fault(exc) from exc
        self._require_same(request.shard_set, request.shard)
        asked = request.context_lengths, request.context_words, request.pairs
        self.check(QueryGroups(*asked[:2], _NOTHING, _NOTHING, asked[2]))
        return Located(request, self._shard.find_blocks(*asked))

    def list(self, located: Located, late: float | None) -> Answered:
        """Like `score`, for contexts that `locate` found."""
        begun, request = self._begin(late), located.request
        stored = self._shard.stored_words(located.found, request.skips, self._most)
        kernels.count_slots(
            request.context_lengths, request.context_words, stored.counts, self._slot_queries.own()
        )
        searched = time.perf_counter()
        data = codec.encode_block_reply(request, stored)
        encode_s = time.perf_counter() - searched
        return Answered(
            data,
            len(stored.ranks),
            orders_of(stored.answers.matched_order),
            begun,
            0.0,
            searched - begun,
            encode_s,
            len(request.context_lengths),
        )

    # ----------------------------------------------------------------------- warm-up

    def warm_up(self, data: bytes) -> None:
        """Runs all the code that handles a message, with the ScoreRequest in `data`.

        Raises  whatever a kernel raises: a server that cannot answer must not become ready
        """
        request = codec.decode_score_request(data, max_queries=len(data))
        groups, uncounted = request.groups, np.zeros(SLOTS, np.int64)
        try:
            self._search(request, 0.0, uncounted)
            self.check(groups)
        except Refusal as refusal:
            if refusal.reason is not Reason.SLOT_NOT_OWNED:
                raise
        skips = np.zeros(len(groups.context_lengths), np.uint32)
        assert groups.pairs is not None
        found = self._shard.find_blocks(groups.context_lengths, groups.context_words, groups.pairs)
        stored = self._shard.stored_words(found, skips, 1)
        kernels.count_slots(groups.context_lengths, groups.context_words, stored.counts, uncounted)
        orders_of(stored.answers.matched_order)


def _refusal(fault: int, place: int, groups: QueryGroups, shard: Shard) -> Refusal:
    if fault == kernels.BAD_CONTEXT_LENGTH:
        longest = shard.order - 1
        allowed = f"expected 2 to {longest}" if longest >= 2 else "it has no partitioned n-grams"
        return Refusal(
            Reason.CONTEXT_LENGTH,
            f"context {place} has {groups.context_lengths[place]} words; the model has order "
            f"{shard.order}: {allowed}. Shorter contexts are in the low orders",
        )
    if fault == kernels.BAD_SLOT:
        return Refusal(
            Reason.SLOT_NOT_OWNED,
            f"the slot of context {place} does not belong to shard {shard.index}; route by the "
            "slot table in the manifest of this shard set",
        )
    if fault == kernels.BAD_PAIR:
        assert groups.pairs is not None
        found = f"pair {place} has number {groups.pairs[place]}; pair numbers"
        most, file = shard.manifest.pairs, "low orders"
    else:
        found = f"context word {place} has id {groups.context_words[place]}; word ids"
        most, file = shard.vocabulary_size, "vocabulary"
    return Refusal(
        Reason.ID_OUT_OF_RANGE,
        f"{found} of this model are below {most}. Use the {file} of this shard set",
    )


def orders_of(orders: NDArray[np.uint8]) -> NDArray[np.int64]:
    totals = np.zeros(MAX_ORDER + 1, np.int64)
    kernels.count_orders(orders, totals)
    return totals
