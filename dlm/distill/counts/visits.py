"""Produces the histories visited by sentences of a source or a text, many at once.

At every history, the source's full distribution is counted, including words that did not follow
(Rao-Blackwell), so few sentences suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit, WordMass
from dlm.distill.counts.sampling import ASKED, GIVEN, Sampling
from dlm.distill.fitting import kernels
from dlm.distill.sources.source import (
    BATCH,
    MOST_WORDS,
    Histories,
    SourceReader,
    check_distributions,
)
from dlm.errors import ConfigError, SourceError
from dlm.ngram.vocab import UNK_ID, Vocabulary
from dlm.units import counted

Seed = np.random.SeedSequence


def visits_of(reader: SourceReader, sampling: Sampling) -> Iterator[Iterator[Visit | WordMass]]:
    """Yields the visits of each block of sentences, drawn from the source or read from a text. A
    block is computed only when it is read."""
    if sampling.text is not None:
        yield from _given(reader, sampling, sampling.text.name)
    elif reader.makes_visits:
        yield from (_made(reader, *block) for block in sampling.drawn())
    elif hasattr(reader.source, "sample"):
        yield from (_said(reader, *block) for block in sampling.drawn(GIVEN))
    else:
        most = None if hasattr(reader.source, "histories") else ASKED
        yield from (_drawn(reader, *block) for block in sampling.drawn(most))


def _given(reader: SourceReader, sampling: Sampling, text: str) -> Iterator[Iterator[Visit]]:
    if reader.makes_visits:
        raise ConfigError(f"{reader.name} makes its own sentences; give --samples, not a text")
    histories, vocabulary = reader.histories(BATCH), reader.vocabulary
    for lines in sampling.given(vocabulary):
        if not vocabulary.unk_in_model and any((line == UNK_ID).any() for line in lines):
            raise ConfigError(
                f"{text} has words that {reader.name} does not know, and {reader.name} has no "
                "<unk> for them; replace the words, or remove their lines"
            )
        yield followed(histories, vocabulary, lines)


def _made(reader: SourceReader, samples: int, seed: Seed) -> Iterator[Visit | WordMass]:
    number = int(seed.generate_state(1)[0])
    for visit in reader.source.visits(samples, number):  # type: ignore[attr-defined]
        if isinstance(visit, Visit):
            check_distributions(visit.given, reader.name)
        yield visit


def _said(reader: SourceReader, samples: int, seed: Seed) -> Iterator[Visit]:
    lines = own_sentences(reader, samples, seed)
    yield from followed(reader.histories(BATCH), reader.vocabulary, lines)


def _drawn(reader: SourceReader, samples: int, seed: Seed) -> Iterator[Visit]:
    places = min(BATCH, samples)
    yield from drawn(reader.histories(places), reader.vocabulary, samples, seed, places)


def drawn(
    histories: Histories,
    vocabulary: Vocabulary,
    samples: int,
    seed: Seed,
    places: int,
) -> Iterator[Visit]:
    """Draws `samples` sentences from a source, word by word, and yields their visits; the same seed
    gives the same visits. When a sentence ends, the next one takes its place in the batch."""
    random = np.random.Generator(np.random.PCG64(seed))
    at, left = np.arange(places), samples - places  # places in use, sentences to begin
    words = np.full(places, vocabulary.begin_id, np.uint32)
    lengths = np.zeros(places, np.int64)
    while len(at):
        given, entropy = histories.advance(words, at)
        yield Visit(words, at, given, entropy)
        words = np.empty(len(at), np.uint32)
        kernels.draw(np.ascontiguousarray(given), random.random(len(at)), words)
        lengths += 1
        ended = (words == vocabulary.end_id) | (lengths >= MOST_WORDS)
        words[ended], lengths[ended] = vocabulary.begin_id, 0
        goes_on = np.ones(len(at), np.bool_)
        goes_on[np.flatnonzero(ended)[max(left, 0) :]] = False
        left -= int(ended.sum())
        at, words, lengths = at[goes_on], words[goes_on], lengths[goes_on]


def followed(
    histories: Histories, vocabulary: Vocabulary, lines: list[NDArray[np.uint32]]
) -> Iterator[Visit]:
    """Yields the visits of sentences, with the source's distribution at each history.
    Follows sentences of similar length together; leaves out words beyond `MOST_WORDS`."""
    lines = sorted((line[:MOST_WORDS] for line in lines), key=len, reverse=True)
    for first in range(0, len(lines), BATCH):
        some = lines[first : first + BATCH]
        lengths = np.array([len(line) for line in some])
        for at in range(int(lengths[0]) + 1):
            # The longest sentences come first, so unfinished ones are always at the front.
            places = np.arange(int((lengths >= at).sum()))
            words = np.full(len(places), vocabulary.begin_id, np.uint32)
            if at:
                words = np.array([some[place][at - 1] for place in places], np.uint32)
            yield Visit(words, places, *histories.advance(words, places))


def own_sentences(reader: SourceReader, samples: int, seed: Seed) -> list[NDArray[np.uint32]]:
    """Gets sentences from a source's own `sample`; SourceError if it does not return the requested
    number, or returns ids outside the vocabulary."""
    number = int(seed.generate_state(1)[0])
    given = reader.source.sample(number, samples)  # type: ignore[attr-defined]
    said = list(given) if hasattr(given, "__iter__") else []
    if len(said) != samples:
        raise SourceError(
            f"sample() of {reader.name} gave {counted(len(said), 'sentence')}; expected {samples}"
        )
    return [_own(reader, np.asarray(line)) for line in said]


def _own(reader: SourceReader, line: NDArray[Any]) -> NDArray[np.uint32]:
    if line.ndim != 1 or (len(line) and line.dtype.kind not in "iu"):
        raise SourceError(
            f"sample() of {reader.name} returned a sentence of dtype {line.dtype} and shape "
            f"{line.shape}; expected a list of ids"
        )
    line = line.astype(np.int64)
    if len(line) and not (line.min() >= 0 and line.max() < len(reader.ids)):
        raise SourceError(
            f"sample() of {reader.name} returned ids from {line.min()} to {line.max()}; expected 0 "
            f"to {len(reader.ids) - 1}, the ids of its vocabulary"
        )
    ids: NDArray[np.uint32] = reader.ids[line]
    if (ids == reader.vocabulary.end_id).any():
        raise SourceError(
            f"sample() of {reader.name} returned a sentence with end_id; expected only words"
        )
    return ids
