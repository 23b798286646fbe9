"""Large arrays: in memory that goes back to the system when freed, or mapped from files."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.files import naming, scratch_file

_Number = TypeVar("_Number", bound=np.generic)

HUGE_BYTES = 4 << 20  # arrays from this size on have large pages, for reads in random order


def anonymous(size_bytes: int) -> mmap.mmap:
    """Maps memory that goes back to the system with its last array, and is resident only once it is
    written to. malloc would keep memory that threads free, and so exceed a memory limit."""
    # The map is private, since large pages for shared memory need a setting that is usually off.
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_BYTES:
        with contextlib.suppress(OSError):  # the system may have no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pages(count: int, dtype: type[_Number]) -> NDArray[_Number]:
    return np.frombuffer(anonymous(count * np.dtype(dtype).itemsize), dtype, count)


def row_pages(rows: int, width: int) -> NDArray[np.uint32]:
    return pages(rows * width, np.uint32).reshape(rows, width)


class Storage:
    """Makes arrays in memory, or in files.

    Args        folder  for the files to which arrays are mapped; None keeps arrays in memory
    Guarantees  a file has no name, so it vanishes with its last array, or with the process. Its
                space is reserved when the array is made (OSError if the disk is full);
                without this, the system could end the process later (SIGBUS)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def empty(self, shape: int | tuple[int, ...], dtype: type[_Number]) -> NDArray[_Number]:
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        if self.folder is None or count == 0:
            return np.empty(shape, dtype)
        size = count * np.dtype(dtype).itemsize
        descriptor = scratch_file(self.folder)
        try:
            with naming(self.folder / f"temporary array of {size:,} bytes"):
                os.posix_fallocate(descriptor, 0, size)
            return np.frombuffer(mmap.mmap(descriptor, size), dtype).reshape(shape)
        finally:
            os.close(descriptor)

    def copy(self, array: NDArray[_Number]) -> NDArray[_Number]:
        out = self.empty(array.shape, array.dtype.type)
        np.copyto(out, array)
        return out


IN_MEMORY = Storage()
