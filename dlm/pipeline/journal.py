"""The journal of a pipeline. Only its owner can read it: it contains the digest of users' text,
without noise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.run.run_files import PIPELINE_JOURNAL
from dlm.files import write_whole
from dlm.pipeline.decide import Entry
from dlm.record.provenance import file_digest

FORMAT_NAME = "dlm pipeline journal"
FORMAT_VERSION = 1
RECORDED = ("unigrams", "pieces", "federate", "distill", "prune", "shard")


class PipelineJournal:
    """The stages' entries, by name, as on disk; FormatError unless a journal of this version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, Entry] = {}
        if not path.exists():
            return
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if (body["format"], body["version"]) != (FORMAT_NAME, FORMAT_VERSION):
                raise ValueError(f"{body['format']}, version {body['version']}")
            self.entries = {name: Entry(**entry) for name, entry in body["stages"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise FormatError(
                f"{path} is not a pipeline journal of this version ({exc!r}); restore it, or give "
                "another [run] folder"
            ) from exc

    def write(self, name: str, entry: Entry) -> None:
        """Records a stage; it is on disk when this returns."""
        self._replace({**self.entries, name: entry})

    def forget(self, names: Iterable[str]) -> None:
        gone = set(names)
        self._replace({name: e for name, e in self.entries.items() if name not in gone})

    def _replace(self, entries: dict[str, Entry]) -> None:
        stages = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
        body = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "stages": stages}
        write_whole(self._path, (json.dumps(body, indent=1) + "\n").encode(), mode=0o600)
        self.entries = entries


def recorded_files(folder: Path) -> list[Path]:
    """Returns a finished pipeline's files with privacy records, one per stage, shard set last.
    Raises ConfigError if a stage is not done, PrivacyError if a file is not what its stage wrote.
    """
    entries = PipelineJournal(folder / PIPELINE_JOURNAL).entries
    left = [name for name, entry in entries.items() if entry.wrote is None]
    if left or "shard" not in entries:
        raise ConfigError(
            f"the pipeline in {folder} is not finished: stage {[*left, 'shard'][0]} is not done. "
            "Run dlm pipeline again first"
        )
    found = []
    for name in RECORDED:
        if (entry := entries.get(name)) is None or not entry.wrote:
            continue
        key, digest = next(iter(entry.wrote.items()))
        if file_digest(folder / key) != digest:
            raise PrivacyError(
                f"{folder / key} is not the file that stage {name} of the pipeline wrote; restore "
                "it, or run dlm pipeline again to see what changed"
            )
        found.append(folder / key)
    return found
