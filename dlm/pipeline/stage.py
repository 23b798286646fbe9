"""What a stage of a pipeline is, and where its files stand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.federated.recorded import sidecar
from dlm.pipeline.decide import StagePlan
from dlm.progress import ProgressReporter


@dataclass(frozen=True)
class Places:
    """Where things stand in the folder of a pipeline."""

    folder: Path

    def key(self, path: Path) -> str:
        """What the journal calls a file: by its name in the folder, which may be moved as a whole,
        or where it is outside of it."""
        whole, folder = path.absolute(), self.folder.absolute()
        return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)

    def place(self, key: str) -> Path:
        """The file that is called so."""
        return self.folder / key

    @property
    def users(self) -> Path:
        """Users' text, sorted; for its owner alone; there until no stage needs it."""
        return self.folder / "users.store"

    @property
    def network(self) -> Path:
        """The run of `dlm federate`."""
        return self.folder / "network"

    @property
    def topology(self) -> Path:
        """Of public text."""
        return self.folder / "topology.arpa.zst"

    @property
    def distilled(self) -> Path:
        """Before pruning."""
        return self.folder / "distilled.arpa.zst"

    @property
    def counting(self) -> Path:
        """Counts of the network's sentences, until the model is made of them."""
        return self.folder / "distilled.work"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.folder / "model.arpa.zst"

    @property
    def shards(self) -> Path:
        """The shard set."""
        return self.folder / "shards"

    @property
    def held_out(self) -> Path:
        """Perplexities of held-out users' text."""
        return self.folder / "held_out.json"


@dataclass(frozen=True)
class Stage:
    """A stage.

    Fields
        plan   what deciding needs
        what   it does, for a person
        run    does it
        works  file that is there while a run of it can go on; None where it has none
        beside files that it makes besides those of the plan, and that go with them
        spare  folder that goes once it is done
    """

    plan: StagePlan
    what: str
    run: Callable[[ProgressReporter], None]
    works: Path | None = None
    beside: tuple[Path, ...] = ()
    spare: Path | None = None

    @property
    def name(self) -> str:
        """As `--redo` has it."""
        return self.plan.name

    def clean(self, at: Places) -> None:
        """Removes what it wrote; nothing of what was released of users, nor of how often."""
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
    """What deciding needs of a stage; see `decide.StagePlan`."""
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
    """Settings as JSON has them, those of tables by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            plain = str(value) if isinstance(value, float) and not math.isfinite(value) else value
            found[f"{prefix}{name}"] = json.loads(json.dumps(plain, default=str))
    return found


def recorded(name: str, path: Path) -> dict[str, Path]:
    """A file and the record beside it, which may be there, for `reads`."""
    return {name: path, f"the record of {name}": sidecar(path)}
