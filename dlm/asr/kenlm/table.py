"""States of one model as small integers, and the steps between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.contexts import BLOCK_WORDS, MAX_WORDS
from dlm.asr.kenlm import file_kernels, kernels
from dlm.asr.kenlm.row_kernels import (
    CONTEXT_BYTES,
    HEAD_BYTES,
)
from dlm.asr.kenlm.scorer import FileScorer, TextScorer, WordScorer
from dlm.client import ContextBlocks, ModelInfo, States, Utterance
from dlm.client.api.states import LOCAL_MODEL
from dlm.jit import builtin
from dlm.kenlm.model import KenlmFile
from dlm.ngram.query import BIGRAM_FALLBACK, Answers
from dlm.ngram.vocab import as_bytes

# Limits, in memory that is allocated as needed: 5 MB of states of a model of order 5, and 4 MB of
# steps. A full table is replaced; states keep their own table alive.
STATES = 1 << 18
STEPS = 1 << 18
NEEDS_SHARD = kernels.NEEDS_SHARD
UNKNOWN_WORDS = 1 << 16  # most unknown words to remember
NULL = 0  # the row of the empty context
ROW_MASK = (1 << kernels.ROW_BITS) - 1


@dataclass(slots=True)
class ModelCounts:
    queries: int = 0
    cached: int = 0
    cache_misses: int = 0
    contexts_fetched: int = 0
    bigram_fallback: int = 0
    local_fallback: int = 0


class ModelTable(ABC):
    """States of the model that an utterance is pinned to, as row numbers: one row per state.
    Threads can share a table, since its kernels hold the GIL.

    Args        counts  of the model; queries to servers are added
                owner   of this table: states of its other tables can continue here
                scorer  looks up words, and scores text if the whole model is in this process
    Attributes  local   the model, if it is in this process
                ids     of the words that were looked up; see `id_of`
                is_whole  the whole model is in this process: no step is NEEDS_SHARD
                step    compiled function that takes `address`: see `kernels.step`
                begin   row of the state at the beginning of a sentence
    """

    is_whole: bool
    address: int
    step: Callable[[int, int, int], tuple[float, int]]
    begin: int

    def __init__(
        self,
        utterance: Utterance,
        counts: ModelCounts,
        owner: object,
        scorer: WordScorer,
    ) -> None:
        self.utterance = utterance
        self.local, self.vocabulary = utterance.local_model, utterance.vocabulary
        self.model_info: ModelInfo = utterance.model_info
        self.order = utterance.order
        self.owner = owner
        self._counts = counts
        self.scorer = scorer
        self.ids: dict[str, int] = {}  # exactly a dict, which Python reads faster

    def id_of(self, word: str) -> int:
        """The id of a word, looked up once; cleared after too many unknown words."""
        found = self.ids.get(word)
        if found is None:
            if not isinstance(word, str):
                raise TypeError(f"a word is of type {type(word).__name__}; expected str")
            if len(self.ids) >= self.utterance.vocabulary_size + UNKNOWN_WORDS:
                self.ids.clear()
            found = self.ids[word] = self.scorer.id_of(as_bytes(word))
        return found

    @abstractmethod
    def words(self, row: int) -> tuple[int, ...]:
        """The ids of a state, most recent first."""

    @abstractmethod
    def row_of(self, words: Sequence[int]) -> int:
        """The row of the state with these ids, most recent first; -1 if there is no room."""

    @abstractmethod
    def score_rows(
        self, rows: NDArray[np.int64], words: NDArray[np.uint32]
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """With a whole model, for (K,) rows and (1, W) or (K, W) words: log10 P (K, W), and the
        next state: its row, uint32, or how many words of (state, word) it keeps, uint8."""

    @abstractmethod
    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        """With a whole model: the sum of the scores of a sentence of at most TEXT_BYTES."""

    @abstractmethod
    def count(self) -> None:
        """Moves this table's counts to the model's counts."""

    def _add(self, asked: int, cached: int) -> None:
        asked += self.scorer.take_count()
        self._counts.queries += asked
        self._counts.cached += cached
        self._counts.local_fallback += asked * (self.model_info.kind == LOCAL_MODEL)


class StepTable(ModelTable):
    """A table of the states that occurred, and of the most recent steps.

    For a mapped single-shard model, a KenLM file, or a model on servers; `ask` requests what the
    table lacks.
    """

    def __init__(
        self, utterance: Utterance, counts: ModelCounts, owner: object, *, states: int = STATES
    ) -> None:
        local = utterance.local_model
        scorer: WordScorer
        if isinstance(local, KenlmFile):
            self.is_whole, self.view, scorer = True, local.view, FileScorer(local)
            self._kernels = compiled_for_files()
        else:
            self._kernels = compiled()
            self.is_whole = local is not None and len(local.shards) == 1
            low = utterance.low_orders.low.view
            self.view = local.shards[0].view if local is not None and self.is_whole else low
            scorer = TextScorer(utterance.vocabulary, utterance.order, self.view)
        super().__init__(utterance, counts, owner, scorer)
        self._states = states
        width = max(self.order, 1)
        self._width = HEAD_BYTES // 4 + width - 1
        contexts = -(-(HEAD_BYTES + 4 * (width - 1)) // 8) * 8
        stride = contexts + CONTEXT_BYTES * (width - 1)
        self._rows = np.zeros((states + 1, stride // 4), np.uint32)
        slots = 1 << (2 * states - 1).bit_length()
        self._slots = np.zeros(slots, np.int64)
        lines = STEPS // kernels.WAYS
        cache = np.zeros(lines * kernels.LINE_BYTES // 8 + 8, np.int64)
        self._cache = cache[-cache.ctypes.data % 64 // 8 :]
        self._numbers = numbers = np.zeros(kernels.PLACES, np.int64)
        numbers[kernels.VIEW] = self.view.ctypes.data
        numbers[kernels.WHOLE] = int(self.is_whole)
        numbers[kernels.ORDER] = self.order
        numbers[kernels.ROWS] = self._rows.ctypes.data
        numbers[kernels.STRIDE] = stride
        numbers[kernels.CONTEXTS] = contexts
        numbers[kernels.CAPACITY] = states
        numbers[kernels.SLOTS] = self._slots.ctypes.data
        numbers[kernels.SLOT_MASK] = slots - 1
        numbers[kernels.CACHE] = self._cache.ctypes.data
        numbers[kernels.LINE_MASK] = lines - 1
        self._blocks: dict[int, ContextBlocks] = {}
        self._held = 0  # words of these
        self.address = numbers.ctypes.data
        self.step = self._kernels.step
        self.row_of(())
        self.begin = self.row_of((utterance.vocabulary.begin_id,) if self.order > 1 else ())

    def words(self, row: int) -> tuple[int, ...]:
        found = self._rows[row, : self._width].tolist()
        return tuple(found[2 : 2 + found[0]])

    def states(self, rows: NDArray[np.int64]) -> States:
        width = max(self.order - 1, 0)
        found = self._rows[rows, : self._width]
        # Most recent last, and at the right.
        return States(
            self.model_info,
            np.ascontiguousarray(_cleared(found[:, 2:], found[:, 0])[:, ::-1][:, :width]),
            found[:, 0].astype(np.uint8),
        )

    def row_of(self, words: Sequence[int]) -> int:
        return int(self._kernels.enter_state(self.address, np.array(words, np.uint32)))

    def score_rows(
        self, rows: NDArray[np.int64], words: NDArray[np.uint32]
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        shape = len(rows), words.shape[1]
        found, reach = np.empty(shape, np.float32), np.empty(shape, np.uint8)
        self._kernels.score_rows(self.address, rows, words, found, reach)
        return found, reach

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        return self.scorer.score(text, bos, eos)

    def renewed(self) -> StepTable:
        self.count()
        return StepTable(self.utterance, self._counts, self.owner, states=self._states)

    def count(self) -> None:
        self._add(int(self._numbers[kernels.ASKED]), int(self._numbers[kernels.HITS]))
        self._numbers[kernels.ASKED] = self._numbers[kernels.HITS] = 0

    def _blocks_of(self, row: int) -> ContextBlocks:
        """Everything stored after a state, since decoders ask for many words after it."""
        found = self._blocks.get(row)
        if found is None:
            found = self.utterance.context_blocks(self.states(np.array([row])))
            self._counts.contexts_fetched += 1
            if found.source[0] != BIGRAM_FALLBACK:  # bigram-fallback answers are never remembered
                self._held += BLOCK_WORDS + int(found.sizes[0])
                if self._held > MAX_WORDS:
                    self._blocks = {}
                    self._held = BLOCK_WORDS + int(found.sizes[0])
                self._blocks[row] = found
        return found

    def remember(self, row: int, words: Sequence[int], answers: Answers) -> bool:
        """Counts and keeps the servers' answers to consecutive words; False if there is no room.

        Answers after a bigram-fallback one are not kept: they were asked after more words than
        its next row has.
        """
        count = len(words)
        degraded = (
            np.zeros(count, bool) if answers.source is None else answers.source == BIGRAM_FALLBACK
        )
        self._counts.queries += count
        self._counts.cache_misses += count
        self._counts.bigram_fallback += int(degraded.sum())
        if self.utterance.model_info != self.model_info:
            return True
        kept = int(degraded.argmax()) if degraded.any() else count
        rows = zip(
            words[:kept],
            answers.log10_prob.tolist(),
            answers.ngram_length.tolist(),
            answers.state_length.tolist(),
            strict=False,
        )
        for word, log10_prob, length, reach in rows:
            _, answer = compiled().enter_step(
                self.address, row, word, log10_prob, length, reach, True
            )
            if answer < 0:
                return False
            self._counts.queries -= 1  # the table counts it too
            row = answer
        return True

    def ask(self, row: int, word: int) -> tuple[float, int]:
        """Like `kernels.step`, from the servers that have what the low orders lack."""
        blocks = self._blocks_of(row)
        answers = blocks.answers(0, np.array([word], np.uint32))
        is_fallback = bool(blocks.source[0] == BIGRAM_FALLBACK)
        self._counts.cache_misses += 1
        self._counts.bigram_fallback += is_fallback
        log10_prob, answer = compiled().enter_step(
            self.address,
            row,
            word,
            float(answers.log10_prob[0]),
            int(answers.ngram_length[0]),
            int(answers.state_length[0]),
            not is_fallback,
        )
        return log10_prob, answer


def _cleared(words: NDArray[np.uint32], lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    used = np.arange(words.shape[1])[None, :] < lengths[:, None]
    return np.where(used, words, 0).astype(np.uint32)


class Compiled(NamedTuple):
    """The compiled functions themselves: numba's dispatchers take half as long again."""

    step: Callable[[int, int, int], tuple[float, int]]
    enter_state: Callable[..., int]
    enter_step: Callable[..., tuple[float, int]]
    score_rows: Callable[..., None]


@lru_cache(1)
def compiled() -> Compiled:
    return Compiled(
        kernels.step.compile(),
        kernels.enter_state,
        kernels.enter_step.compile(),
        kernels.score_rows.compile(),
    )


@lru_cache(1)
def compiled_for_files() -> Compiled:
    """Those of KenLM files, which no server's answers are entered for."""
    return Compiled(
        builtin(file_kernels.step),
        file_kernels.enter_state,
        kernels.enter_step,
        file_kernels.score_rows.compile(),
    )
