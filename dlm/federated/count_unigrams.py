"""Counts words over rounds of users, from files to files: what `dlm unigrams` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlm.errors import ConfigError
from dlm.federated.collect import (
    Collection,
    folder_of,
    has_begun,
    make_sampler,
    write_release,
)
from dlm.federated.counts_file import WordCounts, read_counts
from dlm.federated.keys import Key
from dlm.federated.provenance import Provenance, content_digest
from dlm.federated.recorded import sidecar
from dlm.federated.report import PrivacyReport
from dlm.federated.sampling import check_population
from dlm.federated.signature import require_signed
from dlm.federated.unigrams import OovRate, RoundMetrics, UnigramConfig, oov_rate, read_whitelist
from dlm.federated.users import TOKENIZERS, UserDataset
from dlm.federated.words import record_or_word

DEFAULT_GOAL = 500


@dataclass(frozen=True)
class CollectionSettings:
    """What to count, of whom, and how privately: the options of `dlm unigrams`.

    Fields (unit; bound; default; meaning)
        clip              > 0; most that a user adds to a round (lambda); inf: true counts
        rounds            >= 1
        report_goal       users; >= 1; per round; 500 if neither it nor poisson is given
        noise_multiplier  > 0; noise of a round over lambda; without it there is no guarantee
        delta             0 < . < 1; of the guarantee; required with noise, otherwise not allowed
        max_part          rounds; >= 1; per user, enforced; required with noise
        min_sep           rounds; >= 0; between two participations of a user, enforced
        poisson           0 < . <= 1; each user's probability, instead of a report goal
        cap_words         how many words of a user to read
        tokenizer         "words" or "whitespace"
        public            who says that the list of words has no user's text
        public_key        file, PEM; the key that must have signed the list of words; not with
                          public
        test_fraction     0 <= . < 1; share of users to hold out for the OOV rate
        capacity          words; >= 1; 64,000; size of the vocabulary for the OOV rate
        seed              makes the run a simulation, which guarantees nothing
    """

    clip: float
    rounds: int
    report_goal: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    max_part: int | None = None
    min_sep: int | None = None
    poisson: float | None = None
    cap_words: int | None = None
    tokenizer: str = "words"
    public: str = ""
    public_key: Path | None = None
    test_fraction: float = 0.0
    capacity: int = 64_000
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) != (self.delta is None):
            raise ConfigError("give both --noise-multiplier and --delta, or neither")
        if self.noise_multiplier is not None and self.poisson is None and self.max_part is None:
            raise ConfigError(
                "noise needs --max-part, the enforced limit of rounds per user (1 is best if there "
                "are enough users), or --poisson"
            )
        if self.poisson is not None and (self.max_part is not None or self.min_sep is not None):
            raise ConfigError(
                "--poisson may draw any user in each round; leave out --max-part and --min-sep"
            )
        if self.poisson is not None and self.report_goal is not None:
            raise ConfigError(
                "--poisson draws rounds of varying size, but --report-goal sets their size; give "
                "only one"
            )
        if self.public and self.public_key is not None:
            raise ConfigError(
                "--public and --public-key were both given, but a list that somebody declares "
                "public has no record that could be signed; give only one"
            )
        for option, found, good, bounds in (
            ("--delta", self.delta, self.delta is None or 0 < self.delta < 1, "between 0 and 1"),
            (
                "--poisson",
                self.poisson,
                self.poisson is None or 0 < self.poisson <= 1,
                "above 0 and at most 1",
            ),
            (
                "--test-fraction",
                self.test_fraction,
                0 <= self.test_fraction < 1,
                "at least 0 and below 1",
            ),
            (
                "--max-part",
                self.max_part,
                self.max_part is None or self.max_part >= 1,
                "at least 1",
            ),
            ("--min-sep", self.min_sep, self.min_sep is None or self.min_sep >= 0, "at least 0"),
            ("--report-goal", self.report_goal, self.goal >= 1, "at least 1"),
            ("--capacity", self.capacity, self.capacity >= 1, "at least 1"),
            (
                "--tokenizer",
                self.tokenizer,
                self.tokenizer in TOKENIZERS,
                f"one of {', '.join(TOKENIZERS)}",
            ),
        ):
            if not good:
                raise ConfigError(f"{option} is {found}; expected {bounds}")
        _ = self.config  # raises for invalid settings

    @property
    def config(self) -> UnigramConfig:
        """The settings of the rounds."""
        return UnigramConfig(self.clip, self.rounds, self.noise_multiplier, self.cap_words)

    @property
    def goal(self) -> int:
        """Users per round, unless they are drawn by Poisson sampling."""
        return DEFAULT_GOAL if self.report_goal is None else self.report_goal

    @property
    def gap(self) -> int | None:
        """Least difference of the rounds of two participations of a user."""
        return None if self.min_sep is None else self.min_sep + 1

    @property
    def released(self) -> bool:
        """Whether the counts are a release: noised, and not simulated."""
        return self.noise_multiplier is not None and self.seed is None

    def check_users(self, users: int) -> bool:
        """Whether this many users are sure to fill the rounds; see `sampling.check_population`."""
        if self.gap is None and self.max_part is None:
            return True
        return check_population(
            users, self.goal, self.rounds, gap=self.gap or 1, max_part=self.max_part
        )


@dataclass(frozen=True)
class CountedUnigrams:
    """The result of `count_unigrams`.

    counts, report  as written
    held_out        number of held-out users
    oov             their out-of-vocabulary rate; None if they said no words
    """

    counts: WordCounts
    report: PrivacyReport
    held_out: int
    oov: OovRate | None


def list_record(
    whitelist: Path,
    content: bytes,
    settings: CollectionSettings,
    *,
    begun: bool,
    setting: str = "--public",
) -> Provenance | None:
    """The record of the list of words, or somebody's word that it is public.

    Args
        content  of the list
        begun    whether rounds were done with it
        setting  name of the setting for that word, for errors
    Raises
        PrivacyError  the counts should have a guarantee, but neither is given or the record has
                      none; the key has not signed the list
    """
    record = read_counts(whitelist, content).provenance if sidecar(whitelist).exists() else None
    if settings.public_key is not None:
        record = require_signed(whitelist, settings.public_key, content)
    return record_or_word(
        whitelist,
        "the list of words",
        record,
        by=settings.public,
        setting=setting,
        sha256=content_digest(content),
        promises=settings.released,
        simulated=settings.noise_multiplier is not None,
        begun=begun,
    )


def count_unigrams(
    open_users: Callable[[Path], UserDataset],
    whitelist: Path,
    output: Path,
    settings: CollectionSettings,
    *,
    data_name: str = "",
    progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[RoundMetrics], None] = lambda done: None,
) -> CountedUnigrams:
    """Counts users' words in rounds, and writes what `collect` says, beside `output`.

    Args
        open_users  gives the users, given a folder to sort their text into; only its owner can
                    read it, and it is removed at the end
        data_name   of the users' file, for the report
        progress    gets one line at a time about what happens
        on_round    called after each round, once it counts
    Raises
        ConfigError   a new run would replace a release; too few users
        PrivacyError  the list of words has no record with a guarantee, and nobody says that it is
                      public; the key has not signed it
    Guarantees
        stopped at any moment, the same call resumes after the last round that counts
    """
    split = TOKENIZERS[settings.tokenizer]
    content = whitelist.read_bytes()  # once: what is verified is what is counted
    record = list_record(whitelist, content, settings, begun=has_begun(output))
    with folder_of(output, released=settings.released) as folder:
        words = read_whitelist(whitelist, content)
        never = [word for word in words if split(word) != [word]]
        if never:
            progress(
                f"{len(never):,} of {len(words):,} words of the list can never match, because "
                f"--tokenizer {settings.tokenizer} does not produce them: {', '.join(never[:5])}"
                + (", ..." if len(never) > 5 else "")
            )
        everyone = open_users(folder.store)
        found = everyone.facts
        left_out = found.rows_without_user, found.users_without_text
        # With noise, nothing about users' text is shown without it, not even how much.
        how_much = f", {found.utterances:,} utterances, {found.words:,} words"
        progress(
            f"{found.users:,} users"
            + ("" if settings.released else how_much)
            + (f"; left out: {left_out[0]:,} rows, {left_out[1]:,} users" if any(left_out) else "")
        )
        train, test = everyone.split(settings.test_fraction, name="unigrams")
        key = Key.from_system() if settings.seed is None else Key.from_seed(settings.seed)
        sampler = make_sampler(
            len(train),
            key.fold("unigrams", "sampling"),
            report_goal=settings.goal,
            poisson=settings.poisson,
            gap=settings.gap,
            max_part=settings.max_part,
        )
        if not settings.check_users(len(train)):
            progress(
                f"{len(train):,} users may run out before the last round: they are drawn at "
                "random, and near the end too few may be allowed to take part again"
            )
        collection = Collection(
            train,
            words,
            settings.config,
            sampler,
            key,
            gap=settings.gap,
            max_part=settings.max_part,
            split=split,
            tokenizer=settings.tokenizer,
            folder=folder,
            list_record=record,
        )
        if collection.resumed:
            progress(f"resuming after round {collection.rounds_done} of {settings.rounds}")
        for metrics in collection.run():
            on_round(metrics)
        counts, report = write_release(
            collection,
            output,
            delta=settings.delta,
            held_out=len(test),
            at=datetime.now(UTC),
            data_name=data_name,
        )
        rate = None
        if len(test):
            rate = oov_rate(test, counts.words[: settings.capacity], split=split)
        folder.remove()
    return CountedUnigrams(counts, report, len(test), rate)
