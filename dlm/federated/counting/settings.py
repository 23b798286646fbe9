"""Settings of counting words over rounds of users."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from dlm.config import about, check, setting
from dlm.errors import ConfigError

# How text is split into words; `users.TOKENIZERS` has the functions.
TOKENIZER_NAMES = ("words", "whitespace")
# What to do with rows without a user id and users without text.
MISSING = ("refuse", "count")
DEFAULT_GOAL = 500


@dataclass(frozen=True)
class UserTextSettings:
    """How users' text is read: options of the commands that read it."""

    missing: str = setting(
        "refuse",
        "For rows without a user id and users without text: refuse, or count them and continue.",
        metavar="POLICY",
        one_of=MISSING,
    )
    user_column: str = setting("user_id", "Column of user ids.", metavar="NAME")
    text_column: str = setting("utterance", "Text column.", metavar="NAME")

    def __post_init__(self) -> None:
        check("users", self)


@dataclass(frozen=True)
class UnigramConfig:
    """The rounds of a collection; `clip` is FNG's lambda."""

    clip: float = field(
        metadata=about(
            "Maximum that a user contributes to a round; inf counts exactly.",
            name="lambda",
            metavar="LAMBDA",
            above=0,
            high=math.inf,
            why="1 gives every device the same weight.",
        )
    )
    rounds: int = field(metadata=about("Number of rounds.", low=1))
    noise_multiplier: float | None = setting(
        None,
        "Noise per round, as a multiple of lambda; without noise there is no guarantee.",
        above=0,
        why="It is the standard deviation of the noise in each word's count of one round.",
    )
    cap_words: int | None = setting(
        None, "Use only the first N words of each user.", low=1, metavar="N"
    )
    window: int = setting(50, "Rounds of the moving average of new words.", low=1)

    def __post_init__(self) -> None:
        check("unigrams", self)
        if self.noise_multiplier is not None and math.isinf(self.clip):
            raise ConfigError(
                "lambda is infinite; noise can hide what a user adds only if lambda is finite"
            )

    @property
    def sensitivity(self) -> float:
        """The maximum L2 norm of a user's change to a round's sum: lambda, since clipped counts sum
        to at most lambda; a single word that is typed often enough reaches the maximum."""
        return self.clip

    @property
    def noise_std(self) -> float:
        return 0.0 if self.noise_multiplier is None else self.noise_multiplier * self.clip


@dataclass(frozen=True)
class CollectionSettings(UnigramConfig):
    """What to count, for which users, and how privately: the options of `dlm unigrams`."""

    report_goal: int | None = setting(
        None,
        f"Users per round, {DEFAULT_GOAL} unless Poisson sampling draws them.",
        low=1,
    )
    delta: float | None = setting(
        None,
        "Delta of the guarantee; required with noise.",
        above=0,
        below=1,
        why="It is not allowed without noise.",
    )
    max_participations: int | None = setting(
        None, "Maximum participations per user, enforced; required with noise.", low=1
    )
    min_separation: int | None = setting(
        None, "Minimum rounds between a user's participations (MinS), enforced.", low=0
    )
    poisson: float | None = setting(
        None,
        "Sample each user with this probability, instead of a report goal.",
        above=0,
        high=1,
    )
    tokenizer: str = setting(
        "words",
        "How text is split: words (lower-case letters and apostrophes), or whitespace.",
        one_of=TOKENIZER_NAMES,
    )
    public: str = setting(
        "",
        "Name of the person who attests that the list of words comes from no user's text.",
        name="public_attested_by",
        metavar="NAME",
    )
    public_key: Path | None = setting(
        None,
        "PEM file of the key that must have signed the list of words; not together with "
        "--public-attested-by.",
        metavar="FILE",
    )
    test_fraction: float = setting(
        0.0, "Share of users to hold out, for the OOV rate.", low=0, below=1
    )
    capacity: int = setting(
        64_000, "Size of the vocabulary for which to report the OOV rate.", low=1
    )
    seed: int | None = setting(None, "Simulate with noise from this seed; gives no guarantee.")

    def __post_init__(self) -> None:
        super().__post_init__()
        noised, limited = self.noise_multiplier is not None, self.max_participations is not None
        if noised != (self.delta is not None):
            raise ConfigError("give both --noise-multiplier and --delta, or neither")
        if noised and self.poisson is None and not limited:
            raise ConfigError(
                "noise needs --max-participations, the enforced limit of rounds per user (1 is "
                "best if there are enough users), or --poisson"
            )
        if self.poisson is not None and (limited or self.min_separation is not None):
            raise ConfigError(
                "--poisson may draw any user in each round; leave out --max-participations and "
                "--min-separation"
            )
        if self.poisson is not None and self.report_goal is not None:
            raise ConfigError(
                "--poisson draws rounds of varying size, but --report-goal sets their size; give "
                "only one"
            )
        if self.public and self.public_key is not None:
            raise ConfigError(
                "--public-attested-by and --public-key were both given, but a list attested as "
                "public has no record whose signature could be checked; give only one"
            )

    @property
    def config(self) -> UnigramConfig:
        return UnigramConfig(
            self.clip, self.rounds, self.noise_multiplier, self.cap_words, self.window
        )

    @property
    def goal(self) -> int:
        return DEFAULT_GOAL if self.report_goal is None else self.report_goal

    @property
    def gap(self) -> int | None:
        """The minimum number of rounds from one participation of a user to the next."""
        return None if self.min_separation is None else self.min_separation + 1

    @property
    def released(self) -> bool:
        """Whether the counts are a release: noised, and not simulated."""
        return self.noise_multiplier is not None and self.seed is None
