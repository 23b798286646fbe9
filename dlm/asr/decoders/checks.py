"""Checks of an utterance and of a lexicon's words, shared by the decoder adapters."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from dlm.client import Utterance
from dlm.client.inputs import Word
from dlm.errors import ConfigError, QueryError, shown
from dlm.ngram.vocab import UNK_ID, UNK_SPELLINGS, as_bytes

_SHOWN = 3  # number of words of each kind that an error shows


def check_utterance(given: Utterance) -> None:
    """Raises `QueryError` for anything but an utterance, such as a client or a model's path."""
    if not hasattr(given, "context_blocks"):
        raise QueryError(
            f"found a {type(given).__name__}, expected an utterance; call the client's utterance()"
        )


def word_ids(utterance: Utterance, words: Sequence[Word]) -> list[int]:
    """Returns the ids of words; 0 for words in neither the model nor the utterance's phrases.

    Raises  QueryError  not a list of words, or unknown ids;  ConfigError  the model lacks all words
    """
    if isinstance(words, (str, bytes, set, frozenset, dict)) or not hasattr(words, "__iter__"):
        raise QueryError(
            f"words: found a {type(words).__name__}; expected a list with one word per index"
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


def listed_words(name: str, given: Iterable[str]) -> list[str]:
    """Returns the words of a list or another iterable. Raises `QueryError` for anything else."""
    alone = isinstance(given, (str, bytes, dict)) or not hasattr(given, "__iter__")
    words: list[Any] = [given] if alone else list(given)
    if kinds := {type(word).__name__ for word in words if alone or not isinstance(word, str)}:
        raise QueryError(f"{name}: found {', '.join(sorted(kinds))}; expected a list of strings")
    return words


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises `QueryError` unless the value is a number in range, a whole one if `low` is an int."""
    whole, kinds = isinstance(low, int), (int, float, np.bool_, np.integer, np.floating)
    if not isinstance(value, kinds) or not low <= value <= high or (whole and value % 1):
        raise QueryError(
            f"{name} is {shown(value)}; expected a {'whole ' * whole}number, {low:g} to {high:g}"
        )


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
        f"the model has none of the lexicon's {len(words):,} words ({_some(words)}); its words "
        f"look like {_some(there)}. Use the same case and the same word pieces in both"
    )


def _some(words: Collection[str | bytes]) -> str:
    return ", ".join(repr(word) for word in list(words)[:_SHOWN])
