"""`dlm distill`: a model approximated by one that has the n-grams of another."""

from __future__ import annotations

import json as json_text
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.progress import stage_printer


def distill(
    source: Annotated[Path, typer.Argument(help="ARPA file to approximate.")],
    topology: Annotated[
        Path,
        typer.Option(help="ARPA file whose n-grams the new model has; its values do not matter."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="ARPA file to write; .gz, .zst, .xz compress.")
    ],
    memory: Annotated[
        str | None, typer.Option(help="Limit, as 800M or 4G; what is free if not given.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Approximate a model on another's n-grams.

    Of all models with the n-grams of --topology, the new one is nearest to the source by relative
    entropy. Expected counts come from the source itself, without text or samples. The source's
    words are all in; n-grams with words that it does not know are left out.

    Example: dlm distill big.arpa.zst --topology pruned.arpa.zst --output small.arpa.zst
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.distill.backoff import distill_backoff
    from dlm.errors import ConfigError
    from dlm.estimate.columns import ModelColumns, memory_bytes
    from dlm.ngram.arpa import ArpaReader, provenance_line
    from dlm.resources import available_bytes, parse_size

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)
    if threads < 1:
        raise ConfigError(f"--threads {threads}; give 1 or more")
    check_reads("SOURCE", source, folders=True)
    check_reads("--topology", topology, folders=True)
    check_writes("--output", output)
    counts = []
    for path in (source, topology):
        with ArpaReader(path) as reader:
            counts.append(tuple(reader.counts))
    limit = available_bytes() if memory is None else parse_size(memory)
    # Both models, their union, and some float64 columns beside each n-gram of the union.
    needed = 2 * sum(map(memory_bytes, counts)) + 100 * sum(map(sum, counts))
    if needed > limit:
        raise ConfigError(
            f"these models have {sum(map(sum, counts)):,} n-grams, which take about {needed:,} "
            f"bytes to distill, and the limit is {limit:,}; raise --memory, or prune them first"
        )
    read = []
    for path in (source, topology):
        tell(f"reading {path}")
        read.append(ModelColumns.read(path))
    inputs = [
        {"name": path.name, "as": role, "counts": list(count), "comments": columns.comments}
        for path, role, count, columns in zip(
            (source, topology), ("source", "topology"), counts, read, strict=True
        )
    ]
    made = distill_backoff(*read, threads=threads, progress=tell)
    read.clear()
    if made.dropped:
        tell(
            f"{made.dropped:,} n-grams of the topology were left out: they have some of its "
            f"{made.foreign_words:,} words that {source} does not know"
        )
    model = made.fit.model
    tell(f"writing {sum(model.counts):,} n-grams to {output}")
    about = {"method": "relative entropy, exact counts", "inputs": inputs}
    model.write(output, comments=[provenance_line("distill", **about)])
    figures = {
        "ngrams": list(model.counts),
        "source_perplexity": math.exp(made.entropy),
        "perplexity": math.exp(made.entropy + made.relative_entropy),
        "relative_entropy_nats": made.relative_entropy,
        "steps": made.fit.steps,
        "residual": made.fit.residual,
        "unvisited_contexts": made.fit.unvisited,
        "seconds": round(time.monotonic() - began, 3),
    }
    if json:
        print(json_text.dumps(figures))
        return
    print(
        f"perplexity of text as the source says it: {figures['source_perplexity']:.4f} by the "
        f"source, {figures['perplexity']:.4f} by the new model "
        f"({made.relative_entropy:.4g} nats per word)"
    )
    print(f"{sum(model.counts):,} n-grams, at most {made.fit.steps} steps per context")
