"""Text to ids and scores, in one compiled call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm import sentence_kernels as kernels
from dlm.kenlm import score_kernels as file_kernels
from dlm.kenlm.kernels import find_id
from dlm.kenlm.model import WHITE_SPACE, KenlmFile, splits_at
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import PADDING, WordTable

_DELIMITERS = splits_at(WHITE_SPACE)  # as in `bytes.split`
TEXT_PADDING = b"\n" + PADDING
# Where the bytes of a bytes object begin; CPython puts a zero byte after them.
IN_BYTES = bytes.__basicsize__ - 1


class WordScorer(Protocol):
    """What looks up words, and scores sentences if the whole model is in this process."""

    def id_of(self, word: bytes) -> int:
        """The id of a word; 0 where the model lacks it."""

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        """The sum of the scores of its words; the text has at most TEXT_BYTES."""

    def take_count(self) -> int:
        """How many words were scored since the last call."""


class FileScorer:
    """The scorer of a KenLM file: sums are in float32, as KenLM's."""

    def __init__(self, file: KenlmFile) -> None:
        self._kept = file, np.zeros(file_kernels.SCRATCH_BYTES // 8 + 1, np.int64)
        self._numbers = numbers = np.zeros(file_kernels.PLACES, np.int64)
        numbers[file_kernels.VIEW] = file.view.ctypes.data
        numbers[file_kernels.SPLITS] = _DELIMITERS.ctypes.data
        numbers[file_kernels.SCRATCH] = self._kept[-1].ctypes.data
        self._address = numbers.ctypes.data
        self._view = file.view.ctypes.data
        self._score: Callable[..., float] = file_kernels.score_sentence.compile()
        self._find: Callable[[int, int, int], int] = find_id.compile()

    def id_of(self, word: bytes) -> int:
        """See `WordScorer`."""
        padded = word + PADDING  # this name keeps it in place
        return self._find(self._view, id(padded) + IN_BYTES, len(word))

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        """See `WordScorer`."""
        padded = text + PADDING  # this name keeps it in place
        return self._score(self._address, id(padded) + IN_BYTES, len(text), bos, eos)

    def take_count(self) -> int:
        """See `WordScorer`."""
        found = int(self._numbers[file_kernels.SCORED])
        self._numbers[file_kernels.SCORED] = 0
        return found


class TextScorer:
    """Looks up words; scores sentences if `view` is of the one shard, not only of the low
    orders."""

    def __init__(self, vocabulary: Vocabulary, order: int, view: NDArray[np.int64]) -> None:
        table = WordTable.from_vocabulary(vocabulary)
        self._kept = table, view, np.zeros(kernels.SCRATCH_BYTES, np.uint8)
        self._numbers = numbers = np.zeros(kernels.PLACES, np.int64)
        numbers[kernels.VIEW], numbers[kernels.VIEW_PLACES] = view.ctypes.data, len(view)
        numbers[kernels.ORDER] = order
        numbers[kernels.BEGIN_ID], numbers[kernels.END_ID] = vocabulary.begin_id, vocabulary.end_id
        numbers[kernels.SLOTS] = table.slots.ctypes.data
        numbers[kernels.SLOT_MASK] = len(table.slots) - 2
        numbers[kernels.WORD_BEGIN] = table.word_begin.ctypes.data
        numbers[kernels.WORD_BYTES] = table.word_bytes.ctypes.data
        numbers[kernels.DELIMITERS] = _DELIMITERS.ctypes.data
        numbers[kernels.SCRATCH] = self._kept[-1].ctypes.data
        self.address = numbers.ctypes.data
        self._score: Callable[..., float] = kernels.score_sentence.compile()
        self._find: Callable[[int, int, int], int] = kernels.find_id.compile()

    def id_of(self, word: bytes) -> int:
        padded = word + TEXT_PADDING  # this name keeps it in place
        return self._find(self.address, id(padded) + IN_BYTES, len(word))

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        """The sum of the scores of its words, in float64; the text has at most TEXT_BYTES."""
        padded = text + TEXT_PADDING
        return self._score(self.address, id(padded) + IN_BYTES, len(text), bos, eos)

    def take_count(self) -> int:
        found = int(self._numbers[kernels.ASKED])
        self._numbers[kernels.ASKED] = 0
        return found
