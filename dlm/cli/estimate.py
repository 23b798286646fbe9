"""`dlm estimate`: text becomes an ARPA model."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from dlm.estimate.settings import EstimationSettings, EstimationSummary
    from dlm.progress import ProgressReporter


class EngineName(StrEnum):
    """Where a model is estimated."""

    LOCAL = "local"
    SPARK = "spark"


def estimate(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="ARPA file: plain, .gz, .zst or .xz; - for a pipe. With Spark a folder of parts.",
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text, one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet; - is "
            "standard input. With Spark any path that it reads."
        ),
    ] = None,
    order: Annotated[int, typer.Option("--order", "-n", help="Words of an n-gram, 1 to 8.")] = 5,
    prune: Annotated[
        str,
        typer.Option(
            help="Leave out n-grams that occur at most this often, by order, as 0,0,1; the last "
            "number holds for the orders above."
        ),
    ] = "",
    vocab: Annotated[
        Path | None,
        typer.Option(help="Words that may stay, split at white space; n-grams with others go."),
    ] = None,
    discount_fallback: Annotated[
        bool,
        typer.Option(
            "--discount-fallback",
            help="Use fixed discounts where small or repetitive text gives none.",
        ),
    ] = False,
    fallback_discounts: Annotated[
        str, typer.Option(help="Those of counts 1, 2, and 3 or more.")
    ] = "0.5,1,1.5",
    skip: Annotated[
        bool,
        typer.Option(
            "--skip",
            help="Leave out, and count, lines that are empty, not UTF-8, too long, or hold NUL, "
            "<s>, </s> or <unk>.",
        ),
    ] = False,
    column: Annotated[str, typer.Option(help="Of parquet files.")] = "text",
    memory: Annotated[
        str | None,
        typer.Option(help="Limit of the process, as 800M or 4G; half of what is free if none."),
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for what does not fit in it; beside the output.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that sort, add up and write.")] = 2,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Where it is done: in this process, or as jobs of Spark (extra `spark`)."
        ),
    ] = EngineName.LOCAL,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Estimate an ARPA model from text, by modified Kneser-Ney.

    The n-grams and values are those of KenLM's lmplz. Text beyond the memory is sorted on disk.

    Example: dlm estimate corpus.txt.zst --order 5 --prune 0,0,1 --output model.arpa.zst
    """
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.estimate.discount import checked_fallback
    from dlm.estimate.settings import EstimationSettings
    from dlm.progress import ProgressReporter
    from dlm.resources import available_bytes, parse_size

    if not text:
        raise ConfigError("no text was given; name files, or - for standard input")
    tell = stage_printer(quiet=quiet)

    check_reads("--vocab", vocab)
    check_folder("--tmp", tmp)
    if engine is EngineName.LOCAL:
        check_reads("TEXT", *text)
        check_writes("--output", output, stdout=True, arpa=True)
    else:  # a path without a scheme may be of Spark's own file system
        check_reads("TEXT", *(one for one in text if one.startswith(("/", "./", "../"))))
    settings = EstimationSettings(
        order=order,
        prune=_numbers(prune, int, "--prune"),
        vocabulary=None if vocab is None else frozenset(vocab.read_bytes().split()),
        fallback=(
            checked_fallback(_numbers(fallback_discounts, float, "--fallback-discounts"))
            if discount_fallback
            else None
        ),
        skip=skip,
        column=column,
        memory_bytes=available_bytes() // 2 if memory is None else parse_size(memory),
        threads=threads,
    )
    if engine is EngineName.SPARK:
        if memory is not None or tmp is not None:
            raise ConfigError(
                "--memory and --tmp are of --engine local; Spark is told by spark-submit "
                "(--executor-memory, --conf spark.local.dir=...)"
            )
        summary = _with_spark(text, output, settings, ProgressReporter(tell))
    else:
        from dlm.estimate.pipeline import estimate as run

        summary = run(text, output, settings, tmp=tmp, progress=ProgressReporter(tell))
    tell(f"done: {output}, {summary.arpa_bytes:,} bytes")
    if not quiet:
        out = sys.stderr if output == "-" else sys.stdout
        print(f"text        {summary.totals.summary(skip)}", file=out)
        print(f"n-grams     {' '.join(f'{count:,}' for count in summary.counts)}", file=out)


def _with_spark(
    text: list[str], output: str, settings: EstimationSettings, progress: ProgressReporter
) -> EstimationSummary:
    """As `run`, by Spark."""
    from dlm.spark.engine import estimate as run
    from dlm.spark.session import session

    progress.stage("starting Spark")
    with session() as spark:
        return run(spark, text, output, settings, progress=progress)


_Number = TypeVar("_Number", int, float)


def _numbers(text: str, kind: type[_Number], option: str) -> tuple[_Number, ...]:
    """Numbers between commas or spaces."""
    from dlm.errors import ConfigError

    try:
        return tuple(kind(part) for part in text.replace(",", " ").split())
    except ValueError as exc:
        raise ConfigError(
            f"{option} {text!r} is no list of numbers; write for example 0,0,1"
        ) from exc
