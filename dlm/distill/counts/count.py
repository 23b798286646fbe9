"""Counts how often a source is expected to say each n-gram of a topology.

The count of an n-gram (h, w) is the source's probability of w, summed over the visited histories
that end in h. The count of a context h is how many visited histories end in h. Counts add up over
samples, workers and machines; `local_counts` gives those of SampleApprox (Suresh et al. 2021, 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.distill.fitting import kernels
from dlm.distill.fitting.topology import first_child
from dlm.distill.sources import mass_kernels
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.units import LN_10


@dataclass(frozen=True, eq=False)
class Visit:
    """The histories that samples visit: one per unfinished sentence of a batch.

    Shapes, b sentences, v words
        words    (b,)    uint32   the last word; `<s>` where a sentence begins
        places   (b,)    int64    fixed place of each sentence in the batch; increasing
        given    (b, v)  float32  distribution of the next word; 0 for `<s>`
        entropy  (b,)    float32  entropy of `given`, in nats
    """

    words: NDArray[np.uint32]
    places: NDArray[np.int64]
    given: NDArray[np.float32]
    entropy: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WordMass:
    """A source's probabilities of some words, when its full distribution is not known.

    Shapes, h histories, e words
        histories    (h, m)  uint32           last m words of each history, padded with `MISSING`
        rows         (e,)    int64            the history that each word follows
        words, mass  (e,)    uint32, float64  each word, and its probability, which is above 0
        entropy      (1,)    float64          nan, since it is not known
    begun  number of new sentences
    """

    histories: NDArray[np.uint32]
    rows: NDArray[np.int64]
    words: NDArray[np.uint32]
    mass: NDArray[np.float64]
    entropy: NDArray[np.float64]
    begun: int

    @classmethod
    def of(
        cls,
        histories: NDArray[np.uint32],
        parts: Sequence[tuple[NDArray[Any], NDArray[Any] | int, NDArray[np.float64]]],
        begun: int,
    ) -> WordMass:
        """Joins parts: rows, words (or one word for all), mass. Drops entries without mass."""
        rows = np.concatenate([part for part, _, _ in parts]).astype(np.int64)
        words = np.concatenate([np.broadcast_to(w, part.shape) for part, w, _ in parts])
        mass = np.concatenate([part for _, _, part in parts])
        there = mass > 0
        return cls(
            histories, rows[there], words[there].astype(np.uint32), mass[there],
            np.full(1, np.nan), begun,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class NgramCounts:
    """Expected counts for the n-grams and the contexts of a topology; counts of parts add up.

    Shapes, n_k n-grams of order k
        ngrams[k - 1]  (n_k,)  float64  counts of order k; 0 for `<s>`, which is never predicted
        contexts[k]    (n_k,)  float64  counts of contexts of length k, 0 to N - 1; n_0 is 1
    """

    ngrams: list[NDArray[np.float64]]
    contexts: list[NDArray[np.float64]]

    @property
    def words(self) -> float:
        """Expected number of words, including ends of sentences."""
        return float(self.contexts[0][0])

    def __add__(self, other: NgramCounts) -> NgramCounts:
        return NgramCounts(
            [a + b for a, b in zip(self.ngrams, other.ngrams, strict=True)],
            [a + b for a, b in zip(self.contexts, other.contexts, strict=True)],
        )

    def scaled(self, by: float) -> NgramCounts:
        return NgramCounts([a * by for a in self.ngrams], [a * by for a in self.contexts])

    def of(self, topology: ModelColumns, part: ModelColumns) -> NgramCounts:
        """Selects the counts for `part`, a subset of the `topology` of these counts. The counts
        of an n-gram do not depend on the topology's other n-grams."""
        rows = [topology.rows_of(columns.ids) for columns in part.orders]
        assert not any((row == MISSING).any() for row in rows), "not a subset of the topology"
        return NgramCounts(
            [counts[row] for counts, row in zip(self.ngrams, rows, strict=False)],
            [
                self.contexts[0],
                *(counts[row] for counts, row in zip(self.contexts[1:], rows[:-1], strict=False)),
            ],
        )


@dataclass(frozen=True, eq=False)
class LocalCounts:
    """How often words are found at each context, if contexts are tried from the longest one down.

    Shapes, n_k n-grams of order k
        found[k - 1]  (n_k,)  float64  C(w, h): w was found at h, not at a longer context
        backed[k]     (n_k,)  float64  C(phi, h): h was tried but did not list the word; h has
                                       length k, 0 to N - 1; 0 for the empty context
        direct[k]     (n_k,)  float64  visits whose longest context in the topology is h
        rounding      visits subtracted from `backed`, since they were due to rounding alone
    """

    found: list[NDArray[np.float64]]
    backed: list[NDArray[np.float64]]
    direct: list[NDArray[np.float64]]
    rounding: float


def local_counts(topology: ModelColumns, counts: NgramCounts) -> LocalCounts:
    """Splits counts by the context at which words are found. No count is negative: a difference
    within rounding becomes 0. Where rounding gives a context more backed-off visits than its
    unlisted words have mass, the excess is subtracted."""
    found: list[NDArray[np.float64]] = []
    backed: list[NDArray[np.float64]] = []
    direct: list[NDArray[np.float64]] = []
    for k in range(1, topology.order + 1):
        here = counts.ngrams[k - 1].copy()
        visited = counts.contexts[k - 1]
        back = np.zeros(len(visited))
        if k > 1:
            back[:] = visited
            kernels.add_at(-counts.ngrams[k - 1], topology.orders[k - 1].prefix, back)
        own = visited.copy()
        if k < topology.order:
            longer = topology.orders[k]
            kernels.add_at(-counts.ngrams[k], longer.suffix, here)
            kernels.add_at(-counts.contexts[k], topology.orders[k - 1].suffix, own)
        found.append(_beyond_rounding(here, counts.ngrams[k - 1]))
        backed.append(np.maximum(back, 0.0))
        direct.append(_beyond_rounding(own, visited))
    rounding = 0.0
    for k in range(1, topology.order):
        shorter, longer = topology.orders[k - 1], topology.orders[k]
        rounding += kernels.cap_backed(
            shorter.suffix, first_child(topology, k - 1), shorter.first_child, longer.suffix,
            found[k - 1], backed[k - 1], counts.contexts[k - 1], counts.contexts[k], backed[k],
        )  # fmt: skip
    return LocalCounts(found, backed, direct, rounding)


def _beyond_rounding(left: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(left > kernels.ROUNDING * whole, left, 0.0)


def ln_likelihood(
    counts: LocalCounts, log10_prob: Sequence[NDArray[np.float64]],
    log10_weight: Sequence[NDArray[np.float64]],
) -> float:  # fmt: skip
    """Returns the log-probability, in nats, of the counted text under a model on the same topology.
    `log10_prob` is listed by order, and `log10_weight` by context length, both from 1 up."""
    total = 0.0
    for found, log10 in zip(counts.found, log10_prob, strict=True):
        there = found > 0
        total += float(found[there] @ log10[there])
    for backed, log10 in zip(counts.backed[1:], log10_weight, strict=True):
        there = backed > 0
        total += float(backed[there] @ log10[there])
    return total * LN_10


def grown(array: NDArray[Any], rows: int, fill: Any) -> NDArray[Any]:
    """Returns the array, extended to at least `rows` rows; the new rows hold `fill`."""
    more = max(rows - len(array), 0)
    return np.concatenate([array, np.full((more, *array.shape[1:]), fill, array.dtype)])


class VisitCounter:
    """Adds up visits, one at a time (Suresh et al. 2021, section 4.1), on a closed topology with
    the source's ids; `entropy` is summed over all distributions, in nats."""

    def __init__(self, topology: ModelColumns) -> None:
        self._topology = topology
        self.counts = NgramCounts(
            [np.zeros(len(columns)) for columns in topology.orders],
            [np.zeros(1), *(np.zeros(len(columns)) for columns in topology.orders[:-1])],
        )
        self.entropy = np.zeros(1)
        # The last words of each unfinished sentence, padded with `MISSING`.
        self._window = np.zeros((0, topology.order - 1), np.uint32)
        self._last_words = [np.ascontiguousarray(columns.ids[:, -1]) for columns in topology.orders]

    def add(self, visit: Visit | WordMass) -> int:
        """Counts a visit's histories; returns how many sentences it begins."""
        topology, order = self._topology, self._topology.order
        ngrams, contexts = self.counts.ngrams, self.counts.contexts
        if isinstance(visit, WordMass):
            self.entropy += visit.entropy
            _add_mass(topology, self._last_words, visit, ngrams, contexts)
            return visit.begun
        self._window = grown(self._window, int(visit.places[-1]) + 1, MISSING)
        self.entropy += visit.entropy.sum(dtype=np.float64)
        given = np.ascontiguousarray(visit.given)
        total = given.sum(axis=1, dtype=np.float64)
        kernels.add_given(
            given, total, np.zeros(len(given), np.uint32), first_child(topology, 0),
            self._last_words[0], ngrams[0], contexts[0],
        )  # fmt: skip
        begins = visit.words == topology.vocabulary.begin_id
        if order > 1:
            here = self._window[visit.places]
            here[begins] = MISSING
            here[:, :-1] = here[:, 1:]
            here[:, -1] = visit.words
            self._window[visit.places] = here
            for k in range(1, order):
                rows = topology.rows_of(np.ascontiguousarray(here[:, order - 1 - k :]))
                kernels.add_given(
                    given,
                    total,
                    rows,
                    topology.orders[k - 1].first_child,
                    self._last_words[k],
                    ngrams[k],
                    contexts[k],
                )
        return int(begins.sum())


def _add_mass(
    topology: ModelColumns,
    last_words: Sequence[NDArray[np.uint32]],
    given: WordMass,
    ngrams: Sequence[NDArray[np.float64]],
    contexts: Sequence[NDArray[np.float64]],
) -> None:
    contexts[0][0] += given.mass.sum()
    ngrams[0] += np.bincount(given.words, given.mass, len(ngrams[0]))
    length = given.histories.shape[1]
    assert topology.order - 1 <= length, "the histories are shorter than the topology's contexts"
    for k in range(1, topology.order):
        mass_kernels.add_mass(
            topology.rows_of(np.ascontiguousarray(given.histories[:, length - k :])),
            given.rows,
            given.words,
            given.mass,
            topology.orders[k - 1].first_child,
            last_words[k],
            ngrams[k],
            contexts[k],
        )
