"""Where ARPA text goes: a file that appears whole or not at all, compressed by its suffix."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dlm.files import Replacement, naming

# Bytes written before the disk is made to keep up: at most this much is left for the end.
SYNC_BYTES = 64 << 20
# Higher presets take two to eight times as long for a tenth of the size.
XZ_PRESET = 0


class OutputFile:
    """A file of text that is being written.

    Args        target     a path, compressed by its suffix (.gz, .zst, .xz, else plain; a pipe or a
                           device is written to directly), or an open binary file, which gets plain
                           text and stays open
                xz_preset  0 to 9, of an .xz file
    Raises      OSError    it cannot be written beside the path
    Guarantees  the same text gives the same bytes. `commit` replaces the path with all that was
                written, synced; without it, the path stays as it was. The next process removes
                what a killed one left beside it
    """

    def __init__(self, target: Path | IO[bytes], *, xz_preset: int = XZ_PRESET) -> None:
        self.bytes_written = 0
        self._replacement: Replacement | None = None
        self._unsynced = 0
        self._sync: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None
        self._packer: Any = None
        self._closed = False
        if not isinstance(target, Path):
            self._file = target
            return
        self._replacement = Replacement(target, buffering=0)
        self._file = self._replacement.file
        if not self._replacement.is_direct:
            self._sync = ThreadPoolExecutor(1, thread_name_prefix="dlm-sync")
        try:
            self._packer = self._packer_for(target.suffix.lower(), xz_preset)
        except BaseException:  # it has written its header
            self.discard()
            raise

    def _packer_for(self, suffix: str, xz_preset: int) -> Any:
        raw: Any = _Raw(self._write)
        match suffix:
            case ".gz":  # no name and no time in the header
                return gzip.GzipFile("", "wb", 6, raw, mtime=0)
            case ".xz":
                return lzma.LZMAFile(raw, "wb", preset=xz_preset)
            case ".zst":
                return pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), "zstd")
        return None

    def write(self, text: bytes | memoryview) -> None:
        if self._packer is None:
            self._write(text)
        else:
            self._packer.write(text)

    def commit(self) -> None:
        if self._packer is not None:
            self._packer.close()
        if self._replacement is not None:
            self._wait_for_disk()
            self._replacement.commit()
        self._closed = True

    def discard(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._sync is not None:
            self._sync.shutdown()
        if self._replacement is not None:
            self._replacement.discard()

    def _write(self, data: bytes | memoryview) -> None:
        """Adds bytes of the file as they are; nothing to a file that was discarded."""
        if self._closed:
            return  # a compressor that is deleted writes its rest
        view = memoryview(data).cast("B")
        while len(view):
            with self._naming():
                done = self._file.write(view)
            view = view[done:]
            self.bytes_written += done
            self._unsynced += done
        if self._sync is None or self._unsynced < SYNC_BYTES:
            return
        # The disk works while the rest is computed.
        if self._syncing is None or self._syncing.done():
            self._check_sync()
            self._unsynced = 0
            self._syncing = self._sync.submit(os.fdatasync, self._file.fileno())

    def _wait_for_disk(self) -> None:
        """Raises the disk's error: the system reports it once, so a later sync would not."""
        if self._sync is not None:
            self._sync.shutdown()
        self._check_sync()

    def _check_sync(self) -> None:
        if self._syncing is not None:
            with self._naming():
                self._syncing.result()

    def _naming(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replacement is None else naming(self._replacement.path)


class _Raw:
    """What a compressor writes to, and may close."""

    closed = False

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def write(self, data: Any) -> int:
        self._write(data)
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        """The OutputFile closes the file."""
