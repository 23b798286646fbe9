"""`dlm pipeline`: from users' text to a shard set, in one command."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.pipeline.run import Pipeline


def pipeline(
    config: Annotated[Path, typer.Argument(help="Inputs and the settings of each stage, TOML.")],
    check: Annotated[
        bool,
        typer.Option("--check", "--dry-run", help="Say what each stage would do, and do nothing."),
    ] = False,
    redo: Annotated[
        list[str] | None,
        typer.Option(help="Do this stage anew, and what was made of it; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Make a shard set of users' text, privately.

    Words are counted, a network is trained, both on users' devices as this machine simulates them;
    the network becomes an n-gram model, which is pruned and sharded. Stopped at any moment, the
    same command goes on. privacy.md, in the folder of the run, says what all of it guarantees.

    Example: dlm pipeline pipeline.toml --check
    """
    from dlm.cli.paths import check_folder, check_reads
    from dlm.pipeline.run import Pipeline
    from dlm.pipeline.settings import PipelineSettings
    from dlm.progress import ProgressReporter

    check_reads("CONFIG", config)
    settings = PipelineSettings.read(config)
    check_folder("run.folder", settings.run.folder.absolute(), made=True)
    whole = Pipeline(settings, redo or [])
    if check:
        _tell_plan(whole)
        return
    # How long rounds take would reveal how much users wrote.
    timed = not any(stage.plan.releases for stage in whole.stages)
    tell = stage_printer(quiet=quiet, timed=timed)
    try:
        report = whole.run(ProgressReporter(tell))
    except (KeyboardInterrupt, SystemExit):
        command = shlex.join(["dlm", "pipeline", str(config)])
        print(f"dlm: stopped; what is done is kept, and this goes on: {command}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps(report.to_dict()))
        return
    print(report.statement())
    for name, value in report.model.items():
        print(f"{name:12}{value}")
    print(f"{'report':12}{whole.report_path}")
    print(f"{'serve it':12}dlm cluster {shlex.quote(str(whole.shards))}")


def _tell_plan(whole: Pipeline) -> None:
    """Each stage, what it would do, and where it stands."""
    from dlm.pipeline.check import check, needed_bytes, voids

    check(whole.settings)
    refused = False
    for number, (stage, state) in enumerate(whole.look(), 1):
        is_refused = state not in ("done", "begin", "go on", "adopt")
        refused |= is_refused
        said = "refused" if is_refused else {"adopt": "done"}.get(state, state)
        print(f"{number}  {stage.name:10}{said:9}{stage.what}")
        if is_refused:
            print(f"   {state}")
    print(f"about {needed_bytes(whole.settings):,} bytes of disk in {whole.folder}")
    for reason in voids(whole.settings):
        print(f"NO GUARANTEE: {reason}")
    if refused:
        raise typer.Exit(1)
