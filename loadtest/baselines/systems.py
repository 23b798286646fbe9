"""The paper's baselines: other systems with the same n-grams, wire format and cache.

A `System` defines where n-grams are stored and how a client requests them. This determines each
server's part (`share`), a call's requests to each server (`Caller`), and the messages of a trace
(`counted`), exactly and without a server. The modules `server` and `client` run a system.

Paper: DLM 3.1 to 3.3 and 4.2.1; baseline A is Brants et al. 2007, B is Mandery 2011.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlm.client.kernels import group_queries
from dlm.errors import ConfigError
from dlm.ngram.partition import balanced_slot_table, slots_of
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary
from loadtest.baselines import kernels as kernels
from loadtest.baselines.hash_index import HashIndex, Ngrams, pair_table
from loadtest.traces.routes import extends
from loadtest.traces.trace import Trace

RECORD_BYTES = 8  # bytes of a word id and a value; slots are balanced by bytes


@dataclass(frozen=True, slots=True)
class System:
    """A way to serve a model.

    name     short name, used in rows;  title  name for people
    mode     what servers answer: WHOLE if a server has everything that its query needs, LONGEST if
             it has all probabilities, EXACT if it has neither
    by       for WHOLE: SLOTS for dlm's table, PAIR for the hash of two words, WORD for that of one
    batched  whether all requests to a server travel in one message
    cached   orders that clients hold
    stored   whether clients know which pairs have anything stored after them
    """

    name: str
    title: str
    mode: int = kernels.WHOLE
    by: int = kernels.SLOTS
    batched: bool = True
    cached: int = 2
    stored: bool = True

    @property
    def in_steps(self) -> bool:
        """Whether a shorter n-gram is requested only if the longer one is missing. This saves
        messages, unless look-ups share messages; then a single round needs fewer."""
        return self.mode == kernels.EXACT and not self.batched


SYSTEMS = {
    one.name: one
    for one in (
        System("dlm", "dlm"),
        System("A", "baseline A: by the n-gram's last two words", kernels.LONGEST),
        System("B", "baseline B: by all words", kernels.EXACT, batched=False),
        System("B-batched", "baseline B with batching", kernels.EXACT),
        System("dlm-unbatched", "dlm, one query per message", batched=False),
        System("dlm-hash", "dlm, hash % B in place of slots", by=kernels.PAIR),
        System(
            "dlm-one-word", "dlm, by one word", by=kernels.WORD, cached=1, stored=False
        ),
        System("dlm-uncached", "dlm without the cache of low orders", cached=0, stored=False),
        System(
            "srilm", "one n-gram per message, no cache", batched=False, cached=0, stored=False
        ),
        # As in the paper: clients do not know which pairs have nothing stored after them.
        System("dlm-paper", "dlm as in the paper", by=kernels.PAIR, stored=False),
        System("A-paper", "baseline A as in the paper", kernels.LONGEST, stored=False),
        System(
            "B-paper", "baseline B as in the paper", kernels.EXACT, batched=False, stored=False
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Messages:
    """One round of a call: the server of each message, and its requests."""

    servers: NDArray[np.int64]
    groups: list[QueryGroups]


class Placed:
    """The place of each n-gram; if `slots` is None, dlm's slots are balanced by bytes."""

    def __init__(
        self, system: System, ngrams: Ngrams, servers: int, slots: NDArray[np.uint16] | None = None
    ) -> None:
        if not 1 <= servers <= 4096:
            raise ConfigError(f"{servers} servers were requested; expected 1 to 4096")
        self.system = system
        self.servers = servers
        if slots is None and (system.mode, system.by) == (kernels.WHOLE, kernels.SLOTS):
            slots = balanced_slot_table(slot_bytes(ngrams), servers)
        self.slots = np.zeros(0, np.uint16) if slots is None else slots

    def of_probs(self, rows: NDArray[np.uint32]) -> NDArray[np.int32]:
        """The server of each n-gram's probability; -1 for all servers."""
        end = rows.shape[1] - (self.system.mode == kernels.WHOLE)
        return self._owners(rows, end)

    def of_weights(self, rows: NDArray[np.uint32]) -> NDArray[np.int32]:
        """The server of each n-gram's weight; -1 for all servers."""
        return self._owners(rows, rows.shape[1])

    def _owners(self, rows: NDArray[np.uint32], end: int) -> NDArray[np.int32]:
        out = np.full(len(rows), -1, np.int32)
        least = 2 if self.system.by == kernels.WORD else 3
        if rows.shape[1] >= least:
            by = {
                kernels.WHOLE: self.system.by,
                kernels.LONGEST: kernels.PAIR,
                kernels.EXACT: -1,
            }[self.system.mode]
            kernels.owners(by, rows, end, self.servers, self.slots, out)
        return out

    def share(self, ngrams: Ngrams, server: int) -> HashIndex:
        """A server's n-grams: its own, and the low orders if it uses them."""
        probs: list[NDArray[np.bool_]] = []
        weights: list[NDArray[np.bool_]] = []
        low = self.system.mode == kernels.WHOLE
        for rows, _, _ in ngrams.orders:
            for kept, owner in ((probs, self.of_probs(rows)), (weights, self.of_weights(rows))):
                kept.append((owner == server) | ((owner == -1) & low))
        return HashIndex(ngrams, probs, weights)

    def records(self, ngrams: Ngrams) -> NDArray[np.int64]:
        """(servers,) number of probabilities and weights that no other server holds."""
        out = np.zeros(self.servers, np.int64)
        for rows, _, weights in ngrams.orders[1:]:
            for owner in (self.of_probs(rows), self.of_weights(rows[weights != 0])):
                out += np.bincount(owner[owner >= 0], minlength=self.servers)
        return out


@lru_cache(2)
def slot_bytes(ngrams: Ngrams) -> NDArray[np.int64]:
    """(4096,) number of bytes that each slot's probabilities and weights take."""
    out = np.zeros(4096, np.int64)
    for rows, _, weights in ngrams.orders[2:]:
        held = rows[weights != 0]
        out += np.bincount(slots_of(rows[:, -3], rows[:, -2]), minlength=4096)
        out += np.bincount(slots_of(held[:, -2], held[:, -1]), minlength=4096)
    return RECORD_BYTES * out


@dataclass(frozen=True, eq=False)
class Cache:
    """The data of a system's clients: low orders, and the pairs after which anything is stored."""

    index: HashIndex
    stored: NDArray[np.uint64]

    @classmethod
    def of(cls, ngrams: Ngrams) -> Cache:
        return cls(HashIndex(ngrams.upto(2)), pair_table(ngrams.stored_pairs()))

    def asks_servers(self, call: Call, cached: int = 2, stored: bool = True) -> NDArray[np.bool_]:
        """(C,) whether a context needs servers; arguments `cached`, `stored` as in `System`."""
        out = np.empty(len(call.lengths), np.bool_)
        known = self.stored if stored else np.empty(0, np.uint64)
        kernels.asks_servers(cached, known, call.contexts, call.lengths, out)
        return out


@dataclass(frozen=True, eq=False)
class Call:
    """Distinct queries of one call.

    contexts  (C, order - 1), most recent word last;  lengths (C,)
    row       (Q,) context of each query;  words (Q,)
    place     which of the Q queries answers each requested pair
    """

    contexts: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    row: NDArray[np.int64]
    words: NDArray[np.uint32]
    place: NDArray[np.int64]

    @classmethod
    def of(
        cls, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8], words: NDArray[np.uint32]
    ) -> Call:
        """A call of `extend`: words (W,) of every context (K, order - 1), or (K, W)."""
        rows = len(contexts)
        asked = np.broadcast_to(words, (rows, words.shape[-1]))
        counts = np.full(rows, asked.shape[1], np.uint32)
        flat = np.ascontiguousarray(asked, np.uint32).reshape(-1)
        *found, place = group_queries(np.ascontiguousarray(contexts), lengths, counts, flat)
        groups = QueryGroups(*found)
        width = contexts.shape[1]
        dense = np.zeros((len(groups.context_lengths), width), np.uint32)
        has = np.arange(width) >= width - groups.context_lengths[:, None].astype(np.int64)
        dense[has] = groups.context_words
        row = np.repeat(np.arange(len(dense)), groups.word_counts)
        return cls(dense, groups.context_lengths, row, groups.words, place)


Rounds = Generator[Messages, Sequence[Answers], NDArray[np.float32]]


class Caller:
    """A client's queries for a call, round by round, and its use of the answers."""

    def __init__(self, placed: Placed, cache: Cache, order: int) -> None:
        self._placed = placed
        self._cache = cache
        self._order = order

    def remote(self, call: Call) -> NDArray[np.bool_]:
        system = self._placed.system
        return self._cache.asks_servers(call, system.cached, system.stored)

    def rounds(self, call: Call, *, merged: bool = False) -> Rounds:
        """Yields messages, receives their answers, and returns log10 P of each distinct query.

        Args        merged  whether there is one message per server, whatever the system sends
        Guarantees  the same bits as `dlm.ngram.backoff.score`
        """
        system, queries = self._placed.system, len(call.words)
        remote = self.remote(call)
        found, orders = np.zeros(queries, np.float32), np.zeros(queries, np.uint8)
        weights = np.zeros((len(call.lengths), kernels.LONGEST_CONTEXT + 1), np.float32)
        lengths = [(3, self._order)]
        if system.in_steps:
            lengths = [(n, n) for n in range(self._order, 2, -1)]
        if remote.any():
            for low, high in lengths:
                yield from self._round(
                    call, remote, low, high, found, orders, weights, merged or system.batched
                )
        out = np.empty(queries, np.float32)
        kernels.combine(
            system.mode, *self._cache.index.tables, call.contexts, call.lengths, remote, call.row,
            call.words, found, orders, weights, out,
        )  # fmt: skip
        return out

    def _round(
        self,
        call: Call,
        remote: NDArray[np.bool_],
        low: int,
        high: int,
        found: NDArray[np.float32],
        orders: NDArray[np.uint8],
        weights: NDArray[np.float32],
        merged: bool,
    ) -> Generator[Messages, Sequence[Answers], None]:
        placed = self._placed
        room = (len(call.words) + len(call.lengths)) * (self._order + 1)
        server, at_row, length = (np.empty(room, np.int32) for _ in range(3))
        asked, key = np.empty(room, np.uint32), np.empty(room, np.uint64)
        target, suffix = np.empty(room, np.int32), np.empty(room, np.uint8)
        count = kernels.look_up(
            placed.system.mode, placed.system.by, placed.servers, placed.slots, call.contexts,
            call.lengths, remote, call.row, call.words, orders == 0, low, high,
            server, at_row, length, asked, key, target, suffix,
        )  # fmt: skip
        if not count:
            return
        server = server[:count]
        if (anywhere := server < 0).any():
            server[anywhere] = server.max() if not anywhere.all() else call.row[0] % placed.servers
        first = back = np.arange(count)
        if placed.system.mode == kernels.EXACT:
            _, first, back = np.unique(key[:count], return_index=True, return_inverse=True)
        order = first[np.lexsort((length[first], at_row[first], server[first]))]
        packed = kernels.pack(call.contexts, order, at_row, length, asked, server, merged)
        answers = yield _messages(*packed)
        values = np.concatenate([one.log10_prob for one in answers])
        matched = np.concatenate([one.matched_order for one in answers])
        place = np.empty(count, np.int64)
        place[order] = np.arange(len(order))
        place = place[first][back]
        kernels.take(target, suffix, place, values, matched, found, orders, weights)


def _messages(
    lengths: NDArray[np.uint8],
    context_words: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
    ends: NDArray[np.int64],
) -> Messages:
    groups = []
    contexts = width = query = 0
    for _, context_end, word_end, query_end in ends.tolist():
        groups.append(
            QueryGroups(
                lengths[contexts:context_end],
                context_words[width:word_end],
                counts[contexts:context_end],
                words[query:query_end],
            )
        )
        contexts, width, query = context_end, word_end, query_end
    return Messages(ends[:, 0], groups)


@dataclass
class Counts:
    """The cost of a trace.

    messages, looked_up  number of messages to each server, and of look-ups in them
    contexts  number of messages if only queries of one context travelled together
    rounds    rounds of messages, each of which waits for the previous one
    per_call  (rounds, messages, look-ups) of each call
    """

    audio_s: float
    rounds: int
    messages: NDArray[np.int64]
    looked_up: NDArray[np.int64]
    contexts: int = 0
    per_call: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def per_audio_s(self) -> float:
        return float(self.messages.sum()) / self.audio_s


def imbalance(loads: NDArray[np.int64]) -> float:
    return float(loads.max() / loads.mean() - 1) if loads.any() else 0.0


def calls_of(trace: Trace, vocabulary: Vocabulary, order: int) -> list[Call]:
    """Each `extend` of a trace, in ids of a model; contexts keep their last order - 1 words."""
    asked = extends(trace, vocabulary, order)
    return [Call.of(contexts, lengths, words) for _, contexts, lengths, words in asked]


def counted(
    calls: Sequence[Call], placed: Placed, cache: Cache, whole: HashIndex, audio_s: float
) -> Counts:
    """Counts the messages of successive calls, answered from `whole`, the index of all n-grams."""
    caller = Caller(placed, cache, whole.order)
    system = placed.system
    messages, looked_up = (np.zeros(placed.servers, np.int64) for _ in range(2))
    counts = Counts(audio_s, 0, messages, looked_up)
    for call in calls:
        rounds = caller.rounds(call, merged=True)
        before = counts.rounds, int(messages.sum()), int(looked_up.sum())
        try:
            sent = next(rounds)
            while True:
                counts.rounds += 1
                asked = [len(groups.words) for groups in sent.groups]
                np.add.at(messages, sent.servers, 1 if system.batched else asked)
                np.add.at(looked_up, sent.servers, asked)
                counts.contexts += sum(len(groups.word_counts) for groups in sent.groups)
                sent = rounds.send([_answer(whole, system, groups) for groups in sent.groups])
        except StopIteration:
            pass
        counts.per_call.append(
            (
                counts.rounds - before[0],
                int(messages.sum()) - before[1],
                int(looked_up.sum()) - before[2],
            )
        )
    return counts


def _answer(whole: HashIndex, system: System, groups: QueryGroups) -> Answers:
    """A server's answer, if the next round depends on it; otherwise nothing."""
    if system.in_steps:
        return whole.answer(system.mode, groups)[0]
    queries = len(groups.words)
    return Answers(np.zeros(queries, np.float32), *(np.zeros(queries, np.uint8) for _ in range(3)))
