"""The best paths of a lattice, each sentence once."""

from __future__ import annotations

import heapq
from itertools import count

from dlm.asr.rescoring.lattice import Lattice, Scales
from dlm.asr.rescoring.nbest import Hypothesis, NbestList

# The best way to a node: its score, and its summed acoustic and language-model scores.
_Way = tuple[float, float, float]


def best_paths(lattice: Lattice, limit: int = 1, scales: Scales | None = None) -> NbestList:
    """The `limit` likeliest sentences, best first; fewer if the lattice has fewer.

    Paths that differ only in times or silences count as one sentence: the best of them.

    Args   scales  the lattice's own by default
    Cost   time and memory grow with the words of the sentences found times the paths between them
    Paper  A* over prefixes of sentences, with the exact best completion (`Lattice.best_to_end`).
           The nodes that a prefix leads to are searched together, as in Mohri and Riley, An
           Efficient Algorithm for the n-Best-Strings Problem, 2002.
    """
    scales = lattice.scales if scales is None else scales
    each = lattice.totals(scales)
    search = _Search(lattice, each.tolist(), lattice.best_to_end(each).tolist())
    found: list[tuple[float, Hypothesis]] = []
    while len(found) < limit and (one := search.next()) is not None:
        found.append(one)
    found.sort(key=lambda one: -one[0])  # estimates may differ in the last bits
    return NbestList(lattice.id, tuple(one for _, one in found), scales=scales)


class _Search:
    """Prefixes of sentences, ordered by the score of their best completion."""

    def __init__(self, lattice: Lattice, each: list[float], to_end: list[float]) -> None:
        self._each, self._to_end = each, to_end
        self._begin = lattice.out_begin.tolist()
        self._targets = lattice.targets.tolist()
        self._labels, self._is_word = lattice.labels, lattice.is_word.tolist()
        self._acoustic, self._lm = lattice.acoustic.tolist(), lattice.lm.tolist()
        self._end = lattice.end
        self._number = count()  # the first among equals
        self._heap: list[tuple[float, int, tuple[str, ...], dict[int, _Way]]] = []
        self._push((), {0: (0.0, 0.0, 0.0)})

    def _push(self, words: tuple[str, ...], ways: dict[int, _Way]) -> None:
        best = max(way[0] + self._to_end[node] for node, way in ways.items())
        heapq.heappush(self._heap, (-best, next(self._number), words, ways))

    def next(self) -> tuple[float, Hypothesis] | None:
        while self._heap:
            _, _, words, ways = heapq.heappop(self._heap)
            if self._end in ways:
                score, acoustic, lm = ways[self._end]
                return score, Hypothesis(words, acoustic, lm)
            self._extend(words, ways)
        return None

    def _extend(self, words: tuple[str, ...], ways: dict[int, _Way]) -> None:
        """Pushes the prefix extended by each next word, and as a finished sentence."""
        after: dict[str, dict[int, _Way]] = {}
        waiting = list(ways)
        heapq.heapify(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            way = ways[node]
            for arc in range(self._begin[node], self._begin[node + 1]):
                target = self._targets[arc]
                if self._is_word[arc]:
                    reached = after.setdefault(self._labels[arc], {})
                else:
                    reached = ways
                score = way[0] + self._each[arc]
                known = reached.get(target)
                if known is None and reached is ways:
                    heapq.heappush(waiting, target)
                if known is None or score > known[0]:
                    reached[target] = (
                        score,
                        way[1] + self._acoustic[arc],
                        way[2] + self._lm[arc],
                    )
        if self._end in ways:
            self._push(words, {self._end: ways[self._end]})
        for word, reached in after.items():
            self._push((*words, word), reached)
