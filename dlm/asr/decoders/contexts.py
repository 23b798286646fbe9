"""What adapters of decoders share: a cache of contexts with all that is stored after each, and
checks of an utterance and of the words of a lexicon."""

from __future__ import annotations

import operator
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.client import ContextBlocks, State, Utterance
from dlm.client.inputs import Word
from dlm.errors import ConfigError, QueryError
from dlm.ngram.query import BIGRAM_FALLBACK
from dlm.ngram.vocab import UNK_ID, UNK_SPELLINGS, as_bytes

MAX_WORDS = 1 << 22  # in all cached blocks: some 60 MB
BLOCK_WORDS = 64  # an empty block takes as much memory as this many words
MAX_ANSWERS = 1 << 14  # per context
_SHOWN = 3  # words of each, in an error


@dataclass(slots=True)
class Counts:
    """What decoders asked for, and what it cost, since the cache was created: words scored; blocks
    fetched, or built from the low orders; and calls that may have waited for servers."""

    queries: int = 0
    contexts: int = 0
    round_trips: int = 0


class KnownContext:
    """A state with all that is stored after it; `answers` by word id: log10 P, the next state."""

    __slots__ = ("answers", "bigram_fallback", "blocks", "row", "rows", "size", "state")

    def __init__(self, state: State, blocks: ContextBlocks, row: int) -> None:
        self.state = state
        self.blocks, self.row = blocks, row
        self.answers: dict[int, tuple[float, State]] = {}
        self.rows: tuple[array[float], bytes] | None = None
        self.size = 0  # in words, while it is kept
        self.bigram_fallback = bool(blocks.source[row] == BIGRAM_FALLBACK)

    def score(self, word: int) -> tuple[float, State]:
        found = self.answers.get(word)
        if found is None:
            if len(self.answers) >= MAX_ANSWERS:
                self.answers.clear()
            found = self.answers[word] = self.blocks.score(self.row, word)
        return found

    def after(self, word: int, length: int) -> State:
        """The next state of a word that keeps this many words."""
        words = (*self.state._words, word)
        return State(self.state.model_info, words[len(words) - length :])


class Contexts:
    """The contexts of one utterance's model that were used last; not thread-safe. The least
    recently used is dropped first, so that at most `max_words` stored words are kept."""

    def __init__(self, utterance: Utterance, max_words: int = MAX_WORDS) -> None:
        self.utterance = utterance
        self.counts = Counts()
        self._max_words = max_words
        self._kept: OrderedDict[State, KnownContext] = OrderedDict()
        self._passing: dict[State, KnownContext] = {}
        self._words = 0

    def begin_sentence(self) -> None:
        """Forgets the bigram fallback's answers, since servers may be back."""
        self._passing.clear()

    def find(self, state: State) -> KnownContext | None:
        found = self._kept.get(state)
        if found is not None:
            self._kept.move_to_end(state)
            return found
        return self._passing.get(state)

    def get(self, state: State) -> KnownContext:
        return self.find(state) or self.get_all([state])[0]

    def get_all(self, states: Sequence[State]) -> list[KnownContext]:
        kept, passing = self._kept, self._passing
        missing = [s for s in dict.fromkeys(states) if s not in kept and s not in passing]
        fetched: dict[State, KnownContext] = {}
        if missing:
            blocks = self.utterance.context_blocks(missing)
            self.counts.contexts += len(missing)
            self.counts.round_trips += any(len(state) >= 2 for state in missing)
            fetched = {s: KnownContext(s, blocks, row) for row, s in enumerate(missing)}
        found = [fetched.get(s) or passing.get(s) or kept[s] for s in states]
        for state in states:
            if state in kept:
                kept.move_to_end(state)
        for state, context in fetched.items():
            self._keep(state, context)
        return found

    def score_all(
        self, context: KnownContext, words: NDArray[np.uint32]
    ) -> tuple[array[float], bytes]:
        """log10 P of each word that a decoder has, and how many words of the context and the word
        its next state keeps. Both are kept with the context, and are read faster than arrays."""
        if context.rows is None:
            found = context.blocks.answers(context.row, words)
            context.rows = array("f", found.log10_prob.tobytes()), found.state_length.tobytes()
            if context.state in self._kept:
                self._add(context, len(words) // 2)  # of half the memory of a stored word
        return context.rows

    def _keep(self, state: State, context: KnownContext) -> None:
        if context.bigram_fallback:
            self._passing[state] = context
            return
        self._kept[state] = context
        self._add(context, BLOCK_WORDS + int(context.blocks.sizes[context.row]))

    def _add(self, context: KnownContext, words: int) -> None:
        context.size += words
        self._words += words
        while self._words > self._max_words and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._words -= oldest.size


# ------------------------------------------------------------------------------------ checks


def check_utterance(given: Utterance) -> None:
    """Raises `QueryError` if a client or a model's path was given instead."""
    if not hasattr(given, "context_blocks"):
        raise QueryError(
            f"found a {type(given).__name__}, expected an utterance; call the client's utterance()"
        )


def word_ids(utterance: Utterance, words: Sequence[Word]) -> list[int]:
    """The ids of words by index; 0 for words that the model and the utterance's phrases lack.

    Raises  QueryError  not a list of words, or unknown ids;  ConfigError  the model lacks them all
    """
    if isinstance(words, (str, bytes, set, frozenset, dict)) or not hasattr(words, "__iter__"):
        raise QueryError(
            f"words is a {type(words).__name__}; expected a list with one word per index"
        )
    phrases, size = utterance.phrases, utterance.vocabulary_size
    known = utterance.vocabulary if phrases is None else phrases
    size += 0 if phrases is None else len(phrases.new)
    try:
        ids = [
            known.id_of(word) if isinstance(word, (str, bytes)) else operator.index(word)
            for word in words
        ]
    except TypeError as exc:
        raise QueryError(f"expected words as strings, bytes or ids: {exc}") from exc
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise QueryError(f"found word ids from {min(ids)} to {max(ids)}; expected 0 to {size - 1}")
    check_known([word for word in words if isinstance(word, (str, bytes))], utterance)
    return ids


def check_known(words: Collection[str | bytes], utterance: Utterance) -> None:
    """Raises `ConfigError` if the model lacks all of the words."""
    vocabulary = utterance.vocabulary
    if not words or any(
        vocabulary.id_of(word) != UNK_ID or as_bytes(word) in UNK_SPELLINGS for word in words
    ):
        return
    middle = utterance.vocabulary_size // 2
    there = [word.decode(errors="replace") for word in vocabulary.words[middle : middle + _SHOWN]]
    raise ConfigError(
        f"the model has none of the lexicon's {len(words):,} words ({_some(words)}); its own are "
        f"like {_some(there)}. Both need the same case and the same pieces"
    )


def _some(words: Collection[str | bytes]) -> str:
    return ", ".join(repr(word) for word in list(words)[:_SHOWN])
