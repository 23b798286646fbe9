"""An automaton that counts phrases in what is said, word by word.

A node stands for the longest end of the words so far that begins a phrase. A bonus is handed out
ahead: each word of a phrase brings its share, and a word that leaves the phrase gives the shares
back. The shares of a node are its potential, so the steps of a path add up to the bonuses of the
phrases that it completes, exactly: all are whole numbers of units.

Source  Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search", CACM 1975;
        here over words, with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.client.plan import phrase_kernels

UNIT = float(phrase_kernels.UNIT)  # of bonuses, log10


@dataclass(frozen=True, eq=False)
class PhraseAutomaton:
    """Phrases of symbols from 1; symbol 0 stands for every other word.

    Nodes are numbered level by level, so the children of a node are one range, by their symbol.

    Shapes  N nodes, the first of which stands for nothing said
        children   (N + 1,) int32  children of node n are children[n] to children[n + 1]
        symbols    (N,)     int32  the last symbol of each node
        shorter    (N,)     int32  the node of its longest proper end
        completed  (N,)     int32  units of all phrases that end here
        held       (N,)     int32  units handed out ahead, 0 or more; 0 at node 0
    """

    children: NDArray[np.int32]
    symbols: NDArray[np.int32]
    shorter: NDArray[np.int32]
    completed: NDArray[np.int32]
    held: NDArray[np.int32]

    @classmethod
    def of(cls, phrases: Sequence[Sequence[int]], units: Sequence[int]) -> PhraseAutomaton:
        """The automaton of different phrases, each of one symbol or more, and their bonuses.

        Trusts  sums of bonuses fit in an int32: checked in `api.phrases`
        """
        order = sorted(range(len(phrases)), key=lambda at: tuple(phrases[at]))
        lengths = np.array([len(phrases[at]) for at in order], np.int64)
        bonuses = np.array([units[at] for at in order], np.int64)
        depth = int(lengths.max(initial=0))
        table = np.zeros((len(order), depth), np.int32)
        for row, at in enumerate(order):
            table[row, : lengths[row]] = phrases[at]
        parents, symbols = [np.zeros(1, np.int64)], [np.zeros(1, np.int32)]
        held, completed = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        levels, rows = [0, 1], np.arange(len(order))
        above = np.zeros(len(order), np.int64)  # the node of each row's beginning
        for level in range(depth):
            rows, above = rows[lengths[rows] > level], above[lengths[rows] > level]
            here = table[rows, level]
            new = np.ones(len(rows), bool)
            new[1:] = (above[1:] != above[:-1]) | (here[1:] != here[:-1])
            place = np.cumsum(new) - 1
            parents.append(above[new])
            symbols.append(here[new])
            ends = lengths[rows] == level + 1
            ahead, done = np.zeros(new.sum(), np.int64), np.zeros(new.sum(), np.int64)
            share = np.maximum(bonuses[rows], 0) * (level + 1) // lengths[rows]
            np.maximum.at(ahead, place[~ends], share[~ends])
            done[place[ends]] = bonuses[rows][ends]
            held.append(ahead)
            completed.append(done)
            above = levels[-1] + place
            levels.append(levels[-1] + len(ahead))
        return cls._linked(
            levels,
            np.concatenate(parents),
            np.concatenate(symbols),
            np.concatenate(held),
            np.concatenate(completed),
        )

    @classmethod
    def _linked(
        cls,
        levels: list[int],
        parents: NDArray[np.int64],
        symbols: NDArray[np.int32],
        held: NDArray[np.int64],
        completed: NDArray[np.int64],
    ) -> PhraseAutomaton:
        count = len(symbols)
        children = np.searchsorted(parents[1:], np.arange(count + 1)).astype(np.int32) + 1
        children = children.astype(np.int32)
        shorter = np.zeros(count, np.int32)
        nothing = [np.zeros(count, np.int32)] * 2  # only the nodes are wanted
        identity = np.arange(int(symbols.max()) + 1, dtype=np.int32)
        for first, last in pairwise(levels[2:]):
            level = slice(first, last)
            shorter[level], _ = phrase_kernels.advance(
                shorter[parents[level]],
                np.ones(last - first, np.uint32),
                symbols[level].astype(np.uint32),
                identity,
                children,
                symbols,
                shorter,
                *nothing,
            )
            held[level] = np.maximum(held[level], held[shorter[level]])
            completed[level] += completed[shorter[level]]
        return cls(children, symbols, shorter, completed.astype(np.int32), held.astype(np.int32))

    @cached_property
    def _edges(self) -> dict[tuple[int, int], int]:
        parents = np.repeat(np.arange(len(self.symbols)), np.diff(self.children))
        symbols = self.symbols[1:].tolist()
        pairs = zip(parents.tolist(), symbols, strict=True)
        return dict(zip(pairs, range(1, len(self.symbols)), strict=True))

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        return self.shorter.tolist(), self.completed.tolist(), self.held.tolist()

    def step(self, node: int, symbol: int) -> int:
        """The node after one symbol."""
        if symbol == 0:
            return 0
        edges, shorter = self._edges, self._lists[0]
        while (found := edges.get((node, symbol), 0)) == 0 and node:
            node = shorter[node]
        return found

    def added(self, before: int, after: int) -> int:
        """The units that one step adds."""
        _, completed, held = self._lists
        return completed[after] + held[after] - held[before]

    def advance(
        self,
        nodes: NDArray[np.int32],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        symbol_of: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See `phrase_kernels.advance`."""
        found: tuple[NDArray[np.int32], NDArray[np.float32]] = phrase_kernels.advance(
            nodes,
            counts,
            words,
            symbol_of,
            self.children,
            self.symbols,
            self.shorter,
            self.completed,
            self.held,
        )
        return found

    def walk(
        self,
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        symbol_of: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """See `phrase_kernels.walk`."""
        found: tuple[NDArray[np.int64], NDArray[np.int32]] = phrase_kernels.walk(
            counts,
            words,
            symbol_of,
            self.children,
            self.symbols,
            self.shorter,
            self.completed,
        )
        return found
