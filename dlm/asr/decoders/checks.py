"""Checks of an utterance, and of the words of a lexicon, that adapters of decoders share."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from dlm.client import Utterance
from dlm.client.inputs import Word
from dlm.errors import ConfigError, QueryError
from dlm.ngram.vocab import UNK_ID, UNK_SPELLINGS, as_bytes

_SHOWN = 3  # words of each, in an error


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
