"""Gives the words of a lower-case source the spellings of cased text (FNG 5).

The probability of a word is split over its spellings by a model of cased text, which contains no
user data. To case a history, a spelling of each word is drawn in proportion to its share; FNG takes
the best spelling of the whole sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import Visit, WordMass, grown
from dlm.distill.sources import word_kernels as kernels
from dlm.distill.sources.next_words import NextWords
from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_text, is_mark

if TYPE_CHECKING:
    from dlm.distill.sources.network import NetworkSource

_ROWS = 16  # histories per step: each takes a float64 for every word


class Spellings:
    """The cased spellings of a source's words, and their probabilities under a model.

    A spelling is a word of the model whose lower case is the source's word. A word without
    spellings stays as it is. ConfigError if a word of the source is not in lower case.

    Fields
        history     number of previous words that the model uses
        uncased_of  (v,) uint32: the source's word for each spelling
    """

    def __init__(self, uncased: Vocabulary, model: ModelColumns) -> None:
        found: list[list[bytes]] = [[] for _ in uncased.words]
        ids = uncased.ids
        for i, word in enumerate(uncased.words):
            if not is_mark(word) and lower(word) != word:
                raise ConfigError(
                    f"the source has the word {as_text(word)!r}, which is not lower case; "
                    "--capitalize needs a source of lower-case words"
                )
            if is_mark(word):
                found[i].append(word)
        for word in model.vocabulary.words:
            if not is_mark(word) and (i := ids.get(lower(word), UNK_ID)) != UNK_ID:
                found[i].append(word)
        # If each word has one spelling, spellings have the same ids as the source's words.
        for i, word in enumerate(uncased.words):
            found[i] = found[i] or [word]
        self._begin = np.cumsum([0, *map(len, found)]).astype(np.int64)
        self._spellings = np.arange(self._begin[-1], dtype=np.uint32)
        self.uncased_of = np.repeat(np.arange(len(found), dtype=np.uint32), np.diff(self._begin))
        self.vocabulary = Vocabulary(
            [word for spellings in found for word in spellings], unk_in_model=uncased.unk_in_model
        )
        self._model = _in_words_of(self.vocabulary, model)
        self.history = model.order - 1
        self._next = NextWords(self._model)

    def split(
        self,
        histories: NDArray[np.uint32],
        given: NDArray[np.float32],
        entropy: NDArray[np.float32],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the distribution over spellings after each history, and its entropy. Spellings
        share the probability of their word; a single spelling gets all of it.

        Shapes, b histories, u words of the source, v spellings
            histories       (b, m)        uint32   cased; `MISSING` where shorter
            given, entropy  (b, u), (b,)  float32  of the source
            returns         (b, v), (b,)  float32  of the spellings
        """
        out = np.zeros((len(given), len(self.vocabulary)), np.float32)
        more = entropy.astype(np.float32)
        given = np.ascontiguousarray(given)
        for begin in range(0, len(given), _ROWS):
            some = slice(begin, begin + _ROWS)
            cased = self._next.after(histories[some])
            kernels.split_over(
                given[some], cased, self._begin, self._spellings, out[some], more[some]
            )
        return out, more

    def split_words(
        self, histories: NDArray[np.uint32], rows: NDArray[np.int64], words: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float64]]:
        """Returns all spellings of some words after the histories of `rows`: for each spelling, the
        index of its word in `words`, its id, and its share."""
        count = np.diff(self._begin)[words]
        places = np.repeat(np.arange(len(words)), count)
        offset = np.arange(len(places)) - np.repeat(np.cumsum(count) - count, count)
        spelled = self._spellings[self._begin[words][places] + offset]
        share = np.ones(len(places))
        # For words with several spellings, the model gives the shares.
        among = count[places] > 1
        asked = np.column_stack([self._tail(histories)[rows[places[among]]], spelled[among]])
        share[among] = 10.0 ** self._model.log10_probs(asked.astype(np.uint32))
        total = np.bincount(places, share, len(words))
        even = ~(total[places] > 0)
        share[even], total[total <= 0] = 1.0 / count[places[even]], 1.0
        return places, spelled, share / total[places]

    def split_mass(self, given: WordMass) -> WordMass:
        places, spelled, share = self.split_words(given.histories, given.rows, given.words)
        return replace(
            given, rows=given.rows[places], words=spelled, mass=given.mass[places] * share
        )

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Spreads values of words, (u,), over their spellings by the model's unigrams: (v,), with
        the same sum."""
        words = np.arange(len(values), dtype=np.uint32)
        nothing = np.zeros((1, 0), np.uint32)
        places, _, share = self.split_words(nothing, np.zeros(len(values), np.int64), words)
        out: NDArray[np.float64] = values[places] * share
        return out

    def draw(
        self, histories: NDArray[np.uint32], words: NDArray[np.uint32], random: np.random.Generator
    ) -> NDArray[np.uint32]:
        """Draws a spelling of each word after its history, with probability equal to its share."""
        at = random.random(len(words))
        places, spelled, share = self.split_words(histories, np.arange(len(words)), words)
        reached = np.cumsum(share)
        before = reached - share
        start = np.zeros(len(words))
        first = np.searchsorted(places, np.arange(len(words)))
        start[:] = before[first]
        # The last spelling whose range begins at or below the drawn number.
        under = before - start[places] <= at[places]
        last: NDArray[np.int64] = first + np.bincount(places, under, len(words)).astype(int) - 1
        out: NDArray[np.uint32] = spelled[last]
        return out

    def _tail(self, histories: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return histories[:, max(histories.shape[1] - self.history, 0) :]


def cased_visits(visits: Iterable[Visit], spellings: Spellings, seed: int) -> Iterator[Visit]:
    """Turns visits of uncased words into visits of their spellings, which are drawn with `seed`."""
    begin, random = spellings.vocabulary.begin_id, spelling_generator(seed)
    # The last words at each place, cased.
    window = np.zeros((0, max(spellings.history, 1)), np.uint32)
    for visit in visits:
        window = grown(window, int(visit.places[-1]) + 1, MISSING)
        here = window[visit.places]
        words = spellings.draw(here, visit.words, random)
        here[words == begin] = MISSING
        here = np.concatenate([here[:, 1:], words[:, None]], axis=1)
        window[visit.places] = here
        yield Visit(words, visit.places, *spellings.split(here, visit.given, visit.entropy))


class CasedSource:
    """Turns a source of lower-case words into a source of their spellings in a cased model."""

    def __init__(self, source: NetworkSource, model: ModelColumns) -> None:
        self._source = source
        self.spellings = Spellings(source.vocabulary, model)
        self.vocabulary = self.spellings.vocabulary
        self.record = source.record

    def visits(self, samples: int, seed: int) -> Iterator[Visit]:
        return cased_visits(self._source.visits(samples, seed), self.spellings, seed)


def spelling_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 1))))


def lower(word: bytes) -> bytes:
    try:
        return word.decode().lower().encode()
    except UnicodeDecodeError:
        return word


def _in_words_of(vocabulary: Vocabulary, model: ModelColumns) -> ModelColumns:
    known = np.fromiter((word in vocabulary.ids for word in model.vocabulary.words), np.bool_)
    ids = vocabulary.ids_of(model.vocabulary.words)
    sections = []
    for columns in model.orders:
        stays = np.asarray(known[columns.ids].all(axis=1))
        if columns is model.orders[0] and not model.vocabulary.unk_in_model:
            stays[UNK_ID] = False
        sections.append(
            (ids[columns.ids[stays]], columns.log10_prob[stays], columns.log10_backoff[stays])
        )
    return ModelColumns.of(vocabulary, sections)
