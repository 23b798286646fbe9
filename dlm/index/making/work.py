"""Keeps the results of a streaming build between stages, by name, and streams rows to kernels.

Finished stages are recorded on disk, so that a killed build can resume: `journal.json` in the
build's folder has the input, the arguments, and all results of finished stages, with checksums. It
is replaced atomically, after the files that it lists are synced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ConfigError, SpillError
from dlm.files import sync_folder, write_whole
from dlm.index.layout import FORMAT_VERSION
from dlm.index.making.budget import Budget
from dlm.ngram.arpa import PARTS_INDEX, is_parts_folder
from dlm.spill.column import Array, Column
from dlm.spill.sorter import SortedRuns

JOURNAL = "journal.json"
VERSION = 5  # increases when the results of a stage change
_SAMPLE_BYTES = 1 << 20


class Work:
    """The results of a build so far, by name; `info` holds numbers and texts for JSON."""

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
        """Returns the path for a column's file; None if the columns are in memory."""
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
    """Passes blocks of rows to a kernel, one block at a time."""

    def __init__(self, blocks: Iterator[NDArray[np.uint32]], width: int) -> None:
        self._blocks = blocks
        self.rows: NDArray[np.uint32] = np.empty((0, width), np.uint32)
        self.ended = False

    def refill(self) -> None:
        """Takes the next block, which is empty at the end."""
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
    """Reads rows from blocks of any size, as many rows at a time as are requested."""

    def __init__(self, blocks: Iterator[NDArray[np.uint32]]) -> None:
        self._blocks = blocks
        self._block: NDArray[np.uint32] | None = None
        self._at = 0

    def take(self, count: int) -> Iterator[NDArray[np.uint32]]:
        """Yields the next `count` rows in pieces; taking a piece overwrites the previous one."""
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


def describe_input(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Identifies an input by path, size, time and XXH3 of both ends; returns None for a pipe."""
    place = Path(path)
    if is_parts_folder(place):
        place /= PARTS_INDEX  # this file names the parts and their sizes
    if not place.is_file():
        return None
    status = place.stat()
    digest = xxhash.xxh3_128()
    with place.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(status.st_size - _SAMPLE_BYTES, 0))
        digest.update(file.read(_SAMPLE_BYTES))
    return {
        "path": os.fspath(place.absolute()),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "ends_xxh3_128": digest.hexdigest(),
    }


def build_key(source: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "journal_version": VERSION,
        "format_version": FORMAT_VERSION,
        "dlm": __version__,
        "input": source,
        "arguments": arguments,
    }


class Journal:
    """The journal of one build, in `folder`; if `key` is None, no file is written."""

    def __init__(self, folder: Path, key: dict[str, Any] | None) -> None:
        self._path = folder / JOURNAL
        self._key = key
        self.done: list[str] = []

    def save(self, stage: str, work: Work) -> None:
        """Records that a stage is finished; then removes what later stages do not need."""
        self.done.append(stage)
        if self._key is not None:
            content = {
                "key": self._key,
                "done": self.done,
                "info": work.info,
                "columns": {name: column.manifest() for name, column in work.columns.items()},
                "runs": {name: runs.manifest() for name, runs in work.runs.items()},
            }
            if work.folder is not None:
                sync_folder(work.folder)
            write_whole(self._path, json.dumps(content).encode())
        work.sweep()

    def forget(self, work: Work) -> None:
        work.columns.clear()
        work.runs.clear()
        work.info.clear()
        self.done = []

    def load(self, work: Work, budget: Budget) -> str | None:
        """Restores the results of the journal's stages, if any; returns the problem, or None."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
            if content["key"] != self._key:
                return "the journal is for another input, other arguments or another version of dlm"
            assert work.folder is not None
            # The names come from a file, so nothing outside the folder may be opened.
            for name, manifest in content["columns"].items():
                if Path(manifest["name"]).name != manifest["name"]:
                    raise ValueError(f"{manifest['name']!r:.80} is not a file name")
                work.columns[name] = Column.open(work.folder, manifest)
            for name, manifest in content["runs"].items():
                work.runs[name] = SortedRuns.open(
                    work.folder, manifest, budget.read_bytes, budget.threads
                )
            work.info.update(content["info"])
            self.done = list(content["done"])
        except (OSError, ConfigError, SpillError, ValueError, KeyError, TypeError) as exc:
            self.forget(work)
            return str(exc)
        kept = {column.path.name for column in work.columns.values() if column.path is not None}
        kept |= {run.name for runs in work.runs.values() for run in runs.runs}
        for path in work.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        return None
