"""Controls where a file's bytes are while kernels read them: on disk until touched, or in memory.

The first query that touches a page waits microseconds for the page cache, milliseconds for a disk.

A search of a large model spends much of its time translating addresses of 4 KiB pages: with 77
million n-grams, a token of new text took 321 ns, and 236 with huge pages. So a map of a file that
fits in memory asks for huge pages. A file system with large folios (ext4 since Linux 6.16, XFS)
grants them to what it reads from disk from then on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from typing import IO

import numpy as np

from dlm.errors import ConfigError
from dlm.resources import available_bytes

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; Python has no name for it yet


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How a file is kept in memory.

    preload     every page is mapped before the file counts as open
    lock        every page stays in memory (mlock), neither swapped nor dropped; implies preload
    huge_pages  the file is read into the process's own memory, in huge pages if the system grants
                them (transparent_hugepage: madvise or always). This is a few per cent faster, since
                fewer addresses must be translated; but each process then has its own copy
    """

    preload: bool = False
    lock: bool = False
    huge_pages: bool = False


MAPPED = MemoryOptions()


def hold(file: IO[bytes], size: int, memory_options: MemoryOptions = MAPPED) -> mmap.mmap:
    """Maps the `size` bytes of `file` read-only, or copies them into memory (`huge_pages`).

    Raises  ConfigError  memory cannot be locked; the message names the limit
            OSError      the file cannot be mapped, or ends before `size`
    """
    if memory_options.huge_pages:
        held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _ask_for_huge_pages(held)
        with memoryview(held) as view:
            at = 0
            while at < size:
                # A read ends at 2 GiB, whatever size is requested.
                got = os.preadv(file.fileno(), [view[at : at + (1 << 30)]], at)
                if not got:
                    raise OSError(
                        errno.EIO, f"the file ends after {at} bytes; its size should be {size}"
                    )
                at += got
    else:
        held = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        # This must precede the first read. A file that may not fit in memory keeps small pages:
        # if a huge page is dropped again, most of it was read for nothing.
        if size <= available_bytes() // 2:
            _ask_for_huge_pages(held)
        if memory_options.preload or memory_options.lock:
            _populate(held, size)
    if memory_options.lock:
        _lock(held, size)
    return held


def _ask_for_huge_pages(held: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the kernel may still lack huge pages
        _call("madvise", held, len(held), mmap.MADV_HUGEPAGE)


def _populate(held: mmap.mmap, size: int) -> None:
    number = _call("madvise", held, size, _POPULATE_READ)
    if number == errno.EINVAL:  # an older kernel lacks this, so touch every page
        int(np.frombuffer(held, np.uint8)[:: mmap.PAGESIZE].sum())
    elif number:
        raise OSError(number, os.strerror(number))


def _lock(held: mmap.mmap, size: int) -> None:
    if number := _call("mlock", held, size):
        raise ConfigError(
            f"{size:,} bytes cannot be locked in memory: {os.strerror(number)}. Raise the limit "
            "(ulimit -l; LimitMEMLOCK= of a systemd unit; IPC_LOCK of a container), or serve "
            "without --mlock"
        )


def _call(name: str, held: mmap.mmap, size: int, *more: int) -> int:
    """Calls a libc function for all of `held`; returns its error number, or 0. It runs without the
    GIL, which `mmap.madvise` keeps, so that other threads run while pages are read."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int for _ in more))
    address = np.frombuffer(held, np.uint8).ctypes.data
    return ctypes.get_errno() if function(address, size, *more) else 0
