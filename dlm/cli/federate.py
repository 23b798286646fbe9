"""`dlm federate`: users' devices train a model, simulated on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.federated.train import RoundReport


def federate(
    users: Annotated[
        Path, typer.Argument(help="Users' text: Parquet or TSV (.zst) with user_id, utterance.")
    ],
    config: Annotated[Path, typer.Option("--config", "-c", help="Settings of the run, TOML.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the run; goes on if it has one.")
    ],
    stop_after: Annotated[
        int | None, typer.Option(help="Rounds at which to end; without it, the run goes on.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Simulate: noise that this number gives, not private.")
    ] = None,
    missing: Annotated[
        str, typer.Option(help="Rows without id, users without text: refuse, or count and go on.")
    ] = "refuse",
    user_column: Annotated[str, typer.Option(help="Name of the column of ids.")] = "user_id",
    text_column: Annotated[str, typer.Option(help="Name of the column of text.")] = "utterance",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON a round on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the rounds.")] = False,
) -> None:
    """Train a model on users' text in rounds, privately if asked.

    Rounds are kept as they are done: stopped at any moment, the same command goes on. Until all are
    done, users' text lies sorted in users.store, below the output folder.

    Example: dlm federate users.parquet --config run.toml --output runs/first
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.federated.run_folder import finite
    from dlm.federated.settings import TrainingSettings
    from dlm.federated.train_network import train_network
    from dlm.federated.users import MISSING, UserDataset

    if missing not in MISSING:
        raise ConfigError(f"--missing is {missing}; it must be one of {', '.join(MISSING)}")

    check_reads("USERS", users, folders=True)
    check_writes("--output", output, folder=True)
    settings = TrainingSettings.read(
        config, flags={"run": {"seed": seed, "stop_after": stop_after}}
    )
    check_reads("data.vocabulary", settings.data.vocabulary)
    # The time of a round would reveal how much its users wrote.
    tell = stage_printer(quiet=quiet, timed=settings.run.simulation)

    done_now = 0

    def on_round(done: RoundReport) -> None:
        nonlocal done_now
        done_now += 1
        line = done.line()
        if as_json:
            print(json.dumps(finite(line)), flush=True)
        tell(_sentence(line, settings.run.rounds))

    trained = train_network(
        lambda store: UserDataset.open(
            users,
            user_column=user_column,
            text_column=text_column,
            missing=missing,
            store=store,
        ),
        settings,
        output,
        data_name=users.name,
        progress=tell,
        on_round=on_round,
    )
    if not done_now and trained.rounds_done < settings.run.rounds:
        tell(
            f"nothing was done: {output} has {trained.rounds_done} rounds already, and the run is "
            f"to stop after {settings.run.stop_after}; raise --stop-after, or leave it out"
        )


def _sentence(line: dict[str, object], rounds: int) -> str:
    """A round in words."""
    text = f"round {int(str(line['round'])) + 1} of {rounds}"
    raw = line.get("not_private")
    if isinstance(raw, dict):
        text += f": {line['seconds']:.2f} s, {raw['users']} users"
        if raw["mean_ln_prob"] is not None:
            text += f", loss {-raw['mean_ln_prob']:.3f}"
        if raw["refused"]:
            text += f", {raw['refused']} updates refused (inf or nan)"
    held_out = line.get("held_out")
    if isinstance(held_out, dict) and held_out["top1_in_vocabulary"] is not None:
        text += (
            f"; held out: accuracy {100 * held_out['top1_in_vocabulary']:.2f} %, "
            f"perplexity {held_out['perplexity']:.1f}"
        )
    return text
