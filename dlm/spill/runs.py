"""Writes sorted runs to files, and reads them.

A run is a header, then blocks of rows, each followed by its checksum. Numbers are in the
machine's byte order: a run is read where it was written, and is not for exchange.

    header    0  magic, 8 bytes
              8  version, width, key, rows of a block (the last may have fewer): 4 bytes each
             24  rows of the file, 8 bytes; then zeros
             48  XXH3-64 of the bytes before
    block        rows, 4 * width bytes each; XXH3-64 of them, seeded with the block's number
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import SpillError
from dlm.files import NO_ROOM, Replacement, remove_leftovers
from dlm.spill.column import read_at

Rows = NDArray[np.uint32]

MAGIC = b"dlm-run\n"  # DO NOT CHANGE: on disk
FORMAT_VERSION = 1  # DO NOT CHANGE without refusing or reading the previous version
FORMAT_NAME = "dlm sorted runs"  # DO NOT CHANGE: in manifests
_HEADER = struct.Struct("=8sIIIIQ16x")  # DO NOT CHANGE: on disk
_CHECK = struct.Struct("=Q")  # DO NOT CHANGE: on disk
HEADER_BYTES = _HEADER.size + _CHECK.size
KEEP_CACHED_BYTES = 8 << 20  # bytes read from a run before the page cache is told to forget them
RUN_NAME = re.compile(r"[A-Za-z0-9_.]+-[0-9]{6,}\.run")
ADVICE = "Remove the folder and build again"


@dataclass(frozen=True)
class Run:
    """One sorted run: a file's name, its rows, and the XXH3-64 of its header and checksums."""

    name: str
    rows: int
    xxh3_64: str


def _block_count(rows: int, block_rows: int) -> int:
    return -(-rows // block_rows)


def _run_bytes(rows: int, width: int, block_rows: int) -> int:
    return HEADER_BYTES + 4 * width * rows + _CHECK.size * _block_count(rows, block_rows)


def write_run(
    path: Path, width: int, key: int, rows: int, block_rows: int, chunks: Iterable[Rows]
) -> tuple[Run, Replacement]:
    """Writes sorted chunks, each of whole blocks, as a run to a file that `publish` renames."""
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, width, key, block_rows, rows)
    header += _CHECK.pack(xxhash.xxh3_64_intdigest(header))
    digest = xxhash.xxh3_64(header)
    block = 0
    written = Replacement(path)
    try:
        out = written.file
        out.write(header)
        for chunk in chunks:
            for begin in range(0, len(chunk), block_rows):
                data = memoryview(chunk[begin : begin + block_rows].data).cast("B")
                check = _CHECK.pack(xxhash.xxh3_64_intdigest(data, seed=block))
                out.write(data)
                out.write(check)
                digest.update(check)
                block += 1
        out.flush()
    except BaseException as exc:
        written.discard()
        if isinstance(exc, OSError) and exc.errno in NO_ROOM:
            raise _no_room(exc, path.parent, _run_bytes(rows, width, block_rows)) from exc
        raise
    return Run(path.name, rows, digest.hexdigest()), written


def _no_room(exc: OSError, folder: Path, needed: int) -> OSError:
    free = shutil.disk_usage(folder).free
    return OSError(
        exc.errno,
        f"{exc.strerror}: a sorted run in {folder} needs {needed:,} bytes, but {free:,} are free. "
        "Free some space there, or sort in another folder",
    )


def publish(written: Replacement) -> None:
    """Gives a run its name once it is on disk, so that the name survives a power cut."""
    needed = written.file.tell()
    try:
        written.commit()
    except OSError as exc:
        in_place = written.path.exists()
        written.discard()
        if exc.errno in NO_ROOM and not in_place:  # some file systems check for space only now
            raise _no_room(exc, written.path.parent, needed) from exc
        raise


class RunReader:
    """Reads a run from its beginning to its end, and checks each block."""

    def __init__(self, folder: Path, run: Run, width: int, key: int, most_block_rows: int) -> None:
        """Opens a run of a folder; SpillError if the file is not a whole run of this shape."""
        path = folder / run.name
        self._path = path
        self._width = width
        self._block = 0
        self._forgotten = 0
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as exc:
            raise SpillError(f"{path}, a sorted run, is missing. {ADVICE}") from exc
        try:
            self.rows, self._block_rows = self._read_header(key, run.rows, most_block_rows)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def _read_header(self, key: int, expected_rows: int, most_block_rows: int) -> tuple[int, int]:
        self._header = os.pread(self._fd, HEADER_BYTES, 0)
        if len(self._header) < HEADER_BYTES or not self._header.startswith(MAGIC):
            raise self._error(f"begins with {self._header[: len(MAGIC)]!r}; expected {MAGIC!r}")
        fields = self._header[: _HEADER.size]
        _, version, *shape, block_rows, rows = _HEADER.unpack(fields)
        if _CHECK.pack(xxhash.xxh3_64_intdigest(fields)) != self._header[_HEADER.size :]:
            raise self._error("has a header that does not match its checksum")
        if version != FORMAT_VERSION:
            raise self._error(f"has version {version}; expected {FORMAT_VERSION}")
        if shape != [self._width, key]:
            raise self._error(f"has (width, key) {tuple(shape)}; expected {(self._width, key)}")
        if rows != expected_rows:
            raise self._error(f"has {rows:,} rows; expected {expected_rows:,}")
        if not 1 <= block_rows <= most_block_rows:
            raise self._error(f"has blocks of {block_rows} rows; expected 1 to {most_block_rows}")
        size, expected = os.fstat(self._fd).st_size, _run_bytes(rows, self._width, block_rows)
        if size != expected:
            raise self._error(f"has {size:,} bytes; expected {expected:,}")
        return rows, block_rows

    def _error(self, found: str) -> SpillError:
        return SpillError(f"{self._path}, a sorted run, {found}. {ADVICE}")

    def _place(self, block: int) -> tuple[int, int]:
        begin = HEADER_BYTES + block * (4 * self._width * self._block_rows + _CHECK.size)
        return begin, max(0, min(self._block_rows, self.rows - block * self._block_rows))

    def fill(self, buffer: Rows) -> int:
        """Reads the blocks that fit; returns the row count, 0 at the end. SpillError on damage."""
        filled = 0
        check = bytearray(_CHECK.size)
        while True:
            offset, rows = self._place(self._block)
            if not rows or filled + rows > len(buffer):
                return filled
            data = memoryview(buffer[filled : filled + rows].data).cast("B")
            whole = read_at(self._fd, [data, memoryview(check)], offset)
            (expected,) = _CHECK.unpack(check)
            if not whole or xxhash.xxh3_64_intdigest(data, seed=self._block) != expected:
                count = _block_count(self.rows, self._block_rows)
                raise self._error(
                    f"is damaged: block {self._block} of {count} (byte {offset:,}) "
                    + ("does not match its checksum" if whole else "ends early")
                )
            self._block += 1
            filled += rows
            read = offset + len(data)
            if read - self._forgotten >= KEEP_CACHED_BYTES:
                length = read - self._forgotten
                os.posix_fadvise(self._fd, self._forgotten, length, os.POSIX_FADV_DONTNEED)
                self._forgotten = read

    def digest(self) -> str:
        """The XXH3-64 of the header and the checksums of all blocks, as hex digits."""
        digest = xxhash.xxh3_64(self._header)
        for block in range(_block_count(self.rows, self._block_rows)):
            offset, rows = self._place(block)
            digest.update(os.pread(self._fd, _CHECK.size, offset + 4 * self._width * rows))
        return digest.hexdigest()

    def close(self) -> None:
        os.close(self._fd)


def discard(directory: str | os.PathLike[str], name: str = "rows") -> None:
    """Removes the files that a killed sorter of this name left in a folder."""
    place = Path(directory) / f"{name}-*.run"
    for path in place.parent.glob(place.name):
        path.unlink()
    remove_leftovers(place, rf"{re.escape(name)}-\d+\.run")


def parse_manifest(folder: Path, manifest: Mapping[str, Any]) -> tuple[int, int, list[Run]]:
    """Returns a manifest's width, key and runs; raises `SpillError` for an invalid manifest."""
    try:
        found = (manifest["format"], manifest["format_version"])
        if found != (FORMAT_NAME, FORMAT_VERSION):
            raise ValueError(
                f"its format and version are {found}; expected {(FORMAT_NAME, FORMAT_VERSION)}"
            )
        runs = [Run(**entry) for entry in manifest["runs"]]
        numbers = [manifest["width"], manifest["key"], manifest["rows"], *(r.rows for r in runs)]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"width, key, rows are {numbers}; expected integers >= 0")
        if any(run.rows == 0 for run in runs):
            raise ValueError("a run has no rows")
        for run in runs:
            # The name comes from a file, so it must not lead outside the folder.
            if not isinstance(run.name, str) or not RUN_NAME.fullmatch(run.name):
                raise ValueError(f"{run.name!r:.80} is not the name of a run")
        if sum(run.rows for run in runs) != manifest["rows"]:
            raise ValueError(f"its runs do not add up to {manifest['rows']:,} rows")
    except (KeyError, TypeError, ValueError) as exc:
        raise SpillError(
            f"the manifest of the runs in {folder} is not valid: {exc}. {ADVICE}"
        ) from exc
    return manifest["width"], manifest["key"], runs
