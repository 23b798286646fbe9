"""`dlm federate`: federated training on users' devices, simulated on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import WRITE_FOLDER, check_reads
from dlm.cli.options import Options, Quiet, RunSettings, Users
from dlm.cli.output import print_json_line, stage_printer
from dlm.federated.counting.settings import UserTextSettings
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.federated.training.train import RoundReport


def federate(
    users: Users,
    config: RunSettings,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder of the run; resumed if it exists."
        ),
        WRITE_FOLDER,
    ],
    *,
    stop_after: Annotated[
        int | None,
        typer.Option(metavar="ROUND", help="Stop after this round.  [default: run all rounds]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Simulate with noise from this seed; gives no guarantee.")
    ] = None,
    text: Annotated[UserTextSettings, Options()],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per round.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a network on users' text, in rounds.

    The settings determine the noise, and so the guarantee. Each round is saved when it is done;
    after an interruption, the same command resumes. Until the run ends, the output folder contains
    users' text, sorted, in users.store.

    Examples:
        dlm federate users.parquet --config run.toml --output runs/first
        dlm federate users.parquet -c run.toml -o runs/first --stop-after 100 --json
    """
    stage_printer(quiet=quiet, timed=False)("importing jax")
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.training.train_network import train_network
    from dlm.federated.users import UserDataset

    settings = TrainingSettings.read(
        config, flags={"run": {"seed": seed, "stop_after": stop_after}}
    )
    check_reads("data.vocabulary", settings.data.vocabulary)
    # The time of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=settings.run.simulation)

    done_now = 0
    told = round_teller(tell, settings.run.rounds, as_json=as_json)

    def on_round(done: RoundReport) -> None:
        nonlocal done_now
        done_now += 1
        told(done)

    trained = train_network(
        lambda store: UserDataset.open(users, **vars(text), store=store),
        settings,
        output,
        data_name=users.name,
        progress=tell,
        on_round=on_round,
    )
    if not done_now and not trained.has_ended:
        tell(
            f"nothing to do: {output} already has {counted(trained.rounds_done, 'round')}, and "
            "stop_after is "
            f"{settings.run.stop_after}; raise --stop-after, or leave it out"
        )


def round_teller(
    tell: Callable[[str], None], rounds: int, *, as_json: bool
) -> Callable[[RoundReport], None]:
    def on_round(done: RoundReport) -> None:
        line = done.line()
        if as_json:
            print_json_line(line)
        tell(_sentence(line, rounds))

    return on_round


def _sentence(line: dict[str, object], rounds: int) -> str:
    text = f"round {int(str(line['round'])) + 1} of {rounds}"
    raw = line.get("not_private")
    if isinstance(raw, dict):
        text += f": {line['seconds']:.2f} s, {counted(raw['users'], 'user')}"
        if math.isfinite(raw["mean_ln_prob"]):  # devices do not send this figure
            text += f", loss {-raw['mean_ln_prob']:.3f}"
        if raw["refused"]:
            text += f", {counted(raw['refused'], 'update')} rejected (inf or nan)"
    held_out = line.get("held_out")
    if isinstance(held_out, dict) and held_out["known"]:
        text += (
            f"; held out: accuracy {100 * held_out['top1_in_vocabulary']:.2f} %, "
            f"perplexity {held_out['perplexity']:.1f}"
        )
    return text
