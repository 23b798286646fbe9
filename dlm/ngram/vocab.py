"""The words of a model and their ids.

Words are bytes: an ARPA file may contain any, and they are kept unchanged. Id 0 is the unknown
word, whether the model has an n-gram for it or not; the rest follow in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

UNK_ID = 0
UNK_SPELLINGS = (b"<unk>", b"<UNK>")
AT_ONCE = 4096
BEGIN_SENTENCE = b"<s>"
END_SENTENCE = b"</s>"
MARKS = (b"<unk>", BEGIN_SENTENCE, END_SENTENCE)  # ids 0, 1, 2 of vocabularies that dlm makes

# log10 P of an unknown word where the model has no n-gram for it; KenLM's default.
MISSING_UNK_LOG10_PROB = np.float32(-100.0)


def is_unk_spelling(word: bytes) -> bool:
    return word in UNK_SPELLINGS


def is_mark(word: bytes) -> bool:
    return is_unk_spelling(word) or word in (BEGIN_SENTENCE, END_SENTENCE)


def as_bytes(word: str | bytes) -> bytes:
    """The bytes of `word`; a str is encoded as UTF-8, with surrogate escapes for other bytes.

    Other lone surrogates, which broken JSON can contain, are encoded as if they were characters. No
    well-formed text has them, so such a word is an unknown word.
    """
    if isinstance(word, bytes):
        return word
    try:
        return word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return word.encode("utf-8", "surrogatepass")


def as_text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")


class _Table(Protocol):
    def __len__(self) -> int:
        """The number of words."""

    def words(self) -> list[bytes]:
        """All words, by id."""


class Vocabulary:
    """Words by id and ids by word. Both spellings of the unknown word, and every word not listed,
    have id 0; `words[0]` is the unknown word, in the spelling of the file."""

    __slots__ = ("_ids", "_size", "_words", "begin_id", "end_id", "table", "unk_in_model")

    def __init__(self, words: Sequence[bytes], *, unk_in_model: bool) -> None:
        self._words: list[bytes] | None = list(words)
        self._size = len(words)
        self.unk_in_model = unk_in_model
        if not self._words or not is_unk_spelling(self._words[UNK_ID]):
            raise ValueError("word 0 of a vocabulary must be <unk> or <UNK>")
        self._ids: dict[bytes, int] | None = dict(zip(words, range(self._size), strict=True))
        if len(self._ids) != self._size:
            raise ValueError("a word occurs twice in the vocabulary")
        for spelling in UNK_SPELLINGS:
            if self._ids.setdefault(spelling, UNK_ID) != UNK_ID:
                raise ValueError("both spellings of the unknown word are in the vocabulary")
        self.begin_id = self._ids.get(BEGIN_SENTENCE, UNK_ID)
        self.end_id = self._ids.get(END_SENTENCE, UNK_ID)
        self.table: _Table | None = None

    @classmethod
    def of_table(
        cls, table: _Table, *, begin_id: int, end_id: int, unk_in_model: bool
    ) -> Vocabulary:
        """A vocabulary of the words in a table, which has checked them: see `WordTable.vocabulary`.

        The list and the dictionary are made when first used: making them would take a third of
        the time to open a model, and scoring text needs neither.
        """
        made = cls.__new__(cls)
        made._words = made._ids = None
        made._size, made.table = len(table), table
        made.begin_id, made.end_id, made.unk_in_model = begin_id, end_id, unk_in_model
        return made

    @property
    def words(self) -> list[bytes]:
        if self._words is None:
            assert self.table is not None
            self._words = self.table.words()
        return self._words

    @property
    def ids(self) -> dict[bytes, int]:
        """The id of each word, and of both spellings of the unknown word."""
        if self._ids is None:
            ids, words = dict.fromkeys(UNK_SPELLINGS, UNK_ID), self.words
            for begin in range(0, self._size, AT_ONCE):  # other threads get the GIL in between
                some = words[begin : begin + AT_ONCE]
                ids.update(zip(some, range(begin, begin + len(some)), strict=True))
            self._ids = ids
        return self._ids

    def __len__(self) -> int:
        return self._size

    def __contains__(self, word: str | bytes) -> bool:
        return self.ids.get(as_bytes(word), UNK_ID) != UNK_ID

    def __repr__(self) -> str:
        return f"Vocabulary({self._size} words, unk_in_model={self.unk_in_model})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.words == other.words and self.unk_in_model == other.unk_in_model

    __hash__ = None  # type: ignore[assignment]

    def id_of(self, word: str | bytes) -> int:
        """The id of `word`; 0 if the vocabulary lacks it."""
        return self.ids.get(as_bytes(word), UNK_ID)

    def ids_of(self, words: Iterable[str | bytes]) -> NDArray[np.uint32]:
        """Ids of `words`, shape (n,), uint32; 0 where the vocabulary lacks a word."""
        get = self.ids.get
        return np.fromiter((get(as_bytes(w), UNK_ID) for w in words), dtype=np.uint32)
