"""Collects a source's sentences: the text from which a topology is inferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.distill import work
from dlm.distill.backoff import BackoffSource
from dlm.distill.counting import DRAWN_AT_ONCE, Sampling, first_random
from dlm.distill.source import BATCH, SourceReader, check_distributions
from dlm.distill.topology import united
from dlm.distill.visits import SampledVisits, SentenceBlocks, source_sentences
from dlm.distill.walk import Automaton
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import Vocabulary

U32 = np.uint32


class SentenceStream(Protocol):
    def next_sentences(self) -> tuple[int, NDArray[np.uint32]] | None:
        """Number of sentences begun, and words with `</s>` after each sentence; None at the
        end."""

    def position(self) -> work.Position:
        """Where to resume."""

    def restore(self, at: work.Position) -> None:
        """Resumes from `position`."""


class SentenceCollection:
    """`work.Counting` that keeps sentences: its single sum is all words said."""

    can_stop = True

    def __init__(self, stream: SentenceStream) -> None:
        self._stream = stream
        self._said: list[NDArray[np.uint32]] = []

    def step(self) -> int | None:
        more = self._stream.next_sentences()
        if more is None:
            return None
        self._said.append(more[1])
        return more[0]

    def sums(self) -> list[NDArray[Any]]:
        self._said = [np.concatenate([np.zeros(0, U32), *self._said])]
        return list(self._said)

    def position(self) -> work.Position:
        return self._stream.position()

    def restore(self, sums: Sequence[NDArray[Any]], at: work.Position | None) -> None:
        self._said = [sums[0]]
        if at is not None:
            self._stream.restore(at)


def collect_from(reader: SourceReader, sampling: Sampling) -> SentenceCollection:
    """From a source of the protocol; ConfigError for visits, which do not show where sentences
    end."""
    if reader.makes_visits:
        raise ConfigError(
            f"{reader.name} makes visits, not sentences, so no topology can be inferred; give one"
        )
    if hasattr(reader.source, "sample"):
        blocks = source_sentences(reader, sampling.own_samples, sampling.seeds)
        return SentenceCollection(_OwnSentences(blocks, reader.vocabulary.end_id))
    batch = min(BATCH, sampling.own_samples)
    stream = SampledVisits(
        reader.histories(batch), reader.vocabulary, sampling.own_samples, sampling.seeds, batch
    )
    return SentenceCollection(_SampledSentences(stream, reader.vocabulary, reader.name, batch))


def collect_from_backoff(model: ModelColumns, sampling: Sampling) -> SentenceCollection:
    return SentenceCollection(_WalkedSentences(model, sampling))


class _OwnSentences:
    def __init__(self, blocks: Iterator[list[NDArray[np.uint32]]], end: int) -> None:
        self._blocks = SentenceBlocks(blocks)
        self._end = np.array([end], U32)

    def next_sentences(self) -> tuple[int, NDArray[np.uint32]] | None:
        lines = next(self._blocks, None)
        if lines is None:
            return None
        return len(lines), np.concatenate([part for line in lines for part in (line, self._end)])

    def position(self) -> work.Position:
        return self._blocks.position()

    def restore(self, at: work.Position) -> None:
        self._blocks.restore(at)


class _SampledSentences:
    """Sentences from their visits: a word belongs to the unfinished sentence at its place."""

    def __init__(
        self, stream: SampledVisits, vocabulary: Vocabulary, name: str, places: int
    ) -> None:
        self._stream, self._name = stream, name
        self._begin, self._end = vocabulary.begin_id, vocabulary.end_id
        self._open: list[list[int]] = [[] for _ in range(places)]
        self._begun = [False] * places

    def next_sentences(self) -> tuple[int, NDArray[np.uint32]] | None:
        visit = next(self._stream, None)
        if visit is None:
            if not any(self._begun):
                return None
            said = [word for place in range(len(self._begun)) for word in self._ended(place)]
            return 0, np.array(said, U32)
        check_distributions(visit.given, self._name)
        said = []
        begun = 0
        for place, word in zip(visit.places.tolist(), visit.words.tolist(), strict=True):
            if word == self._begin:
                said += self._ended(place)
                self._begun[place] = True
                begun += 1
            else:
                self._open[place].append(word)
        return begun, np.array(said, U32)

    def _ended(self, place: int) -> list[int]:
        if not self._begun[place]:
            return []
        line = [*self._open[place], self._end]
        self._open[place], self._begun[place] = [], False
        return line

    def position(self) -> work.Position:
        stream = self._stream.position()
        lengths = np.array([len(line) for line in self._open])
        words = np.array([word for line in self._open for word in line], U32)
        own = [lengths, words, np.array(self._begun)]
        return work.Position([*own, *stream.arrays], stream.facts)

    def restore(self, at: work.Position) -> None:
        lengths, words, begun, *rest = at.arrays
        ends = np.cumsum(lengths)[:-1]
        self._open = [line.tolist() for line in np.split(words, ends)]
        self._begun = begun.tolist()
        self._stream.restore(work.Position(rest, at.facts))


class _WalkedSentences:
    def __init__(self, model: ModelColumns, sampling: Sampling) -> None:
        self._automaton = Automaton(BackoffSource.of(model, united([model])))
        self._random = first_random(sampling)
        self._left = sampling.own_samples

    def next_sentences(self) -> tuple[int, NDArray[np.uint32]] | None:
        drawn = min(self._left, DRAWN_AT_ONCE)
        if not drawn:
            return None
        self._left -= drawn
        return drawn, self._automaton.draw(drawn, self._random, keep=True)

    def position(self) -> work.Position:
        return work.Position([self._random], {"left": self._left})

    def restore(self, at: work.Position) -> None:
        self._random[:] = at.arrays[0]
        self._left = int(at.facts["left"])
