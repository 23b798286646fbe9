"""Numbers the states of one model, and steps from state to state: in a table of the states that
occurred, or in a model that is unpacked into memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm import kernels, sentence_kernels, unpacked_kernels
from dlm.asr.kenlm.row_kernels import CONTEXT_BYTES, HEAD_BYTES
from dlm.client import ContextBlocks, ModelInfo, States, Utterance
from dlm.client.states import LOCAL_MODEL
from dlm.index.check.decode import decode_tables
from dlm.index.search.local import LocalModel
from dlm.jit import builtin
from dlm.kenlm import score_kernels as file_kernels
from dlm.kenlm.model import WHITE_SPACE, KenlmFile, splits_at
from dlm.ngram.query import BIGRAM_FALLBACK, Answers
from dlm.ngram.vocab import as_bytes
from dlm.ngram.wordtable import PADDING, WordTable
from dlm.resources import available_bytes

# Limits. Memory is allocated as it is used: up to 27 MB for the states of a model of order 5, and
# 4 MB for steps. A full table is replaced, and freed once no state refers to it.
STATES = 1 << 18
STEPS = 1 << 18
NEEDS_SHARD = kernels.NEEDS_SHARD
UNKNOWN_WORDS = 1 << 16  # maximum number of unknown words to remember
MAX_WORDS = 1 << 22  # maximum number of words in all kept blocks: about 60 MB
BLOCK_WORDS = 64  # an empty block takes as much memory as this many words
NULL = 0  # the row of the empty context
ROW_MASK = (1 << kernels.ROW_BITS) - 1
Stored: TypeAlias = tuple[ContextBlocks, int]  # what is stored after a state: blocks, and an index
# Unpacking.
PEAK_BYTES = 100  # bytes per n-gram while a model is unpacked; 5-gram models take 77
SHARE = 4  # at most 1 / SHARE of the available memory is used
LOAD = 0.7  # load factor of the hash table

_DELIMITERS = splits_at(WHITE_SPACE)  # the separators of `bytes.split`
_PADDING = b"\n" + PADDING
# Offset of the content in a bytes object; CPython puts a zero byte after the content.
IN_BYTES = bytes.__basicsize__ - 1


@dataclass(slots=True)
class ModelCounts:
    queries: int = 0
    cached: int = 0
    cache_misses: int = 0
    contexts_fetched: int = 0
    bigram_fallback: int = 0
    local_fallback: int = 0


class TextScorer:
    """Looks up a word, or scores a sentence if the whole model is in this process, in one compiled
    call. The kernels read `numbers`; `numbers[0]` counts the words scored."""

    def __init__(self, numbers: NDArray[np.int64], score: Any, find: Any, *kept: object) -> None:
        self.numbers, self._address, self._kept = numbers, numbers.ctypes.data, kept
        self._score: Callable[..., float] = score.compile()
        self._find: Callable[[int, int, int], int] = find.compile()

    @classmethod
    def of_file(cls, file: KenlmFile) -> TextScorer:
        """Makes a scorer for a KenLM file; sums are in float32, like KenLM's."""
        scratch = np.zeros(file_kernels.SCRATCH_BYTES // 8 + 1, np.int64)
        numbers = _numbers(
            file_kernels.PLACES,
            {
                file_kernels.VIEW: file.view,
                file_kernels.SPLITS: _DELIMITERS,
                file_kernels.SCRATCH: scratch,
            },
        )
        return cls(numbers, file_kernels.score_sentence, file_kernels.find_id, file, scratch)

    @classmethod
    def of_words(cls, utterance: Utterance, unpacked: int | None = None) -> TextScorer:
        """Makes a scorer for a shard set or, given the address of its table, for an unpacked model;
        sums are in float64."""
        at, vocabulary = sentence_kernels, utterance.vocabulary
        table = WordTable.from_vocabulary(vocabulary)
        scratch = np.zeros(at.SCRATCH_BYTES, np.uint8)
        local, given = utterance.local_model, dict[int, Any]()
        if isinstance(local, LocalModel):
            given = {
                at.LOW: local.low.view,
                at.TREES: local.trees,
                at.SHARDS: len(local.trees),
                at.SHARD_OF_SLOT: local.slots,
            }
        numbers = _numbers(
            at.PLACES,
            {
                **given,
                at.TABLE: unpacked or 0,
                at.ORDER: utterance.order,
                at.BEGIN_ID: vocabulary.begin_id,
                at.END_ID: vocabulary.end_id,
                at.SLOTS: table.slots,
                at.SLOT_MASK: len(table.slots) - 2,
                at.WORD_BEGIN: table.word_begin,
                at.WORD_BYTES: table.word_bytes,
                at.DELIMITERS: _DELIMITERS,
                at.SCRATCH: scratch,
            },
        )
        score = at.score_sentence if unpacked is None else unpacked_kernels.score_sentence
        return cls(numbers, score, at.find_id, table, local, scratch)

    def id_of(self, word: bytes) -> int:
        padded = word + _PADDING  # the variable keeps the bytes alive during the call
        return self._find(self._address, id(padded) + IN_BYTES, len(word))

    def score(self, text: bytes, bos: bool, eos: bool) -> float:
        """Returns the score of a sentence, whose text has at most TEXT_BYTES."""
        padded = text + _PADDING  # the variable keeps the bytes alive during the call
        return self._score(self._address, id(padded) + IN_BYTES, len(text), bos, eos)


def _numbers(places: int, given: dict[int, Any]) -> NDArray[np.int64]:
    """Makes an array for kernels from the values by index; an array is replaced by its address."""
    found = np.zeros(places, np.int64)
    for place, value in given.items():
        found[place] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return found


def _taken(numbers: NDArray[np.int64], place: int) -> int:
    found = int(numbers[place])
    numbers[place] = 0
    return found


class ModelTable(ABC):
    """States of the model that an utterance is pinned to, with one row per state. Every decoder
    adapter uses such a table: it calls `start`, then `score` for each word and for the sentence
    end, or `score_all`. Threads can share a table, since its kernels hold the GIL.

    Args        owner   whose table this is: states of the same owner's other tables are accepted
                scorer  looks up words, and scores text if the whole model is in this process
    Attributes  local   the model, if it is in this process
                numbers  an array that kernels read, given its address
                is_whole  whether the whole model is in this process, so no step needs a shard
                begin   row of the state at the beginning of a sentence
    """

    is_whole: bool
    step: Callable[[int, int, int], tuple[float, int]]
    _score_rows: Callable[..., None]
    begin: int

    def __init__(
        self,
        utterance: Utterance,
        counts: ModelCounts,
        owner: object,
        numbers: NDArray[np.int64],
        scorer: TextScorer,
    ) -> None:
        self.numbers, self.address = numbers, numbers.ctypes.data
        self.utterance = utterance
        self.local, self.vocabulary = utterance.local_model, utterance.vocabulary
        self.model_info: ModelInfo = utterance.model_info
        self.order = utterance.order
        self.owner = owner
        self._counts = counts
        self.scorer = scorer
        self.ids: dict[str, int] = {}  # a plain dict: Python reads subclasses more slowly

    def start(self, bos: bool = True) -> int:
        """Returns the state at the beginning of a sentence or, without `bos`, the empty context."""
        return self.begin if bos else NULL

    def score(self, row: int, word: int) -> tuple[float, int]:
        """Returns log10 P of a word after a state, and the next state; see `kernels.step`."""
        return self.step(self.address, row, word)

    def id_of(self, word: str) -> int:
        """Returns a word's id, looked up once; forgets all ids after too many unknown words."""
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
        """Returns the word ids of a state, most recent first."""

    @abstractmethod
    def row_of(self, words: Sequence[int]) -> int:
        """Returns the row of the state of `words`, most recent first; below 0 if no row is free."""

    def score_rows(self, rows: NDArray[np.int64], words: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Returns (K, W) log10 P for (K,) rows and (1, W) or (K, W) words, if `is_whole`."""
        found = np.empty((len(rows), words.shape[1]), np.float32)
        self._score_rows(self.address, rows, words, found)
        self._counts.queries += found.size
        return found

    def count(self) -> ModelCounts:
        """Returns the counts, including what the kernels counted since the last call."""
        asked = _taken(self.numbers, kernels.ASKED)
        asked += _taken(self.scorer.numbers, sentence_kernels.ASKED)
        self._counts.queries += asked
        self._counts.cached += _taken(self.numbers, kernels.HITS)
        self._counts.local_fallback += asked * (self.model_info.kind == LOCAL_MODEL)
        return self._counts


class StepTable(ModelTable):
    """A table of the states that occurred and of the most recent steps, for a mapped single-shard
    model, a KenLM file, or a model on servers."""

    def __init__(
        self,
        utterance: Utterance,
        counts: ModelCounts,
        owner: object,
        *,
        states: int = STATES,
        scorer: TextScorer | None = None,
        max_words: int = MAX_WORDS,
    ) -> None:
        local = utterance.local_model
        self.is_whole = isinstance(local, KenlmFile) or (
            local is not None and len(local.shards) == 1
        )
        tree = 0
        if isinstance(local, KenlmFile):
            self.view = local.view
            scorer = scorer or TextScorer.of_file(local)
            self.step = builtin(kernels.step_in_file)
            self._enter_state = kernels.enter_state_of_file
            self._score_rows = kernels.score_rows_in_file.compile()
            self._step_all = kernels.step_all_in_file
        else:
            self.view = utterance.low_orders.low.view
            if local is not None and self.is_whole:
                tree = local.trees[0]
            scorer = scorer or TextScorer.of_words(utterance)
            # These are compiled functions: calls through a dispatcher take 1.5 times as long.
            self.step = kernels.step.compile()
            self._enter_state = kernels.enter_state
            self._score_rows = kernels.score_rows.compile()
            self._step_all = kernels.step_all
            self._enter_steps = kernels.enter_steps.compile()
        self.room, self._max_words = states, max_words
        width = max(utterance.order, 1)
        self._width = HEAD_BYTES // 4 + width - 1
        contexts = -(-(HEAD_BYTES + 4 * (width - 1)) // 8) * 8
        stride = contexts + CONTEXT_BYTES * (width - 1)
        self._rows = np.zeros((states + 1, stride // 4), np.uint32)
        slots = 1 << (2 * states - 1).bit_length()
        self._slots = np.zeros(slots, np.int64)
        lines = STEPS // kernels.WAYS
        cache = np.zeros(lines * kernels.LINE_BYTES // 8 + 8, np.int64)
        self._cache = cache[-cache.ctypes.data % 64 // 8 :]
        numbers = _numbers(
            kernels.PLACES,
            {
                kernels.VIEW: self.view,
                kernels.TREE: tree,
                kernels.ORDER: utterance.order,
                kernels.ROWS: self._rows,
                kernels.STRIDE: stride,
                kernels.CONTEXTS: contexts,
                kernels.CAPACITY: states,
                kernels.SLOTS: self._slots,
                kernels.SLOT_MASK: slots - 1,
                kernels.CACHE: self._cache,
                kernels.LINE_MASK: lines - 1,
            },
        )
        super().__init__(utterance, counts, owner, numbers, scorer)
        self._blocks: dict[int, Stored] = {}  # by row: blocks, and the row's index in them
        self._held = 0  # number of words in these blocks
        self.row_of(())
        self.begin = self.row_of((utterance.vocabulary.begin_id,) if self.order > 1 else ())

    def words(self, row: int) -> tuple[int, ...]:
        found = self._rows[row, : self._width].tolist()
        return tuple(found[2 : 2 + found[0]])

    def states(self, rows: NDArray[np.int64]) -> States:
        width = max(self.order - 1, 0)
        found = self._rows[rows, : self._width]
        lengths, words = found[:, 0], found[:, 2:]
        used = np.arange(words.shape[1])[None, :] < lengths[:, None]
        # In `States`, the most recent word is last, and rows are aligned at the right.
        return States(
            self.model_info,
            np.ascontiguousarray(np.where(used, words, 0).astype(np.uint32)[:, ::-1][:, :width]),
            lengths.astype(np.uint8),
        )

    def row_of(self, words: Sequence[int]) -> int:
        return int(self._enter_state(self.address, np.array(words, np.uint32)))

    def renewed(self, states: int | None = None) -> StepTable:
        """Returns an empty table, with room for `states` states."""
        return StepTable(
            self.utterance, self.count(), self.owner, states=states or self.room,
            scorer=self.scorer, max_words=self._max_words,
        )  # fmt: skip

    def grown(self) -> StepTable:
        """Returns a table with the same rows, and room for twice as many."""
        found = self.renewed(2 * self.room)
        for row in range(len(self)):
            found.row_of(self.words(row))
        found._blocks, found._held = self._blocks, self._held
        return found

    def __len__(self) -> int:
        return int(self.numbers[kernels.COUNT])

    def lacks(self, row: int) -> bool:
        """Whether steps after a state need stored continuations that have not been fetched yet."""
        return bool(self._rows[row, 1]) and row not in self._blocks

    def blocks_of(self, rows: Collection[int]) -> dict[int, Stored]:
        """Returns what is stored after different states; sends at most one message per shard."""
        found = {row: self._blocks[row] for row in rows if row in self._blocks}
        lacked = [row for row in rows if row not in found]
        if lacked:
            blocks = self.utterance.context_blocks(self.states(np.array(lacked)))
            self._counts.contexts_fetched += len(lacked)
            sizes, kept = blocks.sizes.tolist(), blocks.source != BIGRAM_FALLBACK
            for place, row in enumerate(lacked):
                found[row] = blocks, place
                if kept[place]:  # bigram-fallback answers are never remembered
                    self._held += BLOCK_WORDS + sizes[place]
                    if self._held > self._max_words:
                        self._blocks, self._held = {}, BLOCK_WORDS + sizes[place]
                    self._blocks[row] = found[row]
        return found

    def remember(self, row: int, words: Sequence[int], answers: Answers) -> bool:
        """Counts the servers' answers to consecutive words, and keeps those before the first answer
        of the bigram fallback. Returns False if there is no room."""
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
        after = self._enter(row, np.array(words[:kept], np.uint32), answers, True, True)
        self._counts.queries -= int((after >= 0).sum())  # the table counts these queries too
        return bool((after >= 0).all())

    def _enter(
        self, row: int, words: NDArray[np.uint32], answers: Answers, keep: bool, follow: bool
    ) -> NDArray[np.int64]:
        after = np.empty(len(words), np.int64)
        self._enter_steps(
            self.address, row, words, answers.log10_prob, answers.ngram_length,
            answers.state_length, keep, follow, after,
        )  # fmt: skip
        return after

    def _found(
        self, row: int, words: NDArray[np.uint32], blocks: ContextBlocks, place: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        answers = blocks.answers(place, words)
        is_fallback = bool(blocks.source[place] == BIGRAM_FALLBACK)
        self._counts.cache_misses += len(words)
        self._counts.bigram_fallback += is_fallback * len(words)
        return answers.log10_prob, self._enter(row, words, answers, not is_fallback, False)

    def score(
        self, row: int, word: int, fetch: Callable[[int], Stored] | None = None
    ) -> tuple[float, int]:
        """Like `ModelTable.score`; if necessary, the servers or fetched blocks answer."""
        log10_prob, after = self.step(self.address, row, word)
        if after == NEEDS_SHARD:
            found = self.blocks_of([row])[row] if fetch is None else fetch(row)
            log10_probs, rows = self._found(row, np.array([word], np.uint32), *found)
            return float(log10_probs[0]), int(rows[0])
        return log10_prob, after

    def score_all(
        self, rows: NDArray[np.int64], words: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """Returns log10 P of N words, each after its own state, and the next rows; None if the
        table is full. Sends at most one message per shard."""
        log10_prob, after = np.empty(len(rows)), np.empty(len(rows), np.int64)
        self._step_all(self.address, rows, words, log10_prob, after)
        lacked = np.flatnonzero(after == NEEDS_SHARD)
        for row, found in self.blocks_of(np.unique(rows[lacked]).tolist()).items():
            at = lacked[rows[lacked] == row]
            log10_prob[at], after[at] = self._found(row, words[at].astype(np.uint32), *found)
        return None if (after < 0).any() else (log10_prob, after & ROW_MASK)


# --------------------------------------------------------------------------------- unpacked


def fits(model: LocalModel) -> bool:
    ngrams = sum(model.manifest.counts) + sum(model.manifest.blanks)
    return ngrams < ROW_MASK and ngrams * PEAK_BYTES * SHARE <= available_bytes()


def unpack(model: LocalModel) -> tuple[NDArray[Any], ...]:
    """Unpacks all n-grams of a model for `unpacked_kernels`. Returns `numbers`; by context number,
    the context without its last word, and that word; and the arrays that `numbers` points to,
    `words` first. Raises ShardFormatError if the model's files do not match each other."""
    found = decode_tables(model)
    tables = found.model.tables
    first = np.cumsum([1, *(len(table) for table in tables)]).tolist()
    rows, vocabulary = first[-1], len(tables[0])
    # The numbered n-grams include all prefixes of n-grams, and all states.
    numbered = np.concatenate([[False], *found.extended])
    numbered[1 : vocabulary + 1] = True  # so the number of a word is its id + 1
    context_of = np.where(numbered, np.cumsum(numbered), 0).astype(np.uint32)
    count = int(context_of.max()) + 1
    size = int((rows - 1 - vocabulary) / LOAD) + 4
    entries = np.zeros(2 * size + 8, np.int64)
    entries = entries[-entries.ctypes.data % 64 // 8 :]
    contexts, words = np.zeros(2 * count, np.uint32), np.zeros(2 * vocabulary, np.uint32)
    numbers = _numbers(
        unpacked_kernels.PLACES,
        {
            unpacked_kernels.ENTRIES: entries,
            unpacked_kernels.SIZE: size,
            unpacked_kernels.CONTEXTS: contexts,
            unpacked_kernels.WORDS: words,
        },
    )
    suffix, after = np.zeros(rows, np.uint32), np.zeros(rows, np.uint32)
    prefix, word = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    for order, table in enumerate(tables, 1):
        last = np.ascontiguousarray(table.rows[:, -1])
        before = table.prefix + first[order - 2] if order > 1 else np.zeros(len(table), np.int64)
        unpacked_kernels.enter_order(
            numbers.ctypes.data, order, first[order - 1], before, last, table.log10_backoff,
            found.extended[order - 1], context_of, suffix, after,
        )  # fmt: skip
        here = context_of[first[order - 1] : first[order]]
        prefix[here[here > 0]] = context_of[before[here > 0]]
        word[here[here > 0]] = last[here > 0]
    log10_prob = np.concatenate([[np.float32(0)], *(table.log10_prob for table in tables)])
    blank = np.concatenate([[False], *(table.blank for table in tables)])
    order_of = np.repeat(np.arange(len(first), dtype=np.uint8), np.diff([0, *first]))
    unpacked_kernels.finish(numbers.ctypes.data, log10_prob, blank, after, order_of)
    words[0::2] = tables[0].log10_prob.view(np.uint32)
    words[1::2] = after[1 : vocabulary + 1]
    return numbers, prefix, word, words, entries, contexts


class UnpackedTable(ModelTable):
    """A table of an unpacked model: a state is the number of a context, and no query is cached."""

    is_whole = True

    def __init__(
        self, utterance: Utterance, counts: ModelCounts, owner: object, model: LocalModel
    ) -> None:
        numbers, self._prefix, self._word, words, *self._kept = unpack(model)
        scorer = TextScorer.of_words(utterance, numbers.ctypes.data)
        super().__init__(utterance, counts, owner, numbers, scorer)
        self.step = unpacked_kernels.step.compile()
        self._score_rows = unpacked_kernels.score_rows.compile()
        self._kept.append(words)
        self.begin = int(words[2 * utterance.vocabulary.begin_id + 1])

    def words(self, row: int) -> tuple[int, ...]:
        found = []
        while row:
            found.append(int(self._word[row]))
            row = int(self._prefix[row])
        return tuple(found)

    def row_of(self, words: Sequence[int]) -> int:
        row = NULL
        for word in reversed(words):
            row = self.step(self.address, row, word)[1] & ROW_MASK
        return row
