"""Counting for each kind of source: a model in Python or a network by its visits, a backoff model
by the states of its automaton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts import work
from dlm.distill.counts.count import (
    NgramCounts,
    VisitCounter,
    ln_likelihood,
    local_counts,
)
from dlm.distill.counts.sampling import Sampling
from dlm.distill.counts.visits import visits_of
from dlm.distill.fitting.topology import united
from dlm.distill.sources.backoff import BackoffSource, as_log10
from dlm.distill.sources.source import SourceReader
from dlm.distill.sources.walk import Automaton
from dlm.estimate.columns import ModelColumns


class NgramCounting(work.Summed, Protocol):
    """Counting that ends in counts for a topology."""

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        """As `work.count_all` takes them."""

    def result(self) -> tuple[NgramCounts, float]:
        """Counts for the topology, and the source's entropy summed over all visits, in nats."""


class VisitCounting:
    def __init__(self, reader: SourceReader, topology: ModelColumns) -> None:
        self._reader, self._counter = reader, VisitCounter(topology)

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        for visits in visits_of(self._reader, sampling):
            yield map(self._counter.add, visits)

    def sums(self) -> list[NDArray[Any]]:
        counts = self._counter.counts
        return [*counts.ngrams, *counts.contexts, self._counter.entropy]

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        _fill(self.sums(), sums)

    def result(self) -> tuple[NgramCounts, float]:
        return self._counter.counts, float(self._counter.entropy[0])


class WalkCounting:
    """Counts the states of a backoff model that its own or given sentences visit; it has the ids of
    `topology`, which is closed."""

    def __init__(self, model: ModelColumns, topology: ModelColumns) -> None:
        self._target = topology
        self._whole = united([model, topology])
        self._known = BackoffSource.of(model, self._whole)
        self._automaton = Automaton(self._known)

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        if sampling.text is not None:
            for lines in sampling.given(self._whole.vocabulary):
                yield self._followed(lines)
            return
        for samples, seed in sampling.drawn():
            yield self._drawn(samples, seed)

    def _followed(self, lines: list[NDArray[np.uint32]]) -> Iterator[int]:
        self._automaton.follow(np.concatenate(lines), np.cumsum([0, *map(len, lines)]))
        yield len(lines)

    def _drawn(self, samples: int, seed: np.random.SeedSequence) -> Iterator[int]:
        self._automaton.draw(samples, seed)
        yield samples

    def sums(self) -> list[NDArray[Any]]:
        return [self._automaton.visits]

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        _fill(self.sums(), sums)

    def result(self) -> tuple[NgramCounts, float]:
        whole, known = self._whole, self._known
        counts = self._automaton.counts()
        own = ln_likelihood(
            local_counts(whole, counts),
            as_log10(known.prob),
            as_log10(known.weight[: whole.order - 1]),
        )
        return counts.of(whole, self._target), -own


def _fill(into: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
    for array, value in zip(into, values, strict=True):
        array[...] = value
