"""The words of a model and their ids.

Words are bytes: an ARPA file may hold any, and they are kept as they stand. Id 0 is the unknown
word, whether the model has an n-gram for it or not; the rest follow in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

UNK_ID = 0
UNK_SPELLINGS = (b"<unk>", b"<UNK>")
BEGIN_SENTENCE = b"<s>"
END_SENTENCE = b"</s>"

# log10 P of an unknown word where the model has no n-gram for it; KenLM's default.
MISSING_UNK_LOG10_PROB = np.float32(-100.0)


def is_unk_spelling(word: bytes) -> bool:
    """Whether `word` is one of the two spellings that mean the unknown word."""
    return word in UNK_SPELLINGS


def as_bytes(word: str | bytes) -> bytes:
    """The bytes of `word`; a str is UTF-8, with surrogate escapes for bytes that are not.

    Other lone surrogates, which broken JSON can hold, stand for no byte: they are encoded as if
    they were characters, which no well-formed text holds, so such a word is an unknown word.
    """
    if isinstance(word, bytes):
        return word
    try:
        return word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return word.encode("utf-8", "surrogatepass")


def as_text(word: bytes) -> str:
    """The inverse of `as_bytes`, for showing a word to a person."""
    return word.decode("utf-8", "surrogateescape")


class Vocabulary:
    """Words by id and ids by word.

    Args
        words         word of each id; `words[0]` is the unknown word, in the spelling of the file
        unk_in_model  whether the model has an n-gram for the unknown word
    Edge cases
        both spellings of the unknown word, and every word not listed, have id 0
    """

    __slots__ = ("begin_id", "end_id", "ids", "unk_in_model", "words")

    def __init__(self, words: Sequence[bytes], *, unk_in_model: bool) -> None:
        self.words: list[bytes] = list(words)
        self.unk_in_model = unk_in_model
        if not self.words or not is_unk_spelling(self.words[UNK_ID]):
            raise ValueError("word 0 of a vocabulary must be <unk> or <UNK>")
        self.ids: dict[bytes, int] = dict(zip(self.words, range(len(self.words)), strict=True))
        if len(self.ids) != len(self.words):
            raise ValueError("a word stands twice in the vocabulary")
        for spelling in UNK_SPELLINGS:
            if self.ids.setdefault(spelling, UNK_ID) != UNK_ID:
                raise ValueError("both spellings of the unknown word are in the vocabulary")
        self.begin_id = self.ids.get(BEGIN_SENTENCE, UNK_ID)
        self.end_id = self.ids.get(END_SENTENCE, UNK_ID)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str | bytes) -> bool:
        return self.ids.get(as_bytes(word), UNK_ID) != UNK_ID

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.words)} words, unk_in_model={self.unk_in_model})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.words == other.words and self.unk_in_model == other.unk_in_model

    __hash__ = None  # type: ignore[assignment]

    def id_of(self, word: str | bytes) -> int:
        """The id of `word`; 0 where the vocabulary lacks it."""
        return self.ids.get(as_bytes(word), UNK_ID)

    def ids_of(self, words: Iterable[str | bytes]) -> NDArray[np.uint32]:
        """Ids of `words`, shape (n,), uint32; 0 where the vocabulary lacks a word."""
        get = self.ids.get
        return np.fromiter((get(as_bytes(w), UNK_ID) for w in words), dtype=np.uint32)
