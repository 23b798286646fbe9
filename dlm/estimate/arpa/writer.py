"""ARPA text, written as it is made: beside its place, synced, and renamed."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dlm.files import Replacement

# Text that is written before the disk is asked to keep up: so much at most is left for the end.
SYNC_BYTES = 64 << 20


class ArpaFile:
    """A file of ARPA text that appears whole or not at all.

    Args
        path      compressed by its suffix (.gz, .zst, .xz, else plain); `-`: standard output. A
                  pipe or a device is written to directly
    Raises
        OSError   it cannot be written beside
    Guarantees
        `commit` puts all that was written in the place of the path, synced; without it the path
        stays as it was. What a killed process left beside is removed by the next one
    """

    def __init__(self, path: Path) -> None:
        self._replacement: Replacement | None = None
        self.bytes_written = 0
        self._unsynced = 0
        if str(path) == "-":
            self._file: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        else:
            self._replacement = Replacement(path, buffering=0)
            self._file = self._replacement.file
        self._syncs = self._replacement is not None and not self._replacement.is_direct
        self._packer: Any = None
        match path.suffix:
            case ".gz":
                self._packer = gzip.GzipFile(
                    filename="", fileobj=_Raw(self), mode="wb", compresslevel=6, mtime=0
                )
            case ".xz":
                packed: Any = _Raw(self)
                self._packer = lzma.LZMAFile(packed, "wb", preset=6)  # noqa: SIM115
            case ".zst":
                self._packer = pa.CompressedOutputStream(
                    pa.PythonFile(_Raw(self), mode="w"), "zstd"
                )
        self._sync = ThreadPoolExecutor(1, thread_name_prefix="dlm-sync")
        self._syncing: Future[None] | None = None
        self._closed = False

    def write(self, data: bytes | memoryview) -> None:
        """Adds text."""
        if self._packer is None:
            self.write_raw(data)
        else:
            self._packer.write(data)

    def write_raw(self, data: bytes | memoryview) -> None:
        """Adds bytes of the file as they are."""
        view = memoryview(data)
        while len(view):
            done = self._file.write(view)
            view = view[done:]
            self.bytes_written += done
            self._unsynced += done
        if not self._syncs or self._unsynced < SYNC_BYTES:
            return
        # The disk works while the rest is computed.
        if self._syncing is None or self._syncing.done():
            if self._syncing is not None:
                self._syncing.result()
            self._unsynced = 0
            self._syncing = self._sync.submit(os.fdatasync, self._file.fileno())

    def commit(self) -> None:
        """Finishes the file and puts it in its place."""
        if self._packer is not None:
            self._packer.close()
        self._sync.shutdown(wait=True)
        if self._replacement is None:
            self._file.close()
        else:
            self._replacement.commit()
        self._closed = True

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        if self._closed:
            return
        self._closed = True
        self._sync.shutdown(wait=True)
        if self._replacement is not None:
            self._replacement.discard()
        else:
            with contextlib.suppress(OSError):
                self._file.close()


class _Raw:
    """What a compressor writes to."""

    closed = False

    def __init__(self, file: ArpaFile) -> None:
        self._arpa = file

    def write(self, data: Any) -> int:
        self._arpa.write_raw(data)
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """The ArpaFile closes the file."""


class Behind:
    """Writes in a thread of its own, a few pieces behind, in order.

    Raises   what writing raised, at the next `write` or at `finish`
    """

    def __init__(self, file: ArpaFile, pieces: int = 4) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlm-write")
        self._room = threading.Semaphore(pieces)
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Hands a piece over; waits while too many are under way."""
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        self._last = self._pool.submit(self._write, data)

    def finish(self) -> None:
        """Waits until all is written."""
        self._pool.shutdown(wait=True)
        if self._error is not None:
            raise self._error

    def _write(self, data: bytes | memoryview) -> None:
        try:
            if self._error is None:
                self._file.write(data)
        except BaseException as exc:  # noqa: BLE001 (raised where the caller looks)
            self._error = exc
        finally:
            self._room.release()


def header(comments: Sequence[str], counts: Sequence[int]) -> bytes:
    """What comes before the sections."""
    lines = [f"# {line}" for comment in comments for line in comment.split("\n")]
    lines.append("\\data\\")
    lines += [f"ngram {n}={count}" for n, count in enumerate(counts, 1)]
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def section_head(order: int) -> bytes:
    """What comes before the rows of an order."""
    return b"\n\\%d-grams:\n" % order


END = b"\n\\end\\\n"


@contextlib.contextmanager
def arpa_file(path: Path) -> Iterator[ArpaFile]:
    """An ArpaFile that is committed where nothing was raised, and else discarded."""
    file = ArpaFile(path)
    try:
        yield file
        file.commit()
    finally:
        file.discard()
