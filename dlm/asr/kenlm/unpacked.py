"""A model unpacked into memory: as fast as KenLM, at 26 bytes per n-gram in each process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm import unpacked_kernels as kernels
from dlm.asr.kenlm.scorer import IN_BYTES, TEXT_PADDING, TextScorer
from dlm.asr.kenlm.table import NULL, ROW_MASK, ModelCounts, ModelTable
from dlm.client import Utterance
from dlm.index.check.decode import decode_tables
from dlm.index.search.local import LocalModel
from dlm.resources import available_bytes

PEAK_BYTES = 100  # per n-gram, while it is unpacked; 77 of a 5-gram
SHARE = 4  # at most 1 / SHARE of the available memory is used
LOAD = 0.7  # of the hash table


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedModel:
    """A model in the form of `unpacked_kernels`. Contexts are numbered from 1; 0 is the empty one.

    Shapes  numbers  the table for the kernels;  entries, contexts, words  arrays that it points to
            prefix, word  (contexts + 1,)  each context without its last word, and that word
    """

    numbers: NDArray[np.int64]
    entries: NDArray[np.int64]
    contexts: NDArray[np.uint32]
    words: NDArray[np.uint32]
    prefix: NDArray[np.uint32]
    word: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        kept = (self.entries, self.contexts, self.words, self.prefix, self.word)
        return sum(array.nbytes for array in kept)


def fits(model: LocalModel) -> bool:
    ngrams = sum(model.manifest.counts) + sum(model.manifest.blanks)
    return ngrams < ROW_MASK and ngrams * PEAK_BYTES * SHARE <= available_bytes()


def unpack(model: LocalModel) -> UnpackedModel:
    """Unpacks every n-gram of a model, from all of its shards.

    Raises  ShardFormatError  its files do not match each other
    """
    found = decode_tables(model)
    tables = found.model.tables
    first = np.cumsum([1, *(len(table) for table in tables)]).tolist()
    rows, vocabulary = first[-1], len(tables[0])
    # These include all prefixes of n-grams, and all states.
    numbered = np.concatenate([[False], *found.extended])
    numbered[1 : vocabulary + 1] = True  # so the number of a word is its id + 1
    context_of = np.where(numbered, np.cumsum(numbered), 0).astype(np.uint32)
    count = int(context_of.max()) + 1
    size = int((rows - 1 - vocabulary) / LOAD) + 4
    entries = np.zeros(2 * size + 8, np.int64)
    entries = entries[-entries.ctypes.data % 64 // 8 :]
    contexts, words = np.zeros(2 * count, np.uint32), np.zeros(2 * vocabulary, np.uint32)
    numbers = np.zeros(kernels.PLACES, np.int64)
    numbers[kernels.ENTRIES], numbers[kernels.SIZE] = entries.ctypes.data, size
    numbers[kernels.CONTEXTS], numbers[kernels.WORDS] = contexts.ctypes.data, words.ctypes.data
    suffix, after = np.zeros(rows, np.uint32), np.zeros(rows, np.uint32)
    prefix, word = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    for order, table in enumerate(tables, 1):
        last = np.ascontiguousarray(table.rows[:, -1])
        before = table.prefix + first[order - 2] if order > 1 else np.zeros(len(table), np.int64)
        kernels.enter_order(
            numbers.ctypes.data, order, first[order - 1], before, last, table.log10_backoff,
            found.extended[order - 1], context_of, suffix, after,
        )  # fmt: skip
        here = context_of[first[order - 1] : first[order]]
        prefix[here[here > 0]] = context_of[before[here > 0]]
        word[here[here > 0]] = last[here > 0]
    log10_prob = np.concatenate([[np.float32(0)], *(table.log10_prob for table in tables)])
    blank = np.concatenate([[False], *(table.blank for table in tables)])
    order_of = np.repeat(np.arange(len(first), dtype=np.uint8), np.diff([0, *first]))
    kernels.finish(numbers.ctypes.data, log10_prob, blank, after, order_of)
    words[0::2] = tables[0].log10_prob.view(np.uint32)
    words[1::2] = after[1 : vocabulary + 1]
    return UnpackedModel(numbers, entries, contexts, words, prefix, word)


class UnpackedTable(ModelTable):
    """States of an unpacked model are numbers of its n-grams, so no queries are cached."""

    is_whole = True

    def __init__(
        self, utterance: Utterance, counts: ModelCounts, owner: object, model: UnpackedModel
    ) -> None:
        view = utterance.low_orders.low.view
        self._text = TextScorer(utterance.vocabulary, utterance.order, view)
        super().__init__(utterance, counts, owner, self._text)
        self._model = model
        self.address = model.numbers.ctypes.data
        self._score: Callable[..., float]
        self.step, self._score, self._score_rows = compiled()
        self.begin = int(model.words[2 * utterance.vocabulary.begin_id + 1])

    def words(self, row: int) -> tuple[int, ...]:
        found = []
        while row:
            found.append(int(self._model.word[row]))
            row = int(self._model.prefix[row])
        return tuple(found)

    def row_of(self, words: Sequence[int]) -> int:
        row = NULL
        for word in reversed(words):
            row = self.step(self.address, row, word)[1] & ROW_MASK
        return row

    def score_rows(
        self, rows: NDArray[np.int64], words: NDArray[np.uint32]
    ) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        shape = len(rows), words.shape[1]
        found, after = np.empty(shape, np.float32), np.empty(shape, np.uint32)
        self._score_rows(self.address, rows, words, found, after)
        return found, after

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        padded = text + TEXT_PADDING  # which this name keeps in its place
        text_at = id(padded) + IN_BYTES
        return self._score(self.address, self._text.address, text_at, len(text), bos, eos)

    def count(self) -> None:
        numbers = self._model.numbers
        self._add(int(numbers[kernels.ASKED]), 0)
        numbers[kernels.ASKED] = 0


@lru_cache(1)
def compiled() -> tuple[Any, Any, Any]:
    return (
        kernels.step.compile(),
        kernels.score_sentence.compile(),
        kernels.score_rows.compile(),
    )
