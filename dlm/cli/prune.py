"""`dlm prune`: an ARPA model becomes smaller by relative-entropy pruning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer
from dlm.cli.scoring import COLUMN, SKIP, open_text

if TYPE_CHECKING:
    from dlm.estimate.prune import PerplexityChange, PruneResult
    from dlm.estimate.text import Reader


def prune(
    model: Annotated[Path, typer.Argument(help="ARPA file: plain, .gz, .zst or .xz.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="ARPA file to write; .gz, .zst, .xz compress.")
    ],
    threshold: Annotated[
        float | None,
        typer.Option(help="Drop n-grams of a lower score than this, such as 1e-8."),
    ] = None,
    ngrams: Annotated[
        str | None,
        typer.Option(help="Keep so many in all, words included; or by order: -,500000,300000."),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Keep what fits in a plain ARPA file: 800M, 2G.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="ARPA file that says how probable histories are, not Kneser-Ney."),
    ] = None,
    keep_suffixes: Annotated[
        bool, typer.Option("--keep-suffixes", help="Keep the suffixes of what stays, too.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="Text, one sentence per line, to measure what pruning costs."),
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help=SKIP)] = False,
    column: Annotated[str, typer.Option(help=COLUMN)] = "text",
    memory: Annotated[
        str | None, typer.Option(help="Limit, as 800M or 4G; what is free if not given.")
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for what does not fit in it; beside the output.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Prune an ARPA model by relative entropy.

    Give one of --threshold, --ngrams and --bytes. Words stay, and so does every n-gram that a
    longer one which stays begins with; back-off weights are computed anew. The score of an n-gram
    is e^D - 1, D being the relative entropy, in nats per word, of the model without it alone.
    With --text, the perplexity of that text before and after is printed.

    Example: dlm prune model.arpa.zst --threshold 1e-8 --output small.arpa.zst
    """
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.estimate.prune import prune_file, read_goal
    from dlm.resources import parse_size

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)

    check_reads("MODEL", model, folders=True)
    check_reads("--history", history, folders=True)
    check_writes("--output", output, arpa=True)
    check_folder("--tmp", tmp)
    reader = None if text is None else open_text([text], skip, column)
    done = prune_file(
        model,
        output,
        read_goal(threshold, ngrams, size),
        history=history,
        keep_suffixes=keep_suffixes,
        text=None if reader is None else _blocks(reader, lambda: tell(f"scoring {text}")),
        memory_bytes=None if memory is None else parse_size(memory),
        tmp=tmp,
        threads=threads,
        progress=tell,
    )
    if reader is not None and skip:
        tell(f"lines left out: {reader.totals.left_out()}")
    if not quiet:
        _summary(done.result, done.measured, time.monotonic() - began)


def _blocks(reader: Reader, began: Callable[[], None]) -> Iterator[bytes]:
    """The lines of a text; `began` is called before the first."""
    began()
    yield from (block.lines for block in reader.read() if block.size)


def _summary(result: PruneResult, measured: PerplexityChange | None, seconds: float) -> None:
    """How many are left, by order, and what it costs."""
    print(f"{'order':>7} {'n-grams':>15} {'kept':>15}")
    rows = list(zip(result.counts_before, result.counts, strict=True))
    for k, (before, after) in enumerate(rows, 1):
        print(f"{k:>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}")
    before, after = sum(result.counts_before), sum(result.counts)
    print(f"{'all':>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}")
    if measured is None:
        print(
            f"criterion, summed over the n-grams that went, each as if it went alone: "
            f"{result.ln_divergence:.4g} nats per word; --text measures the loss on text"
        )
    else:
        for name, (old, new) in (
            ("including", measured.with_oovs),
            ("excluding", measured.without_oovs),
        ):
            print(
                f"perplexity {name} OOVs: {old:.6f} before, {new:.6f} after, {new / old - 1:+.2%}"
            )
        print(f"measured on {measured.tokens:,} tokens, {measured.oovs:,} of them OOVs")
    if result.without_mass:
        print(f"{result.without_mass:,} contexts have nothing left for words they do not list")
    print(f"{seconds:.1f} s, {before / max(seconds, 1e-9):,.0f} n-grams a second")
