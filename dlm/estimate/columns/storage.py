"""Where large arrays are: in memory, or in files that the system may write out and read again."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", bound=np.generic)


class Storage:
    """Makes arrays.

    Args
        folder  for files that the arrays are maps of; None keeps them in memory
    Guarantees
        a file has no name, so that it goes with its last array, or with a process that is killed
    Edge cases
        a full disk  the system ends the process (SIGBUS) when it can write a page nowhere; room is
                     asked for when the array is made, so that it fails there, with OSError
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def empty(self, shape: int | tuple[int, ...], dtype: type[_Number]) -> NDArray[_Number]:
        """An array of any content."""
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        if self.folder is None or size == 0:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, size * np.dtype(dtype).itemsize)
            array: NDArray[Any] = np.memmap(file, dtype, "r+", shape=shape)
        return np.asarray(array)

    def copy(self, array: NDArray[_Number]) -> NDArray[_Number]:
        """Another array of the same values."""
        out = self.empty(array.shape, array.dtype.type)
        np.copyto(out, array)
        return out


IN_MEMORY = Storage()
