"""A run's settings: one frozen dataclass a table of `run.toml`, resolved together.

One file past 500 lines: each setting stands beside its bounds and their reason.

::

    [run]          rounds, seed, checkpoint_every, evaluate_every, stop_after
    [data]         vocabulary, vocabulary_size, tokenizer, max_tokens, held_out, held_out_tokens
    [model]        preset, or the network's own settings
    [local]        what a device does            (`local.LocalConfig`)
    [server]       what the server does          (`rounds.OptimizerConfig`)
    [privacy]      mechanism, noise, clip norm, what is enforced
    [sampling]     who takes part
    [aggregation]  in the clear, or encoded as for secure aggregation
    [pretrain]     public text first
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlm import config
from dlm.errors import ConfigError, PrivacyError
from dlm.federated import presets
from dlm.federated.clip import AdaptiveClip
from dlm.federated.local import LocalConfig
from dlm.federated.rnn import RnnConfig
from dlm.federated.rounds import OptimizerConfig, ReleaseConfig
from dlm.federated.sampling import Diurnal
from dlm.federated.users import TOKENIZERS
from dlm.federated.words import PIECES_SUFFIX

REAL = -1
# Not DLM alone: a server's own settings are DLM_SERVER_<NAME>.
PREFIX = "DLM_FEDERATE"


def _at_least(owner: str, values: Any, bounds: Mapping[str, float]) -> None:
    for name, least in bounds.items():
        value = getattr(values, name)
        if not (value >= least and math.isfinite(value)):
            raise ConfigError(f"{owner}.{name} is {value}; it must be {least:g} or more")


@dataclass(frozen=True)
class RunSettings:
    """[run]

    Fields (unit; bound; default; meaning)
        rounds            >= 1; what noise and accounting are made for
        seed              >= 0, or -1; -1; a seed makes the run a simulation, which is not private;
                          -1 draws every key from the operating system and writes it nowhere
        checkpoint_every  rounds; >= 1; 1; a run that is no simulation keeps every round
        evaluate_every    rounds; >= 0; 20; on held-out users; 0 for never
        stop_after        rounds; >= 0; 0; ends the run early; 0 for not. May change on resuming
    """

    rounds: int
    seed: int = REAL
    checkpoint_every: int = 1
    evaluate_every: int = 20
    stop_after: int = 0

    def __post_init__(self) -> None:
        bounds = {"rounds": 1, "seed": REAL, "checkpoint_every": 1}
        _at_least("run", self, {**bounds, "evaluate_every": 0, "stop_after": 0})
        if not self.simulation and self.checkpoint_every != 1:
            raise PrivacyError(
                f"run.checkpoint_every is {self.checkpoint_every}: a run that is no simulation "
                "keeps every round, for a round done twice would be released with two different "
                "noises; set it to 1, or give a seed to simulate"
            )

    @property
    def simulation(self) -> bool:
        """Whether anybody who reads the settings can make the noise again."""
        return self.seed != REAL


@dataclass(frozen=True)
class DataSettings:
    """[data]

    Fields (unit; bound; default; meaning)
        vocabulary       file; one word a line, or counts of words of users with their record (`dlm
                         unigrams`), which accounting takes in; ids from 3 on. Or, where its name
                         ends in .model, wordpieces (`dlm pieces`) with theirs; accuracy and
                         perplexity are then of pieces
        public           ""; who says that a vocabulary without a record is of no user's text. A run
                         that promises something needs a record or this name, which the report
                         tells; may change on resuming
        public_key       ""; file, PEM; the Ed25519 key that must have signed the vocabulary (`dlm
                         privacy sign`); without one its record stays unverified; may change
        vocabulary_size  words; >= 0; 0 for all; the first of the file that are taken
        tokenizer        "whitespace"; or "words" as in `dlm unigrams`: lower case, letters and
                         apostrophes alone; what words of users' and of public text are: as those
                         of the vocabulary were counted, or they are not met
        max_tokens       of a user; >= 1; 1600 (DPF); the rest is never looked at
        held_out         share of users; 0 <= . < 1; 0; who never train and only evaluate, without
                         noise: no guarantee covers them, and they must have agreed
        held_out_tokens  >= 1; 100000; how much of their text an evaluation reads
    """

    vocabulary: Path
    public: str = ""
    public_key: str = ""
    vocabulary_size: int = 0
    tokenizer: str = "whitespace"
    max_tokens: int = 1600
    held_out: float = 0.0
    held_out_tokens: int = 100_000

    def __post_init__(self) -> None:
        _at_least(
            "data",
            self,
            {"max_tokens": 1, "held_out": 0, "held_out_tokens": 1, "vocabulary_size": 0},
        )
        if self.held_out >= 1:
            raise ConfigError(f"data.held_out is {self.held_out}; somebody must be left to train")
        if self.tokenizer not in TOKENIZERS:
            raise ConfigError(
                f"data.tokenizer is {self.tokenizer}; it must be one of {', '.join(TOKENIZERS)}"
            )
        if self.has_pieces and self.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary_size is {self.vocabulary_size}, but {self.vocabulary} holds "
                "wordpieces, all of which are taken; build a smaller inventory with dlm pieces"
            )

    @property
    def has_pieces(self) -> bool:
        """Whether the vocabulary is of wordpieces."""
        return self.vocabulary.suffix == PIECES_SUFFIX


@dataclass(frozen=True)
class ModelSettings:
    """[model]

    Fields
        preset   name of a paper's network (`presets.PRESETS`), with this vocabulary; or "" and the
                 settings of `rnn.RnnConfig`, which say what they mean there
    """

    preset: str = ""
    embedding_size: int = 96
    hidden_size: int = 670
    layers: int = 1
    cell: Literal["cifg", "lstm"] = "cifg"
    recurrence: Literal["projected", "hidden"] = "projected"
    groups: int = 1
    residual: bool = False
    layer_norm: Literal["gates", "output", "none"] = "none"
    tied: bool = True
    output_bias: bool = True
    projection_bias: bool = False
    unit_norm: bool = False

    def network(self, vocab_size: int) -> RnnConfig:
        """The network for a vocabulary of so many ids, marks included."""
        if self.preset:
            return dataclasses.replace(presets.preset(self.preset), vocab_size=vocab_size)
        values = dataclasses.asdict(self)
        del values["preset"]
        return RnnConfig(vocab_size, **values)


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy]

    Fields (unit; bound; default; meaning)
        clip_norm           > 0; L2 norm of an update at most
        mechanism           "none", or one of `noise.NAMES`
        noise_multiplier    >= 0; 0; standard deviation of the independent draws over the clip norm
        noise               "auto": "discrete" outside of simulations, "float" in them. Discrete is
                            drawn exactly, on a grid, by a cryptographic generator; float is for
                            simulations, and for runs of earlier versions, which go on with it
        estimator           "fixed" (f~_f) or "clipped" (f~_c)
        denominator         users; >= 0; 0 for the report goal, or q times the users
        gap                 rounds; >= 1; 1; between a user's participations (MinS + 1); enforced
        max_part            >= 0; 0 for no bound but the gap's; of a user; enforced
        delta               0 < . < 1; 1e-6; at which epsilon is told
        restarts            rounds at whose start tree-restart begins anew
        bands               >= 0; 0 for the gap; of bandmf, bandtoep and bandfhu
        buffers             >= 1; 4; of blt
        error               "max" or "mean"; "max"; the loss that blt is optimised for
        schedule            [round, clip norm] pairs, at the same noise multiplier
        adaptive            false; whether the clip norm follows `quantile` of the updates
        quantile            0..1; 0.5
        clip_learning_rate  > 0; 0.2
        count_stddev        users; >= 0; 0 for a twentieth of the denominator
        first_restart       rounds; >= 0; 128
        restart_every       rounds; >= 1; 1024
    """

    clip_norm: float
    mechanism: str = "none"
    noise_multiplier: float = 0.0
    noise: Literal["auto", "discrete", "float"] = "auto"
    estimator: Literal["fixed", "clipped"] = "fixed"
    denominator: float = 0.0
    gap: int = 1
    max_part: int = 0
    delta: float = 1e-6
    restarts: tuple[int, ...] = ()
    bands: int = 0
    buffers: int = 4
    error: Literal["max", "mean"] = "max"
    schedule: tuple[tuple[int, float], ...] = ()
    adaptive: bool = False
    quantile: float = 0.5
    clip_learning_rate: float = 0.2
    count_stddev: float = 0.0
    first_restart: int = 128
    restart_every: int = 1024

    def __post_init__(self) -> None:
        bounds = {"denominator": 0, "gap": 1, "max_part": 0, "count_stddev": 0}
        _at_least("privacy", self, {**bounds, "bands": 0, "buffers": 1})
        if self.error not in ("max", "mean"):
            raise ConfigError(f"privacy.error is {self.error!r}; it is max or mean")
        if self.noise not in ("auto", "discrete", "float"):
            raise ConfigError(f"privacy.noise is {self.noise!r}; it is auto, discrete or float")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"privacy.delta is {self.delta}; it must be between 0 and 1")
        if (self.mechanism == "none") != (self.noise_multiplier == 0):
            raise PrivacyError(
                f"privacy.mechanism is {self.mechanism!r} with a noise multiplier of "
                f"{self.noise_multiplier}; give both, or neither: a run without noise has no "
                "guarantee"
            )
        try:
            pairs = tuple((int(at), float(bound)) for at, bound in self.schedule)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"privacy.schedule holds [round, clip norm] pairs: {exc}") from exc
        object.__setattr__(self, "schedule", pairs)
        object.__setattr__(self, "restarts", tuple(self.restarts))

    def release(self, users_a_round: float) -> ReleaseConfig:
        """How sums are released, where so many users are expected in a round."""
        over = self.denominator or users_a_round
        adaptive = None
        if self.adaptive:
            adaptive = AdaptiveClip(
                self.quantile,
                self.clip_learning_rate,
                self.count_stddev or over / 20.0,
                self.first_restart,
                self.restart_every,
            )
        return ReleaseConfig(
            self.clip_norm, self.noise_multiplier, over, self.estimator, adaptive, self.schedule
        )


@dataclass(frozen=True)
class SamplingSettings:
    """[sampling]

    Fields (unit; bound; default; meaning)
        kind         "timer": available and rested users (GDP); "poisson": each with probability q
                     (DPF); "fixed": so many at random
        report_goal  users; >= 1; 100; of a round (timer, fixed)
        q            0 < . <= 1; 0.01 (poisson)
        timer_s      seconds; >= 0; 0; until a user may take part again (timer)
        round_s      seconds; > 0; 60; how long a round is taken to last (timer)
        low, high    0 to 1; 1, 1; part of the devices that are idle, charging and connected at
                     noon and at midnight, where they are (timer); a run begins at midnight
        zones        "0:1"; where they are: HOURS:SHARE, ..., hours of difference to that midnight
                     and the part of the users, as "0:0.5, -8:0.5"; shares sum to 1 (timer)
    """

    kind: Literal["timer", "poisson", "fixed"] = "timer"
    report_goal: int = 100
    q: float = 0.01
    timer_s: float = 0.0
    round_s: float = 60.0
    low: float = 1.0
    high: float = 1.0
    zones: str = "0:1"

    def __post_init__(self) -> None:
        if self.kind not in ("timer", "poisson", "fixed"):
            raise ConfigError(f"sampling.kind is {self.kind!r}; it is timer, poisson or fixed")
        _at_least("sampling", self, {"report_goal": 1, "timer_s": 0, "round_s": 0})
        if not 0 < self.q <= 1:
            raise ConfigError(f"sampling.q is {self.q}; it must be above 0 and at most 1")
        days = self.diurnal()
        if days is not None and self.kind != "timer":
            raise ConfigError(
                f"sampling.low, high and zones say who is available when, which sampling.kind = "
                f"{self.kind} does not ask; leave them out, or take timer"
            )

    def diurnal(self) -> Diurnal | None:
        """Who is available when; None: everyone, always."""
        if (self.low, self.high, self.zones) == (1.0, 1.0, "0:1"):
            return None
        zones = []
        for zone in self.zones.split(","):
            hours, _, share = zone.partition(":")
            try:
                zones.append((float(hours), float(share)))
            except ValueError:
                raise ConfigError(
                    f'sampling.zones is {self.zones!r}; it must be as "0:0.5, -8:0.5"'
                ) from None
        return Diurnal(self.low, self.high, tuple(zones))

    def users_a_round(self, users: int) -> float:
        """Users expected in a round."""
        return self.q * users if self.kind == "poisson" else float(self.report_goal)

    def most_users(self, users: int) -> int:
        """Most users that a round can have: were larger cohorts refused, those that are left would
        not be Poisson-sampled ones any more."""
        return users if self.kind == "poisson" else self.report_goal


@dataclass(frozen=True)
class AggregationSettings:
    """[aggregation]

    Fields (unit; bound; default; meaning)
        secure  false; encode updates and add them up modulo M, as secure aggregation does
        scale   > 0; 1000; s of GDP Algorithm 2: how fine updates are rounded
    """

    secure: bool = False
    scale: float = 1000.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ConfigError(f"aggregation.scale is {self.scale}; it must be above 0")


@dataclass(frozen=True)
class PretrainSettings:
    """[pretrain]

    Fields (unit; bound; default; meaning)
        text           file of public text, an utterance a line (.zst too); none by default
        public         ""; who says that no user's text is in it, as `data.public`
        steps          >= 0; 0
        batch_size     rows; >= 1; 64
        unroll         tokens; >= 1; 20
        learning_rate  > 0; 0.002; of Adam
    Paper   GDP 2.3
    """

    text: str = ""
    public: str = ""
    steps: int = 0
    batch_size: int = 64
    unroll: int = 20
    learning_rate: float = 0.002

    def __post_init__(self) -> None:
        _at_least("pretrain", self, {"steps": 0, "batch_size": 1, "unroll": 1})
        if bool(self.text) != bool(self.steps):
            raise ConfigError("pretrain.text and pretrain.steps are given together, or neither")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"pretrain.learning_rate is {self.learning_rate}, not above 0")


@dataclass(frozen=True)
class TrainingSettings:
    """All tables of a run."""

    run: RunSettings
    data: DataSettings
    model: ModelSettings
    local: LocalConfig
    server: OptimizerConfig
    privacy: PrivacySettings
    sampling: SamplingSettings
    aggregation: AggregationSettings
    pretrain: PretrainSettings

    def __post_init__(self) -> None:
        privacy = self.privacy
        if self.sampling.kind == "poisson" and (privacy.gap > 1 or privacy.max_part):
            raise PrivacyError(
                f"privacy.gap is {privacy.gap} and privacy.max_part {privacy.max_part}, and "
                "cohorts are Poisson-sampled: a round that is refused for a bound and drawn again "
                "is no Poisson sample. Leave both out, or take sampling.kind = timer"
            )

    @classmethod
    def read(
        cls,
        file: Path,
        *,
        flags: Mapping[str, Mapping[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> TrainingSettings:
        """Settings of a TOML file, under those of flags and variables DLM_FEDERATE_<TABLE>_<NAME>.

        Paths in the file are relative to its folder.

        Raises
            ConfigError   the file cannot be read, names an unknown table or setting, lacks one
                          that has no default, or a value is out of bounds
            PrivacyError  a value that would leave the run without the guarantee it asks for
        """
        found = config.read_toml(file)
        environ = os.environ if environ is None else environ
        known = tuple(f"{PREFIX}_{name}_".upper() for name in _names())
        lost = sorted(v for v in environ if v.startswith(f"{PREFIX}_") and not v.startswith(known))
        if lost:
            raise ConfigError(
                f"the environment sets what is of no table: {', '.join(lost)}; variables are "
                f"{PREFIX}_<TABLE>_<NAME>, and the tables {', '.join(_names())}"
            )
        return cls.of(found, file, flags=flags, environ=environ)

    @classmethod
    def of(
        cls,
        found: Mapping[str, Any],
        file: Path,
        *,
        flags: Mapping[str, Mapping[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
        within: str = "",
    ) -> TrainingSettings:
        """Settings of tables that were read from a file; see `read`.

        Args
            found    the tables, by name
            within   what stands before the names of tables in the file, as "federate."
        """
        tables = dict(zip(_names(), _TABLES, strict=True))
        unknown = sorted(set(found) - set(tables))
        if unknown:
            said = ", ".join(f"{name}{config.nearest(name, tables)}" for name in unknown)
            raise ConfigError(
                f"{file} has no use for {within}{said}; its tables are {', '.join(tables)}"
            )
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name, kind in tables.items():
            given = dict((flags or {}).get(name, {}))
            try:
                values[name] = config.resolve(
                    kind,
                    name,
                    flags=given,
                    file=file,
                    found=found,
                    tables=tables,
                    environ=environ,
                    prefix=PREFIX,
                    within=within,
                )
            except TypeError as exc:
                lacking = _lacking(kind, name, found.get(name, {}), given, environ)
                if not lacking:
                    raise ConfigError(f"{file}: [{within}{name}] is not complete: {exc}") from exc
                raise ConfigError(f"{file}: [{within}{name}] lacks {', '.join(lacking)}") from exc
        settings = cls(**values)
        place = file.parent / settings.data.vocabulary
        key = settings.data.public_key
        data = dataclasses.replace(
            settings.data, vocabulary=place, public_key=str(file.parent / key) if key else ""
        )
        text = settings.pretrain.text
        pretrain = dataclasses.replace(
            settings.pretrain, text=str(file.parent / text) if text else ""
        )
        return dataclasses.replace(settings, data=data, pretrain=pretrain)

    @property
    def noise(self) -> Literal["none", "float", "discrete"]:
        """What noise the run has, where it begins with these settings."""
        given = self.privacy.noise
        if self.privacy.mechanism == "none":
            return "none"
        if given == "auto":
            return "float" if self.run.simulation else "discrete"
        return given

    def binding(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that began.

        Left out are places of files (their contents are compared) and what changes no number.
        """
        found = dataclasses.asdict(self)
        for name in ("stop_after", "checkpoint_every", "evaluate_every"):
            del found["run"][name]
        del found["data"]["vocabulary"], found["data"]["held_out_tokens"], found["pretrain"]["text"]
        del found["data"]["public"], found["data"]["public_key"], found["pretrain"]["public"]
        if self.noise == "discrete":
            found["privacy"]["noise"] = self.noise
        else:  # as in runs that began before there was another
            del found["privacy"]["noise"]
        if self.data.tokenizer == "whitespace":  # as in runs that began before it could be chosen
            del found["data"]["tokenizer"]
        return found


def _names() -> list[str]:
    """The tables."""
    return [field.name for field in dataclasses.fields(TrainingSettings)]


def _lacking(
    kind: type,
    table: str,
    found: Mapping[str, Any],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
) -> list[str]:
    """Settings of a table that have no default and that nothing gives."""
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in found
        and flags.get(field.name) is None
        and f"{PREFIX}_{table}_{field.name}".upper() not in environ
    ]


_TABLES: tuple[type, ...] = (
    RunSettings,
    DataSettings,
    ModelSettings,
    LocalConfig,
    OptimizerConfig,
    PrivacySettings,
    SamplingSettings,
    AggregationSettings,
    PretrainSettings,
)
