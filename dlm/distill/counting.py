"""Counting for each kind of source, of drawn sentences or a given text, as work that can be
interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.distill import work
from dlm.distill.backoff import BackoffSource, as_log10
from dlm.distill.count import (
    NgramCounts,
    Visit,
    VisitCounter,
    ln_likelihood,
    local_counts,
    sampled_counts,
)
from dlm.distill.source import BATCH, SourceReader, check_distributions
from dlm.distill.topology import united
from dlm.distill.visits import (
    BLOCK,
    FollowedVisits,
    SampledVisits,
    SentenceBlocks,
    UnstoppableVisits,
    VisitStream,
    source_sentences,
)
from dlm.distill.walk import Automaton
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.ngram.vocab import END_SENTENCE, UNK_ID, Vocabulary
from dlm.ngram.wordtable import WordTable

DRAWN_AT_ONCE = 10_000


@dataclass(frozen=True)
class GivenText:
    """Text whose histories are visited instead of sampled ones; `sha256` is of its content.

    `blocks` has one sentence per line, joined by line feeds; every call returns the same. `record`
    is the line of its privacy record, stored with its counts; "" without one.
    """

    name: str
    sha256: str
    blocks: Callable[[], Iterable[bytes]]
    record: str = ""


@dataclass(frozen=True)
class Sampling:
    """Which sentences are counted.

    Fields
        samples  sentences to draw, over all parts; 0 with `text`
        seed     the same seed gives the same sentences
        part     (i, n): part i of n, from 1, each counted by one worker
        text     instead of samples
    """

    samples: int = 0
    seed: int = 0
    part: tuple[int, int] = (1, 1)
    text: GivenText | None = None

    def __post_init__(self) -> None:
        place, parts = self.part
        if not 1 <= place <= parts:
            most = max(parts, 1)
            raise ConfigError(f"part {place}/{parts}; expected 1/{most} to {most}/{most}")
        if self.text is not None:
            if self.samples:
                raise ConfigError("both samples and a text were given; give only one")
        elif self.own_samples < 1:
            raise ConfigError(
                f"{self.samples} samples; expected at least 1 per part, of {self.part[1]}"
            )
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed}; expected 0 or more")

    @property
    def own_samples(self) -> int:
        place, parts = self.part
        return self.samples // parts + (place <= self.samples % parts)

    @property
    def seeds(self) -> tuple[int, int, int]:
        return (self.seed, *self.part)

    def settings(self) -> dict[str, Any]:
        """As `work` stores them: what all parts share, and what is this part's own."""
        place, parts = self.part
        if self.text is not None:
            record = {"text_record": self.text.record} if self.text.record else {}
            own = {"text": self.text.sha256, "parts": parts, work.SHARE: {"part": place}}
            return own | record
        share = {"seed": self.seed, "part": f"{place}/{parts}", "samples": self.own_samples}
        return {work.SHARE: share}


class NgramCounting(work.Counting, Protocol):
    """Counting that ends in counts for a topology."""

    def result(self) -> tuple[NgramCounts, float]:
        """Counts for the topology, and the source's entropy summed over all visits, in nats."""


def text_blocks(
    text: GivenText, vocabulary: Vocabulary, part: tuple[int, int] = (1, 1)
) -> Iterator[list[NDArray[np.uint32]]]:
    """The sentences of a text as ids, `BLOCK` per block except the last; a part takes every n-th.
    Words outside the vocabulary become `<unk>`; `<s>` and `</s>` in a line are left out."""

    def lines() -> Iterator[NDArray[np.uint32]]:
        for block in text.blocks():
            ids, begins = table.ids_of_text(block)
            for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
                line = ids[begin:end]
                yield line[(line != vocabulary.begin_id) & (line != vocabulary.end_id)]

    table = WordTable.from_vocabulary(vocabulary)
    rest = lines()
    blocks = iter(lambda: list(islice(rest, BLOCK)), [])
    return islice(blocks, part[0] - 1, None, part[1])


class VisitCounting:
    def __init__(
        self, reader: SourceReader, topology: ModelColumns, sampling: Sampling | None
    ) -> None:
        self._name = reader.name
        self._stream = None if sampling is None else stream_of(reader, sampling)
        self._counter = VisitCounter(topology)
        self._topology = topology

    def step(self) -> int | None:
        visit = None if self._stream is None else next(self._stream, None)
        if visit is None:
            return None
        if isinstance(visit, Visit):
            check_distributions(visit.given, self._name)
        before = self._counter.begun
        sampled_counts(self._topology, [visit], counter=self._counter)
        return self._counter.begun - before

    @property
    def can_stop(self) -> bool:
        return self._stream is not None and self._stream.can_stop

    def sums(self) -> list[NDArray[Any]]:
        counts = self._counter.counts
        return [*counts.ngrams, *counts.contexts, self._counter.entropy]

    def position(self) -> work.Position:
        assert self._stream is not None
        at = self._stream.position()
        return work.Position([self._counter.window, *at.arrays], at.facts)

    def restore(self, sums: Sequence[NDArray[Any]], at: work.Position | None) -> None:
        _fill(self.sums(), sums)
        if at is not None and self._stream is not None:
            self._counter.window = at.arrays[0].copy()
            self._stream.restore(work.Position(at.arrays[1:], at.facts))

    def result(self) -> tuple[NgramCounts, float]:
        return self._counter.counts, float(self._counter.entropy[0])


def stream_of(reader: SourceReader, sampling: Sampling) -> VisitStream:
    """The visits of sentences that a source draws, or of given ones."""
    vocabulary = reader.vocabulary
    if reader.makes_visits:
        if sampling.text is not None:
            raise ConfigError(f"{reader.name} makes its own sentences; give samples, not a text")
        seed = int(np.random.SeedSequence(sampling.seeds).generate_state(1)[0])
        visits = reader.source.visits(sampling.own_samples, seed)  # type: ignore[attr-defined]
        return visits if isinstance(visits, VisitStream) else UnstoppableVisits(iter(visits))
    if sampling.text is not None:
        blocks = text_blocks(sampling.text, vocabulary, sampling.part)
        if not vocabulary.unk_in_model:
            blocks = _without_unknown(blocks, reader.name, sampling.text.name)
        return FollowedVisits(reader.histories(BATCH), vocabulary, blocks, BATCH)
    batch = min(BATCH, sampling.own_samples)
    histories = reader.histories(batch)
    if hasattr(reader.source, "sample"):
        blocks = source_sentences(reader, sampling.own_samples, sampling.seeds)
        return FollowedVisits(histories, vocabulary, blocks, batch)
    return SampledVisits(histories, vocabulary, sampling.own_samples, sampling.seeds, batch)


def _without_unknown(
    blocks: Iterator[list[NDArray[np.uint32]]], source: str, text: str
) -> Iterator[list[NDArray[np.uint32]]]:
    for block in blocks:
        if any((line == UNK_ID).any() for line in block):
            raise ConfigError(
                f"{text} has words that {source} does not know, and {source} has no <unk> for "
                "them; remove those lines, or replace the words"
            )
        yield block


class WalkCounting:
    """Counts the states of a backoff model that its own or given sentences visit; it has the ids of
    `topology`, which is closed."""

    can_stop = True

    def __init__(
        self, model: ModelColumns, topology: ModelColumns, sampling: Sampling | None
    ) -> None:
        self._target = topology
        self._whole = united([model, topology])
        self._known = BackoffSource.of(model, self._whole)
        self._automaton = Automaton(self._known)
        self._random = np.zeros(1, np.uint64) if sampling is None else first_random(sampling)
        self._left = 0 if sampling is None else sampling.own_samples
        self._blocks: SentenceBlocks | None = None
        if sampling is not None and sampling.text is not None:
            self._blocks = SentenceBlocks(
                text_blocks(sampling.text, model.vocabulary, sampling.part)
            )

    def step(self) -> int | None:
        if self._blocks is not None:
            lines = next(self._blocks, None)
            if lines is None:
                return None
            begins = np.cumsum([0, *map(len, lines)])
            self._automaton.follow(np.concatenate(lines), begins)
            return len(lines)
        drawn = min(self._left, DRAWN_AT_ONCE)
        self._automaton.draw(drawn, self._random)
        self._left -= drawn
        return drawn or None

    def sums(self) -> list[NDArray[Any]]:
        return [self._automaton.visits]

    def position(self) -> work.Position:
        if self._blocks is not None:
            return self._blocks.position()
        return work.Position([self._random], {"left": self._left})

    def restore(self, sums: Sequence[NDArray[Any]], at: work.Position | None) -> None:
        _fill(self.sums(), sums)
        if at is None:
            return
        if self._blocks is not None:
            self._blocks.restore(at)
            return
        self._random[:] = at.arrays[0]
        self._left = int(at.facts["left"])

    def result(self) -> tuple[NgramCounts, float]:
        whole, known = self._whole, self._known
        counts = self._automaton.counts()
        own = ln_likelihood(
            local_counts(whole, counts),
            as_log10(known.prob),
            as_log10(known.weight[: whole.order - 1]),
        )
        return counts.of(whole, self._target), -own


def first_random(sampling: Sampling) -> NDArray[np.uint64]:
    return np.random.SeedSequence(sampling.seeds).generate_state(1, np.uint64).astype(np.uint64)


def check_backoff_source(model: ModelColumns, name: str) -> None:
    """Raises ConfigError if a backoff model has no `</s>`, so that its sentences never end."""
    if END_SENTENCE not in model.vocabulary.ids:
        raise ConfigError(f"{name} has no </s>, so its sentences never end; estimate it again")


def _fill(into: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
    for array, value in zip(into, values, strict=True):
        array[...] = value
