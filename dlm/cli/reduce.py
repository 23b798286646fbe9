"""`dlm reduce`: an ARPA model without its highest orders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reduce(
    model: Annotated[Path, typer.Argument(help="ARPA file: plain, .gz, .zst or .xz.")],
    order: Annotated[int, typer.Option("--order", "-n", help="The highest order to keep.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="ARPA file to write; .gz, .zst, .xz compress.")
    ],
    memory: Annotated[
        str | None, typer.Option(help="Limit, as 800M or 4G; what is free if not given.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Drop the highest orders of an ARPA model.

    What is left backs off as before and sums to 1 as before: order 2 is what a cascade answers from
    where a shard is down.

    Example: dlm reduce model.arpa.zst --order 2 --output bigrams.arpa.zst
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.estimate.reduce import reduce_arpa
    from dlm.ngram.arpa import provenance_line
    from dlm.resources import available_bytes, parse_size

    check_reads("MODEL", model, folders=True)
    check_writes("--output", output, arpa=True)
    about = {
        "method": "lower orders as they are",
        "order": order,
        "from": model.name,
    }
    result = reduce_arpa(
        model,
        order,
        output,
        memory_bytes=available_bytes() if memory is None else parse_size(memory),
        comment=provenance_line("reduce", **about),
    )
    if not quiet:
        before, after = sum(result.counts_before), sum(result.counts)
        print(f"order {len(result.counts_before)} to {order}: {before:,} to {after:,} n-grams")
