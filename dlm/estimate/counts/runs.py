"""Counted n-grams of many blocks: sorted runs on disk, merged when they are read."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.counts import kernels

# The fewest and the most rows of a run in memory while runs are merged.
MIN_PIECE = 1 << 8
MAX_PIECE = 1 << 18

_Rows = NDArray[np.uint32]


class Run:
    """Sorted rows in a file without a name, (rows, order + 1) uint32."""

    def __init__(self, folder: Path, order: int) -> None:
        self.rows = 0
        self.width = order + 1
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # whoever fails lets go of it unclosed

    def append(self, rows: _Rows) -> None:
        """Writes rows after those that are there."""
        view = np.ascontiguousarray(rows).data.cast("B") if len(rows) else memoryview(b"")
        while len(view):
            view = view[self._file.write(view[: 1 << 26]) :]
        self.rows += len(rows)

    def read(self, begin: int, out: _Rows) -> int:
        """Fills `out` with the rows from `begin` on; how many there were."""
        wanted = min(self.rows - begin, len(out))
        if wanted <= 0:
            return 0
        view = out[:wanted].data.cast("B")
        at = begin * self.width * 4
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise EOFError("a run is shorter than it was written")
            at += got
            view = view[got:]
        return wanted

    def close(self) -> None:
        """Frees its place on the disk."""
        self._file.close()


def merged(runs: list[Run], memory_bytes: int) -> Iterator[_Rows]:
    """The rows of all runs in order, equal keys added up.

    Args
        memory_bytes  for pieces of the runs, and for what is merged of them
    Returns
        arrays of shape (n, order + 1) uint32, valid until the next is asked for; the first key of
        one may be the last of that before
    """
    if not runs:
        return
    width = runs[0].width
    piece = memory_bytes // (4 * width) // (2 * len(runs))
    piece = min(max(piece, MIN_PIECE), MAX_PIECE)
    rows = np.empty((piece * len(runs), width), np.uint32)
    out = np.empty((max(piece * len(runs) // 2, MIN_PIECE), width), np.uint32)
    at = np.arange(len(runs), dtype=np.int64) * piece
    end = at.copy()
    begin = at.copy()
    done = [0] * len(runs)
    last = np.zeros(len(runs), np.uint8)
    heap = np.empty(len(runs), np.int64)
    while True:
        for k in np.flatnonzero((at == end) & (last == 0)).tolist():
            got = runs[k].read(done[k], rows[begin[k] : begin[k] + piece])
            done[k] += got
            at[k], end[k] = begin[k], begin[k] + got
            last[k] = done[k] == runs[k].rows
        found, spent = kernels.merge(rows, at, end, last, heap, out)
        if found:
            yield out[:found]
        if spent < 0 and bool((at == end).all()):
            return


def fan_in(memory_bytes: int, order: int) -> int:
    """How many runs can be merged at once, at least 2."""
    return min(max(memory_bytes // (4 * (order + 1)) // (4 * MIN_PIECE), 2), 512)


def few_enough(runs: list[Run], memory_bytes: int, folder: Path) -> list[Run]:
    """The same rows in so few runs that all can be merged at once."""
    order = runs[0].width - 1 if runs else 1
    most = fan_in(memory_bytes, order)
    while len(runs) > most:
        group, runs = runs[:most], runs[most:]
        one = Run(folder, order)
        _append_all(one, merged(group, memory_bytes))
        for run in group:
            run.close()
        runs.append(one)
    return runs


def _append_all(run: Run, blocks: Iterable[_Rows]) -> None:
    for rows in blocks:
        run.append(rows)
