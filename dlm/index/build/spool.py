"""Arrays written from their beginning to their end, in memory or in a file, and read again.

Everything the streaming builder keeps between its stages is here: `Spool` for arrays, `Work` for
all of them by name, with the sorted runs and the numbers, so that a journal can name them.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import SpillError
from dlm.extsort import SortedRuns

Array = NDArray[Any]
_WRITE_BYTES = 1 << 20


class Spool:
    """An array that is appended to, then finished, then read.

    Args
        path    of the file; None keeps the array in memory
        dtype   of its values
        width   columns of a row; 0 for an array of one dimension
    Guarantees
        a finished file is synced, and `manifest` names its size and XXH3-128
    """

    def __init__(self, path: Path | None, dtype: Any, width: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.width = width
        self.rows = 0
        self._parts: list[Array] = []
        self._begins = [0]
        self._digest = xxhash.xxh3_128()
        self._file: IO[bytes] | None = path.open("wb", _WRITE_BYTES) if path is not None else None
        self._fd = -1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.dtype.itemsize) * max(self.width, 1)

    def append(self, rows: Array) -> None:
        """Copies rows."""
        if not len(rows):
            return
        if self._file is None:
            self._parts.append(np.array(rows, self.dtype))
            self._begins.append(self._begins[-1] + len(rows))
        else:
            data = memoryview(np.ascontiguousarray(rows, self.dtype).data).cast("B")
            self._file.write(data)
            self._digest.update(data)
        self.rows += len(rows)

    def finish(self, sync: bool = True) -> Spool:
        """No more is appended; a file is synced."""
        if self._file is not None:
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        return self

    def manifest(self) -> dict[str, Any]:
        """What `open` needs; JSON can hold it."""
        assert self.path is not None
        return {
            "name": self.path.name,
            "dtype": self.dtype.str,
            "width": self.width,
            "rows": self.rows,
            "xxh3_128": self._digest.hexdigest(),
        }

    @classmethod
    def open(cls, folder: Path, manifest: Mapping[str, Any]) -> Spool:
        """A finished spool of another process; raises `SpillError` where it is not as it was."""
        path = folder / str(manifest["name"])
        spool = cls(None, manifest["dtype"], manifest["width"])
        spool.path = path
        spool.rows = manifest["rows"]
        digest = xxhash.xxh3_128()
        try:
            with path.open("rb") as file:
                while block := file.read(_WRITE_BYTES):
                    digest.update(block)
                size = file.tell()
        except FileNotFoundError as exc:
            raise SpillError(f"{path} is missing") from exc
        if size != spool.rows * spool.row_bytes or digest.hexdigest() != manifest["xxh3_128"]:
            raise SpillError(
                f"{path} is not what was written: {size:,} bytes with another checksum"
            )
        spool._digest = digest
        return spool

    def read(self, begin: int, end: int) -> Array:
        """Rows begin .. end - 1; in memory perhaps a view."""
        end = min(end, self.rows)
        shape = (end - begin, self.width) if self.width else (end - begin,)
        if begin >= end:
            return np.empty((0, self.width) if self.width else (0,), self.dtype)
        if self.path is not None:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY)
                self._closing = weakref.finalize(self, os.close, self._fd)
            out = np.empty(shape, self.dtype)
            view = memoryview(out.data).cast("B")
            at = begin * self.row_bytes
            while view:
                got = os.preadv(self._fd, [view], at)
                if not got:
                    raise SpillError(f"{self.path} ends early; remove the folder and build again")
                view = view[got:]
                at += got
            return out
        first = bisect.bisect_right(self._begins, begin) - 1
        pieces = []
        while begin < end:
            start = self._begins[first]
            piece = self._parts[first][begin - start : end - start]
            pieces.append(piece)
            begin += len(piece)
            first += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def chunks(self, rows: int) -> Iterator[Array]:
        """All rows, so many at a time; the last chunk may have fewer."""
        for begin in range(0, self.rows, rows):
            yield self.read(begin, begin + rows)

    def remove(self) -> None:
        """Frees memory and file."""
        self._parts = []
        self._begins = [0]
        self.rows = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._fd >= 0:
            self._closing()
            self._fd = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Work:
    """What a build has made so far, by name.

    spools, runs  arrays and sorted runs;  info  numbers and texts that JSON can hold
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.spools: dict[str, Spool] = {}
        self.runs: dict[str, SortedRuns] = {}
        self.info: dict[str, Any] = {}
        self._old: list[Spool | SortedRuns] = []

    def spool(self, name: str, dtype: Any, width: int = 0) -> Spool:
        """A new spool of this name."""
        path = None if self.folder is None else self.folder / f"{name}.spool"
        self.spools[name] = Spool(path, dtype, width)
        return self.spools[name]

    def keep(self, name: str, array: Array) -> None:
        """A finished spool with a small array."""
        spool = self.spool(name, array.dtype, array.shape[1] if array.ndim == 2 else 0)
        spool.append(array)
        spool.finish()

    def array(self, name: str) -> Array:
        """All of a spool."""
        spool = self.spools[name]
        return spool.read(0, spool.rows)

    def drop(self, name: str) -> None:
        """Forgets a spool or runs; its files go with the next `sweep`."""
        spool = self.spools.pop(name, None)
        runs = self.runs.pop(name, None)
        for old in (spool, runs):
            if old is not None:
                self._old.append(old)
        if self.folder is None:
            self.sweep()

    def sweep(self) -> None:
        """Removes what was dropped."""
        for old in self._old:
            old.remove()
        self._old = []

    def close_runs(self) -> None:
        """Ends reading of the runs; their files stay."""
        for runs in self.runs.values():
            runs.close()


class Feed:
    """Blocks of rows, one at hand: what a kernel takes as a stream."""

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
        """Ends the iterator, and its threads."""
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()


class Taker:
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
        """As `Feed.close`."""
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()
