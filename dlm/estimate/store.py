"""Columns of a model in the making: in memory while it lasts, and in files beyond.

A file has no name (it is unlinked as it is made), so that a process that is killed leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Memory:
    """How many bytes columns may take, and how many they have taken.

    Args
        limit_bytes  of all columns together
        folder       where the files of the others are
    """

    def __init__(self, limit_bytes: int, folder: Path) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder
        self.used_bytes = 0
        self.spilled_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Whether so much more may be held; if so, it counts as taken."""
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                return False
            self.used_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Counts so much as free."""
        with self._lock:
            self.used_bytes -= size_bytes

    @property
    def free_bytes(self) -> int:
        """What may be taken yet."""
        return max(self.limit_bytes - self.used_bytes, 0)


class Column:
    """Numbers one after another, appended and read by their place.

    Args
        most     how many there may be; nothing is resident until it is written to
        dtype    of the numbers
        memory   where it is counted, and where its file is if that does not suffice
    Guarantees
        a column in memory is read without a copy
    Trusts
        no more than `most` are appended
    """

    def __init__(self, most: int, dtype: DTypeLike, memory: Memory) -> None:
        self.dtype = np.dtype(dtype)
        self._memory = memory
        self._array: NDArray[Any] | None = np.empty(most, self.dtype)
        self._file: IO[bytes] | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def in_memory(self) -> bool:
        """Whether it is read without a copy."""
        return self._file is None

    def append(self, values: NDArray[Any]) -> None:
        """Adds values at the end; writes all to a file where memory does not suffice."""
        if self._file is None and not self._memory.take(values.nbytes):
            self.spill()
        begin, self._length = self._length, self._length + len(values)
        self._put(begin, values)

    def extend(self, count: int) -> None:
        """Makes room for so many values at the end, which are to be set by `open` and `store`."""
        size_bytes = count * self.dtype.itemsize
        if self._file is None and not self._memory.take(size_bytes):
            self.spill()
        self._length += count
        if self._file is not None:
            os.ftruncate(self._file.fileno(), self._length * self.dtype.itemsize)

    def open(self, begin: int, end: int) -> NDArray[Any]:
        """As `read`, to be changed and given to `store`."""
        return self.read(begin, end)

    def store(self, begin: int, values: NDArray[Any]) -> None:
        """Puts back what `open` gave."""
        if self._array is None:
            self._put(begin, values)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """The values of places begin <= i < end; not to be changed."""
        if self._array is not None:
            return self._array[begin:end]
        assert self._file is not None
        out = np.empty(end - begin, self.dtype)
        view = out.data.cast("B") if len(out) else memoryview(b"")
        at = begin * self.dtype.itemsize
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise EOFError("a column's file is shorter than it was written")
            at += got
            view = view[got:]
        return out

    def spill(self) -> None:
        """Moves it to a file."""
        if self._array is None:
            return
        array = self._array[: self._length]
        self._file = tempfile.TemporaryFile(dir=self._memory.folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # whoever fails lets go of it unclosed
        self._array = None
        self._put(0, array)
        self._memory.give_back(array.nbytes)
        self._memory.spilled_bytes += array.nbytes

    def close(self) -> None:
        """Frees what it holds."""
        if self._file is None:
            if self._array is not None:
                self._memory.give_back(self._length * self.dtype.itemsize)
        else:
            self._file.close()
        self._array = np.empty(0, self.dtype)
        self._file = None
        self._length = 0

    def _put(self, begin: int, values: NDArray[Any]) -> None:
        if self._array is not None:
            self._array[begin : begin + len(values)] = values
            return
        assert self._file is not None
        values = np.ascontiguousarray(values, self.dtype)
        view = values.data.cast("B") if len(values) else memoryview(b"")
        at = begin * self.dtype.itemsize
        while len(view):
            done = os.pwrite(self._file.fileno(), view[: 1 << 26], at)
            at += done
            view = view[done:]
