"""`dlm prune`: relative-entropy pruning of an ARPA model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import (
    ArpaModel,
    ArpaOutput,
    Json,
    Memory,
    Silent,
    Skip,
    TextColumn,
    Threads,
    Tmp,
    option,
)
from dlm.cli.progress import stage_printer
from dlm.cli.scoring import open_text
from dlm.estimate.goal import PruneSettings
from dlm.progress import compiling_notice
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.estimate.prune import PerplexityChange, PruneResult
    from dlm.estimate.text import Reader


def prune(
    model: ArpaModel,
    output: ArpaOutput,
    threshold: Annotated[float | None, option(PruneSettings, "threshold")] = None,
    ngrams: Annotated[str | None, option(PruneSettings, "ngrams", metavar="COUNTS")] = None,
    size: Annotated[str | None, option(PruneSettings, "size", metavar="SIZE")] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="ARPA file for history probabilities (not Kneser-Ney).  [default: MODEL]",
        ),
    ] = None,
    keep_suffixes: Annotated[bool, option(PruneSettings, "keep_suffixes")] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text, one sentence per line, on which to measure the loss."
        ),
    ] = None,
    skip: Skip = False,
    column: TextColumn = "text",
    memory: Memory = None,
    tmp: Tmp = None,
    threads: Threads = 2,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Prune an ARPA model by relative entropy.

    Give one of --threshold, --ngrams and --bytes. Words are kept, and so is every n-gram that is a
    prefix of a kept one; backoff weights are recomputed. The score of an n-gram is e^D - 1, where D
    is the relative entropy, in nats per word, of the model with only that n-gram
    removed. With --text, the perplexity of the text before and after is printed.

    Examples:
        dlm prune model.arpa.zst --threshold 1e-8 --output small.arpa.zst
        dlm prune model.arpa.zst --ngrams 1000 --text heldout.txt -o small.arpa.zst
    """
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.estimate.prune import prune_file
    from dlm.resources import parse_size

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)

    check_reads("MODEL", model, folders=True)
    check_reads("--history", history, folders=True)
    check_writes("--output", output, arpa=True, inputs=(model, history, text))
    check_folder("--tmp", tmp)
    reader = None if text is None else open_text([text], skip, column)
    done = prune_file(
        model,
        output,
        PruneSettings(threshold, ngrams, size).goal,
        history=history,
        keep_suffixes=keep_suffixes,
        text=None if reader is None else _blocks(reader, lambda: tell(f"scoring {text}")),
        memory_bytes=None if memory is None else parse_size(memory),
        tmp=tmp,
        threads=threads,
        progress=tell,
    )
    if reader is not None and skip:
        tell(f"skipped lines: {reader.totals.left_out()}")
    if as_json:
        print_json(_facts(done.result, done.measured, time.monotonic() - began))
    elif not quiet:
        compiling_s = compiling_notice.spent_s
        _summary(done.result, done.measured, time.monotonic() - began, compiling_s)


def _blocks(reader: Reader, began: Callable[[], None]) -> Iterator[bytes]:
    """The lines of a text; `began` is called before the first."""
    began()
    yield from (block.lines for block in reader.read() if block.size)


def _facts(
    result: PruneResult, measured: PerplexityChange | None, seconds: float
) -> dict[str, Any]:
    """What `_summary` prints, for machines."""
    facts: dict[str, Any] = {
        "counts_before": list(result.counts_before),
        "counts": list(result.counts),
        "criterion_nats_per_word": result.ln_divergence,
        "contexts_without_mass": result.without_mass,
        "seconds": round(seconds, 3),
    }
    if measured is not None:
        facts |= {
            "tokens": measured.tokens,
            "oovs": measured.oovs,
            "perplexity_before": measured.with_oovs[0],
            "perplexity": measured.with_oovs[1],
            "perplexity_without_oovs_before": measured.without_oovs[0],
            "perplexity_without_oovs": measured.without_oovs[1],
        }
    return facts


def _summary(
    result: PruneResult, measured: PerplexityChange | None, seconds: float, compiling_s: float
) -> None:
    """How many n-grams are left per order, and what pruning costs."""
    print(f"{'order':>7} {'n-grams':>15} {'kept':>15}")
    rows = list(zip(result.counts_before, result.counts, strict=True))
    for k, (before, after) in enumerate(rows, 1):
        print(f"{k:>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}")
    before, after = sum(result.counts_before), sum(result.counts)
    print(f"{'all':>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}")
    if measured is None:
        print(
            f"criterion, summed over the pruned n-grams as if each were pruned alone: "
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
        print(f"measured on {counted(measured.tokens, 'token')}, {measured.oovs:,} of them OOVs")
    if result.without_mass:
        have = "context has" if result.without_mass == 1 else "contexts have"
        print(f"{result.without_mass:,} {have} no probability left for unlisted words")
    if compiling_s >= 1.0:
        print(f"{seconds:.1f} s, {compiling_s:.1f} s of it compiling kernels")
        return
    print(f"{seconds:.1f} s, {before / max(seconds, 1e-9):,.0f} n-grams per second")
