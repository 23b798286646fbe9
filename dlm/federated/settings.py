"""A run's settings: one frozen dataclass per table of `run.toml`, resolved together.

Longer than 500 lines, to keep each setting beside its bounds and their reason.

::

    [run]          rounds, seed, checkpoint_every, evaluate_every, stop_after
    [data]         vocabulary, vocabulary_size, tokenizer, max_tokens, held_out, held_out_tokens
    [model]        preset, or the network's own settings
    [local]        what a device does            (`local.LocalConfig`)
    [server]       what the server does          (`rounds.OptimizerConfig`)
    [privacy]      mechanism, noise, clip norm, enforced limits
    [sampling]     who takes part
    [aggregation]  in the clear, or encoded as for secure aggregation
    [pretrain]     training on public text first
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
# Not just DLM, since a server's own settings are DLM_SERVER_<NAME>.
PREFIX = "DLM_FEDERATE"


def _at_least(owner: str, values: Any, bounds: Mapping[str, float]) -> None:
    for name, least in bounds.items():
        value = getattr(values, name)
        if not (value >= least and math.isfinite(value)):
            raise ConfigError(f"{owner}.{name} is {value}; expected {least:g} or more")


@dataclass(frozen=True)
class RunSettings:
    """[run]

    Fields (unit; bound; default; meaning)
        rounds            >= 1; noise and accounting are planned for this many
        seed              >= 0, or -1; -1; a seed makes the run a simulation, which is not private;
                          -1 draws every key from the operating system and never stores it
        checkpoint_every  rounds; >= 1; 1; must be 1 unless the run is a simulation
        evaluate_every    rounds; >= 0; 20; on held-out users; 0: never
        stop_after        rounds; >= 0; 0; ends the run early; 0: do not. Can change on resuming
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
                f"run.checkpoint_every is {self.checkpoint_every}, but a run that is not a "
                "simulation must save every round: a repeated round would be released twice with "
                "different noise. Set it to 1, or give a seed to simulate"
            )

    @property
    def simulation(self) -> bool:
        """Whether anyone who reads the settings can reproduce the noise."""
        return self.seed != REAL


@dataclass(frozen=True)
class DataSettings:
    """[data]

    Fields (unit; bound; default; meaning)
        vocabulary       file; one word per line, or counts of users' words with their record (`dlm
                         unigrams`), whose privacy cost is added; ids from 3 on. Or, if its name
                         ends in .model, wordpieces (`dlm pieces`) with their record; accuracy and
                         perplexity are then per piece
        public           ""; who says that a vocabulary without a record has no user's text. A run
                         with a guarantee needs a record or this name, which its report shows; can
                         change on resuming
        public_key       ""; file, PEM; the Ed25519 key that must have signed the vocabulary (`dlm
                         privacy sign`); without one its record stays unverified; can change
        vocabulary_size  words; >= 0; 0 for all; how many words of the file to use, from its start
        tokenizer        "whitespace"; or "words" as in `dlm unigrams`: lower case, only letters and
                         apostrophes; how users' and public text is split into words. Use the same
                         as for the vocabulary, or its words will not be found
        max_tokens       per user; >= 1; 1600 (DPF); the rest is never read
        held_out         share of users; 0 <= . < 1; 0; users who only evaluate, without noise: no
                         guarantee covers them, and they must have agreed
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
            raise ConfigError(
                f"data.held_out is {self.held_out}; expected less than 1, so that users are left "
                "to train"
            )
        if self.tokenizer not in TOKENIZERS:
            raise ConfigError(
                f"data.tokenizer is {self.tokenizer}; expected one of {', '.join(TOKENIZERS)}"
            )
        if self.has_pieces and self.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary_size is {self.vocabulary_size}, but {self.vocabulary} has "
                "wordpieces, all of which are used; make fewer with dlm pieces"
            )

    @property
    def has_pieces(self) -> bool:
        """Whether the vocabulary has wordpieces."""
        return self.vocabulary.suffix == PIECES_SUFFIX


@dataclass(frozen=True)
class ModelSettings:
    """[model]

    Fields
        preset   name of a paper's network (`presets.PRESETS`), with this vocabulary; or "" and the
                 settings of `rnn.RnnConfig`, explained there
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
        """The network for a vocabulary of this many ids, including marks."""
        if self.preset:
            return dataclasses.replace(presets.preset(self.preset), vocab_size=vocab_size)
        values = dataclasses.asdict(self)
        del values["preset"]
        return RnnConfig(vocab_size, **values)


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy]

    Fields (unit; bound; default; meaning)
        clip_norm           > 0; largest L2 norm of an update
        mechanism           "none", or one of `noise.NAMES`
        noise_multiplier    >= 0; 0; standard deviation of the independent draws over the clip norm
        noise               "auto": "float" in simulations, "discrete" otherwise. Discrete noise is
                            drawn exactly, on a grid, by a cryptographic generator; float is for
                            simulations, and for resuming runs of earlier versions
        estimator           "fixed" (f~_f) or "clipped" (f~_c)
        denominator         users; >= 0; 0 for the report goal, or q times the users
        gap                 rounds; >= 1; 1; between a user's participations (MinS + 1); enforced
        max_part            >= 0; 0; most participations of a user; 0: limited only by the gap;
                            enforced
        delta               0 < . < 1; 1e-6; for which epsilon is reported
        restarts            rounds before which tree-restart starts a new tree
        bands               >= 0; 0 for the gap; of bandmf, bandtoep and bandfhu
        buffers             >= 1; 4; of blt
        error               "max" or "mean"; "max"; the loss that blt is optimised for
        schedule            [round, clip norm] pairs, with the same noise multiplier
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
            raise ConfigError(f"privacy.error is {self.error!r}; expected max or mean")
        if self.noise not in ("auto", "discrete", "float"):
            raise ConfigError(f"privacy.noise is {self.noise!r}; expected auto, discrete or float")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"privacy.delta is {self.delta}; expected a number between 0 and 1")
        if (self.mechanism == "none") != (self.noise_multiplier == 0):
            raise PrivacyError(
                f"privacy.mechanism is {self.mechanism!r} with a noise multiplier of "
                f"{self.noise_multiplier}; give both, or neither. Without noise a run has no "
                "guarantee"
            )
        try:
            pairs = tuple((int(at), float(bound)) for at, bound in self.schedule)
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"privacy.schedule is {self.schedule!r}; expected [round, clip norm] pairs: {exc}"
            ) from exc
        object.__setattr__(self, "schedule", pairs)
        object.__setattr__(self, "restarts", tuple(self.restarts))

    def release(self, users_a_round: float) -> ReleaseConfig:
        """How sums are released, if this many users are expected per round."""
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
        kind         "timer": available users whose timer has run out (GDP); "poisson": each user
                     with probability q (DPF); "fixed": report_goal users at random
        report_goal  users; >= 1; 100; per round (timer, fixed)
        q            0 < . <= 1; 0.01 (poisson)
        timer_s      seconds; >= 0; 0; until a user may take part again (timer)
        round_s      seconds; > 0; 60; assumed duration of a round (timer)
        low, high    0 to 1; 1, 1; share of devices that are idle, charging and connected at noon
                     and at midnight, local time (timer); a run begins at midnight
        zones        "0:1"; time zones: HOURS:SHARE, ..., each an offset from that midnight and a
                     share of the users, such as "0:0.5, -8:0.5"; shares sum to 1 (timer)
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
            raise ConfigError(f"sampling.kind is {self.kind!r}; expected timer, poisson or fixed")
        _at_least("sampling", self, {"report_goal": 1, "timer_s": 0, "round_s": 0})
        if not 0 < self.q <= 1:
            raise ConfigError(f"sampling.q is {self.q}; expected above 0 and at most 1")
        days = self.diurnal()
        if days is not None and self.kind != "timer":
            raise ConfigError(
                "sampling.low, high and zones set who is available when, but sampling.kind = "
                f"{self.kind} ignores that; leave them out, or use timer"
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
                    f'sampling.zones is {self.zones!r}; expected a list such as "0:0.5, -8:0.5"'
                ) from None
        return Diurnal(self.low, self.high, tuple(zones))

    def users_a_round(self, users: int) -> float:
        """Users expected per round."""
        return self.q * users if self.kind == "poisson" else float(self.report_goal)

    def most_users(self, users: int) -> int:
        """Most users that a round can have: all of them with Poisson sampling, which would no
        longer be Poisson sampling if large cohorts were rejected."""
        return users if self.kind == "poisson" else self.report_goal


@dataclass(frozen=True)
class AggregationSettings:
    """[aggregation]

    Fields (unit; bound; default; meaning)
        secure  false; encode updates and add them modulo M, as secure aggregation does
        scale   > 0; 1000; s of GDP Algorithm 2: how finely updates are rounded
    """

    secure: bool = False
    scale: float = 1000.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ConfigError(f"aggregation.scale is {self.scale}; expected a number above 0")


@dataclass(frozen=True)
class PretrainSettings:
    """[pretrain]

    Fields (unit; bound; default; meaning)
        text           file of public text, one utterance per line (.zst too); default none
        public         ""; who says that it has no user's text, as `data.public`
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
            raise ConfigError("give both pretrain.text and pretrain.steps, or neither")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(
                f"pretrain.learning_rate is {self.learning_rate}; expected a number above 0"
            )


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
                f"privacy.gap is {privacy.gap} and privacy.max_part is {privacy.max_part}, but "
                "cohorts are Poisson-sampled: a round that is redrawn because it breaks a limit is "
                "no longer a Poisson sample. Leave both out, or use sampling.kind = timer"
            )

    @classmethod
    def read(
        cls,
        file: Path,
        *,
        flags: Mapping[str, Mapping[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> TrainingSettings:
        """Settings of a TOML file; flags and variables DLM_FEDERATE_<TABLE>_<NAME> override them.

        Paths in the file are relative to its folder.

        Raises
            ConfigError   the file cannot be read, names an unknown table or setting, lacks one
                          without a default, or a value is out of bounds
            PrivacyError  a value that would leave the run without the guarantee it asks for
        """
        found = config.read_toml(file)
        environ = os.environ if environ is None else environ
        known = tuple(f"{PREFIX}_{name}_".upper() for name in _names())
        lost = sorted(v for v in environ if v.startswith(f"{PREFIX}_") and not v.startswith(known))
        if lost:
            raise ConfigError(
                f"unknown environment variable {', '.join(lost)}; expected "
                f"{PREFIX}_<TABLE>_<NAME>, with a table of {', '.join(_names())}"
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
            within   prefix of table names in the file, such as "federate."
        """
        tables = dict(zip(_names(), _TABLES, strict=True))
        unknown = sorted(set(found) - set(tables))
        if unknown:
            said = ", ".join(f"{name}{config.nearest(name, tables)}" for name in unknown)
            raise ConfigError(
                f"{file}: unknown table {within}{said}; the tables are {', '.join(tables)}"
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
        """The noise of a run that begins with these settings."""
        given = self.privacy.noise
        if self.privacy.mechanism == "none":
            return "none"
        if given == "auto":
            return "float" if self.run.simulation else "discrete"
        return given

    def binding(self) -> dict[str, Any]:
        """The settings that must be the same when a run resumes.

        Leaves out paths of files (their contents are compared) and settings that change no number.
        """
        found = dataclasses.asdict(self)
        for name in ("stop_after", "checkpoint_every", "evaluate_every"):
            del found["run"][name]
        del found["data"]["vocabulary"], found["data"]["held_out_tokens"], found["pretrain"]["text"]
        del found["data"]["public"], found["data"]["public_key"], found["pretrain"]["public"]
        if self.noise == "discrete":
            found["privacy"]["noise"] = self.noise
        else:  # as in runs from before there was a choice
            del found["privacy"]["noise"]
        if self.data.tokenizer == "whitespace":  # as in runs from before there was a choice
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
    """Settings of a table without a default or a given value."""
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
