"""Turns sorted keys into the n-grams of all orders, with their adjusted counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.adjust import kernels
from dlm.spill.column import Column, Memory

MAX_RANK = (1 << 32) - 2

TOO_OFTEN = (
    f"an n-gram occurs more than {kernels.COUNT_BITS:,} times, which is more than dlm can count; "
    "remove repeated lines"
)

# Nodes of an order that are collected before they are put in a column.
ROOM = 1 << 18


@dataclass
class Trie:
    """The n-grams of all orders, each order sorted by its reversed words.

    Attributes, by order
        words       uint32, the leftmost word of each n-gram
        counts      uint32, the adjusted count of each n-gram, with kernels.PRUNED
        children    uint32, of all orders but the highest: rank of the first n-gram that is one word
                    longer to the left; the column has one entry more than there are n-grams
        statistics  (order, kernels.STATISTICS) int64
    """

    words: list[Column]
    counts: list[Column]
    children: list[Column]
    statistics: NDArray[np.int64]

    @property
    def order(self) -> int:
        return len(self.words)

    @property
    def kept(self) -> list[int]:
        """The number of n-grams of each order that stay in the model."""
        return [int(n) for n in self.statistics[:, kernels.KEPT]]

    def close(self) -> None:
        for column in [*self.words, *self.counts, *self.children]:
            column.remove()


class TrieBuilder:
    """Builds the trie from sorted keys.

    Args
        words       number of words; every id above 2 must end some key
        thresholds  n-grams that occur at most this often are left out, by order
        known       for each word, whether n-grams with that word may stay; None keeps all
    """

    def __init__(
        self,
        order: int,
        most: int,
        words: int,
        thresholds: Sequence[int],
        known: NDArray[np.uint8] | None,
        memory: Memory,
        room: int = ROOM,
    ) -> None:
        self._order = order
        bounds = [words, *[most + 1] * (order - 1)]
        self._trie = Trie(
            [Column(np.uint32, memory=memory, most=bound) for bound in bounds],
            [Column(np.uint32, memory=memory, most=bound) for bound in bounds],
            [Column(np.uint32, memory=memory, most=bound + 1) for bound in bounds[:-1]],
            np.zeros((order, kernels.STATISTICS), np.int64),
        )
        self._words = np.empty((order, room), np.uint32)
        self._counts = np.empty((order, room), np.uint32)
        self._children = np.empty((order, room), np.uint32)
        self._used = np.zeros(order, np.int64)
        self._base = np.zeros(order, np.int64)
        self._actual = np.zeros(order, np.int64)
        self._outside = np.zeros(order, np.uint8)
        self._path = np.zeros(order, np.uint32)
        self._depth = 0
        self._known = np.empty(0, np.uint8) if known is None else known
        self._thresholds = np.array(thresholds, np.int64)
        # <unk> and <s> end no n-gram of the text.
        self._words[0, :2] = (0, kernels.BOS)
        self._counts[0, :2] = 0
        self._children[0, :2] = 0
        self._used[0] = 2
        self._trie.statistics[0, [kernels.ALL, kernels.KEPT]] = 2

    def add(self, rows: NDArray[np.uint32]) -> None:
        done = 0
        while done < len(rows):
            done, self._depth = kernels.grow(
                rows, done, self._depth, self._path, self._words, self._counts, self._children,
                self._used, self._base, self._actual, self._outside, self._known, self._thresholds,
                self._trie.statistics,
            )  # fmt: skip
            if done < len(rows):
                self._flush()

    @property
    def open_actual(self) -> list[int]:
        """How often each n-gram that ends the last key has occurred so far, by order; the list
        stops at the key's first `<s>`."""
        return [int(often) for often in self._actual[: self._depth]]

    def finish(self, *, at_end: bool = True) -> Trie:
        """Returns the trie of all keys; EstimationError if a count or a rank is too large. If the
        last key is the last of the whole text (`at_end`), the statistics use the actual counts of
        the n-grams that end this key, instead of their adjusted counts."""
        kernels.close(
            self._depth, self._words, self._counts, self._used, self._actual, self._outside,
            self._thresholds, self._trie.statistics, at_end,
        )  # fmt: skip
        self._depth = 0
        self._flush()
        trie = self._trie
        for n, column in enumerate(trie.children):
            column.append(np.array([len(trie.words[n + 1])], np.uint32))
        if trie.statistics[:, kernels.TOO_LARGE].any():
            raise EstimationError(TOO_OFTEN)
        return trie

    def _flush(self) -> None:
        for n in range(self._order):
            full = int(self._used[n]) - (n < self._depth)
            if int(self._base[n]) + full > MAX_RANK:
                raise EstimationError(
                    f"the text has more than {MAX_RANK:,} n-grams of order {n + 1}, which is the "
                    "most that dlm can count; estimate a lower order, or use less text"
                )
            self._trie.words[n].append(self._words[n, :full])
            self._trie.counts[n].append(self._counts[n, :full])
            if n + 1 < self._order:
                self._trie.children[n].append(self._children[n, :full])
        kernels.keep_open(
            self._words, self._counts, self._children, self._used, self._base, self._depth
        )
