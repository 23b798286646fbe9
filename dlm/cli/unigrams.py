"""`dlm unigrams`: how often people use each word of a list, counted over rounds of users."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.federated.unigrams import OovRate, RoundMetrics

TOLD_EVERY_S = 5.0
DEFAULT_GOAL = 500


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
    has a record of its own (as counts have), or somebody says by name that it is public.

    Example: dlm unigrams users.parquet --whitelist words.txt --public "ACME research" --lambda 100
    --rounds 20 --max-part 1 --noise-multiplier 1.0 --delta 1e-6 --output counts.tsv
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.federated.collect import Collection, folder_of, make_sampler, write_release
    from dlm.federated.counts_file import read_counts
    from dlm.federated.keys import Key
    from dlm.federated.provenance import file_digest
    from dlm.federated.recorded import sidecar
    from dlm.federated.sampling import check_population
    from dlm.federated.unigrams import UnigramConfig, oov_rate, read_whitelist
    from dlm.federated.users import TOKENIZERS, UserDataset
    from dlm.federated.words import record_or_word
    from dlm.resources import parse_size

    if (noise_multiplier is None) != (delta is None):
        raise ConfigError("--noise-multiplier and --delta are given together, or neither")
    if noise_multiplier is not None and poisson is None and max_part is None:
        raise ConfigError(
            "with noise give --max-part, the most rounds of a user, which is then enforced (1 is "
            "best where there are users enough), or --poisson"
        )
    if poisson is not None and (max_part is not None or min_sep is not None):
        raise ConfigError("--poisson draws every user each time; it takes no --max-part, --min-sep")
    if poisson is not None and report_goal is not None:
        raise ConfigError(
            "--poisson draws rounds of varying size, and --report-goal asks for one size; give one"
        )
    goal = DEFAULT_GOAL if report_goal is None else report_goal
    # Whatever is refused is refused before users' text is looked at.
    _check_values(delta, poisson, test_fraction, max_part, min_sep, goal, capacity, missing)
    memory_bytes = parse_size(memory)
    if memory_bytes < 1 << 20:
        raise ConfigError(f"--memory is {memory}; sorting takes at least 1M")
    if tokenizer not in TOKENIZERS:
        raise ConfigError(f"--tokenizer is one of {', '.join(TOKENIZERS)}; found {tokenizer}")
    try:
        bound = float(clip)
    except ValueError as exc:
        raise ConfigError(f"--lambda is a number over 0 or inf; found {clip}") from exc
    check_reads("USERS", users, folders=True)
    check_reads("--whitelist", whitelist)
    check_writes("--output", output)
    config = UnigramConfig(bound, rounds, noise_multiplier, cap_words)
    split = TOKENIZERS[tokenizer]
    released = noise_multiplier is not None and seed is None
    # The time of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=not released)
    gap = None if min_sep is None else min_sep + 1
    list_record = record_or_word(
        whitelist,
        "the list of words",
        read_counts(whitelist).provenance if sidecar(whitelist).exists() else None,
        by=public,
        setting="--public",
        sha256=file_digest(whitelist),
        promises=released,
        simulated=noise_multiplier is not None,
    )
    with folder_of(output, released=released) as folder:
        words = read_whitelist(whitelist)
        never = sum(split(word) != [word] for word in words)
        if never:
            tell(
                f"{never:,} of {len(words):,} words of the list are never met by --tokenizer "
                f"{tokenizer}"
            )
        everyone = UserDataset.open(
            users,
            user_column=user_column,
            text_column=text_column,
            missing=missing,
            memory_bytes=memory_bytes,
            store=folder.store,
        )
        found = everyone.facts
        left_out = found.rows_without_user, found.users_without_text
        # With noise nothing that users wrote is told without it, how much neither.
        how_much = f", {found.utterances:,} utterances, {found.words:,} words"
        tell(
            f"{found.users:,} users"
            + ("" if released else how_much)
            + (f"; left out: {left_out[0]:,} rows, {left_out[1]:,} users" if any(left_out) else "")
        )
        train, test = everyone.split(test_fraction, name="unigrams")
        key = Key.from_system() if seed is None else Key.from_seed(seed)
        sampler = make_sampler(
            len(train),
            key.fold("unigrams", "sampling"),
            report_goal=goal,
            poisson=poisson,
            gap=gap,
            max_part=max_part,
        )
        if (gap is not None or max_part is not None) and not check_population(
            len(train), goal, rounds, gap=gap or 1, max_part=max_part
        ):
            tell(
                f"{len(train):,} users may run out before the last round: they are drawn at "
                "random, and towards the end too few may be left who may take part again"
            )
        collection = Collection(
            train,
            words,
            config,
            sampler,
            key,
            gap=gap,
            max_part=max_part,
            split=split,
            tokenizer=tokenizer,
            folder=folder,
            list_record=list_record,
        )
        if collection.resumed:
            tell(f"going on after round {collection.rounds_done} of {rounds}")
        last_s = 0.0
        for metrics in collection.run():
            now_s = time.monotonic()
            if metrics.z is not None or metrics.round == rounds or now_s - last_s > TOLD_EVERY_S:
                last_s = now_s
                tell(_line(metrics, rounds))
        counts, report = write_release(
            collection,
            output,
            delta=delta,
            held_out=len(test),
            at=datetime.now(UTC),
            data_name=users.name,
        )
        print(f"{len(counts.words):,} words in {output}")
        print(report.statement())
        rate = oov_rate(test, counts.words[:capacity], split=split) if len(test) else None
        folder.remove()
    tell(f"done: {output}")
    if len(test):
        _print_oov(rate, min(capacity, len(counts.words)))


def _check_values(
    delta: float | None,
    poisson: float | None,
    test_fraction: float,
    max_part: int | None,
    min_sep: int | None,
    report_goal: int,
    capacity: int,
    missing: str,
) -> None:
    """Refuses values that are out of bounds, by the names of the command line."""
    from dlm.errors import ConfigError
    from dlm.federated.users import MISSING

    for option, found, good, bounds in (
        ("--delta", delta, delta is None or 0 < delta < 1, "between 0 and 1"),
        ("--poisson", poisson, poisson is None or 0 < poisson <= 1, "over 0 and at most 1"),
        ("--test-fraction", test_fraction, 0 <= test_fraction < 1, "at least 0 and below 1"),
        ("--max-part", max_part, max_part is None or max_part >= 1, "at least 1"),
        ("--min-sep", min_sep, min_sep is None or min_sep >= 0, "at least 0"),
        ("--report-goal", report_goal, report_goal >= 1, "at least 1"),
        ("--capacity", capacity, capacity >= 1, "at least 1"),
        ("--missing", missing, missing in MISSING, f"one of {', '.join(MISSING)}"),
    ):
        if not good:
            raise ConfigError(f"{option} is {found}; it must be {bounds}")


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
