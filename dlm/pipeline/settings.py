"""The configuration of a pipeline: one frozen dataclass per table of the TOML file.

::

    [run]         folder, seed, memory, threads
    [inputs]      users, held_out, whitelist or vocabulary, text or topology, public
    [unigrams]    as `dlm unigrams`
    [federate.*]  as the tables of `dlm federate --config`
    [estimate]    as `dlm estimate`, for the topology
    [distill]     as `dlm distill`
    [prune]       as `dlm prune`; without the table nothing is pruned
    [shard]       as `dlm shard`

The file is all there is: no environment variable sets any of it. Paths are relative to its folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dlm import config
from dlm.errors import ConfigError
from dlm.estimate.discount import DEFAULT_FALLBACK
from dlm.estimate.prune import Goal, read_goal
from dlm.estimate.settings import EstimationSettings
from dlm.federated.count_unigrams import CollectionSettings
from dlm.federated.settings import TrainingSettings
from dlm.federated.users import MISSING, TOKENIZERS
from dlm.federated.words import PIECES_SUFFIX
from dlm.index.coding import coding_of
from dlm.ngram.partition import check_shards
from dlm.resources import available_bytes, parse_size

T = TypeVar("T")
# Names of options that are no names of fields.
FIELD_OF = {("unigrams", "lambda"): "clip", ("prune", "bytes"): "size"}
# What the pipeline sets itself, and where it is said.
SET_HERE = {
    "run": {"seed": "[run] seed", "stop_after": ""},
    "data": {
        "vocabulary": "[inputs] vocabulary, or [inputs] whitelist",
        "public": "[inputs] public",
        "tokenizer": "[inputs] tokenizer",
    },
}


@dataclass(frozen=True)
class FolderSettings:
    """[run]

    Fields (unit; bound; default; meaning)
        folder   where everything is made; it is gone on with if it has a run
        seed     >= 0; none; a seed makes users' stages a simulation, which is not private
        memory   as 4G; what is free; limit of each stage that takes one
        threads  >= 1; 2
    """

    folder: Path
    seed: int | None = None
    memory: str | None = None
    threads: int = 2

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"run.seed is {self.seed}; it must be 0 or more")
        if self.threads < 1:
            raise ConfigError(f"run.threads is {self.threads}; it must be 1 or more")
        _ = self.memory_bytes

    @property
    def memory_bytes(self) -> int | None:
        """The limit; None for what is free."""
        return None if self.memory is None else parse_size(self.memory)


@dataclass(frozen=True)
class InputSettings:
    """[inputs]

    Fields (default; meaning)
        users         users' text: .parquet or TSV, plain, .zst or .gz
        held_out      none; text of other users, who agreed to be measured without noise: the final
                      model's perplexity on it is told
        whitelist     list of words that users' words are counted of; or
        vocabulary    the words of the network: a list, or counts with their record
        text          public text, a sentence per line, whose n-grams the model has; or
        topology      an ARPA file with these n-grams
        public        ""; who says that no user's text is in whitelist, vocabulary, text, topology
                      and [federate.pretrain] text, as far as they have no record
        user_column, text_column   of users and held_out; "user_id", "utterance"
        missing       "refuse"; rows without id, users without text; or "count"
        tokenizer     "words"; or "whitespace"; what words of users' text are
    """

    users: Path
    held_out: Path | None = None
    whitelist: Path | None = None
    vocabulary: Path | None = None
    text: Path | None = None
    topology: Path | None = None
    public: str = ""
    user_column: str = "user_id"
    text_column: str = "utterance"
    missing: str = "refuse"
    tokenizer: str = "words"

    def __post_init__(self) -> None:
        for a, b in (("whitelist", "vocabulary"), ("text", "topology")):
            if (getattr(self, a) is None) == (getattr(self, b) is None):
                raise ConfigError(f"[inputs] has one of {a} and {b}; give exactly one")
        for name, found, known in (
            ("missing", self.missing, MISSING),
            ("tokenizer", self.tokenizer, TOKENIZERS),
        ):
            if found not in known:
                raise ConfigError(f"inputs.{name} is {found!r}; it must be {' or '.join(known)}")
        if self.vocabulary is not None and self.vocabulary.suffix == PIECES_SUFFIX:
            raise ConfigError(
                f"inputs.vocabulary is {self.vocabulary}: a network of wordpieces is not distilled "
                "yet; give a list of words"
            )

    def files(self) -> dict[str, Path]:
        """The files, by the name of the setting."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: path for name, path in found.items() if isinstance(path, Path)}


@dataclass(frozen=True)
class UnigramSettings:
    """[unigrams]: the options of `dlm unigrams`, which say what they mean there; `clip` is lambda.

    Without noise_multiplier nothing is guaranteed, neither here nor of the final model.
    """

    clip: float = 100.0
    rounds: int = 20
    report_goal: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    max_part: int | None = None
    min_sep: int | None = None
    poisson: float | None = None
    cap_words: int | None = None
    test_fraction: float = 0.0
    capacity: int = 64_000


@dataclass(frozen=True)
class TopologySettings:
    """[estimate]: the options of `dlm estimate`, which say what they mean there.

    Fields (default)
        order 3, prune "", discount_fallback false, skip false, column "text"
    """

    order: int = 3
    prune: str = ""
    discount_fallback: bool = False
    skip: bool = False
    column: str = "text"

    def __post_init__(self) -> None:
        _ = EstimationSettings(order=self.order, prune=self.thresholds)

    @property
    def thresholds(self) -> tuple[int, ...]:
        """What `prune` says."""
        try:
            return tuple(int(part) for part in self.prune.replace(",", " ").split())
        except ValueError as exc:
            raise ConfigError(f"estimate.prune is {self.prune!r}; it must be as 0,0,1") from exc

    def of(self, run: FolderSettings) -> EstimationSettings:
        """With the limits of the run."""
        return EstimationSettings(
            order=self.order,
            prune=self.thresholds,
            fallback=DEFAULT_FALLBACK if self.discount_fallback else None,
            skip=self.skip,
            column=self.column,
            memory_bytes=available_bytes() // 2 if run.memory_bytes is None else run.memory_bytes,
            threads=run.threads,
        )


@dataclass(frozen=True)
class DistillSettings:
    """[distill]: the options of `dlm distill`.

    Fields (bound; default)
        samples  >= 1; 100,000 sentences;  seed  0;  prior  >= 0; 0.01
    """

    samples: float = 1e5
    seed: int = 0
    prior: float = 0.01

    def __post_init__(self) -> None:
        if not self.samples >= 1:
            raise ConfigError(f"distill.samples is {self.samples}; it must be 1 or more")
        if not self.prior >= 0:
            raise ConfigError(f"distill.prior is {self.prior}; it must be 0 or more")


@dataclass(frozen=True)
class PruneSettings:
    """[prune]: the options of `dlm prune`; `size` is bytes. One of the first three is given."""

    threshold: float | None = None
    ngrams: str | None = None
    size: str | None = None
    keep_suffixes: bool = False

    def __post_init__(self) -> None:
        _ = self.goal

    @property
    def goal(self) -> Goal:
        """How much goes."""
        return read_goal(self.threshold, self.ngrams, self.size)


@dataclass(frozen=True)
class ShardSettings:
    """[shard]: the options of `dlm shard`.

    Fields (default)
        shards 1, encoding "exact", bits none
    """

    shards: int = 1
    encoding: str = "exact"
    bits: int | None = None

    def __post_init__(self) -> None:
        check_shards(self.shards)
        coding_of(self.encoding, self.bits)


_TABLES: dict[str, type] = {
    "run": FolderSettings,
    "inputs": InputSettings,
    "unigrams": UnigramSettings,
    "estimate": TopologySettings,
    "distill": DistillSettings,
    "prune": PruneSettings,
    "shard": ShardSettings,
}


@dataclass(frozen=True)
class PipelineSettings:
    """All tables; `unigrams`, `estimate` and `prune` are None where the stage is left out.

    `federate` names the vocabulary that the stage before it makes, or the one given.
    """

    run: FolderSettings
    inputs: InputSettings
    unigrams: CollectionSettings | None
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
                          that has no default, or a value is out of bounds
            PrivacyError  as `TrainingSettings.read`
        """
        found = config.read_toml(file)
        known = [*_TABLES, "federate"]
        if unknown := sorted(set(found) - set(known)):
            said = "; ".join(f"[{name}]{config.nearest(name, known)}" for name in unknown)
            raise ConfigError(f"{file}: nothing reads {said}; the tables are {', '.join(known)}")
        values: dict[str, Any] = {
            name: _table(kind, name, found.get(name, {}), file)
            for name, kind in _TABLES.items()
            if name in found or name not in ("prune",)
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
            raise ConfigError(
                f"{file}: [{unused[0]}] is given, and [inputs] has nothing for it: "
                + (
                    "it counts the words of inputs.whitelist"
                    if unused == ["unigrams"]
                    else "it estimates the topology from inputs.text"
                )
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
            _training(found.get("federate", {}), file, run, inputs),
            values["estimate"] if inputs.text is not None else None,
            values["distill"],
            values.get("prune"),
            values["shard"],
        )


def counts_of(run: FolderSettings) -> Path:
    """Where users' words and their counts stand."""
    return run.folder / "counts.tsv"


def _training(
    tables: Mapping[str, Any], file: Path, run: FolderSettings, inputs: InputSettings
) -> TrainingSettings:
    """The tables below [federate], with what the pipeline says itself."""
    for table, names in SET_HERE.items():
        for name, where in names.items():
            if name in tables.get(table, {}):
                said = f"the pipeline takes it from {where}" if where else "a pipeline has no such"
                raise ConfigError(f"{file}: [federate.{table}] {name}: {said}; leave it out")
    words = counts_of(run) if inputs.vocabulary is None else inputs.vocabulary
    text = tables.get("pretrain", {}).get("text", "")
    flags: dict[str, dict[str, Any]] = {
        "run": {"seed": run.seed},
        "data": {
            "vocabulary": words.absolute(),
            # Counts have a record of their own.
            "public": inputs.public if inputs.vocabulary is not None else "",
            "tokenizer": inputs.tokenizer,
        },
    }
    if text and "public" not in tables.get("pretrain", {}):
        flags["pretrain"] = {"public": inputs.public}
    return TrainingSettings.of(tables, file, flags=flags, environ={}, within="federate.")


def _table(kind: type[T], name: str, table: Mapping[str, Any], file: Path) -> T:
    """A table as the dataclass `kind`; keys have the names of options."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{file}: {name} is {table!r}; it must be a table, [{name}]")
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
    """What TOML has in another type than the option: 100 for "100", "inf" for infinity."""
    if (table, key) in (("prune", "ngrams"), ("prune", "bytes")) and isinstance(value, int):
        return str(value)
    if (table, key) == ("unigrams", "lambda"):
        try:
            return float(value)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"unigrams.lambda is {value!r}; it must be a number or inf") from exc
    return value


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
