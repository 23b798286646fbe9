"""The tables of a pipeline's configuration: frozen dataclasses with bounds and defaults."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from dlm.distill.request import MOST_SAMPLES
from dlm.errors import ConfigError
from dlm.estimate.discount import DEFAULT_FALLBACK
from dlm.estimate.prune import Goal, read_goal
from dlm.estimate.settings import EstimationSettings
from dlm.federated.make_pieces import LONGEST
from dlm.federated.pieces import MAX_PIECE_LENGTH
from dlm.federated.users import MISSING, TOKENIZERS
from dlm.index.coding import coding_of
from dlm.ngram.partition import check_shards
from dlm.resources import available_bytes, parse_size


@dataclass(frozen=True)
class FolderSettings:
    """[run]

    Fields (unit; bound; default; meaning)
        folder   where everything is written; if it has a run, that resumes
        seed     >= 0; none; with a seed, stages that use users' text are a simulation: not private
        memory   such as 4G; free memory; limit for each stage that has one
        threads  >= 1; 2
    """

    folder: Path
    seed: int | None = None
    memory: str | None = None
    threads: int = 2

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"run.seed is {self.seed}; expected 0 or more")
        if self.threads < 1:
            raise ConfigError(f"run.threads is {self.threads}; expected 1 or more")
        _ = self.memory_bytes

    @property
    def memory_bytes(self) -> int | None:
        """The limit; None for the free memory."""
        return None if self.memory is None else parse_size(self.memory)


@dataclass(frozen=True)
class InputSettings:
    """[inputs]

    Fields (default; meaning)
        users         users' text: .parquet or TSV, plain, .zst or .gz
        held_out      none; text of other users, who agreed to be measured without noise; the final
                      model's perplexity on it is reported
        whitelist     list of words to count in users' text; or
        vocabulary    the words of the network: a list, or counts with their record; or wordpieces,
                      FILE.model
        text          public text, one sentence per line, whose n-grams the model will have; or
        topology      an ARPA file with these n-grams
        public        ""; who says that no user's text is in whitelist, vocabulary, text, topology
                      and [federate.pretrain] text; for those without a record
        user_column, text_column   in users and held_out; "user_id", "utterance"
        missing       "refuse"; what to do with rows without id and users without text; or "count"
        tokenizer     "words"; or "whitespace"; how users' text is split into words
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
                raise ConfigError(f"[inputs] needs exactly one of {a} and {b}")
        for name, found, known in (
            ("missing", self.missing, MISSING),
            ("tokenizer", self.tokenizer, TOKENIZERS),
        ):
            if found not in known:
                raise ConfigError(f"inputs.{name} is {found!r}; expected {' or '.join(known)}")

    def files(self) -> dict[str, Path]:
        """The files, by the name of the setting."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: path for name, path in found.items() if isinstance(path, Path)}


@dataclass(frozen=True)
class UnigramSettings:
    """[unigrams]: the options of `dlm unigrams`, explained there; `clip` is lambda.

    Without noise_multiplier there is no guarantee, neither here nor for the final model.
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
class PieceSettings:
    """[pieces]: the options of `dlm pieces`.

    Fields (bound; default)
        size  >= 4; none;  max_length  1 to 512; 16 characters per piece
    """

    size: int
    max_length: int = MAX_PIECE_LENGTH

    def __post_init__(self) -> None:
        if self.size < 4:
            raise ConfigError(f"pieces.size is {self.size}; expected 4 or more")
        if not 1 <= self.max_length <= LONGEST:
            raise ConfigError(f"pieces.max_length is {self.max_length}; expected 1 to {LONGEST}")


@dataclass(frozen=True)
class TopologySettings:
    """[estimate]: the options of `dlm estimate`, explained there.

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
        """`prune` as numbers."""
        try:
            return tuple(int(part) for part in self.prune.replace(",", " ").split())
        except ValueError as exc:
            raise ConfigError(
                f"estimate.prune is {self.prune!r}; expected 0,0,1 or similar"
            ) from exc

    def of(self, run: FolderSettings) -> EstimationSettings:
        """Settings for estimation, with the limits of the run."""
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
        samples  1 to 1e15; 100,000 sentences;  seed  >= 0; 0;  prior  >= 0; as in `dlm distill`
    """

    samples: float = 1e5
    seed: int = 0
    prior: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"distill.samples is {self.samples}; expected 1 to {MOST_SAMPLES:g}")
        if self.seed < 0:
            raise ConfigError(f"distill.seed is {self.seed}; expected 0 or more")
        if self.prior is not None and not 0 <= self.prior < math.inf:
            raise ConfigError(f"distill.prior is {self.prior}; expected 0 or more")


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
        """How much to prune."""
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
