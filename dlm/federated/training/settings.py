"""A run's settings: one frozen dataclass per table of `run.toml`, resolved together."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dlm import config
from dlm.config import about, check, like, setting
from dlm.errors import ConfigError, PrivacyError
from dlm.federated.counting.settings import TOKENIZER_NAMES
from dlm.federated.noise.make import NAMES as MECHANISMS
from dlm.federated.noise.mechanism import MOST_ROUNDS
from dlm.federated.run.sampling import Diurnal
from dlm.federated.training import presets
from dlm.federated.training.clip import AdaptiveClip
from dlm.federated.training.local import LocalConfig
from dlm.federated.training.rnn import RnnConfig
from dlm.federated.training.rounds import OptimizerConfig, ReleaseConfig
from dlm.federated.words import PIECES_SUFFIX

REAL = -1
# The prefix is not just DLM, since a server's own settings are named DLM_SERVER_<NAME>.
PREFIX = "DLM_FEDERATE"


@dataclass(frozen=True)
class RunSettings:
    """[run]"""

    rounds: int = field(
        metadata=about(
            "Number of rounds; noise and accounting are planned for this many.",
            low=1,
            high=MOST_ROUNDS,
        )
    )
    seed: int = setting(
        REAL,
        "A seed makes the run a simulation, which is not private; -1 draws every key from the "
        "operating system and never stores it.",
        low=REAL,
    )
    checkpoint_every: int = setting(
        1, "Rounds between checkpoints; 1 unless the run is a simulation.", low=1
    )
    evaluate_every: int = setting(
        20, "Rounds between evaluations on held-out users; 0: never.", low=0
    )
    stop_after: int = setting(
        0, "Round after which the run ends early; 0: none. Can change on resuming.", low=0
    )

    def __post_init__(self) -> None:
        check("run", self)
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
    """[data]"""

    vocabulary: Path = field(
        metadata=about(
            "File with one word per line, or counts of users' words with their record (`dlm "
            "unigrams`), whose privacy cost is added; ids start at 3. Or, if its name ends in "
            ".model, wordpieces (`dlm pieces`) with their record.",
            why="With wordpieces, accuracy and perplexity are per piece.",
        )
    )
    public: str = setting(
        "",
        "Name of the person who attests that a vocabulary without a record has no user's text.",
        why="A run with a guarantee needs a record or this name, which the report shows. Can "
        "change on resuming.",
    )
    public_key: str = setting(
        "",
        "PEM file of the Ed25519 key that must have signed the vocabulary (`dlm privacy sign`).",
        why="Without a key, the record stays unverified. Can change on resuming.",
    )
    vocabulary_size: int = setting(
        0, "How many words of the file to use, from its start; 0 for all.", low=0
    )
    tokenizer: str = setting(
        "whitespace",
        "How users' and public text is split: at white space, or into words of lower-case letters "
        "and apostrophes.",
        one_of=TOKENIZER_NAMES,
        why="Use the same as for the vocabulary, or its words will not be found.",
    )
    max_tokens: int = setting(
        1600, "Tokens to use from each user; the rest are never read.", low=1, why="DPF."
    )
    held_out: float = setting(
        0.0,
        "Share of users whose text is only used to evaluate, without noise.",
        low=0,
        below=1,
        why="No guarantee covers them, and they must have agreed.",
    )
    held_out_tokens: int = setting(
        100_000, "Maximum text of held-out users that an evaluation reads.", unit="tokens", low=1
    )

    def __post_init__(self) -> None:
        check("data", self)
        if self.has_pieces and self.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary_size is {self.vocabulary_size}, but {self.vocabulary} holds "
                "wordpieces, all of which are used; leave vocabulary_size out, or make fewer "
                "pieces with dlm pieces"
            )

    @property
    def has_pieces(self) -> bool:
        return self.vocabulary.suffix == PIECES_SUFFIX


@dataclass(frozen=True)
class ModelSettings:
    """[model]: the name of a paper's network, or the settings of any network."""

    preset: str = setting(
        "",
        f"A paper's network ({', '.join(presets.PRESETS)}), with this vocabulary; or empty, to "
        "use the settings below.",
    )
    embedding_size: int = like(RnnConfig, "embedding_size", 96)
    hidden_size: int = like(RnnConfig, "hidden_size", 670)
    layers: int = like(RnnConfig, "layers")
    cell: Literal["cifg", "lstm"] = like(RnnConfig, "cell")
    recurrence: Literal["projected", "hidden"] = like(RnnConfig, "recurrence")
    groups: int = like(RnnConfig, "groups")
    residual: bool = like(RnnConfig, "residual", False)
    layer_norm: Literal["gates", "output", "none"] = like(RnnConfig, "layer_norm", "none")
    tied: bool = like(RnnConfig, "tied")
    output_bias: bool = like(RnnConfig, "output_bias")
    projection_bias: bool = like(RnnConfig, "projection_bias")
    unit_norm: bool = like(RnnConfig, "unit_norm")

    def network(self, vocab_size: int) -> RnnConfig:
        if self.preset:
            return dataclasses.replace(presets.preset(self.preset), vocab_size=vocab_size)
        values = dataclasses.asdict(self)
        del values["preset"]
        return RnnConfig(vocab_size, **values)


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy]"""

    clip_norm: float = field(
        metadata=about(
            "Largest L2 norm of an update; infinite only without noise.", low=0, high=math.inf
        )
    )
    mechanism: str = setting(
        "none", "How noise is correlated between rounds.", one_of=("none", *MECHANISMS)
    )
    noise_multiplier: float = setting(
        0.0, "Standard deviation of the independent draws over the clip norm.", low=0
    )
    estimator: Literal["fixed", "clipped"] = setting(
        "fixed", "Denominator of the average: fixed (f~_f) or clipped (f~_c)."
    )
    denominator: float = setting(
        0.0, "Divisor of the sum; 0 for the report goal, or q times the users.", unit="users", low=0
    )
    gap: int = setting(
        1,
        "Minimum number of rounds from one participation of a user to the next (MinS + 1), "
        "enforced.",
        unit="rounds",
        low=1,
    )
    max_participations: int = setting(
        0, "Maximum participations of a user, enforced; 0: limited only by the gap.", low=0
    )
    delta: float = setting(1e-6, "Delta for which epsilon is reported.", above=0, below=1)
    restarts: tuple[int, ...] = setting((), "Rounds before which tree-restart starts a new tree.")
    bands: int = setting(0, "Bands of bandmf, bandtoep and bandfhu; 0 for the gap.", low=0)
    buffers: int = setting(4, "Buffers of blt.", low=1)
    error: Literal["max", "mean"] = setting("max", "The loss that blt is optimised for.")
    schedule: tuple[tuple[int, float], ...] = setting(
        (), "[round, clip norm] pairs, with the same noise multiplier."
    )
    adaptive: bool = setting(False, "The clip norm follows the `quantile` of the updates' norms.")
    quantile: float = like(AdaptiveClip, "quantile")
    clip_learning_rate: float = like(AdaptiveClip, "learning_rate")
    count_stddev: float = like(AdaptiveClip, "count_stddev")
    first_restart: int = like(AdaptiveClip, "first_restart")
    restart_every: int = like(AdaptiveClip, "restart_every")

    def __post_init__(self) -> None:
        check("privacy", self)
        if (self.mechanism == "none") != (self.noise_multiplier == 0):
            raise PrivacyError(
                f"privacy.mechanism is {self.mechanism!r} with a noise multiplier of "
                f"{self.noise_multiplier}; give both a mechanism and a multiplier, or neither. "
                "Without noise a run has no guarantee"
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
        """Returns how sums are released for `users_a_round` expected users per round."""
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
    """[sampling]"""

    kind: Literal["timer", "poisson", "fixed"] = setting(
        "timer",
        "timer: available users whose timer has run out (GDP); poisson: each user with probability "
        "q (DPF); fixed: `report_goal` users at random.",
    )
    report_goal: int = setting(100, "Users per round (timer, fixed).", low=1)
    q: float = setting(0.01, "Probability of each user (poisson).", above=0, high=1)
    timer_s: float = setting(
        0.0, "Time until a user may take part again (timer).", unit="seconds", low=0
    )
    round_s: float = setting(60.0, "Assumed duration of a round (timer).", unit="seconds", above=0)
    low: float = setting(
        1.0,
        "Share of devices that are idle, charging and connected at noon, local time (timer); a "
        "run begins at midnight.",
        low=0,
        high=1,
    )
    high: float = setting(1.0, "Share of available devices at midnight.", low=0, high=1)
    zones: str = setting(
        "0:1",
        "Time zones (timer): HOURS:SHARE, ..., each an offset from the run's clock and a share of "
        'the users, such as "0:0.5, -8:0.5"; shares sum to 1.',
    )

    def __post_init__(self) -> None:
        check("sampling", self)
        days = self.diurnal()
        if days is not None and self.kind != "timer":
            raise ConfigError(
                "sampling.low, .high and .zones apply only to sampling.kind = timer, but the kind "
                f"is {self.kind}; leave these three out, or use timer"
            )

    def diurnal(self) -> Diurnal | None:
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
        return self.q * users if self.kind == "poisson" else float(self.report_goal)

    def most_users(self, users: int) -> int:
        """The maximum number of users in a round. For Poisson sampling, this is the number of all
        users, since a draw may have any size."""
        return users if self.kind == "poisson" else self.report_goal


@dataclass(frozen=True)
class AggregationSettings:
    """[aggregation]"""

    secure: bool = setting(
        False, "Encode updates and add them modulo M, as secure aggregation does."
    )
    scale: float = setting(
        1000.0, "Scale before updates are rounded: s of GDP Algorithm 2.", above=0
    )

    def __post_init__(self) -> None:
        check("aggregation", self)


@dataclass(frozen=True)
class PretrainSettings:
    """[pretrain] (GDP 2.3)"""

    text: str = setting("", "File of public text, one utterance per line (.zst too).")
    public: str = setting(
        "", "Name of the person who attests that the file has no user's text, as in [data]."
    )
    steps: int = setting(0, "Steps of Adam.", low=0)
    batch_size: int = setting(64, "Rows of a batch.", low=1)
    unroll: int = setting(20, "Length of backpropagation through time.", unit="tokens", low=1)
    learning_rate: float = setting(0.002, "Learning rate of Adam.", above=0)

    def __post_init__(self) -> None:
        check("pretrain", self)
        if bool(self.text) != bool(self.steps):
            raise ConfigError("give both pretrain.text and pretrain.steps, or neither")


@dataclass(frozen=True)
class TrainingSettings:
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
        if self.sampling.kind == "poisson" and (privacy.gap > 1 or privacy.max_participations):
            raise PrivacyError(
                f"privacy.gap is {privacy.gap} and privacy.max_participations is "
                f"{privacy.max_participations}, but cohorts are Poisson-sampled: a round that must "
                "be redrawn because it exceeds a limit is no longer a Poisson sample. Leave both "
                "limits out, or use sampling.kind = timer"
            )

    @classmethod
    def read(
        cls,
        file: Path,
        *,
        flags: Mapping[str, Mapping[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> TrainingSettings:
        """Reads a TOML file; flags and variables DLM_FEDERATE_<TABLE>_<NAME> override its values.

        Paths in the file are relative to its folder.

        Raises
            ConfigError   the file cannot be read, names an unknown table or setting, or lacks a
                          setting without a default; or a value is out of bounds
            PrivacyError  a value would leave the run without the guarantee that it asks for
        """
        found = config.read_toml(file)
        environ = os.environ if environ is None else environ
        known = tuple(f"{PREFIX}_{name}_".upper() for name in _names())
        lost = sorted(v for v in environ if v.startswith(f"{PREFIX}_") and not v.startswith(known))
        if lost:
            raise ConfigError(
                f"unknown environment variable {', '.join(lost)}; expected "
                f"{PREFIX}_<TABLE>_<NAME>, where <TABLE> is one of {', '.join(_names())}"
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
        """Like `read`, from a file's parsed tables; messages put `within` before table names."""
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
            values[name] = config.resolve(
                kind,
                name,
                flags=(flags or {}).get(name),
                file=file,
                found=found,
                tables=tables,
                environ=environ,
                prefix=PREFIX,
                within=within,
            )
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

    def binding(self) -> dict[str, Any]:
        """Returns the settings that may not change when a run resumes. It leaves out file paths,
        since contents are compared, and settings that do not affect the result."""
        found = dataclasses.asdict(self)
        for name in ("stop_after", "checkpoint_every", "evaluate_every"):
            del found["run"][name]
        del found["data"]["vocabulary"], found["data"]["held_out_tokens"], found["pretrain"]["text"]
        del found["data"]["public"], found["data"]["public_key"], found["pretrain"]["public"]
        return found


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(TrainingSettings)]


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
