"""What a streaming build keeps between its stages, by name; and how kernels take rows from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.spill.column import Array, Column
from dlm.spill.sorter import SortedRuns


class Work:
    """What a build has made so far, by name; `info` holds numbers and texts for JSON."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.columns: dict[str, Column] = {}
        self.runs: dict[str, SortedRuns] = {}
        self.info: dict[str, Any] = {}
        self._old: list[Column | SortedRuns] = []

    def column(self, name: str, dtype: Any, width: int = 0) -> Column:
        self.columns[name] = Column(dtype, width, path=self.file(f"{name}.column"))
        return self.columns[name]

    def file(self, name: str) -> Path | None:
        """The file for a column that is not yet part of the build; None: in memory."""
        return None if self.folder is None else self.folder / name

    def keep(self, name: str, array: Array) -> None:
        column = self.column(name, array.dtype, array.shape[1] if array.ndim == 2 else 0)
        column.append(array)
        column.finish()

    def array(self, name: str) -> Array:
        column = self.columns[name]
        return column.read(0, len(column))

    def drop(self, name: str) -> None:
        """Forgets a column or runs; the next `sweep` removes their files."""
        for old in (self.columns.pop(name, None), self.runs.pop(name, None)):
            if old is not None:
                self._old.append(old)
        if self.folder is None:
            self.sweep()

    def sweep(self) -> None:
        for old in self._old:
            old.remove()
        self._old = []

    def close_runs(self) -> None:
        for runs in self.runs.values():
            runs.close()


class BlockStream:
    """Blocks of rows, one at a time: what a kernel takes as a stream."""

    def __init__(self, blocks: Iterator[NDArray[np.uint32]], width: int) -> None:
        self._blocks = blocks
        self.rows: NDArray[np.uint32] = np.empty((0, width), np.uint32)
        self.ended = False

    def refill(self) -> None:
        """Takes the next block; an empty one at the end."""
        block = next(self._blocks, None)
        if block is None:
            self.rows, self.ended = self.rows[:0], True
        else:
            self.rows = block

    def close(self) -> None:
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()


class RowReader:
    """Rows of blocks that come in any size, taken in whatever number is asked for."""

    def __init__(self, blocks: Iterator[NDArray[np.uint32]]) -> None:
        self._blocks = blocks
        self._block: NDArray[np.uint32] | None = None
        self._at = 0

    def take(self, count: int) -> Iterator[NDArray[np.uint32]]:
        """The next `count` rows, in pieces that are overwritten when the next is taken."""
        while count > 0:
            if self._block is None or self._at == len(self._block):
                self._block, self._at = next(self._blocks), 0
            piece = self._block[self._at : self._at + count]
            self._at += len(piece)
            count -= len(piece)
            yield piece

    def close(self) -> None:
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()
