"""Merges sorted rows, from files with names and from columns.

A run is read by a thread into one of its two buffers while the other is merged; with one thread, a
run has one buffer, and reading and merging take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np

from dlm.spill import kernels
from dlm.spill.arrays import row_pages
from dlm.spill.column import Column, Memory
from dlm.spill.sort import Rows

_Item = TypeVar("_Item")
Made = Generator[_Item, None, None]
Chunks = Made[Rows]

# Limits for merging columns: the minimum and maximum rows of a column in memory, and the maximum
# number of columns that are merged at once.
MIN_PIECE = 1 << 8
MAX_PIECE = 1 << 18
MAX_COLUMNS = 512


class BlockReader(Protocol):
    """Reads sorted rows from their beginning to their end."""

    def fill(self, buffer: Rows) -> int:
        """Reads as many of the next rows as fit; returns how many, 0 at the end."""

    def close(self) -> None:
        """Releases the source."""


class ColumnReader:
    """Reads a column (n, width), uint32, and leaves it open."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._at = 0

    def fill(self, buffer: Rows) -> int:
        count = min(len(self._column) - self._at, len(buffer))
        self._column.read_into(self._at, buffer[:count])
        self._at += count
        return count

    def close(self) -> None:
        """Does nothing: closing the column is up to its owner."""


def buffers_of_run(threads: int) -> int:
    return 2 if threads > 1 else 1


def ahead(chunks: Made[_Item], threads: int) -> Made[_Item]:
    """Yields `chunks`; with several threads, each is made while the previous one is used."""
    return _ahead(chunks) if threads > 1 else chunks


def _ahead(chunks: Made[_Item]) -> Made[_Item]:
    with ThreadPoolExecutor(1) as pool:
        coming: Future[_Item | None] = pool.submit(next, chunks, None)
        try:
            while (chunk := coming.result()) is not None:
                coming = pool.submit(next, chunks, None)
                yield chunk
        finally:
            # A generator cannot be closed while a thread runs it.
            with contextlib.suppress(Exception):
                coming.result()
            chunks.close()


class _Feed:
    """The buffers of one run in a merge: one is merged, and the other, if any, is being filled."""

    def __init__(
        self, reader: BlockReader, rows: Rows, begins: list[int], pool: ThreadPoolExecutor | None
    ) -> None:
        """`begins` bounds one or two buffers in `rows`; two buffers are filled in turn."""
        self._reader = reader
        self._rows = rows
        self._spans = list(pairwise(begins))
        self._pool = pool
        self._coming: Future[int] | None = None
        self._read_on()

    def _read_on(self) -> None:
        if self._pool is not None:
            self._coming = self._pool.submit(self._reader.fill, self._rows[slice(*self._spans[0])])

    def next(self) -> tuple[int, int]:
        """Returns where the run's next rows begin and end; both are equal at the run's end."""
        begin, end = self._spans[0]
        if self._coming is None:
            return begin, begin + self._reader.fill(self._rows[begin:end])
        count = self._coming.result()
        self._spans.reverse()
        if count:
            self._read_on()
        return begin, begin + count


def merged(
    runs: Sequence[Callable[[], BlockReader]],
    width: int,
    key: int,
    chunk_rows: int,
    buffer_rows: int,
    threads: int,
) -> Chunks:
    """Merges runs, and yields a chunk at a time; each is valid until the next but one is begun.

    Args  runs  functions that open the runs, in the order they were added; no run is empty
          buffer_rows  rows read from a run at a time
    Cost  memory: two chunks, and buffers_of_run(threads) * buffer_rows rows per run
    """
    if not runs:
        return
    each = buffers_of_run(threads)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(opened())) for opened in runs]
        rows = row_pages(each * len(runs) * buffer_rows, width)
        outs = [row_pages(chunk_rows, width) for _ in range(2)]
        # The pool is entered after the readers, so that it ends before their files are closed.
        pool = stack.enter_context(ThreadPoolExecutor(1)) if threads > 1 else None
        feeds = []
        for i, reader in enumerate(readers):
            begins = [(each * i + j) * buffer_rows for j in range(each + 1)]
            feeds.append(_Feed(reader, rows, begins, pool))
        place, end = np.array([feed.next() for feed in feeds], np.int64).T.copy()
        head, tree = np.empty(len(feeds), np.uint64), np.empty(len(feeds), np.int64)
        filled = turn = 0
        while feeds:
            out = outs[turn % 2]
            filled, empty = kernels.merge(rows, place, end, key, head, tree, out, filled)
            if empty >= 0:
                place[empty], end[empty] = feeds[empty].next()
                if place[empty] == end[empty]:
                    del feeds[empty]
                    place, end = np.delete(place, empty), np.delete(end, empty)
            if filled == chunk_rows:
                yield out
                filled = 0
                turn += 1
        if filled:
            yield outs[turn % 2][:filled]


def smallest_neighbours(sizes: Sequence[int], fan_in: int) -> slice:
    """Chooses the smallest neighbouring runs to merge: as many as needed, and at most `fan_in`.

    Only neighbours may be merged, since runs must stay in the order in which they were added.

    Args  sizes  the rows of each run, for more than `fan_in` runs; `fan_in` is at least 2
    """
    count = min(fan_in, len(sizes) - fan_in + 1)
    ends = np.cumsum([0, *sizes])
    first = int(np.argmin(ends[count:] - ends[:-count]))
    return slice(first, first + count)


def merged_sums(columns: Sequence[Column], memory_bytes: int) -> Chunks:
    """Merges sorted columns (n, width); rows with equal keys become one row with their sum.

    Chunks are as in `merged`. The first key of a chunk may be the last of the previous chunk, and a
    sum that exceeds 32 bits is in two rows. All numbers of a row but the last are its key.

    Args  memory_bytes  limit for pieces of the columns and for the merged rows
    """
    columns = [column for column in columns if len(column)]
    if not columns:
        return
    width = columns[0].width
    piece = memory_bytes // (4 * width) // (2 * len(columns))
    piece = min(max(piece, MIN_PIECE), MAX_PIECE)
    runs = [partial(ColumnReader, column) for column in columns]
    chunk_rows = max(piece * len(columns) // 4, MIN_PIECE)
    for chunk in merged(runs, width, width - 1, chunk_rows, piece, 1):
        yield chunk[: kernels.add_up(chunk)]


def merge_to_fan_in(columns: list[Column], memory_bytes: int, memory: Memory) -> list[Column]:
    """Merges columns until all can be merged at once; some rows with equal keys are added up."""
    columns = list(columns)
    most = memory_bytes // (4 * columns[0].width) // (4 * MIN_PIECE) if columns else 2
    most = min(max(most, 2), MAX_COLUMNS)
    while len(columns) > most:
        chosen = smallest_neighbours([len(column) for column in columns], most)
        one = Column(np.uint32, columns[0].width, memory=memory)
        for rows in merged_sums(columns[chosen], memory_bytes):
            one.append(rows)
        for column in columns[chosen]:
            column.remove()
        columns[chosen] = [one]
    return columns
