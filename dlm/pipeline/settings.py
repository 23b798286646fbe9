"""The configuration of a pipeline: all tables of its TOML file.

::

    [run]         folder, seed, memory, threads
    [inputs]      users, held_out, whitelist or vocabulary, text or topology, public
    [unigrams]    as `dlm unigrams`
    [pieces]      as `dlm pieces`; without the table, the network is trained on words
    [federate.*]  as the tables of `dlm federate --config`
    [estimate]    as `dlm estimate`, for the topology
    [distill]     as `dlm distill`
    [prune]       as `dlm prune`; without the table, nothing is pruned
    [shard]       as `dlm shard`

No environment variable changes these settings. Paths are relative to the file's folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dlm import config
from dlm.errors import ConfigError
from dlm.federated.count_unigrams import CollectionSettings
from dlm.federated.recorded import sidecar
from dlm.federated.settings import TrainingSettings
from dlm.federated.words import PIECES_SUFFIX
from dlm.pipeline.tables import (
    DistillSettings,
    FolderSettings,
    InputSettings,
    PieceSettings,
    PruneSettings,
    ShardSettings,
    TopologySettings,
    UnigramSettings,
)

T = TypeVar("T")
# Names of options that differ from the names of fields.
FIELD_OF = {("unigrams", "lambda"): "clip", ("prune", "bytes"): "size"}
# Settings that the pipeline sets itself, and where they come from.
SET_HERE = {
    "run": {"seed": "[run] seed", "stop_after": ""},
    "data": {
        "vocabulary": "[inputs] vocabulary, or [inputs] whitelist",
        "public": "[inputs] public",
        "tokenizer": "[inputs] tokenizer",
    },
}


_TABLES: dict[str, type] = {
    "run": FolderSettings,
    "inputs": InputSettings,
    "unigrams": UnigramSettings,
    "pieces": PieceSettings,
    "estimate": TopologySettings,
    "distill": DistillSettings,
    "prune": PruneSettings,
    "shard": ShardSettings,
}


@dataclass(frozen=True)
class PipelineSettings:
    """All tables; `unigrams`, `pieces`, `estimate` and `prune` are None if the stage is left out.

    `federate` names the vocabulary made by the previous stage, or the given one.
    """

    run: FolderSettings
    inputs: InputSettings
    unigrams: CollectionSettings | None
    pieces: PieceSettings | None
    federate: TrainingSettings
    estimate: TopologySettings | None
    distill: DistillSettings
    prune: PruneSettings | None
    shard: ShardSettings

    @classmethod
    def read(cls, file: Path) -> PipelineSettings:
        """Settings of a TOML file.

        Raises
            ConfigError   the file cannot be read, names an unknown table or setting, lacks one
                          without a default, or a value is out of bounds
            PrivacyError  as `TrainingSettings.read`
        """
        found = config.read_toml(file)
        known = [*_TABLES, "federate"]
        if unknown := sorted(set(found) - set(known)):
            said = "; ".join(f"[{name}]{config.nearest(name, known)}" for name in unknown)
            raise ConfigError(f"{file}: unknown table {said}; the tables are {', '.join(known)}")
        values: dict[str, Any] = {
            name: _table(kind, name, found.get(name, {}), file)
            for name, kind in _TABLES.items()
            if name in found or name not in ("pieces", "prune")
        }
        run = dataclasses.replace(values["run"], folder=file.parent / values["run"].folder)
        given: InputSettings = values["inputs"]
        placed: dict[str, Any] = {n: file.parent / path for n, path in given.files().items()}
        inputs = dataclasses.replace(given, **placed)
        unused = [
            name
            for name, needs in (("unigrams", inputs.whitelist), ("estimate", inputs.text))
            if name in found and needs is None
        ]
        if unused:
            table = unused[0]
            needed, instead = {
                "unigrams": ("whitelist", "vocabulary, whose words are not counted"),
                "estimate": ("text", "topology, which is already estimated"),
            }[table]
            raise ConfigError(
                f"{file}: [{table}] needs inputs.{needed}, but you gave inputs.{instead}. Remove "
                f"[{table}], or give inputs.{needed} instead"
            )
        if "pieces" in values and words_of(run, inputs).suffix == PIECES_SUFFIX:
            raise ConfigError(
                f"{file}: [pieces] is given, but inputs.vocabulary already has wordpieces; leave "
                "one of them out"
            )
        unigrams = None
        if inputs.whitelist is not None:
            counted = {
                "max_part": 1,
                **_without_none(dataclasses.asdict(values["unigrams"])),
            }
            if counted.get("poisson") is not None and "max_part" not in found.get("unigrams", {}):
                del counted["max_part"]
            if counted.get("noise_multiplier") is not None:
                counted.setdefault("delta", 1e-6)
            unigrams = CollectionSettings(
                **counted, tokenizer=inputs.tokenizer, public=inputs.public, seed=run.seed
            )
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


def counts_of(run: FolderSettings) -> Path:
    """Path of the words and their counts."""
    return run.folder / "counts.tsv"


def pieces_of(run: FolderSettings) -> Path:
    """Path of the wordpieces made from counts."""
    return run.folder / f"pieces{PIECES_SUFFIX}"


def words_of(run: FolderSettings, inputs: InputSettings) -> Path:
    """The words of the network, or the words from which its wordpieces are made."""
    return counts_of(run) if inputs.vocabulary is None else inputs.vocabulary


def vouched(inputs: InputSettings) -> str:
    """Who says that the given vocabulary is public; "" if it has a record."""
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
    """The tables below [federate], with what the pipeline sets itself."""
    for table, names in SET_HERE.items():
        for name, where in names.items():
            if name in tables.get(table, {}):
                said = f"the pipeline takes it from {where}" if where else "pipelines do not use it"
                raise ConfigError(f"{file}: [federate.{table}] {name}: {said}; leave it out")
    words = pieces_of(run) if pieces else words_of(run, inputs)
    text = tables.get("pretrain", {}).get("text", "")
    flags: dict[str, dict[str, Any]] = {
        "run": {"seed": run.seed},
        "data": {
            "vocabulary": words.absolute(),
            # The pipeline's own output has a record.
            "public": "" if pieces else vouched(inputs),
            "tokenizer": inputs.tokenizer,
        },
    }
    if text and "public" not in tables.get("pretrain", {}):
        flags["pretrain"] = {"public": inputs.public}
    return TrainingSettings.of(tables, file, flags=flags, environ={}, within="federate.")


def _table(kind: type[T], name: str, table: Mapping[str, Any], file: Path) -> T:
    """A table as the dataclass `kind`; keys are names of options."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{file}: {name} is {table!r}; expected a table, [{name}]")
    renamed = {field: option for (at, option), field in FIELD_OF.items() if at == name}
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    options = {renamed.get(field.name, field.name): field for field in fields}
    if unknown := sorted(set(table) - set(options)):
        said = "; ".join(key + config.nearest(key, options) for key in unknown)
        raise ConfigError(f"{file}: [{name}] has no setting named {said}")
    values = {options[key].name: _value(name, key, table[key]) for key in table}
    lacking = [
        option
        for option, field in options.items()
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if lacking:
        raise ConfigError(f"{file}: [{name}] lacks {', '.join(lacking)}")
    return config.resolve(kind, name, flags=values, environ={})


def _value(table: str, key: str, value: Any) -> Any:
    """Converts TOML values whose type differs from the option: 100 to "100", "inf" to infinity."""
    if (table, key) in (("prune", "ngrams"), ("prune", "bytes")) and isinstance(value, int):
        return str(value)
    if (table, key) == ("unigrams", "lambda"):
        try:
            if isinstance(value, bool):  # a number, in Python
                raise ValueError
            return float(value)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"unigrams.lambda is {value!r}; expected a number or inf") from exc
    return value


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
