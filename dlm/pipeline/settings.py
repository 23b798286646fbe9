"""The configuration of a pipeline: all tables of its TOML file. Paths are relative to the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm import config
from dlm.distill.settings import DistillSettings
from dlm.errors import ConfigError, DlmError
from dlm.estimate.goal import PruneSettings
from dlm.estimate.settings import EstimateOptions
from dlm.federated.counting.settings import CollectionSettings
from dlm.federated.pieces.settings import PieceSettings
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.words import PIECES_SUFFIX
from dlm.index.settings import ShardSettings
from dlm.pipeline.tables import FolderSettings, InputSettings
from dlm.record.sidecar import sidecar

# Settings that the pipeline sets itself, by table, and the sources of their values.
SET_HERE = {
    "unigrams": {
        "tokenizer": "[inputs] tokenizer",
        "public_attested_by": "[inputs] public",
        "public_key": "",
        "seed": "[run] seed",
    },
    "federate.run": {"seed": "[run] seed", "stop_after": ""},
    "federate.data": {
        "vocabulary": "[inputs] vocabulary, or [inputs] wordlist",
        "public": "[inputs] public",
        "tokenizer": "[inputs] tokenizer",
    },
}
# Defaults that differ from those of the commands.
DEFAULTS: dict[str, dict[str, Any]] = {
    "unigrams": {"lambda": 100.0, "rounds": 20},
    "estimate": {"order": 3},
    "distill": {"samples": 1e5},
}

_TABLES: dict[str, type] = {
    "run": FolderSettings,
    "inputs": InputSettings,
    "unigrams": CollectionSettings,
    "pieces": PieceSettings,
    "estimate": EstimateOptions,
    "distill": DistillSettings,
    "prune": PruneSettings,
    "shard": ShardSettings,
}


@dataclass(frozen=True)
class PipelineSettings:
    """All tables; the table of a stage that is left out is None. `federate` names the vocabulary
    that the previous stage makes, or the given vocabulary."""

    run: FolderSettings
    inputs: InputSettings
    unigrams: CollectionSettings | None
    pieces: PieceSettings | None
    federate: TrainingSettings
    estimate: EstimateOptions | None
    distill: DistillSettings
    prune: PruneSettings | None
    shard: ShardSettings

    @classmethod
    def read(cls, file: Path) -> PipelineSettings:
        """Reads settings from a TOML file; raises what `TrainingSettings.read` raises."""
        found = config.read_toml(file)
        known = [*_TABLES, "federate"]
        if unknown := sorted(set(found) - set(known)):
            said = "; ".join(f"[{name}]{config.nearest(name, known)}" for name in unknown)
            raise ConfigError(f"{file}: unknown table {said}; the tables are {', '.join(known)}")
        values: dict[str, Any] = {
            name: _table(name, found, file)
            for name in _TABLES
            if name != "unigrams" and (name in found or name not in ("pieces", "prune"))
        }
        run = dataclasses.replace(values["run"], folder=file.parent / values["run"].folder)
        given: InputSettings = values["inputs"]
        placed: dict[str, Any] = {n: file.parent / path for n, path in given.files().items()}
        inputs = dataclasses.replace(given, **placed)
        unused = [
            name
            for name, needs in (("unigrams", inputs.wordlist), ("estimate", inputs.text))
            if name in found and needs is None
        ]
        if unused:
            table = unused[0]
            needed, instead = {
                "unigrams": ("wordlist", "vocabulary, whose words are not counted"),
                "estimate": ("text", "topology, which is already estimated"),
            }[table]
            raise ConfigError(
                f"{file}: [{table}] needs inputs.{needed}, but you gave inputs.{instead}. Remove "
                f"[{table}], or give inputs.{needed} instead"
            )
        if "pieces" in values and words_of(run, inputs).suffix == PIECES_SUFFIX:
            raise ConfigError(
                f"{file}: [pieces] is given, but inputs.vocabulary already has wordpieces; leave "
                "[pieces] out, or give a vocabulary of words"
            )
        unigrams = None
        if inputs.wordlist is not None:
            flags = {"tokenizer": inputs.tokenizer, "public": inputs.public, "seed": run.seed}
            unigrams = _table("unigrams", found, file, flags)
        return cls(
            run,
            inputs,
            unigrams,
            values.get("pieces"),
            _training(found.get("federate", {}), file, run, inputs, pieces="pieces" in values),
            values["estimate"] if inputs.text is not None else None,
            values["distill"],
            values.get("prune"),
            values["shard"],
        )


@contextmanager
def about(*tables: str) -> Iterator[None]:
    """Adds the tables' names to an error raised in the block, unless it names one already."""
    try:
        yield
    except DlmError as exc:
        if not any(f"{table}." in str(exc) for table in tables):
            said = " and ".join(f"[{table}]" for table in tables)
            exc.add_note(f"the relevant settings are in {said}")
        raise


def counts_of(run: FolderSettings) -> Path:
    return run.folder / "counts.tsv"


def pieces_of(run: FolderSettings) -> Path:
    return run.folder / f"pieces{PIECES_SUFFIX}"


def words_of(run: FolderSettings, inputs: InputSettings) -> Path:
    """The file with the network's words, or with the words that its wordpieces are made from."""
    return counts_of(run) if inputs.vocabulary is None else inputs.vocabulary


def vouched(inputs: InputSettings) -> str:
    """The person who attests that the given vocabulary is public; "" if it has a record."""
    given = inputs.vocabulary
    return inputs.public if given is not None and not sidecar(given).exists() else ""


def _training(
    tables: Mapping[str, Any],
    file: Path,
    run: FolderSettings,
    inputs: InputSettings,
    *,
    pieces: bool,
) -> TrainingSettings:
    _require_table("federate", tables, file)
    for table, given in tables.items():
        _require_table(f"federate.{table}", given, file)
        _check_set_here(f"federate.{table}", given, file)
    words = pieces_of(run) if pieces else words_of(run, inputs)
    text = tables.get("pretrain", {}).get("text", "")
    flags: dict[str, dict[str, Any]] = {
        "run": {"seed": run.seed},
        "data": {
            "vocabulary": words.absolute(),
            # Wordpieces made by the pipeline have a record.
            "public": "" if pieces else vouched(inputs),
            "tokenizer": inputs.tokenizer,
        },
    }
    if text and "public" not in tables.get("pretrain", {}):
        flags["pretrain"] = {"public": inputs.public}
    return TrainingSettings.of(tables, file, flags=flags, environ={}, within="federate.")


def _table(
    name: str, found: Mapping[str, Any], file: Path, flags: Mapping[str, Any] | None = None
) -> Any:
    given = found.get(name, {})
    _require_table(name, given, file)
    _check_set_here(name, given, file)
    given = {**DEFAULTS.get(name, {}), **given}
    if name == "unigrams" and "poisson" not in given:
        given.setdefault("max_participations", 1)
    if name == "unigrams" and "noise_multiplier" in given:
        given.setdefault("delta", 1e-6)
    tables = {**found, name: given}
    with about(name):
        return config.resolve(
            _TABLES[name], name, flags=flags, file=file, found=tables, tables=tables, environ={}
        )


def _require_table(name: str, found: Any, file: Path) -> None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: {name} is {found!r}; expected a table, [{name}]")


def _check_set_here(table: str, given: Mapping[str, Any], file: Path) -> None:
    for name, where in SET_HERE.get(table, {}).items():
        if name in given:
            said = f"the pipeline takes it from {where}" if where else "pipelines do not use it"
            raise ConfigError(f"{file}: [{table}] {name}: {said}; leave it out")
