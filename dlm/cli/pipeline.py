"""`dlm pipeline`: turns users' text into a shard set."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, check_folder
from dlm.cli.options import Json, Quiet
from dlm.cli.output import print_answer, stage_printer
from dlm.units import size_text

if TYPE_CHECKING:
    from dlm.pipeline.run import Pipeline

# A stage's state, as `look` returns it -> text to print. Any other state is the reason to refuse.
STATES = {"done": "done", "adopt": "done", "begin": "begin", "go on": "resume"}


def pipeline(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="TOML file: inputs, and settings of each stage."),
        READ,
    ],
    check: Annotated[
        bool,
        typer.Option("--check", "--dry-run", help="Print what each stage would do, and stop."),
    ] = False,
    redo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE", help="Redo this stage and what depends on it. May be repeated."
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn users' text into a shard set, privately, in one command.

    Counts words and trains a network, both on users' devices, simulated on this machine; then
    distills the network into an n-gram model, prunes it and shards it. After an interruption, the
    same command resumes. privacy.md in the run's folder states the overall guarantee.

    Examples:
        dlm pipeline pipeline.toml --check
        dlm pipeline pipeline.toml
    """
    from dlm.pipeline.quality import warnings
    from dlm.pipeline.report import MARKDOWN
    from dlm.pipeline.run import Pipeline
    from dlm.pipeline.settings import PipelineSettings
    from dlm.progress import ProgressReporter

    settings = PipelineSettings.read(config)
    check_folder("run.folder", settings.run.folder, make=False)
    whole = Pipeline(settings, redo or [])
    if check:
        _print_plan(whole, as_json)
        return
    # The duration of a round would reveal how much its users wrote.
    timed = not any(stage.plan.releases for stage in whole.stages)
    tell = stage_printer(quiet=quiet, timed=timed)
    try:
        report = whole.run(ProgressReporter(tell))
    except (KeyboardInterrupt, SystemExit):
        command = shlex.join(["dlm", "pipeline", str(config)])
        print(f"dlm: stopped; finished work is kept. To resume, run: {command}", file=sys.stderr)
        raise
    for warning in warnings(settings):
        tell(warning)
    facts = {
        **report.model,
        "report": whole.folder / MARKDOWN,
        "serve it": f"dlm cluster {shlex.quote(str(whole.at.shards))}",
    }
    lines = [report.statement(), *(f"{name:12}{value}" for name, value in facts.items())]
    print_answer(report.to_dict(), lines, as_json=as_json)


def _print_plan(whole: Pipeline, as_json: bool) -> None:
    from dlm.pipeline.check import check, check_users, needed_bytes, voids

    check(whole.settings)
    found = whole.look()
    left = {stage.name for stage, state in found if STATES.get(state) != "done"}
    users = check_users(whole.settings) if left & {"unigrams", "federate"} else None
    stages = []
    for stage, said in found:
        state = STATES.get(said, "refused")
        why = said if state == "refused" else None
        stages.append({"stage": stage.name, "state": state, "what": stage.what, "why": why})
    needed, reasons = needed_bytes(whole.settings), list(voids(whole.settings))
    facts = {
        "stages": stages,
        "disk_bytes": needed,
        "folder": str(whole.folder),
        "users": users,
        "no_guarantee": reasons,
    }
    lines = []
    for number, one in enumerate(stages, 1):
        lines.append(f"{number}  {one['stage']:10}{one['state']:9}{one['what']}")
        if one["why"] is not None:
            lines.append(f"   {one['why']}")
    lines.append(f"needs about {size_text(needed)} of disk in {whole.folder}")
    lines += [f"NO GUARANTEE: {reason}" for reason in reasons]
    print_answer(facts, lines, as_json=as_json)
    if any(one["state"] == "refused" for one in stages):
        raise typer.Exit(1)
