"""The histories that sentences visit, drawn from a source or given, many at once.

Every history counts the source's whole distribution, including words that did not follow
(Rao-Blackwell), so few sentences suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dlm.distill import kernels, work
from dlm.distill.count import Visit, WordMass
from dlm.distill.source import BATCH, MOST_WORDS, Histories, SourceReader
from dlm.errors import SourceError
from dlm.ngram.vocab import Vocabulary
from dlm.units import counted

# Given sentences to sort by length and follow together.
BLOCK = 4 * BATCH


@runtime_checkable
class VisitStream(Protocol):
    """Visits that can be interrupted and resumed."""

    def __iter__(self) -> Iterator[Visit | WordMass]: ...

    def __next__(self) -> Visit | WordMass: ...

    @property
    def can_stop(self) -> bool:
        """Whether they can be interrupted here."""

    def position(self) -> work.Position:
        """Where to resume."""

    def restore(self, at: work.Position) -> None:
        """Resumes from `position`."""


class SampledVisits:
    """Visits of `samples` sentences drawn from a source, word by word; the same for the same seed.
    When one ends, its place in the batch begins the next."""

    can_stop = True

    def __init__(
        self,
        histories: Histories,
        vocabulary: Vocabulary,
        samples: int,
        seed: Sequence[int],
        batch: int,
    ) -> None:
        self._histories = histories
        self._begin, self._end = vocabulary.begin_id, vocabulary.end_id
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._left = np.full(batch, samples // batch)
        self._left[: samples % batch] += 1
        self._next = np.full(batch, self._begin, np.uint32)
        self._said = np.zeros(batch, np.int64)

    def __iter__(self) -> SampledVisits:
        return self

    def __next__(self) -> Visit:
        places = np.flatnonzero(self._left > 0)
        if not len(places):
            raise StopIteration
        words = self._next[places]
        given, entropy = self._histories.advance(words, places)
        drawn = np.empty(len(places), np.uint32)
        kernels.draw(np.ascontiguousarray(given), self._random.random(len(places)), drawn)
        self._said[places] += 1
        ended = places[(drawn == self._end) | (self._said[places] >= MOST_WORDS)]
        self._next[places] = drawn
        self._left[ended] -= 1
        self._next[ended], self._said[ended] = self._begin, 0
        return Visit(words, places, given, entropy)

    def position(self) -> work.Position:
        own = [self._left, self._next, self._said, *self._histories.arrays()]
        return work.Position(own, {"random": self._random.bit_generator.state})

    def restore(self, at: work.Position) -> None:
        self._left, self._next, self._said = (array.copy() for array in at.arrays[:3])
        self._histories.restore(at.arrays[3:])
        self._random.bit_generator.state = at.facts["random"]


class VisitReader(Protocol):
    """Converts visits one by one: pieces to words, words to spellings."""

    def read(self, visit: Visit) -> Visit | WordMass:
        """The converted visit."""

    def position(self) -> work.Position:
        """Where to resume."""

    def restore(self, at: work.Position) -> None:
        """Resumes from `position`."""


class ReadVisits:
    """A source's visits, converted by a reader and resumed together with it."""

    def __init__(self, visits: VisitStream, reader: VisitReader) -> None:
        self._visits, self._reader = visits, reader

    def __iter__(self) -> ReadVisits:
        return self

    def __next__(self) -> Visit | WordMass:
        visit = next(self._visits)
        assert isinstance(visit, Visit)
        return self._reader.read(visit)

    @property
    def can_stop(self) -> bool:
        return self._visits.can_stop

    def position(self) -> work.Position:
        own, visits = self._reader.position(), self._visits.position()
        facts = {"reader": own.facts, "arrays": len(own.arrays), "visits": visits.facts}
        return work.Position([*own.arrays, *visits.arrays], facts)

    def restore(self, at: work.Position) -> None:
        own, facts = int(at.facts["arrays"]), at.facts
        self._reader.restore(work.Position(at.arrays[:own], facts["reader"]))
        self._visits.restore(work.Position(at.arrays[own:], facts["visits"]))


class UnstoppableVisits:
    """Visits of a source that returns a plain iterator: they cannot be resumed."""

    can_stop = False

    def __init__(self, visits: Iterator[Visit | WordMass]) -> None:
        self._visits = visits

    def __iter__(self) -> UnstoppableVisits:
        return self

    def __next__(self) -> Visit | WordMass:
        return next(self._visits)

    def position(self) -> work.Position:
        raise AssertionError("visits of a plain iterator cannot be resumed")

    def restore(self, at: work.Position) -> None:
        raise AssertionError("visits of a plain iterator cannot be resumed")


class SentenceBlocks:
    """Sentences as ids without marks, some at a time, that can be interrupted between blocks, which
    must be the same when resumed."""

    def __init__(self, blocks: Iterator[list[NDArray[np.uint32]]]) -> None:
        self._blocks = blocks
        self._done = 0

    def __next__(self) -> list[NDArray[np.uint32]]:
        block = next(self._blocks)
        self._done += 1
        return block

    def position(self) -> work.Position:
        return work.Position([], {"blocks": self._done})

    def restore(self, at: work.Position) -> None:
        """Skips the blocks that were taken."""
        for _ in range(int(at.facts["blocks"])):
            next(self)


class FollowedVisits:
    """Visits of given sentences, those of similar length together, with the source's distribution
    at each history; words beyond `MOST_WORDS` are left out."""

    def __init__(
        self,
        histories: Histories,
        vocabulary: Vocabulary,
        blocks: Iterator[list[NDArray[np.uint32]]],
        batch: int,
    ) -> None:
        self._histories = histories
        self._begin = np.uint32(vocabulary.begin_id)
        self._blocks = SentenceBlocks(blocks)
        self._batch = batch
        self._visits: Iterator[Visit] = iter(())
        self.can_stop = True

    def __iter__(self) -> FollowedVisits:
        return self

    def __next__(self) -> Visit:
        while (visit := next(self._visits, None)) is None:
            self._visits = self._of(next(self._blocks))
        return visit

    def _of(self, block: list[NDArray[np.uint32]]) -> Iterator[Visit]:
        block = sorted((line[:MOST_WORDS] for line in block), key=len, reverse=True)
        for first in range(0, len(block), self._batch):
            some = block[first : first + self._batch]
            lengths = np.array([len(line) for line in some])
            for at in range(int(lengths[0]) + 1):
                # The longest come first, so the unfinished ones are always at the front.
                places = np.arange(int((lengths >= at).sum()))
                words = np.full(len(places), self._begin)
                if at:
                    words = np.array([some[place][at - 1] for place in places], np.uint32)
                visit = Visit(words, places, *self._histories.advance(words, places))
                self.can_stop = bool(at == lengths[0]) and first + self._batch >= len(block)
                yield visit

    def position(self) -> work.Position:
        """Where to resume; only at the end of a block."""
        return self._blocks.position()

    def restore(self, at: work.Position) -> None:
        self._blocks.restore(at)


def source_sentences(
    reader: SourceReader, samples: int, seed: Sequence[int]
) -> Iterator[list[NDArray[np.uint32]]]:
    """Sentences from a source's own `sample`; SourceError for fewer than requested, or for ids
    outside its vocabulary."""
    for block, first in enumerate(range(0, samples, BLOCK)):
        wanted = min(BLOCK, samples - first)
        number = int(np.random.SeedSequence([*seed, block]).generate_state(1)[0])
        given = reader.source.sample(number, wanted)  # type: ignore[attr-defined]
        said = list(given) if hasattr(given, "__iter__") else []
        if len(said) != wanted:
            raise SourceError(
                f"sample of {reader.name} returned {counted(len(said), 'sentence')}; expected "
                f"{wanted}"
            )
        yield [_own(reader, np.asarray(line)) for line in said]


def _own(reader: SourceReader, line: NDArray[Any]) -> NDArray[np.uint32]:
    if line.ndim != 1 or (len(line) and line.dtype.kind not in "iu"):
        raise SourceError(
            f"sample of {reader.name} returned a sentence of {line.dtype} {line.shape}; expected "
            "a list of ids"
        )
    line = line.astype(np.int64)
    if len(line) and not (line.min() >= 0 and line.max() < len(reader.ids)):
        raise SourceError(
            f"sample of {reader.name} returned ids from {line.min()} to {line.max()}; expected 0 "
            f"to {len(reader.ids) - 1}, the ids of its vocabulary"
        )
    ids: NDArray[np.uint32] = reader.ids[line]
    if (ids == reader.vocabulary.end_id).any():
        raise SourceError(
            f"sample of {reader.name} returned a sentence that contains end_id; expected only words"
        )
    return ids
