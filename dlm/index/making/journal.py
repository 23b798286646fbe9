"""Records the finished stages of a build on disk, so that a killed build can resume.

`journal.json` in the build's folder has the input, the arguments, and all that the finished stages
left, with checksums. It is replaced atomically, after what it lists is synced.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from dlm import __version__
from dlm.errors import ConfigError, SpillError
from dlm.files import sync_folder, write_whole
from dlm.index.layout import FORMAT_VERSION
from dlm.index.making.budget import Budget
from dlm.index.making.work import Work
from dlm.ngram.arpa import PARTS_INDEX, is_parts_folder
from dlm.spill.column import Column
from dlm.spill.sorter import SortedRuns

JOURNAL = "journal.json"
VERSION = 3  # increases when a stage leaves other things than before
_SAMPLE_BYTES = 1 << 20


def describe_input(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What identifies an input: size, time, XXH3 of its ends; None for a pipe."""
    place = Path(path)
    if is_parts_folder(place):
        place /= PARTS_INDEX  # it names the parts and their sizes
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
    """The journal of one build, in its `folder`; a `key` of None keeps none."""

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
        """Restores what the journal, if any, lists (see `done`); why it cannot, or None."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
            if content["key"] != self._key:
                return "it is for another input, other arguments or another version"
            assert work.folder is not None
            # The names come from a file: nothing outside of the folder is opened.
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
