"""`dlm unigrams`: how often people use each word of a list, counted over rounds of users."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer
from dlm.cli.records import PublicKey

if TYPE_CHECKING:
    from dlm.federated.unigrams import OovRate, RoundMetrics

TOLD_EVERY_S = 5.0


def unigrams(
    users: Annotated[
        Path, typer.Argument(help="Users' text: .parquet or TSV, plain, .zst or .gz; by user_id.")
    ],
    whitelist: Annotated[
        Path, typer.Option("--whitelist", help="List of words that are counted, one per line.")
    ],
    clip: Annotated[
        str,
        typer.Option("--lambda", help="Most that a user adds to a round; inf takes true counts."),
    ],
    rounds: Annotated[int, typer.Option(help="Rounds of users.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="TSV of words and counts.")],
    report_goal: Annotated[
        int | None, typer.Option(help="Users of a round; 500 if not given.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise of a round over lambda; without it nothing is guaranteed."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of the guarantee, with noise.")] = None,
    max_part: Annotated[
        int | None, typer.Option(help="Most rounds of a user, enforced; needed with noise.")
    ] = None,
    min_sep: Annotated[
        int | None, typer.Option(help="Least rounds between two of a user (MinS), enforced.")
    ] = None,
    poisson: Annotated[
        float | None,
        typer.Option(help="Draw each user with this probability instead of a report goal."),
    ] = None,
    cap_words: Annotated[
        int | None, typer.Option(help="Words of a user that are looked at.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="words: lower case, letters and apostrophes; or whitespace.")
    ] = "words",
    public: Annotated[
        str, typer.Option(help="Who says that no user's text is in the list of words.")
    ] = "",
    public_key: PublicKey = None,
    missing: Annotated[
        str, typer.Option(help="Rows without id, users without text: refuse, or count and go on.")
    ] = "refuse",
    user_column: Annotated[str, typer.Option(help="Name of the column of ids.")] = "user_id",
    text_column: Annotated[str, typer.Option(help="Name of the column of text.")] = "utterance",
    test_fraction: Annotated[
        float, typer.Option(help="Share of the users to keep out, for the OOV rate.")
    ] = 0.0,
    capacity: Annotated[
        int, typer.Option(help="Words of the vocabulary that the OOV rate is of.")
    ] = 64_000,
    seed: Annotated[
        int | None, typer.Option(help="Simulate: draw from this seed; guarantees nothing.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Limit while users are sorted.")] = "256M",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the rounds.")] = False,
) -> None:
    """Count how often people use the words of a list.

    Beside the counts stand who took part (.ledger.json), the privacy report (.report.md,
    .report.json), the record that whatever is built from them inherits (.provenance.json) and the
    journal of its rounds (.metrics.jsonl). If a run is interrupted, the same command goes on where
    it was; until then the folder .work holds it, with users' text. With noise, the list of words
    has a record of its own (as counts have), or somebody says by name that it is public. With
    --public-key, a list that this key has not signed (dlm privacy sign) is refused.

    Example: dlm unigrams users.parquet --whitelist words.txt --public "ACME research" --lambda 100
    --rounds 20 --max-part 1 --noise-multiplier 1.0 --delta 1e-6 --output counts.tsv
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.federated.count_unigrams import CollectionSettings, count_unigrams
    from dlm.federated.users import MISSING, UserDataset
    from dlm.resources import parse_size

    # Whatever is refused is refused before users' text is looked at.
    try:
        bound = float(clip)
    except ValueError as exc:
        raise ConfigError(f"--lambda is a number over 0 or inf; found {clip}") from exc
    settings = CollectionSettings(
        clip=bound,
        rounds=rounds,
        report_goal=report_goal,
        noise_multiplier=noise_multiplier,
        delta=delta,
        max_part=max_part,
        min_sep=min_sep,
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
        raise ConfigError(f"--missing is {missing}; it must be one of {', '.join(MISSING)}")
    memory_bytes = parse_size(memory)
    if memory_bytes < 1 << 20:
        raise ConfigError(f"--memory is {memory}; sorting takes at least 1M")
    check_reads("USERS", users, folders=True)
    check_reads("--whitelist", whitelist)
    check_writes("--output", output)
    # The time of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=not settings.released)
    last_s = 0.0

    def on_round(metrics: RoundMetrics) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if metrics.z is not None or metrics.round == rounds or now_s - last_s > TOLD_EVERY_S:
            last_s = now_s
            tell(_line(metrics, rounds))

    done = count_unigrams(
        lambda store: UserDataset.open(
            users,
            user_column=user_column,
            text_column=text_column,
            missing=missing,
            memory_bytes=memory_bytes,
            store=store,
        ),
        whitelist,
        output,
        settings,
        data_name=users.name,
        progress=tell,
        on_round=on_round,
    )
    print(f"{len(done.counts.words):,} words in {output}")
    print(done.report.statement())
    tell(f"done: {output}")
    if done.held_out:
        _print_oov(done.oov, min(capacity, len(done.counts.words)))


def _line(metrics: RoundMetrics, rounds: int) -> str:
    between = metrics.rounds_between_new
    rare = (
        "none new of late" if math.isinf(between) else f"something new every {between:.1f} rounds"
    )
    text = f"round {metrics.round}/{rounds}: {metrics.words_seen:,} words seen, {rare}"
    return text if metrics.z is None else f"{text}, Z {metrics.z:+.4g}"


def _print_oov(rate: OovRate | None, words: int) -> None:
    """OOV rate of the users that were kept out, over all words and as a mean over users."""
    if rate is None:
        print("OOV rate: the users kept out said no words")
        return
    print(
        f"OOV rate of {rate.users:,} users kept out, {words:,} words: {rate.of_words:.3f} % of "
        f"words, {rate.of_users:.3f} +- {rate.error:.3f} % a user (not covered by any guarantee)"
    )
