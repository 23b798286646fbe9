"""Finds the n-grams of a KenLM file whose hash tables store only hashes of the n-grams' words.

A KenLM file also has every n-gram's context and suffix, so the n-grams of order n are sought
among pairs of n-grams of order n - 1 that share n - 2 words. The signs of values show which n-grams
begin or end a longer one, and a filter of the table's keys rejects most other candidates. The
result is accepted only if every key of a table is claimed exactly once.

    2-grams        all pairs of a word that may begin a longer n-gram and a word that may end one
    n-grams        for each context p, the suffixes s whose first n - 2 words are p's last n - 2

Before an order is begun, its number of candidates is known; soon after, its time is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, KenlmFormatError
from dlm.files import scratch_folder
from dlm.jit import compile_ahead
from dlm.kenlm import read_kernels as kernels
from dlm.kenlm.kernels import OF_SUFFIX, OF_WORD
from dlm.kenlm.layout import Layout, Level
from dlm.ngram.arpa import NgramBatch
from dlm.progress import ProgressReporter
from dlm.spill.arrays import IN_MEMORY, Storage, pages
from dlm.spill.sorter import MIN_MEMORY_BYTES, Sorter

U8, U32, I64, F32 = np.uint8, np.uint32, np.int64, np.float32

KERNELS = (
    kernels.fill_filter,
    kernels.pair_words,
    kernels.claim,
    kernels.values,
    kernels.flags,
    kernels.suffixes,
    kernels.cut,
    kernels.join,
    kernels.take,
)
LIMIT_S = 10 * 3600.0  # seconds that one order may take without --force
MOST_BUCKETS = (1 << 32) - 1  # maximum per order: bucket numbers have 32 bits
_TRIAL_S = 3.0  # seconds after which the time is estimated
_CLASS_BYTES = 1 << 14  # bytes of the filter per class: half of a first-level cache
_FILTER_BYTES = 4  # bytes per key: one in a thousand keys outside the table passes
_MOST_CLASS_BITS, _MOST_WORD_BITS = 16, 26
_CLASS_WORD_BITS = 7  # leaves a class at least 64 words of the vocabulary, on average
_TURN = 1 << 26  # candidates between checks of the clock
_FOUND_ROWS = 1 << 16


@dataclass(frozen=True)
class Effort:
    """The limits of an inversion: memory, beyond which arrays are files in `folder`, and estimated
    seconds per order, None for no limit."""

    memory_bytes: int
    folder: Path | None = None
    limit_s: float | None = LIMIT_S


@dataclass(frozen=True, eq=False)
class _Order:
    """The n-grams of one order, sorted by their words.

    Shapes, k the order, n rows
        ids      (n, k)  uint32  oldest word first
        context  (n,)    uint32  rank of all but the last word in order k - 1
        suffix   (n,)    uint32  rank of all but the first word in order k - 1
        bucket   (n,)    uint32  number of the bucket in the file's table
        contexts int             the number of n-grams of order k - 1
    """

    ids: NDArray[np.uint32]
    context: NDArray[np.uint32]
    suffix: NDArray[np.uint32]
    bucket: NDArray[np.uint32]
    contexts: int

    @classmethod
    def of(cls, rows: int, order: int, contexts: int, storage: Storage) -> _Order:
        context, suffix, bucket = (storage.empty(rows, U32) for _ in range(3))
        return cls(storage.empty((rows, order), U32), context, suffix, bucket, contexts)


@dataclass(frozen=True, eq=False)
class _Table:
    """A hash table of the file, at address `at`, with a filter of its keys."""

    level: Level
    at: int
    class_bits: int
    word_bits: int
    words: NDArray[np.int64]
    keys: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int, NDArray[np.int64]]:
        level = self.level
        return self.at, level.entries, level.entry_size, self.class_bits, self.word_bits, self.words


class _Claims:
    def __init__(self, layout: Layout, table: _Table) -> None:
        self._layout, self._table = layout, table
        self._claimed = np.zeros(table.level.entries, U8)
        self._found = 0
        self.again = 0

    def add(self, found: NDArray[np.uint32]) -> None:
        """Counts n-grams that were found, and marks their buckets, given in the last column."""
        self._found += len(found)
        self.again += int(kernels.claim(found, self._claimed))

    def check(self) -> None:
        """Raises `KenlmFormatError` unless every key was found once."""
        lost = self._table.keys - (self._found - self.again)
        if not lost and not self.again:
            return
        order = self._table.level.order
        raise KenlmFormatError(
            f"of {self._table.keys:,} keys, {lost:,} match no {order}-gram of known words and "
            f"{self.again:,} match several, so the n-grams cannot be recovered",
            path=self._layout.path,
            section=f"{order}-grams",
            advice="A key that matches no n-gram means that the file is damaged, or that the ARPA "
            "file listed an n-gram twice. Rebuild the file; this one can be used only for scoring",
        )


class _Turns:
    def __init__(
        self, effort: Effort, progress: ProgressReporter, table: _Table, total: int
    ) -> None:
        self._effort, self._progress, self._total = effort, progress, total
        self._order = table.level.order
        self._done, self._began_s, self._is_estimated = 0, time.monotonic(), False
        progress.stage(f"finding {table.keys:,} {self._order}-grams", total, "candidates")

    def done(self, candidates: int) -> None:
        """Counts candidates; raises `ConfigError` if all candidates would take too long."""
        self._done += candidates
        self._progress.step(candidates)
        elapsed_s = time.monotonic() - self._began_s
        limit_s = self._effort.limit_s
        trial_s = _TRIAL_S if limit_s is None else min(_TRIAL_S, limit_s)
        if self._is_estimated or not self._done or elapsed_s < trial_s:
            return
        self._is_estimated = True
        needed_s = elapsed_s * self._total / self._done
        self._progress.tell(
            f"the {self._total:,} candidates for {self._order}-grams take about {needed_s:,.0f} s"
        )
        if limit_s is not None and needed_s > limit_s:
            raise ConfigError(
                f"finding the {self._order}-grams would take about {needed_s / 3600:,.1f} hours, "
                f"more than the limit of {limit_s / 3600:,.1f}. Pass --force to `dlm export`, and "
                "give other commands the ARPA file that it writes"
            )


class Inversion:
    """Recovers the n-grams of orders 2 and up of a mapped file, one order after another.

    Raises  ConfigError       too many buckets, too little memory; or an order would take too long
            KenlmFormatError  a key is claimed by no n-gram, or twice
    """

    def __init__(
        self,
        layout: Layout,
        base: int,
        unigrams: NDArray[np.float32],
        effort: Effort,
        progress: ProgressReporter,
    ) -> None:
        self._layout, self._base, self._unigrams = layout, base, unigrams
        self._effort, self._progress = effort, progress
        for level in layout.levels:
            if level.entries > MOST_BUCKETS:
                raise ConfigError(
                    f"{layout.path} has {level.entries:,} buckets of {level.order}-grams; at most "
                    f"{MOST_BUCKETS:,} can be turned back into n-grams. Use the ARPA file of the "
                    "model"
                )
        arrays, least = needed_bytes(layout)
        if least > effort.memory_bytes:
            raise ConfigError(
                f"turning {layout.path} back into n-grams needs at least {least:,} bytes of "
                f"memory, but the limit is {effort.memory_bytes:,}; raise --memory"
            )
        self._in_files = arrays + least > effort.memory_bytes

    def batches(self, rows: int) -> Iterator[NgramBatch]:
        compile_ahead(KERNELS)  # otherwise the time estimate would include compilation
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder(self._effort.folder, "dlm-kenlm"))
            storage = Storage(folder) if self._in_files else IN_MEMORY
            below: _Order | None = None
            for level in self._layout.levels:
                table = self._table(level)
                if below is None:
                    order = self._pairs(table, storage, folder)
                else:
                    order = self._joined(table, below, storage)
                yield from self._rows(table, order, rows)
                below = order

    def _table(self, level: Level) -> _Table:
        bits = max((level.count * _FILTER_BYTES).bit_length() - 4, 0)
        widest = max(self._layout.words.bit_length() - _CLASS_WORD_BITS, 0)
        class_bits = min(max(bits - (_CLASS_BYTES.bit_length() - 4), 0), widest, _MOST_CLASS_BITS)
        word_bits = min(max(bits - class_bits, 0), _MOST_WORD_BITS)
        words = pages(1 << (class_bits + word_bits), I64)  # zeros, in large pages for random reads
        at = self._base + level.at
        keys = kernels.fill_filter(
            at, level.entries, level.entry_size, class_bits, word_bits, words
        )
        return _Table(level, at, class_bits, word_bits, words, int(keys))

    def _pairs(self, table: _Table, storage: Storage, folder: Path) -> _Order:
        """Finds the 2-grams: tries each word that may begin one with each that may end one."""
        bits = self._unigrams.view(U32)
        first_ids = np.flatnonzero(bits[:, 1] != 1 << 31).astype(U32)
        last_ids = np.flatnonzero(bits[:, 0] < 1 << 31).astype(U32)
        first, first_ids, first_begin = _by_class(
            (first_ids.astype(I64) + 1) * OF_WORD, first_ids, table.class_bits
        )
        last, last_ids, last_begin = _by_class(
            last_ids.astype(I64) * OF_SUFFIX, last_ids, table.class_bits
        )
        hashes = np.concatenate([first, last])
        widest = int(np.diff(last_begin).max(initial=0))
        candidates = np.empty(widest, I64)
        found = np.empty((max(_FOUND_ROWS, 2 * widest), 3), U32)
        claims = _Claims(self._layout, table)
        turns = _Turns(self._effort, self._progress, table, len(first_ids) * len(last_ids))
        memory = max(self._effort.memory_bytes // 4, MIN_MEMORY_BYTES)
        with Sorter(folder, 3, 2, memory, name="pairs") as sorter:
            for c in range(len(first_begin) - 1):
                state = np.zeros(2, I64)
                while state[0] >= 0:
                    count = kernels.pair_words(
                        table.at, table.level.entries, table.level.entry_size, table.word_bits,
                        table.words, c, first_begin, last_begin, hashes, first_ids, last_ids,
                        state, candidates, found,
                    )  # fmt: skip
                    claims.add(found[:count])
                    sorter.add(found[:count])
                turns.done(int(first_begin[c + 1] - first_begin[c]) * len(last_ids))
            claims.check()
            order = _Order.of(table.keys, 2, self._layout.words, storage)
            at = 0
            runs = sorter.finish()
            with runs:
                for block in runs.blocks(_FOUND_ROWS):
                    here = slice(at, at + len(block))
                    order.ids[here] = block[:, :2]
                    order.bucket[here] = block[:, 2]
                    at += len(block)
            runs.remove()
        order.context[:], order.suffix[:] = order.ids[:, 0], order.ids[:, 1]
        return order

    def _joined(self, table: _Table, below: _Order, storage: Storage) -> _Order:
        """Finds the n-grams of an order above 2 by joining overlapping n-grams one word shorter."""
        level = self._layout.levels[table.level.order - 3]
        at, size, n = self._base + level.at, level.entry_size, len(below.bucket)
        is_suffix, goes_on = storage.empty(n, U8), storage.empty(n, U8)
        kernels.flags(at, size, below.bucket, is_suffix, goes_on)
        known = int(np.count_nonzero(is_suffix))
        begin = storage.empty(below.contexts + 1, I64)
        halves, rank, last = (storage.empty(known, t) for t in (I64, U32, U32))
        kernels.suffixes(
            at, size, below.bucket, below.context, is_suffix, below.ids, begin, halves, rank, last
        )
        del is_suffix
        out = np.zeros(3, I64)
        kernels.cut(below.suffix, goes_on, begin, 0, np.iinfo(I64).max, out)
        widest = int(out[2])
        candidates = np.empty(widest, I64)
        found = np.empty((max(_FOUND_ROWS, 2 * widest), 3), U32)
        claims = _Claims(self._layout, table)
        turns = _Turns(self._effort, self._progress, table, int(out[1]))
        order = _Order.of(table.keys, table.level.order, n, storage)
        state = np.zeros(1, I64)
        rows = 0
        while state[0] < n:
            kernels.cut(below.suffix, goes_on, begin, int(state[0]), _TURN, out)
            end, turn = int(out[0]), int(out[1])
            while state[0] < end:
                count = kernels.join(
                    *table.numbers, below.ids, below.suffix, goes_on, begin, halves, end,
                    state, candidates, found,
                )  # fmt: skip
                claims.add(found[:count])
                if not claims.again:  # once a key is claimed twice, n-grams may outnumber keys
                    here = slice(rows, rows + count)
                    kernels.take(
                        found[:count], below.ids, rank, last, order.ids[here],
                        order.context[here], order.suffix[here], order.bucket[here],
                    )  # fmt: skip
                    rows += count
            turns.done(turn)
        claims.check()
        return order

    def _rows(self, table: _Table, order: _Order, rows: int) -> Iterator[NgramBatch]:
        level = table.level
        top = level.order == self._layout.order
        for begin in range(0, len(order.bucket), rows):
            bucket = order.bucket[begin : begin + rows]
            prob, backoff = np.empty(len(bucket), F32), np.empty(len(bucket), F32)
            kernels.values(table.at, level.entry_size, top, bucket, prob, backoff)
            ids = order.ids[begin : begin + rows]
            yield NgramBatch(level.order, begin, ids, prob, backoff)


def _by_class(
    hashes: NDArray[np.int64], ids: NDArray[np.uint32], class_bits: int
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.int64]]:
    low = hashes & ((1 << class_bits) - 1)
    place = np.argsort(low, kind="stable")
    begin = np.zeros((1 << class_bits) + 1, I64)
    np.cumsum(np.bincount(low, minlength=1 << class_bits), out=begin[1:])
    return hashes[place], ids[place], begin


def needed_bytes(layout: Layout) -> tuple[int, int]:
    """Returns the bytes that inverting a file takes: in arrays that can be files, and in memory."""
    rows = [(4 * level.order + 12) * level.count for level in layout.levels]
    joining = [17 * level.count for level in layout.levels]
    arrays = max(sum(rows[i : i + 2]) + joining[i] for i in range(len(rows)))
    held = max(level.count * _FILTER_BYTES + level.entries for level in layout.levels)
    return arrays, held + 40 * layout.words + 2 * MIN_MEMORY_BYTES
