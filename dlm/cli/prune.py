"""`dlm prune`: an ARPA model becomes smaller by relative-entropy pruning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer
from dlm.cli.scoring import COLUMN, SKIP, open_text

if TYPE_CHECKING:
    from dlm.estimate.prune import PerplexityChange, PruneResult


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
    from dataclasses import replace

    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.prune import Goal, file_bytes, least_bytes, measure, needed_bytes
    from dlm.estimate.prune import prune as prune_columns
    from dlm.ngram.arpa import provenance_line
    from dlm.resources import available_bytes, check_disk, parse_size
    from dlm.spill.arrays import IN_MEMORY, Storage

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)

    if threads < 1:
        raise ConfigError(f"--threads {threads}; give 1 or more")
    check_reads("MODEL", model, folders=True)
    check_reads("--history", history, folders=True)
    check_writes("--output", output)
    check_folder("--tmp", tmp)
    reader = None if text is None else open_text([text], skip, column)
    by_order = _numbers(ngrams)
    goal = Goal(
        threshold=threshold,
        text_bytes=None if size is None else parse_size(size),
        ngrams=None if by_order is None or len(by_order) > 1 else by_order[0],
        by_order=None if by_order is None or len(by_order) == 1 else by_order,
    )
    limit = available_bytes() if memory is None else parse_size(memory)
    counts = _counts(model)
    heard = () if history is None else _counts(history)
    storage = IN_MEMORY
    if needed_bytes(counts, heard) > limit:
        least, room = least_bytes(counts, heard), file_bytes(counts, heard)
        if least > limit:
            raise ConfigError(
                f"pruning {sum(counts):,} n-grams of {counts[0]:,} words takes {least:,} bytes at "
                f"least, and the limit is {limit:,}; raise --memory"
            )
        folder = output.parent if tmp is None else tmp
        check_disk(folder, room, f"pruning with {limit:,} bytes of memory")
        tell(f"arrays in files in {folder}: in memory they would take {needed_bytes(counts):,}")
        storage = Storage(folder)
    other = None
    if history is not None:
        tell(f"reading {history}")
        other = ModelColumns.read(history, storage=storage)
    tell(f"reading {model}")
    columns = ModelColumns.read(model, storage=storage)
    about: dict[str, object] = {
        "method": "relative entropy",
        **goal.facts(),
        "histories": None if history is None else history.name,
        "keep_suffixes": keep_suffixes,
        "from": model.name,
        "from_ngrams": columns.counts,
    }
    line = provenance_line("prune", **about)
    columns = replace(columns, comments=[*columns.comments, line])
    result = prune_columns(
        columns,
        goal,
        history=other,
        keep_suffixes=keep_suffixes,
        threads=threads,
        progress=tell,
    )
    tell(f"writing {output}")
    result.model.write(output)
    measured = None
    if reader is not None:
        tell(f"scoring {text}")
        blocks = (block.lines for block in reader.read() if block.size)
        measured = measure(columns, result.model, blocks)
        if skip:
            tell(f"lines left out: {reader.totals.left_out()}")
    if not quiet:
        _summary(result, measured, time.monotonic() - began)


def _counts(path: Path) -> tuple[int, ...]:
    """N-grams of an ARPA file by order, from its header; it is opened again for the rest."""
    from dlm.errors import ConfigError
    from dlm.ngram.arpa import ArpaReader, is_reopenable

    if path.exists() and not path.is_dir() and not is_reopenable(path):
        raise ConfigError(f"{path} is no file, and a model is opened twice; write it to one first")
    with ArpaReader(path) as reader:
        return tuple(reader.counts)


def _numbers(text: str | None) -> tuple[int | None, ...] | None:
    """What `--ngrams` says, None for `-`."""
    from dlm.errors import ConfigError

    if text is None:
        return None
    try:
        return tuple(None if n.strip() == "-" else int(n) for n in text.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"--ngrams {text!r} is no number, nor numbers and - separated by commas"
        ) from exc


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
