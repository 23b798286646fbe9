"""Computes the probabilities of an order from those of the order below. Each context's sums go
into an array by rank, one range of contexts at a time if not all fit in memory."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.adjust.kernels import COUNT_BITS, KEPT, PRUNED
from dlm.estimate.adjust.trie import MAX_RANK, Trie
from dlm.estimate.interpolate import kernels
from dlm.resources import in_order
from dlm.spill.column import Column, Memory

# N-grams processed at once.
CHUNK = 1 << 18

# Bytes per context: its sums and its leftmost word.
CONTEXT_BYTES = 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """N-grams begin <= j < end of an order, whose children have the ranks first <= i < last."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ContextRange:
    """Contexts of ranks first <= p < last: the children of the n-grams of ranks low <= q < high."""

    low: int
    high: int
    first: int
    last: int


def unigrams(
    counts: NDArray[np.uint32], discounts: NDArray[np.float32], kept: int
) -> NDArray[np.float32]:
    """Computes the probabilities of words from adjusted counts (words,) with the PRUNED bit. `<s>`
    gets 1, and <unk> its share of the discounted mass. `kept` words stay in the model."""
    numbers = (counts & COUNT_BITS).astype(np.float64)
    pruned = counts >= PRUNED
    taken = np.where(
        pruned, numbers, discounts.astype(np.float64)[np.minimum(numbers, 3).astype(int)]
    )
    total = numbers.sum()
    spared = taken.sum() / total
    uniform = 1.0 / (kept - 1)  # <s> is never predicted
    probs: NDArray[np.float32] = ((numbers - taken) / total + spared * uniform).astype(np.float32)
    probs[1] = 1.0
    return probs


class Interpolation:
    """Goes from order to order: `step` computes the next order's probabilities. `probs` holds those
    of the current order's kept n-grams, `backoffs` the weights one order below; both float32."""

    def __init__(
        self,
        trie: Trie,
        discounts: list[NDArray[np.float32]],
        memory: Memory,
        work_bytes: int,
        pool: ThreadPoolExecutor,
        threads: int,
        chunk: int = CHUNK,
    ) -> None:
        self._trie = trie
        self._discounts = discounts
        self._memory = memory
        self._work_bytes = work_bytes
        self._pool = pool
        self._threads = threads
        self._chunk = chunk
        self._links: Column | None = None  # for order 2 and above: the rank of each context
        self.order = 1
        counts = trie.counts[0].read(0, len(trie.counts[0]))
        probs = unigrams(counts, discounts[0], int(trie.statistics[0, KEPT]))
        self.probs = Column(np.float32, memory=memory, most=len(probs))
        self.probs.append(probs)
        self.backoffs: Column | None = None
        self.ranges = 0

    def step(self) -> Column:
        """Computes the probabilities of the next order; returns those of the current one."""
        trie, n = self._trie, self.order + 1
        discounts = self._discounts[n - 1].astype(np.float64)
        shorter, longer = len(trie.words[n - 2]), len(trie.words[n - 1])
        backoffs = Column(np.float32, memory=self._memory, most=shorter)
        probs = Column(np.float32, memory=self._memory, most=longer)
        probs.extend(longer)
        if n == 2:
            links = trie.words[1]
        else:
            links = Column(np.uint32, memory=self._memory, most=longer)
            links.extend(longer)
        for contexts in self._ranges(n):
            self.ranges += 1
            if contexts.first == 0 and contexts.last < shorter:
                self._forget(links)
            sums = self._sums(n, contexts, links, discounts)
            backoff = np.empty(len(sums), np.float32)
            kernels.weights(sums, backoff)
            backoffs.append(backoff)
            self._probabilities(n, contexts, links, sums, discounts, probs)
        before, self.probs, self.backoffs = self.probs, probs, backoffs
        if self._links is not None and n > 3:
            self._links.remove()
        self._links = links
        self.order = n
        return before

    def close(self) -> None:
        if self._links is not None and self.order > 2:
            self._links.remove()
        self._links = None

    # ------------------------------------------------------------------------ one order

    def _forget(self, links: Column) -> None:
        for begin in range(0, len(links), self._chunk):
            end = min(begin + self._chunk, len(links))
            some = links.edit(begin, end)
            some[:] = MAX_RANK + 1
            links.store(begin, some)

    def _ranges(self, n: int) -> Iterator[ContextRange]:
        trie = self._trie
        if n == 2:
            # At order 2, the sums of all words are held in memory at once.
            yield ContextRange(0, 1, 0, len(trie.words[0]))
            return
        most = max(self._work_bytes // CONTEXT_BYTES, 1)
        children = trie.children[n - 3]
        total = len(trie.words[n - 3])
        low = 0
        while low < total:
            first = int(children.read(low, low + 1)[0])

            def room(end: int, low: int = low, first: int = first) -> int:
                return int(children.read(end, end + 1)[0]) - first + (end - low) // 5

            # A range has as many contexts as fit, and at least all children of one n-gram.
            fits = low + max(bisect(range(low + 1, total + 1), most, key=room), 1)
            yield ContextRange(low, fits, first, int(children.read(fits, fits + 1)[0]))
            low = fits

    def _chunks(self, n: int) -> Iterator[Chunk]:
        column, begin = self._trie.children[n - 2], 0
        total = len(self._trie.words[n - 2])
        while begin < total:
            children = column.read(begin, min(begin + self._chunk, total) + 1)
            first = int(children[0])
            # A chunk has at most `_chunk` children, but at least one n-gram.
            count = int(np.searchsorted(children, first + self._chunk, side="right")) - 1
            count = max(count, 1)
            yield Chunk(begin, begin + count, first, int(children[count]))
            begin += count

    def _sums(
        self, n: int, contexts: ContextRange, links: Column, discounts: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Adds up what follows each context of a range, and fills in the links of its n-grams."""
        trie = self._trie
        sums = np.zeros((contexts.last - contexts.first, 2))
        if n == 2:
            half = self._halves(np.arange(contexts.first, contexts.last + 1), contexts)
            for chunk in self._chunks(n):
                words = links.read(chunk.first, chunk.last)
                counts = trie.counts[1].read(chunk.first, chunk.last)
                for part in [
                    self._pool.submit(
                        kernels.add_up_bigrams, words, counts, low, high, discounts, sums[low:high]
                    )
                    for low, high in half
                ]:
                    part.result()
            return sums
        assert self._links is not None
        searched = trie.children[n - 3].read(contexts.low, contexts.high + 1)
        searched_words = trie.words[n - 2].read(contexts.first, contexts.last)
        halves = self._halves(searched, contexts)
        for chunk in self._chunks(n):
            mine = self._links.read(chunk.begin, chunk.end)
            children = trie.children[n - 2].read(chunk.begin, chunk.end + 1)
            words = trie.words[n - 1].read(chunk.first, chunk.last)
            counts = trie.counts[n - 1].read(chunk.first, chunk.last)
            found = links.edit(chunk.first, chunk.last)
            for part in [
                self._pool.submit(
                    kernels.add_up, mine, children, chunk.first, words, counts, low, high, searched,
                    contexts.low, contexts.first, searched_words, discounts, sums, found,
                )
                for low, high in halves
            ]:  # fmt: skip
                part.result()
            links.store(chunk.first, found)
        return sums

    def _halves(self, begins: NDArray[np.integer], contexts: ContextRange) -> list[tuple[int, int]]:
        if contexts.high - contexts.low == 1 and len(begins) == contexts.last - contexts.first + 1:
            low, high = contexts.first, contexts.last  # order 2: each context is a word
        else:
            low, high = contexts.low, contexts.high
        share = (int(begins[-1]) - int(begins[0])) / self._threads
        cuts = [
            low + int(np.searchsorted(begins, int(begins[0]) + k * share))
            for k in range(1, self._threads)
        ]
        edges = [low, *(min(cut, high) for cut in cuts), high]
        return [(a, b) for a, b in pairwise(edges) if a < b]

    def _probabilities(
        self,
        n: int,
        contexts: ContextRange,
        links: Column,
        sums: NDArray[np.float64],
        discounts: NDArray[np.float64],
        probs: Column,
    ) -> None:
        trie = self._trie

        def work(chunk: Chunk) -> None:
            out = probs.edit(chunk.first, chunk.last)
            kernels.probabilities(
                trie.children[n - 2].read(chunk.begin, chunk.end + 1),
                chunk.first,
                trie.counts[n - 1].read(chunk.first, chunk.last),
                links.read(chunk.first, chunk.last),
                self.probs.read(chunk.begin, chunk.end),
                contexts.first,
                contexts.last,
                sums,
                discounts,
                out,
            )
            probs.store(chunk.first, out)

        chunks = (self._pool.submit(work, chunk) for chunk in self._chunks(n))
        for _ in in_order(chunks, 2 * self._threads):
            pass
