"""Collects a source's sentences: the text from which a topology is inferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit
from dlm.distill.counts.sampling import GIVEN, Sampling
from dlm.distill.counts.visits import own_sentences, visits_of
from dlm.distill.fitting.topology import united
from dlm.distill.sources.backoff import BackoffSource
from dlm.distill.sources.source import SourceReader
from dlm.distill.sources.walk import Automaton
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns

U32 = np.uint32
# How many sentences began, and words with `</s>` after each sentence.
Said: TypeAlias = tuple[int, NDArray[np.uint32]]
SentenceBlocks: TypeAlias = Callable[[Sampling], Iterator[Iterator[Said]]]


class SentenceCollection:
    """`work.Summed` that keeps sentences: its single sum is all words said."""

    def __init__(self, sentences: SentenceBlocks) -> None:
        self._sentences = sentences
        self._said: list[NDArray[np.uint32]] = []

    def blocks(self, sampling: Sampling) -> Iterator[Iterator[int]]:
        for block in self._sentences(sampling):
            yield map(self._keep, block)

    def _keep(self, said: Said) -> int:
        self._said.append(said[1])
        return said[0]

    def sums(self) -> list[NDArray[Any]]:
        self._said = [np.concatenate([np.zeros(0, U32), *self._said])]
        return list(self._said)

    def restore(self, sums: Sequence[NDArray[Any]]) -> None:
        self._said = [sums[0]]


def sentences_of(reader: SourceReader) -> SentenceBlocks:
    """Of a source of the protocol; ConfigError for visits, which do not show where sentences
    end."""
    if reader.makes_visits:
        raise ConfigError(
            f"{reader.name} makes visits, not sentences, so no topology can be inferred; give one"
        )
    end = reader.vocabulary.end_id

    def own(samples: int, seed: np.random.SeedSequence) -> Iterator[Said]:
        lines = own_sentences(reader, samples, seed)
        yield samples, np.concatenate([np.append(line, U32(end)) for line in lines])

    def blocks(sampling: Sampling) -> Iterator[Iterator[Said]]:
        if hasattr(reader.source, "sample"):
            return (own(*block) for block in sampling.drawn(GIVEN))
        begin = reader.vocabulary.begin_id
        return (_visited(visits, begin, end) for visits in visits_of(reader, sampling))

    return blocks


def _visited(visits: Iterator[Any], begin: int, end: int) -> Iterator[Said]:
    """Sentences from their visits: a word belongs to the unfinished sentence at its place."""
    unfinished: dict[int, list[int]] = {}
    for visit in visits:
        assert isinstance(visit, Visit)
        said: list[int] = []
        for place, word in zip(visit.places.tolist(), visit.words.tolist(), strict=True):
            if word == begin:
                said += unfinished.get(place, [])
                unfinished[place] = [end]
            else:
                unfinished[place].insert(-1, word)
        yield int((visit.words == begin).sum()), np.array(said, U32)
    yield 0, np.array([word for line in unfinished.values() for word in line], U32)


def walked_sentences(model: ModelColumns) -> SentenceBlocks:
    """Of a backoff model."""
    automaton = Automaton(BackoffSource.of(model, united([model])))

    def drawn(samples: int, seed: np.random.SeedSequence) -> Iterator[Said]:
        yield samples, automaton.draw(samples, seed, keep=True)

    return lambda sampling: (drawn(*block) for block in sampling.drawn())
