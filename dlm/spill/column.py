"""Columns of numbers or of rows, appended and read by row number, in memory or in a file. A file
without a name leaves nothing behind; a file with a name serves a later process."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from dlm.errors import SpillError
from dlm.files import naming, scratch_file
from dlm.spill.arrays import anonymous

Array = NDArray[Any]

_LEAST_BYTES = 1 << 16  # minimum size to which a column in memory grows
_WRITE_BYTES = 1 << 26  # bytes written at a time
_READ_BYTES = 1 << 20  # bytes read at a time, for a checksum


def read_at(descriptor: int, views: list[memoryview], offset: int) -> bool:
    """Fills the views from a place in a file; False if the file ends early."""
    while views:
        got = os.preadv(descriptor, views, offset)
        if got == 0:
            return False
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if views:
            views[0] = views[0][got:]
    return True


class Memory:
    """Limits the memory that columns take together, and counts what they have taken.

    Args  folder  folder for the files of columns that exceed the limit
    """

    def __init__(self, limit_bytes: int, folder: Path) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder
        self.used_bytes = 0
        self.spilled_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Returns whether `size_bytes` more bytes may be taken; if so, takes the bytes."""
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                return False
            self.used_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes


class Column:
    """A sequence of numbers, or of rows of numbers.

    Args        width   numbers per row; 0 means that rows are single numbers
                memory  counts the memory taken; a column beyond its limit is in an unnamed file in
                        its folder. If None, the column stays in memory and is not counted
                path    file that holds all rows from the start, and stays until `remove`
                most    maximum number of rows, if known; nothing is resident until it is written to
    Guarantees  a column in memory is read without a copy; a file with a name is synced by `finish`,
                and `manifest` names its size and its XXH3-128
    Trusts      callers hold no array from `read` while they append, unless `most` has room
    """

    def __init__(
        self,
        dtype: DTypeLike,
        width: int = 0,
        *,
        memory: Memory | None = None,
        path: Path | None = None,
        most: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self.path = path
        self._memory = memory
        self._length = 0
        self._held: mmap.mmap | None = None
        self._array: Array = np.empty(0, self.dtype)
        self._descriptor = -1
        self._digest: Any = None
        if path is None:
            self._hold(anonymous(most * self.row_bytes))
        else:
            self._digest = xxhash.xxh3_128()
            self._use(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))

    def __len__(self) -> int:
        return self._length

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize) * max(self.width, 1)

    def append(self, rows: Array) -> None:
        begin = self._length
        self._lengthen(len(rows))
        self._put(begin, rows)

    def extend(self, count: int) -> None:
        """Makes room for `count` rows at the end, to be set by `edit` and `store`."""
        self._lengthen(count)
        if self._held is None:
            os.ftruncate(self._descriptor, self._length * self.row_bytes)

    def edit(self, begin: int, end: int) -> Array:
        """Reads rows to be changed and passed to `store`; not for a file with a name."""
        return self.read(begin, end)

    def store(self, begin: int, rows: Array) -> None:
        if self._held is None:
            self._put(begin, rows)

    def read(self, begin: int, end: int) -> Array:
        """Returns the rows begin <= i < end that exist; the caller must not change them."""
        end = min(end, self._length)
        if self._held is not None:
            return self._array[begin:end]
        count = max(end - begin, 0)
        out = np.empty((count, self.width) if self.width else count, self.dtype)
        self.read_into(begin, out)
        return out

    def read_into(self, begin: int, out: Array) -> None:
        """Fills C-contiguous `out` with rows from `begin` on; SpillError if the file is short."""
        if self._held is not None:
            out[:] = self._array[begin : begin + len(out)]
        elif len(out):
            if self._descriptor < 0:
                assert self.path is not None
                self._use(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            views = [memoryview(out.data).cast("B")]
            if not read_at(self._descriptor, views, begin * self.row_bytes):
                raise SpillError(
                    f"{self.path or 'a temporary file'} ends early; remove the folder and build "
                    "again"
                )

    def chunks(self, rows: int) -> Iterator[Array]:
        """Yields all rows in chunks of `rows` rows; the last chunk may have fewer."""
        for begin in range(0, self._length, rows):
            yield self.read(begin, begin + rows)

    def spill(self) -> None:
        if self._held is None:
            return
        assert self._memory is not None
        held = self._array[: self._length]
        self._use(scratch_file(self._memory.folder))
        self._held, self._array = None, np.empty(0, self.dtype)
        self._put(0, held)
        self._memory.give_back(held.nbytes)
        self._memory.spilled_bytes += held.nbytes

    def finish(self, sync: bool = True) -> Column:
        """Ends appending; a file with a name is synced and closed until it is read."""
        if self.path is not None and self._descriptor >= 0:
            if sync:
                os.fsync(self._descriptor)
            self._let_go()
        return self

    def manifest(self) -> dict[str, Any]:
        """The facts that `open` needs about a file with a name, for JSON."""
        assert self.path is not None
        return {
            "name": self.path.name,
            "dtype": self.dtype.str,
            "width": self.width,
            "rows": self._length,
            "xxh3_128": self._digest.hexdigest(),
        }

    @classmethod
    def open(cls, folder: Path, manifest: Mapping[str, Any]) -> Column:
        """Opens a column that another process finished; raises `SpillError` if it has changed."""
        path = folder / str(manifest["name"])
        column = cls(manifest["dtype"], manifest["width"])
        column._held, column.path, column._digest = None, path, xxhash.xxh3_128()
        try:
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    column._digest.update(block)
                size = file.tell()
        except FileNotFoundError as exc:
            raise SpillError(f"{path} is missing; remove the folder and build again") from exc
        column._length = manifest["rows"]
        if size != column._length * column.row_bytes or column.manifest() != manifest:
            raise SpillError(
                f"{path} has changed since it was written: its size or its checksum is not the "
                "recorded one. Remove the folder and build again"
            )
        return column

    def remove(self) -> None:
        if self._held is not None and self._memory is not None:
            self._memory.give_back(self._length * self.row_bytes)
        self._let_go()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._length = 0
        self._hold(anonymous(0))

    def _hold(self, memory: mmap.mmap) -> None:
        self._held = memory
        array = np.frombuffer(memory, self.dtype, len(memory) // self.dtype.itemsize)
        if self.width:
            array = array[: len(array) // self.width * self.width].reshape(-1, self.width)
        self._array = array

    def _use(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # After an error, the object may be dropped without being closed.
        self._closing = weakref.finalize(self, os.close, descriptor)

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            self._closing()
            self._descriptor = -1

    def _lengthen(self, count: int) -> None:
        memory = self._memory if self._held is not None else None
        if memory is not None and not memory.take(count * self.row_bytes):
            self.spill()
        self._length += count
        if self._held is not None and self._length > len(self._array):
            held, self._array = self._held, np.empty(0, self.dtype)
            held.resize(max(self._length * self.row_bytes, 2 * len(held), _LEAST_BYTES))
            self._hold(held)

    def _name(self) -> Path:
        """The name of the column's file for errors; for a temporary file, its folder."""
        if self.path is not None or self._memory is None:
            return self.path or Path()
        return self._memory.folder / "temporary file"

    def _put(self, begin: int, rows: Array) -> None:
        if self._held is not None:
            self._array[begin : begin + len(rows)] = rows
        elif len(rows):
            view = memoryview(np.ascontiguousarray(rows, self.dtype).data).cast("B")
            if self._digest is not None:
                self._digest.update(view)
            at = begin * self.row_bytes
            with naming(self._name()):
                while view:
                    done = os.pwrite(self._descriptor, view[:_WRITE_BYTES], at)
                    at += done
                    view = view[done:]
