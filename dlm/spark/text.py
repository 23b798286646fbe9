"""Turns one part of a text into words and counted n-grams, with the local engine's code.

Nothing here depends on Spark: functions turn Arrow batches into Arrow batches, however text is cut.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.counts import block, kernels
from dlm.estimate.text import DELIMITERS, LineFault, fault_of, lines_of, may_have_fault
from dlm.ngram.wordtable import PADDING, WordTable

# Ids that are counted at once; with their places and sorted keys, they take about 50 bytes each.
BLOCK_TOKENS = 1 << 21

U32, I64 = np.uint32, np.int64


# ------------------------------------------------------------------------------------- text


def clean(column: Any) -> tuple[bytes, bytes, dict[LineFault, int], tuple[LineFault, int] | None]:
    """Returns (clean text, all text, count of each fault, first fault and its line from 0 on)."""
    found: dict[LineFault, int] = {}
    first: tuple[LineFault, int] | None = None
    if column.null_count:
        found[LineFault.NULL_ROW] = column.null_count
        first = LineFault.NULL_ROW, column.is_null().index(True).as_py()
        column = column.drop_null()
    text = lines_of(column)
    if not text or not may_have_fault(text):
        return text, text, found, first
    kept = []
    for number, line in enumerate(text[:-1].split(b"\n")):
        fault = fault_of(line)
        if fault is None:
            kept.append(line)
            continue
        found[fault] = found.get(fault, 0) + 1
        first = first or (fault, number)
    return b"\n".join([*kept, b""]), text, found, first


class _Encoder:
    def __init__(self, table: WordTable, skip: bool, capacity: int) -> None:
        self.table = table
        self.tokens = np.empty(capacity, U32)
        self.used = 0
        self.state = np.zeros(kernels.STATE, I64)
        self.state[[kernels.WORDS, kernels.WORD_BYTES]] = table.state(None)[:2]
        self._skip = skip

    def encode(self, text: bytes, learn: bool) -> Iterator[None]:
        """Adds the ids of whole lines; yields when full, and the caller then sets `used` to 0."""
        chars, at = np.frombuffer(text + PADDING, np.uint8), 0
        while at < len(text):
            # A word is recognised as new only if the table has room for it, so reserve more room
            # than the longest word needs.
            self.table.reserve(1 << 10, 1 << 17)
            before, words = at, int(self.state[kernels.WORDS])
            at, self.used = kernels.encode(
                chars, at, len(text), DELIMITERS, int(not self._skip), self.table.slots,
                self.table.word_begin, self.table.word_bytes, self.state, self.tokens, self.used,
            )  # fmt: skip
            if learn:
                self.table.settle(np.append(self.state[:2], -1))
            elif int(self.state[kernels.WORDS]) != words:
                raise EstimationError("the text changed while it was read; estimate again")
            if self.used:
                if at < len(text):
                    yield
            elif at == before and int(self.state[kernels.WORDS]) == words:
                # The line, of at most 1 MiB, has more words than the buffer, so double the buffer.
                self.tokens = np.empty(2 * len(self.tokens), U32)


WORDS_SCHEMA = "word binary, count bigint, facts binary, path string, start bigint, place bigint"


def words_of_text(batches: Iterable[pa.RecordBatch], skip: bool) -> Iterator[pa.RecordBatch]:
    """Finds the words of each part of a file, in order of first occurrence, and the part's facts.

    Args
        batches  value binary, path string, start bigint: a line, its file, and the byte at
                 which its part of the file begins
    Returns
        word, its count, path, start, and its number in that part; then one row without a word,
        whose facts are JSON: bytes, lines, empty, words, skipped (by fault), fault (the first,
        and its line from 1 on) or null
    """
    part: tuple[str, int] | None = None
    encoder = _Encoder(_fresh_table(), skip, 1 << 20)
    counts = np.zeros(0, I64)
    size, before, skipped = 0, 0, Counter[str]()
    fault: list[Any] | None = None

    def finished() -> Iterator[pa.RecordBatch]:
        assert part is not None
        words = encoder.table.words()[3:]
        n = len(words)
        facts = {
            "bytes": size,
            "lines": int(encoder.state[kernels.LINES]),
            "empty": int(encoder.state[kernels.EMPTY]),
            "words": int(encoder.state[kernels.TOKENS]),
            "skipped": skipped,
            "fault": fault,
        }
        yield pa.record_batch(
            {
                "word": pa.array([*words, None], pa.binary()),
                "count": np.append(counts[3:], 0),
                "facts": pa.array([None] * n + [json.dumps(facts).encode()], pa.binary()),
                "path": pa.array([part[0]] * (n + 1), pa.string()),
                "start": pa.array(np.full(n + 1, part[1], I64)),
                "place": pa.array(np.arange(n + 1)),
            }
        )

    for batch in batches:
        at = 0
        while at < batch.num_rows:
            here = batch.column("path")[at].as_py(), batch.column("start")[at].as_py()
            if here != part:
                if part is not None:
                    yield from finished()
                part, encoder = here, _Encoder(_fresh_table(), skip, 1 << 20)
                counts = np.zeros(3, I64)
                size, before, skipped, fault = 0, 0, Counter(), None
            end = _end_of_part(batch, at, here)
            column = batch.column("value").slice(at, end - at)
            text, read, found, first = clean(column)
            if first is not None and fault is None:
                fault = [str(first[0]), before + first[1] + 1]
            skipped.update({str(name): count for name, count in found.items()})
            size += len(read)
            before += read.count(b"\n")
            for _ in encoder.encode(text, learn=True):
                counts = _added(counts, encoder)
            counts = _added(counts, encoder)
            at = end
    if part is not None:
        yield from finished()


def _added(counts: NDArray[np.int64], encoder: _Encoder) -> NDArray[np.int64]:
    out = np.bincount(encoder.tokens[: encoder.used], minlength=len(encoder.table))
    out[: len(counts)] += counts
    encoder.used = 0
    return out


def _fresh_table() -> WordTable:
    return WordTable([b"<unk>", b"<s>", b"</s>"])


def _end_of_part(batch: pa.RecordBatch, at: int, here: tuple[str, int]) -> int:
    def is_of_another(row: int) -> bool:  # rows of a part follow one another
        return (batch.column("path")[row].as_py(), batch.column("start")[row].as_py()) != here

    return bisect(range(batch.num_rows), False, at, key=is_of_another)


# ------------------------------------------------------------------------------------ counts


COUNTS_SCHEMA = "part int, value binary"


def counted(
    batches: Iterable[pa.RecordBatch],
    order: int,
    skip: bool,
    table: WordTable,
    bounds: NDArray[np.uint64],
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[pa.RecordBatch]:
    """Counts n-grams of the highest order in batches of lines (`value`), as far as memory allows.

    Args     bounds  (partitions - 1,) rising: the lowest value of `pairs_of` in each partition
                     after the first
    Returns  rows (part, value): a partition, and its n-grams as sorted columns of (order + 1, n)
             uint32: the most recent word, the words before it, how often the n-gram occurs
    """
    encoder = _Encoder(table, skip, block_tokens)

    def gathered() -> Iterator[pa.RecordBatch]:
        tokens, encoder.used = encoder.tokens[: encoder.used], 0
        if not len(tokens):
            return
        held: list[NDArray[np.uint32]] = []
        part = 0
        for rows in block.counted_keys(tokens, len(table), order, pool, 1, block.BUCKET):
            begin = 0
            ends = np.searchsorted(pairs_of(rows[:, 0], rows[:, min(1, order - 1)]), bounds[part:])
            for end in ends[: int(np.searchsorted(ends, len(rows)))].tolist():
                held.append(rows[begin:end])
                yield from _block(part, held)
                held, begin, part = [], end, part + 1
            held.append(rows[begin:])
        yield from _block(part, held)

    with ThreadPoolExecutor(1) as pool:
        for batch in batches:
            text = clean(batch.column("value"))[0]
            for _ in encoder.encode(text, learn=False):
                yield from gathered()
        yield from gathered()


def _block(part: int, rows: list[NDArray[np.uint32]]) -> Iterator[pa.RecordBatch]:
    if any(map(len, rows)):
        columns = np.concatenate([some.T for some in rows], axis=1)
        yield pa.record_batch(
            {
                "part": pa.array([part], pa.int32()),
                "value": pa.array([columns.tobytes()], pa.binary()),
            }
        )


def pairs_of(last: NDArray[np.integer], before: NDArray[np.integer] | int) -> NDArray[np.uint64]:
    """Packs an n-gram's last word and the word before it into one number that sorts as they do."""
    return last.astype(np.uint64) << np.uint64(32) | np.asarray(before, np.uint64)
