"""`dlm estimate`: estimates an ARPA model from text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, check_reads, check_writes
from dlm.cli.options import (
    EngineName,
    HalfMemory,
    Json,
    Options,
    PiecesFile,
    Silent,
    Threads,
    Tmp,
)
from dlm.cli.output import print_answer, stage_printer
from dlm.estimate.settings import EstimateOptions

if TYPE_CHECKING:
    from dlm.estimate.settings import EstimationSettings, EstimationSummary
    from dlm.progress import ProgressReporter


def estimate(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="ARPA file to write; .gz, .zst or .xz compresses it; - is standard output. With "
            "Spark, a folder of parts.",
        ),
    ],
    settings: Annotated[EstimateOptions, Options()],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT...",
            help="Text, one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet; - is "
            "standard input. With Spark, any path that Spark reads.",
        ),
    ] = None,
    vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Words to keep, separated by white space; n-grams with other words are dropped.",
        ),
        READ,
    ] = None,
    pieces: PiecesFile = None,
    memory: HalfMemory = None,
    tmp: Tmp = None,
    threads: Threads = 2,
    engine: Annotated[
        EngineName,
        typer.Option(help="Run in this process, or as Spark jobs (extra `spark`)."),
    ] = EngineName.LOCAL,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Estimate an ARPA model from text (modified Kneser-Ney).

    N-grams are those of KenLM's lmplz; values agree up to rounding. Text larger than the memory
    limit is sorted on disk. If the model goes to standard output, the summary goes to standard
    error.

    Examples:
        dlm estimate corpus.txt --order 3 --output model.arpa.zst
        dlm estimate corpus.txt --order 5 --prune 0,0,1 --memory 4G -o model5.arpa
        zcat corpus.txt.gz | dlm estimate - --order 3 --output - > model3.arpa
    """
    from dlm.errors import ConfigError
    from dlm.progress import ProgressReporter
    from dlm.resources import available_bytes

    if not text:
        raise ConfigError("TEXT is missing; name one or more files, or - for standard input")
    if output.isdecimal():
        raise ConfigError(
            f"-o is the output file; the order is -n, --order. Did you mean --order {output}? For "
            f"a file of this name write ./{output}"
        )
    tell = stage_printer(quiet=quiet)
    if engine is EngineName.LOCAL:
        for one in text:
            if one.isdecimal() and not Path(one).exists():
                raise ConfigError(
                    f"TEXT: no file named {one}. If it belongs to --prune, separate thresholds by "
                    "commas: --prune 0,0,1"
                )
        check_reads("TEXT", *text)
        check_writes("--output", output, stdout=True, arpa=True, inputs=(*text, vocab))
    else:  # a path without a scheme may be on Spark's own file system
        check_reads("TEXT", *(one for one in text if one.startswith(("/", "./", "../"))))
    complete = settings.settings(
        available_bytes() // 2 if memory is None else memory,
        threads,
        None if vocab is None else frozenset(vocab.read_bytes().split()),
        pieces,
    )
    if engine is EngineName.SPARK:
        if memory is not None or tmp is not None or pieces is not None:
            raise ConfigError(
                "--memory, --tmp and --pieces apply to --engine local only; for Spark, pass "
                "--executor-memory and --conf spark.local.dir=... to spark-submit, and split the "
                "text into pieces first"
            )
        summary = _with_spark(text, output, complete, ProgressReporter(tell))
    else:
        from dlm.cli.push import local_output
        from dlm.estimate.pipeline import estimate as run

        with local_output(output, tmp, tell) as file:
            summary = run(text, str(file), complete, tmp=tmp, progress=ProgressReporter(tell))
    tell(f"done: {output}, {summary.arpa_bytes:,} bytes")
    totals = summary.totals
    facts = {
        "output": output,
        "bytes": summary.arpa_bytes,
        "counts": summary.counts,
        "counts_before_pruning": summary.counts_before_pruning,
        "words": totals.words,
        "lines": totals.lines,
        "empty_lines": totals.empty,
        "skipped": totals.skipped,
    }
    lines = [
        f"text        {totals.summary(settings.skip)}",
        f"n-grams     {' '.join(f'{count:,}' for count in summary.counts)}",
    ]
    out = sys.stderr if output == "-" else sys.stdout
    print_answer(facts, lines, as_json=as_json, quiet=quiet, to=out)


def _with_spark(
    text: list[str], output: str, settings: EstimationSettings, progress: ProgressReporter
) -> EstimationSummary:
    from dlm.spark.engine import estimate as run
    from dlm.spark.session import session

    progress.stage("starting Spark")
    with session() as spark:
        return run(spark, text, output, settings, progress=progress)
