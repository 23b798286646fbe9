"""`dlm unigrams`: counts how often users use each word of a list, over rounds of users."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json, Missing, Quiet, UserColumn, Users, UserTextColumn, option
from dlm.cli.progress import stage_printer
from dlm.cli.records import PublicKey
from dlm.federated.counting.settings import MISSING, CollectionSettings
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.federated.counting.count_unigrams import CountedUnigrams
    from dlm.federated.counting.unigrams import OovRate, RoundMetrics

REPORT_INTERVAL_S = 5.0

Wordlist = Annotated[
    Path, typer.Option("--wordlist", metavar="FILE", help="Words to count, one per line.")
]
Clip = Annotated[float, option(CollectionSettings, "clip", metavar="LAMBDA")]
Rounds = Annotated[int, option(CollectionSettings, "rounds")]
CountsFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="TSV to write: word, count.")
]
NoiseMultiplier = Annotated[float | None, option(CollectionSettings, "noise_multiplier")]
Delta = Annotated[float | None, option(CollectionSettings, "delta")]
MaxParticipations = Annotated[int | None, option(CollectionSettings, "max_participations")]
MinSeparation = Annotated[int | None, option(CollectionSettings, "min_separation")]
CapWords = Annotated[int | None, option(CollectionSettings, "cap_words", metavar="N")]
Tokenizer = Annotated[str, option(CollectionSettings, "tokenizer")]
Public = Annotated[str, option(CollectionSettings, "public", metavar="NAME")]
Seed = Annotated[int | None, option(CollectionSettings, "seed")]


def unigrams(
    users: Users,
    wordlist: Wordlist,
    clip: Clip,
    rounds: Rounds,
    output: CountsFile,
    report_goal: Annotated[int | None, option(CollectionSettings, "report_goal")] = None,
    noise_multiplier: NoiseMultiplier = None,
    delta: Delta = None,
    max_participations: MaxParticipations = None,
    min_separation: MinSeparation = None,
    poisson: Annotated[float | None, option(CollectionSettings, "poisson")] = None,
    cap_words: CapWords = None,
    tokenizer: Tokenizer = CollectionSettings.tokenizer,
    public: Public = "",
    public_key: PublicKey = None,
    missing: Missing = "refuse",
    user_column: UserColumn = "user_id",
    text_column: UserTextColumn = "utterance",
    test_fraction: Annotated[float, option(CollectionSettings, "test_fraction")] = 0.0,
    capacity: Annotated[int, option(CollectionSettings, "capacity")] = CollectionSettings.capacity,
    seed: Seed = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory limit while sorting users.")
    ] = "256M",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count how often users use the words of a list.

    Next to the counts, the command writes who took part (.ledger.json), the privacy report
    (.privacy.md, .privacy.json), the record that everything built from the counts inherits
    (.provenance.json) and the journal of the rounds (.metrics.jsonl). If the run is interrupted,
    the same command resumes it; until it is done, the folder .work holds users' text. With noise,
    the word list needs its own privacy record, or --public-attested-by NAME must vouch for it. With
    --public-key, that key must have signed the list (dlm privacy sign).

    Examples:
        dlm unigrams users.parquet --wordlist words.txt \\
            --public-attested-by "ACME research" \\
            --lambda 100 --rounds 20 --max-participations 1 --noise-multiplier 1.0 \\
            --delta 1e-6 --output counts.tsv
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.federated.counting.count_unigrams import count_unigrams
    from dlm.federated.users import UserDataset
    from dlm.resources import parse_size

    # Refuse before users' text is read.
    settings = CollectionSettings(
        clip=clip,
        rounds=rounds,
        report_goal=report_goal,
        noise_multiplier=noise_multiplier,
        delta=delta,
        max_participations=max_participations,
        min_separation=min_separation,
        poisson=poisson,
        cap_words=cap_words,
        tokenizer=tokenizer,
        public=public,
        public_key=public_key,
        test_fraction=test_fraction,
        capacity=capacity,
        seed=seed,
    )
    if missing not in MISSING:
        raise ConfigError(f"--missing is {missing}; expected one of {', '.join(MISSING)}")
    memory_bytes = parse_size(memory)
    if memory_bytes < 1 << 20:
        raise ConfigError(f"--memory is {memory}; sorting needs at least 1M")
    check_reads("USERS", users, folders=True)
    check_reads("--wordlist", wordlist)
    check_writes("--output", output)
    # The time of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=not settings.released)
    done = count_unigrams(
        lambda store: UserDataset.open(
            users,
            user_column=user_column,
            text_column=text_column,
            missing=missing,
            memory_bytes=memory_bytes,
            store=store,
        ),
        wordlist,
        output,
        settings,
        data_name=users.name,
        progress=tell,
        on_round=count_teller(tell, rounds),
    )
    tell(f"done: {output}")
    print_counted(done, output, capacity, as_json=as_json)


def count_teller(tell: Callable[[str], None], rounds: int) -> Callable[[RoundMetrics], None]:
    """Tells some of the rounds, and those with a result."""
    last_s = 0.0

    def on_round(metrics: RoundMetrics) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if metrics.z is not None or metrics.round == rounds or now_s - last_s > REPORT_INTERVAL_S:
            last_s = now_s
            tell(_line(metrics, rounds))

    return on_round


def print_counted(done: CountedUnigrams, output: Path, capacity: int, *, as_json: bool) -> None:
    if as_json:
        rate = done.oov
        print_json(
            {
                "output": str(output),
                "words": len(done.counts.words),
                "privacy": done.report.statement(),
                "held_out": None if rate is None else dataclasses.asdict(rate),
            }
        )
        return
    words = len(done.counts.words)
    print(f"{words:,} word{'s' * (words != 1)} in {output}")
    print(done.report.statement())
    if done.held_out:
        _print_oov(done.oov, min(capacity, len(done.counts.words)))


def _line(metrics: RoundMetrics, rounds: int) -> str:
    between = metrics.rounds_between_new
    rare = "none new lately" if math.isinf(between) else f"a new one every {between:.1f} rounds"
    text = f"round {metrics.round}/{rounds}: {counted(metrics.words_seen, 'word')} seen, {rare}"
    return text if metrics.z is None else f"{text}, Z {metrics.z:+.4g}"


def _print_oov(rate: OovRate | None, words: int) -> None:
    """OOV rate of the held-out users, over all words and as a mean over users."""
    if rate is None:
        print("OOV rate: the held-out users have no words")
        return
    print(
        f"OOV rate of {rate.users:,} held-out users, {counted(words, 'word')}: "
        f"{rate.of_words:.3f} % of "
        f"words, {rate.of_users:.3f} +- {rate.error:.3f} % per user (not covered by any guarantee)"
    )
