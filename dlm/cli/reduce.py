"""`dlm reduce`: an ARPA model without its highest orders."""

from __future__ import annotations

from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import ArpaModel, ArpaOutput, Json, Memory, Silent
from dlm.cli.progress import stage_printer
from dlm.units import counted


def reduce(
    model: ArpaModel,
    order: Annotated[int, typer.Option("--order", "-n", help="Highest order to keep.")],
    output: ArpaOutput,
    memory: Memory = None,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Drop the highest orders of an ARPA model.

    The remaining n-grams keep their values and back off as before, so contexts still sum to 1.

    Examples:
        dlm reduce model.arpa.zst --order 2 --output bigrams.arpa.zst
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
        progress=stage_printer(quiet=quiet),
    )
    if as_json:
        print_json({"counts_before": list(result.counts_before), "counts": list(result.counts)})
    elif not quiet:
        before, after = sum(result.counts_before), sum(result.counts)
        print(
            f"order {len(result.counts_before)} to {order}: {before:,} to "
            f"{counted(after, 'n-gram')}"
        )
