"""Counts the words of users' text over rounds, and writes the counts, for `dlm unigrams`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlm.federated.counting.collect import (
    Collection,
    folder_of,
    make_sampler,
    write_release,
)
from dlm.federated.counting.settings import CollectionSettings
from dlm.federated.counting.unigrams import OovRate, RoundMetrics, oov_rate, read_wordlist
from dlm.federated.keys import Key
from dlm.federated.report.report import PrivacyReport
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.run.sampling import check_population
from dlm.federated.users import TOKENIZERS, UserDataset
from dlm.record.counts_file import WordCounts, read_counts
from dlm.record.inputs import record_or_word
from dlm.record.provenance import Provenance, content_digest
from dlm.record.sidecar import sidecar
from dlm.record.signature import require_signed


@dataclass(frozen=True)
class CountedUnigrams:
    """The result of `count_unigrams`; `oov` is the OOV rate of held-out users, None if they used
    no words."""

    counts: WordCounts
    report: PrivacyReport
    held_out: int
    oov: OovRate | None


def check_users(settings: CollectionSettings, users: int) -> bool:
    """Whether `users` users are sure to fill the rounds; see `sampling.check_population`."""
    if settings.gap is None and settings.max_participations is None:
        return True
    return check_population(
        users,
        settings.goal,
        settings.rounds,
        gap=settings.gap or 1,
        max_participations=settings.max_participations,
    )


def list_record(
    wordlist: Path,
    content: bytes,
    settings: CollectionSettings,
    *,
    setting: str = "--public-attested-by",
) -> Provenance | None:
    """Returns the record of the list of words, or the attestation by `setting` that it is public.
    Raises PrivacyError if the key has not signed the list, or if the counts should have a guarantee
    but the list has neither an attestation nor a record with a guarantee."""
    record = read_counts(wordlist, content).provenance if sidecar(wordlist).exists() else None
    if settings.public_key is not None:
        record = require_signed(wordlist, settings.public_key, content)
    return record_or_word(
        wordlist,
        "the list of words",
        record,
        by=settings.public,
        setting=setting,
        sha256=content_digest(content),
        promises=settings.released,
        simulated=settings.noise_multiplier is not None,
    )


def count_unigrams(
    open_users: Callable[[Path], UserDataset],
    wordlist: Path,
    output: Path,
    settings: CollectionSettings,
    *,
    data_name: str = "",
    progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[RoundMetrics], None] = lambda done: None,
) -> CountedUnigrams:
    """Counts users' words in rounds, and writes the files that `collect` lists. After a stop,
    the same call resumes after the last saved round. `open_users` sorts users' text
    into the folder that it gets, which only the owner can read; the folder is removed at the end.

    Raises
        ConfigError   a new run would replace a release; too few users
        PrivacyError  see `list_record`
    """
    held_out: list[UserDataset] = []

    def opened(folder: RunFolder, words: list[str], record: Provenance | None) -> Collection:
        everyone = open_users(folder.store)
        found = everyone.facts
        left_out = found.rows_without_user, found.users_without_text
        # If counts are noised, nothing exact about users' text is shown, not even its amount.
        how_much = f", {found.utterances:,} utterances, {found.words:,} words"
        progress(
            f"{found.users:,} users"
            + ("" if settings.released else how_much)
            + (f"; left out: {left_out[0]:,} rows, {left_out[1]:,} users" if any(left_out) else "")
        )
        train, test = everyone.split(settings.test_fraction, name="unigrams")
        held_out.append(test)
        key = key_of(settings)
        sampler = make_sampler(
            len(train),
            key.fold("unigrams", "sampling"),
            report_goal=settings.goal,
            poisson=settings.poisson,
            gap=settings.gap,
            max_participations=settings.max_participations,
        )
        if not check_users(settings, len(train)):
            progress(
                f"{len(train):,} users may run out before the last round: they are drawn at "
                "random, and near the end too few may be allowed to take part again"
            )
        return Collection(
            train,
            words,
            settings.config,
            sampler,
            key,
            gap=settings.gap,
            max_participations=settings.max_participations,
            split=TOKENIZERS[settings.tokenizer],
            tokenizer=settings.tokenizer,
            folder=folder,
            list_record=record,
        )

    return run_collection(
        opened,
        wordlist,
        output,
        settings,
        held_out,
        data_name=data_name,
        progress=progress,
        on_round=on_round,
    )


def key_of(settings: CollectionSettings) -> Key:
    return Key.from_system() if settings.seed is None else Key.from_seed(settings.seed)


def run_collection(
    open_collection: Callable[[RunFolder, list[str], Provenance | None], Collection],
    wordlist: Path,
    output: Path,
    settings: CollectionSettings,
    held_out: Sequence[UserDataset] = (),
    *,
    data_name: str = "",
    progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[RoundMetrics], None] = lambda done: None,
) -> CountedUnigrams:
    """Like `count_unigrams`, for a collection that `open_collection` opens with the run's folder,
    the words and their record. Once it is open, `held_out` has the users for the OOV rate."""
    split = TOKENIZERS[settings.tokenizer]
    content = wordlist.read_bytes()  # read once: the verified bytes are the bytes used
    record = list_record(wordlist, content, settings)
    with folder_of(output, released=settings.released) as folder:
        words = read_wordlist(wordlist, content)
        never = [word for word in words if split(word) != [word]]
        if never:
            progress(
                f"{len(never):,} of {len(words):,} words of the list can never match, because "
                f"--tokenizer {settings.tokenizer} does not produce them: {', '.join(never[:5])}"
                + (", ..." if len(never) > 5 else "")
            )
        collection = open_collection(folder, words, record)
        if collection.resumed:
            progress(f"resuming after round {collection.rounds_done} of {settings.rounds}")
        for metrics in collection.run():
            on_round(metrics)
        users = sum(map(len, held_out))
        counts, report = write_release(
            collection,
            output,
            delta=settings.delta,
            held_out=users,
            at=datetime.now(UTC),
            data_name=data_name,
        )
        rate = None
        if users:
            rate = oov_rate(held_out[0], counts.words[: settings.capacity], split=split)
        folder.remove()
    return CountedUnigrams(counts, report, users, rate)
