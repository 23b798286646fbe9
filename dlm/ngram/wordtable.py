"""Looks up many words at once, without an object for each, in the hash table of `kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.ngram import kernels
from dlm.ngram.vocab import (
    BEGIN_SENTENCE,
    END_SENTENCE,
    UNK_ID,
    Vocabulary,
    as_bytes,
    is_unk_spelling,
)

_Number = TypeVar("_Number", np.int64, np.uint8)

# Text extends this far beyond the range that is read: see kernels.py.
PADDING = bytes(kernels.PAD_BYTES)

# The fewest slots, a power of two; there are at least 3 for every 2 words.
_MIN_SLOTS = 64


class WordTable:
    """Words by id, and ids by word in bulk.

    Args    words       the unknown word first, in either spelling; its id is 0
    Shapes  word_bytes  (bytes,)  the words one after another
            word_begin  (n + 1,)  where each word begins, then where the last one ends
            slots       (2**k,)   see kernels.py
    Raises  ValueError  word 0 is not the unknown word, or a word occurs twice
    Guarantees
        ids are exact: words are compared by all their bytes, whatever their hashes. Both spellings
        of the unknown word, and every word not listed, have id 0
    Cost
        about 30 bytes per word besides its own; finding a word of up to eight bytes reads 16 bytes
        in one place; finding a longer word reads two more places
    """

    __slots__ = ("_bytes_used", "_count", "slots", "word_begin", "word_bytes")

    def __init__(self, words: Sequence[bytes] = (b"<unk>",)) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        begin = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        self._build(np.frombuffer(b"".join(words), np.uint8), begin)

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> WordTable:
        """Returns the vocabulary's own table, which must not grow, or makes one if it has none."""
        return vocabulary.table if isinstance(vocabulary.table, cls) else cls(vocabulary.words)

    @classmethod
    def from_arrays(
        cls, word_bytes: NDArray[np.uint8], word_begin: NDArray[np.integer]
    ) -> WordTable:
        """Makes a table of words from copies of word_bytes (bytes,) and word_begin (n + 1,). Also
        raises ValueError unless word_begin rises from 0 to len(word_bytes)."""
        table = cls.__new__(cls)
        table._build(word_bytes, word_begin.astype(np.int64))
        return table

    def _build(self, word_bytes: NDArray[np.uint8], word_begin: NDArray[np.int64]) -> None:
        count = len(word_begin) - 1
        if (
            count < 1
            or word_begin[0] != 0
            or word_begin[-1] != len(word_bytes)
            or bool((np.diff(word_begin) < 0).any())
            or not is_unk_spelling(word_bytes[: word_begin[1]].tobytes())
        ):
            raise ValueError(
                "word_begin must start at 0, never decrease, and end at the length of word_bytes; "
                "the first word must be <unk> or <UNK>"
            )
        self._count = count
        self._bytes_used = len(word_bytes)
        self.word_begin = word_begin
        self.word_bytes = np.concatenate((word_bytes, np.zeros(kernels.PAD_BYTES, np.uint8)))
        self.slots = np.zeros(0, np.uint64)
        self._enter(count)

    def _enter(self, words: int) -> None:
        size = _MIN_SLOTS
        while size * 2 < words * 3:
            size *= 2
        self.slots = np.zeros(2 * size, np.uint64)
        twice = kernels.enter_words(self.slots, self.word_begin, self.word_bytes, 1, self._count)
        if twice != self._count:
            raise ValueError(f"word {twice} occurs twice in the vocabulary: {self.word(twice)!r}")

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"WordTable({self._count} words)"

    def word(self, word_id: int) -> bytes:
        begin, end = self.word_begin[word_id], self.word_begin[word_id + 1]
        return self.word_bytes[begin:end].tobytes()

    def words(self) -> list[bytes]:
        text = self.word_bytes[: self._bytes_used]
        begin = self.word_begin[: self._count + 1]
        if not (text == kernels.NEWLINE).any():
            # Splitting at a byte that no word has makes the same list three times as fast.
            return np.insert(text, begin[1:-1], kernels.NEWLINE).tobytes().split(b"\n")
        data = text.tobytes()
        return [data[b:e] for b, e in pairwise(begin.tolist())]

    def vocabulary(self, *, unk_in_model: bool) -> Vocabulary:
        """Returns a `Vocabulary` of these words. Do not add words afterwards."""
        return Vocabulary.of_table(
            self,
            begin_id=self.find(BEGIN_SENTENCE) or UNK_ID,
            end_id=self.find(END_SENTENCE) or UNK_ID,
            unk_in_model=unk_in_model,
        )

    # --------------------------------------------------------------------------- lookups

    def find(self, word: bytes) -> int | None:
        """The id of `word`; None if the table lacks it, 0 for the unknown word."""
        found = np.zeros(1, np.uint32)
        text = np.frombuffer(word + PADDING, np.uint8)
        self._find(text, np.zeros(1, np.int64), np.array([len(word)], np.int64), found)
        return int(found[0]) if found[0] != UNK_ID or is_unk_spelling(word) else None

    def ids_of(self, words: Sequence[str | bytes]) -> NDArray[np.uint32]:
        """Ids (n,) of `words`, as in `Vocabulary.ids_of`; encodes non-ASCII strings one by one."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        joined = b""
        try:
            # ASCII characters are bytes, so these are also the lengths in bytes.
            text = "".join(words)  # type: ignore[arg-type]
            plain = text.isascii()
            joined = text.encode() if plain else b""
        except TypeError:
            plain = all(isinstance(word, bytes) for word in words)
            joined = b"".join(words) if plain else b""  # type: ignore[arg-type]
        if not plain:
            encoded = [as_bytes(word) for word in words]
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            joined = b"".join(encoded)
        end = np.cumsum(lengths)
        ids = np.empty(len(words), np.uint32)
        self._find(np.frombuffer(joined + PADDING, np.uint8), end - lengths, end, ids)
        return ids

    def ids_of_text(
        self, text: bytes, *, spaces: bytes = b" \t\r"
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of the words of `text`, one sentence per line.

        Args     text    sentences joined by newlines; a newline after the last makes one more, and
                         an empty text is one sentence without words
                 spaces  bytes that separate words, as the newline does; none is above a space
        Returns  ids (words,), 0 where the table lacks a word; sentence_begin (sentences + 1,), the
                 first word of each line, then the number of words
        Raises   ValueError  `spaces` holds a byte above a space
        """
        chars, delimiters, lines = _prepared(text, spaces)
        # Room for the most words that the text can have: their number is known only at the end.
        ids = np.empty((len(text) + 1) // 2, np.uint32)
        sentence_begin = np.empty(lines + 1, np.int64)
        words = kernels.find_text(
            self.slots,
            self.word_begin,
            self.word_bytes,
            chars,
            len(text),
            delimiters,
            ids,
            sentence_begin,
        )
        return ids[: int(words)].copy(), sentence_begin

    def _find(
        self,
        text: NDArray[np.uint8],
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        ids: NDArray[np.uint32],
    ) -> None:
        kernels.find_words(self.slots, self.word_begin, self.word_bytes, text, begin, end, ids)

    # ---------------------------------------------------------------------------- growth

    def add(self, word: bytes) -> int:
        """Gives `word` the next id; ValueError if it has one already."""
        if self.find(word) is not None:
            raise ValueError(f"{word!r} is already in the table")
        self.reserve(1, len(word))
        word_id, here = self._count, self._bytes_used
        end = here + len(word)
        self.word_bytes[here:end] = np.frombuffer(word, np.uint8)
        self.word_begin[word_id + 1] = end
        kernels.enter_words(self.slots, self.word_begin, self.word_bytes, word_id, word_id + 1)
        self._count, self._bytes_used = word_id + 1, end
        return word_id

    def spell_unk(self, spelling: bytes) -> None:
        if not is_unk_spelling(spelling):
            raise ValueError(f"word 0 of a vocabulary is {spelling!r}; expected <unk> or <UNK>")
        # <unk> and <UNK> have the same length.
        self.word_bytes[: len(spelling)] = np.frombuffer(spelling, np.uint8)

    def reserve(self, words: int, size_bytes: int) -> None:
        """Makes room for more words and their bytes, at a cost proportional to the added size."""
        if self._count + words + 1 > len(self.word_begin):
            self.word_begin = _grown(self.word_begin, self._count + words + 1)
        if self._bytes_used + size_bytes + kernels.PAD_BYTES > len(self.word_bytes):
            needed = self._bytes_used + size_bytes + kernels.PAD_BYTES
            self.word_bytes = _grown(self.word_bytes, needed)
        if len(self.slots) < (self._count + words) * 3:
            self._enter(self._count + words)

    def state(self, unk_row: int | None) -> NDArray[np.int64]:
        """Returns the state with which `kernels.read_words` continues; `settle` takes it back."""
        return np.array(
            [self._count, self._bytes_used, -1 if unk_row is None else unk_row], np.int64
        )

    def settle(self, state: NDArray[np.int64]) -> int | None:
        """Takes over the words of `kernels.read_words`; returns the row of the unknown word."""
        self._count = int(state[kernels.WORDS])
        self._bytes_used = int(state[kernels.WORD_BYTES])
        row = int(state[kernels.UNK_ROW])
        return None if row < 0 else row


def _prepared(text: bytes, spaces: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    if any(byte > kernels.SPACE for byte in spaces):
        raise ValueError(f"words can be split only at ASCII white space, not at {spaces!r}")
    delimiters = np.zeros(256, np.uint8)
    delimiters[[kernels.NEWLINE, *spaces]] = 1
    chars = np.frombuffer(b"".join((text, b"\n", PADDING)), np.uint8)
    return chars, delimiters, int(kernels.count_newlines(chars, 0, len(text) + 1))


def _grown(array: NDArray[_Number], size: int) -> NDArray[_Number]:
    grown = np.zeros(size + size // 2, array.dtype)
    grown[: len(array)] = array
    return grown
