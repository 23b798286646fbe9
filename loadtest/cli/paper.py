"""`python -m loadtest paper`: the evaluation of the DLM paper on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.errors import ConfigError
from loadtest.cli.run import DEMO_TRACE

if TYPE_CHECKING:
    from loadtest.paper.result import Result, Setup

OUTPUT = Path("loadtest-results/paper")
FILE_WIDTH = 140  # characters per line of tables that go into a file


def paper(
    only: Annotated[
        list[str] | None, typer.Option(help="An experiment, such as figure-7; may be repeated.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for results.json and results.html; it may contain earlier results."
        ),
    ] = OUTPUT,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for shard sets and caches, kept; OUTPUT/work if not given."),
    ] = None,
    arpa: Annotated[
        Path | None, typer.Option(help="ARPA file of the model; default: the small packaged one.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Shard set of the model, with exact encoding and one shard; by default, it is "
            "built."
        ),
    ] = None,
    trace: Annotated[
        Path,
        typer.Option(help="Trace of requests.  [default: the packaged one]", show_default=False),
    ] = DEMO_TRACE,
    held_out: Annotated[
        Path | None, typer.Option(help="Text for perplexities, a sentence per line.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run experiments that already have a result.")
    ] = False,
    note: Annotated[
        str, typer.Option(help="Note to store with each result, such as what else was running.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Use the smallest sizes, only to try the command; do not quote figures."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the tables.")] = False,
) -> None:
    """Make the tables and figures of the DLM paper's evaluation.

    They repeat section 4 of the paper and show its own numbers alongside. Every row says whether
    it was measured, simulated or computed. Results in --output are not computed again. KenLM's
    sizes need its build_binary: name its folder in DLM_KENLM_BIN. The exit status is 1 if an
    experiment failed.

    Example: python -m loadtest paper --arpa model.arpa.zst --held-out text.txt
    """
    from dlm.cli.output import stage_printer
    from loadtest.paper.evaluation import Evaluation, chosen
    from loadtest.run.latency import check_installed

    check_installed()
    names = chosen(only or [])
    tell = stage_printer(quiet=quiet)
    setup = _setup(work or output / "work", arpa, model, trace, held_out, seed, quick)
    setup.progress.tell = tell
    evaluation = Evaluation(setup, output, tell, again=again, note=note)
    if again:
        shutil.rmtree(setup.kept, ignore_errors=True)
    _show(evaluation.run(names))
    for name, text in evaluation.failed.items():
        print(f"{name}: {text}", file=sys.stderr)
    print(f"wrote {output}/results.json, results.html")
    if evaluation.failed:
        raise typer.Exit(1)


def _setup(
    work: Path,
    arpa: Path | None,
    model: Path | None,
    trace: Path,
    held_out: Path | None,
    seed: int,
    quick: bool,
) -> Setup:
    """The setup of an evaluation, including the model in one shard.

    Raises  ConfigError, ArpaError, ...
    """
    from importlib.resources import files

    from dlm.cli.output import compile_kernels
    from dlm.index.layout import read_manifest
    from dlm.index.making import build_shard_set
    from dlm.index.making.shard_set import KERNELS as BUILDING
    from loadtest.paper.result import Setup
    from loadtest.run.local_cluster import DEMO

    if model is not None and arpa is None:
        raise ConfigError(
            "--model was given without --arpa; give the ARPA file that the model was built from"
        )
    for path in (arpa, trace, held_out):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} is not a file, or does not exist; give an existing file")
    if arpa is None:
        arpa = Path(str(files("dlm") / "data" / DEMO))
    work.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = work / f"{arpa.name.split('.arpa')[0]}-exact-1"
        if not model.exists():
            compile_kernels(BUILDING)
            build_shard_set(arpa, model, 1)
    manifest = read_manifest(model)
    if manifest.shards != 1 or manifest.encoding != "exact":
        raise ConfigError(
            f"{model} has {manifest.shards} shards in the encoding {manifest.encoding}; expected "
            "one shard in the encoding exact"
        )
    named = os.environ.get("DLM_KENLM_BIN")
    kenlm_bin = None if not named or not (Path(named) / "build_binary").exists() else Path(named)
    return Setup(
        model.absolute(),
        arpa.absolute(),
        trace.absolute(),
        work.absolute(),
        (1, 2) if quick else (1, 2, 3, 4),
        seed=seed,
        quick=quick,
        held_out=None if held_out is None else held_out.absolute(),
        kenlm_bin=kenlm_bin,
    )


def _show(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    from loadtest.paper.page import cells_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    for result in results:
        names, rows = cells_of(result)
        shown = Table(title=result.title, title_justify="left")
        for at, name in enumerate(names):
            is_text = at == 0 or not any(row[at][:1].isdigit() for row in rows)
            shown.add_column(name, justify="left" if is_text else "right")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        for note in result.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)
