"""A stage of a pipeline, and the places of its files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.pipeline.decide import StagePlan
from dlm.progress import ProgressReporter
from dlm.record.sidecar import sidecar


class Places:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Users' text, sorted: only its owner can read it, and it is removed once no stage needs it.
        self.users = folder / "users.store"
        self.network = folder / "network"
        self.topology = folder / "topology.arpa.zst"
        self.distilled = folder / "distilled.arpa.zst"
        # Counts of the network's sentences, until the model is made from them.
        self.counting = folder / "distilled.work"
        self.model = folder / "model.arpa.zst"
        self.shards = folder / "shards"
        self.held_out = folder / "held_out.json"

    def key(self, path: Path) -> str:
        """Returns a file's key in the journal: its path, relative to the folder if it is inside."""
        whole, folder = path.absolute(), self.folder.absolute()
        return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)

    def place(self, key: str) -> Path:
        return self.folder / key


@dataclass(frozen=True)
class Stage:
    """A stage: its plan, its description, and the function that runs it. The file
    `works` exists while a run can resume; the files in `beside` are removed with those that the
    plan writes; `spare` is removed once the stage is done."""

    plan: StagePlan
    what: str
    run: Callable[[ProgressReporter], None]
    works: Path | None = None
    beside: tuple[Path, ...] = ()
    spare: Path | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def clean(self, at: Places) -> None:
        """Removes the stage's output, unless the stage releases something about users."""
        if self.plan.releases:
            return
        for path in (*map(at.place, self.plan.writes), *self.beside):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def stage_plan(
    at: Places,
    name: str,
    settings: Mapping[str, Any],
    reads: Mapping[str, Path],
    *writes: Path,
    releases: bool = False,
    goes_on: bool = False,
    last: Path | None = None,
) -> StagePlan:
    return StagePlan(
        name,
        _flat(settings),
        {what: at.key(path) for what, path in reads.items()},
        tuple(map(at.key, writes)),
        releases,
        goes_on,
        "" if last is None else at.key(last),
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            plain = str(value) if isinstance(value, float) and not math.isfinite(value) else value
            found[f"{prefix}{name}"] = json.loads(json.dumps(plain, default=str))
    return found


def recorded(name: str, path: Path) -> dict[str, Path]:
    """Returns a file and the record beside it, for a stage's `reads`."""
    return {name: path, f"the record of {name}": sidecar(path)}
