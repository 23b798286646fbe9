"""The stages of a pipeline that use users' text, and the stage of wordpieces between them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from dlm.checkpoint import CHECKPOINT
from dlm.errors import ConfigError, PrivacyError, TrainingDiverged
from dlm.federated.counting.count_unigrams import check_users, count_unigrams
from dlm.federated.counting.unigrams import read_wordlist
from dlm.federated.run.run_files import REPORTS
from dlm.federated.run.sampling import check_population
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.users import UserDataset
from dlm.pipeline.quality import wordlist_warning
from dlm.pipeline.settings import PipelineSettings, counts_of, pieces_of, vouched, words_of
from dlm.pipeline.stage import Places, Stage, recorded, stage_plan
from dlm.progress import ProgressReporter
from dlm.record.counts_file import JOURNAL, LEDGER, REPORT_JSON, REPORT_MD, WORK
from dlm.record.sidecar import SIDECAR_SUFFIX, sidecar
from dlm.units import counted

USERS = "inputs.users"  # name of users' text among a stage's `reads`


def open_users(settings: PipelineSettings) -> UserDataset:
    """Sorts users' text into the pipeline's folder; raises what `check_populations` raises."""
    given = settings.inputs
    users = UserDataset.open(
        given.users,
        user_column=given.user_column,
        text_column=given.text_column,
        missing=given.missing,
        store=Places(settings.run.folder).users,
    )
    check_populations(
        settings, len(users), lambda share, name: len(users.split(share, name=name)[0])
    )
    return users


def check_populations(
    settings: PipelineSettings, users: int, left: Callable[[float, str], int]
) -> None:
    """Raises ConfigError, with the settings to change, if a stage has too few users for its rounds.
    `left` returns how many of `users` remain once a share is held out under a name."""
    if settings.unigrams is not None:
        given = settings.unigrams
        there = left(given.test_fraction, "unigrams")
        with _noted("[unigrams] report_goal, rounds, gap and max_participations", users, there):
            check_users(given, there)
    network = settings.federate
    if network.sampling.kind != "poisson":
        there = left(network.data.held_out, "split")
        which = (
            "[federate.sampling] report_goal, [federate.run] rounds, [federate.privacy] gap and "
            "max_participations"
        )
        with _noted(which, users, there):
            check_population(
                there,
                network.sampling.report_goal,
                network.run.rounds,
                gap=network.privacy.gap,
                max_participations=network.privacy.max_participations or None,
            )


@contextmanager
def _noted(names: str, users: int, left: int) -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        exc.add_note(f"the relevant settings are {names}")
        if left < users:
            exc.add_note(
                f"inputs.users has {counted(users, 'user')}; {users - left:,} of them are held out"
            )
        raise


def promises(settings: TrainingSettings) -> bool:
    return settings.privacy.mechanism != "none" and not settings.run.simulation


def unigrams_stage(settings: PipelineSettings, at: Places) -> Stage | None:
    given, wordlist = settings.unigrams, settings.inputs.wordlist
    if given is None or wordlist is None:
        return None
    output = counts_of(settings.run)
    reads = {USERS: settings.inputs.users, **recorded("inputs.wordlist", wordlist)}

    def run(progress: ProgressReporter) -> None:
        rounds = _Rounds(progress, given.rounds, timed=not given.released)
        done = count_unigrams(
            lambda _: open_users(settings),
            wordlist,
            output,
            given,
            data_name=settings.inputs.users.name,
            progress=progress.tell,
            on_round=lambda _: rounds.step(),
        )
        used, listed = len(done.counts.words), len(read_wordlist(wordlist))
        progress.tell(f"{used:,} of {listed:,} words were used; {done.report.statement()}")
        if (warning := wordlist_warning(used, listed)) is not None:
            progress.tell(warning)

    endings = ("", LEDGER, REPORT_MD, REPORT_JSON, SIDECAR_SUFFIX)
    work = Path(f"{output}{WORK}")
    scale = given.noise_multiplier
    noise = "without noise" if scale is None else f"noise {scale:g}"
    unbound = ("clip", "public", "capacity")
    return Stage(
        stage_plan(
            at,
            "unigrams",
            {"lambda": given.clip}
            | {name: value for name, value in asdict(given).items() if name not in unbound},
            reads,
            *(Path(f"{output}{ending}") for ending in endings),
            releases=given.released,
            goes_on=True,
            last=sidecar(output),
        ),
        f"count the words of {wordlist.name} in {counted(given.rounds, 'round')} of users, {noise}",
        run,
        work / CHECKPOINT,
        (work, Path(f"{output}{JOURNAL}")),
        work,
    )


def pieces_stage(settings: PipelineSettings, at: Places) -> Stage | None:
    given = settings.pieces
    if given is None:
        return None
    counts, output = words_of(settings.run, settings.inputs), pieces_of(settings.run)
    public = vouched(settings.inputs)

    def run(progress: ProgressReporter) -> None:
        from dlm.federated.pieces.make_pieces import make_pieces

        made = make_pieces(counts, given, output, public=public or None)
        progress.tell(f"{counted(made.inventory.size, 'piece')}, {made.per_word:.2f} per word")

    return Stage(
        stage_plan(
            at,
            "pieces",
            {**asdict(given), "public": public},
            recorded("the counts", counts),
            output,
            sidecar(output),
        ),
        f"make {given.size:,} wordpieces from the words of {counts.name}",
        run,
    )


def federate_stage(settings: PipelineSettings, at: Places) -> Stage:
    given = settings.federate
    words = given.data.vocabulary
    reads = {USERS: settings.inputs.users, **recorded("the vocabulary", words)}
    if given.pretrain.text:
        reads |= recorded("federate.pretrain.text", Path(given.pretrain.text))

    def run(progress: ProgressReporter) -> None:
        from dlm.federated.training.train_network import train_network

        rounds = _Rounds(progress, given.run.rounds, timed=given.run.simulation)
        try:
            train_network(
                lambda _: open_users(settings),
                given,
                at.network,
                data_name=settings.inputs.users.name,
                progress=progress.tell,
                on_round=lambda _: rounds.step(),
            )
        except TrainingDiverged:  # no later stage will read the text
            shutil.rmtree(at.users, ignore_errors=True)
            raise

    checkpoint = at.network / CHECKPOINT
    noise = given.privacy
    how = (
        f"noise {noise.mechanism} {noise.noise_multiplier:g}"
        if noise.noise_multiplier
        else ("without noise")
    )
    return Stage(
        stage_plan(
            at,
            "federate",
            given.binding(),
            reads,
            checkpoint,
            *(at.network / name for name in REPORTS),
            releases=promises(given),
            goes_on=True,
        ),
        f"train a network on the {'wordpieces' if given.data.has_pieces else 'words'} of "
        f"{words.name} in {counted(given.run.rounds, 'round')} of users, {how}",
        run,
        checkpoint,
        (at.network,),
    )


def check_vouched(settings: PipelineSettings) -> None:
    """Raises PrivacyError, before users are counted, if pretraining text lacks its attestation."""
    text = settings.federate.pretrain.text
    given = settings.federate.pretrain.public
    if text and not given and promises(settings.federate) and not sidecar(text).exists():
        raise PrivacyError(
            f"the pretraining text {text} has no record, and nobody has attested that it is "
            "public; if it contains no user's text, set [inputs] public to the name of the person "
            "who attests it"
        )


class _Rounds:
    """Reports how many rounds are done, with rate and time left if they reveal nothing about users.

    The time of a round reveals how much its users wrote. So for rounds with a guarantee, only how
    many are done is reported, after each per cent of the rounds.
    """

    def __init__(self, progress: ProgressReporter, rounds: int, *, timed: bool) -> None:
        self._progress, self._rounds, self._timed = progress, rounds, timed
        self._done = 0
        if timed:
            progress.stage(counted(rounds, "round"), rounds, "rounds")

    def step(self) -> None:
        self._done += 1
        if self._timed:
            self._progress.step(1)
        elif self._done * 100 // self._rounds != (self._done - 1) * 100 // self._rounds:
            self._progress.tell(f"round {self._done:,} of {self._rounds:,}")
