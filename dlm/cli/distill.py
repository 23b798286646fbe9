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
    source: Annotated[
        Path, typer.Argument(help="What to approximate: an ARPA file, or a run of dlm federate.")
    ],
    topology: Annotated[
        Path,
        typer.Option(help="ARPA file whose n-grams the new model has; its values do not matter."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="ARPA file to write; .gz, .zst, .xz compress.")
    ],
    samples: Annotated[
        float | None, typer.Option(help="Sentences to sample from a network, such as 1e5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    prior: Annotated[
        float, typer.Option(help="Visits added to each context that samples visited.")
    ] = 0.01,
    public: Annotated[
        str, typer.Option(help="Who says that what has no privacy record is of no user's text.")
    ] = "",
    memory: Annotated[
        str | None, typer.Option(help="Limit, as 800M or 4G; what is free if not given.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Approximate a model on another's n-grams.

    Of all models with the n-grams of --topology, the new one is nearest to the source by relative
    entropy. The source's words are all in; n-grams with words that it does not know are left out.

    An ARPA file gives its expected counts itself, without text or samples. A network, the folder
    of a run of dlm federate, is sampled. Where source or topology carries a privacy record, the
    records are composed; without one the new model has no guarantee, unless --public NAME vouches.

    Example: dlm distill big.arpa.zst --topology pruned.arpa.zst --output small.arpa.zst
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.distill.files import distill_files
    from dlm.resources import parse_size

    began = time.monotonic()
    check_reads("SOURCE", source, folders=True)
    check_reads("--topology", topology, folders=True)
    check_writes("--output", output)
    made = distill_files(
        source,
        topology,
        output,
        samples=samples,
        seed=seed,
        prior=prior,
        public=public,
        memory_bytes=None if memory is None else parse_size(memory),
        threads=threads,
        progress=stage_printer(quiet=quiet),
    )
    model = made.fit.model
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
