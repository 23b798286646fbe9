"""Merges sorted runs: for `extsort`.

A run is read by a thread into one of its two buffers while the rows of the other are merged, so the
disk and the merging overlap; with one thread, a run has one buffer and they take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from dlm import kernels
from dlm._extsort_files import Run, RunReader
from dlm._extsort_memory import Rows, row_pages

Chunks = Generator[Rows, None, None]


def buffers_of_run(threads: int) -> int:
    """How many buffers a run has while it is merged."""
    return 2 if threads > 1 else 1


def ahead(chunks: Chunks) -> Chunks:
    """The same chunks, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        coming: Future[Rows | None] = pool.submit(next, chunks, None)
        try:
            while (chunk := coming.result()) is not None:
                coming = pool.submit(next, chunks, None)
                yield chunk
        finally:
            # A generator at work in a thread cannot be closed.
            with contextlib.suppress(Exception):
                coming.result()
            chunks.close()


class _Feed:
    """The buffers of one run in a merge: one is merged, and the other, if any, is being filled."""

    def __init__(
        self, reader: RunReader, rows: Rows, begins: list[int], pool: ThreadPoolExecutor | None
    ) -> None:
        """Reads into a part of `rows` between begins[0] and begins[1], then between the next."""
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
        """Where the run's next rows begin and end; the same place at its end."""
        begin, end = self._spans[0]
        if self._coming is None:
            return begin, begin + self._reader.fill(self._rows[begin:end])
        count = self._coming.result()
        self._spans.reverse()
        if count:
            self._read_on()
        return begin, begin + count


def merged(
    directory: Path,
    runs: Sequence[Run],
    width: int,
    key: int,
    chunk_rows: int,
    block_rows: int,
    read_blocks: int,
    threads: int,
) -> Chunks:
    """Merged runs a chunk at a time; a chunk stays while the next is made, and no longer.

    Args
        runs         in the order of adding
        block_rows   most rows of a block in the files
        read_blocks  that a buffer has room for
    Raises           SpillError, OSError
    Cost             memory: two chunks, and buffers_of_run(threads) * read_blocks blocks a run
    """
    if not runs:
        return
    each = buffers_of_run(threads)
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(
                contextlib.closing(RunReader(directory, run, width, key, block_rows))
            )
            for run in runs
        ]
        size = read_blocks * block_rows
        rows = row_pages(each * len(runs) * size, width)
        outs = [row_pages(chunk_rows, width) for _ in range(2)]
        # Entered after the readers, so that it ends before their files are closed.
        pool = stack.enter_context(ThreadPoolExecutor(1)) if threads > 1 else None
        feeds = []
        for i, reader in enumerate(readers):
            begins = [(each * i + j) * size for j in range(each + 1)]
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
