"""Trains a network on users' text, and writes the run to a folder, for `dlm federate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlm.errors import TrainingDiverged
from dlm.federated.report.noise_level import noise_warning
from dlm.federated.report.report import PrivacyReport
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.training.settings import PrivacySettings, TrainingSettings
from dlm.federated.training.train import RoundReport, Training
from dlm.federated.training.trained import why_diverged
from dlm.federated.users import UserDataset


@dataclass(frozen=True)
class TrainedNetwork:
    """How many rounds count, their report (None without rounds), and whether the run has ended, so
    that no round can follow."""

    rounds_done: int
    report: PrivacyReport | None
    has_ended: bool


def train_network(
    open_users: Callable[[Path], UserDataset],
    settings: TrainingSettings,
    output: Path,
    *,
    data_name: str = "",
    progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[RoundReport], None] = lambda done: None,
) -> TrainedNetwork:
    """Trains a network on users' text, as `run_rounds` does, in the folder `output`. `open_users`
    sorts the text into the folder that it gets; only the owner can read this folder, which is
    removed once no rounds are left."""

    def opened(folder: RunFolder) -> Training:
        progress("reading and sorting users' text")
        dataset = open_users(folder.store)
        found = dataset.facts
        if found.rows_without_user or found.users_without_text:
            progress(
                f"left out: {found.rows_without_user:,} "
                f"row{'s' * (found.rows_without_user != 1)} without a user id, "
                f"{found.users_without_text:,} "
                f"user{'s' * (found.users_without_text != 1)} without text"
            )
        return Training(settings, dataset, folder, progress=progress)

    if settings.data.has_pieces and settings.run.evaluate_every and settings.data.held_out:
        progress("accuracy and perplexity are per wordpiece; do not compare them with word models")
    return run_rounds(
        opened, settings, output, data_name=data_name, progress=progress, on_round=on_round
    )


def run_rounds(
    open_training: Callable[[RunFolder], Training],
    settings: TrainingSettings,
    output: Path,
    *,
    data_name: str = "",
    progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[RoundReport], None] = lambda done: None,
) -> TrainedNetwork:
    """Trains a network in the folder `output`, or continues its run, and writes the run's report.
    After a stop at any time, the same call resumes after the last round that counts. Raises
    TrainingDiverged once the rounds done are reported, or at once if the run had already diverged;
    also what `Training` raises."""
    if settings.run.simulation:
        progress("a seed is set: this is a simulation, and its model is not private")
    elif settings.privacy.mechanism == "none":
        progress("no noise: this model has no privacy guarantee")
    with RunFolder(output) as folder:
        why = why_diverged(folder)
        if why and all(path.exists() for path in folder.reports):
            folder.end()
            raise _with_places(TrainingDiverged(why), folder)
        training = open_training(folder)
        held_out = len(training.held_out_users)
        users = len(training.train_users)
        if (warning := _delta_warning(settings.privacy, users)) is not None:
            progress(warning)
        if held_out and settings.run.evaluate_every and not settings.run.simulation:
            progress(
                f"{held_out:,} held-out users are evaluated without noise: no guarantee covers "
                "them, and they must have agreed"
            )
        if training.rounds_done < (settings.run.stop_after or settings.run.rounds):
            progress("compiling a round")
        diverged = None
        try:
            for done in training.run():
                on_round(done)
        except TrainingDiverged as exc:  # the rounds done are reported as usual
            diverged = exc
        progress(f"{training.rounds_done} of {settings.run.rounds} rounds done: {output}")
        report = None
        if training.rounds_done:
            report = training.report(at=datetime.now(UTC), data_name=data_name)
            report.write(*folder.reports)
            progress(report.statement())
            if (warning := noise_warning(folder.journal, settings)) is not None:
                progress(warning)
        if diverged is not None:
            raise _with_places(diverged, folder)
        if not folder.has_ended:
            text = " and users' text" if folder.store.exists() else ""
            progress(
                f"{output} keeps noise{text} for the rounds that are left. To run them, repeat "
                f"the command; to run no more, erase what is kept: dlm privacy erase {output}"
            )
        return TrainedNetwork(training.rounds_done, report, folder.has_ended)


def _with_places(exc: TrainingDiverged, folder: RunFolder) -> TrainingDiverged:
    exc.add_note(
        f"the run's report is {folder.reports[0]}; {folder.path} holds no noise or users' text"
    )
    return exc


def _delta_warning(privacy: PrivacySettings, users: int) -> str | None:
    """Returns a warning if delta is so large that publishing the text of one random user out of
    `users` is (0, delta)-private (Dwork and Roth 2014, 2.3)."""
    if privacy.mechanism == "none" or privacy.delta * users < 1:
        return None
    return (
        f"privacy.delta is {privacy.delta:g}; with {users:,} users, a meaningful guarantee needs a "
        f"delta much smaller than {1 / users:.1g}"
    )
