"""Counts how often sentences, drawn from a backoff model or read from a text, visit the states of
its automaton; the distributions of the states are computed once, at the end."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import NgramCounts
from dlm.distill.sources import walk_kernels
from dlm.distill.sources.backoff import BackoffSource, counts_of_visits
from dlm.distill.sources.source import MOST_WORDS

F64, I64, U32 = np.float64, np.int64, np.uint32


class Automaton:
    """A backoff model as an automaton, which takes 24 bytes per n-gram. `visits` (s,) counts
    visits to states; the states are the contexts, sorted by length from the empty one on."""

    def __init__(self, source: BackoffSource) -> None:
        self._source = source
        topology = source.topology
        sizes = [1, *map(len, topology.orders[:-1])]
        self._places = np.cumsum([0, *sizes])
        arcs = np.cumsum([0, *map(len, topology.orders)])
        firsts, parents, leads = [np.zeros(1, I64)], [np.zeros(1, U32)], []
        for k, columns in enumerate(topology.orders, 1):
            if k < topology.order:
                firsts.append(arcs[k] + columns.first_child[:-1].astype(I64))
                parents.append((self._places[k - 1] + columns.suffix).astype(U32))
                leads.append(np.arange(len(columns), dtype=U32) + U32(self._places[k]))
            elif k == 1:
                leads.append(np.zeros(len(columns), U32))
            else:
                leads.append((self._places[k - 1] + columns.suffix).astype(U32))
        self._first = np.concatenate([*firsts, arcs[-1:]]).astype(I64)
        self._parent = np.concatenate(parents)
        self._leads = np.concatenate(leads)
        self._word = np.concatenate([columns.ids[:, -1] for columns in topology.orders])
        prob = np.concatenate(source.prob)
        owner = np.repeat(np.arange(len(self._parent)), np.diff(self._first))
        before = np.concatenate([[0.0], np.cumsum(prob)])
        self._reached = before[1:] - before[self._first[owner]]
        self._end = topology.vocabulary.end_id
        self._start = 1 + topology.vocabulary.begin_id if topology.order > 1 else 0
        self.visits = np.zeros(len(self._parent))

    def draw(
        self, sentences: int, seed: np.random.SeedSequence, *, keep: bool = False
    ) -> NDArray[np.uint32]:
        """Draws sentences from the model and adds their visits. Returns the words (n,), with `</s>`
        after each sentence, if `keep` is true, and no words otherwise."""
        random = seed.generate_state(1, np.uint64).astype(np.uint64)
        said = np.empty(sentences * (MOST_WORDS + 1) if keep else 0, U32)
        kept = walk_kernels.draw_sentences(
            self._first, self._parent, self._word, self._reached, self._leads, self._start,
            self._end, sentences, MOST_WORDS, random, self.visits, said,
        )  # fmt: skip
        return said[:kept].copy()

    def follow(self, ids: NDArray[np.uint32], begins: NDArray[np.int64]) -> None:
        """Adds the visits of sentences: `ids` (n,), cut at `begins` (m + 1,)."""
        walk_kernels.follow_sentences(
            self._first, self._parent, self._word, self._leads, self._start, MOST_WORDS,
            ids, begins, self.visits,
        )  # fmt: skip

    def counts(self) -> NgramCounts:
        parts = [self.visits[a:b] for a, b in pairwise(self._places)]
        return counts_of_visits(self._source, parts)
