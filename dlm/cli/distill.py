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
    from dlm.cli.records import merged_record
    from dlm.errors import ConfigError
    from dlm.estimate.columns import ModelColumns, memory_bytes
    from dlm.federated.run_folder import CHECKPOINT
    from dlm.ngram.arpa import ArpaReader, provenance_line
    from dlm.resources import available_bytes, parse_size

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)
    is_network = source.name == CHECKPOINT or (source / CHECKPOINT).exists()
    if threads < 1:
        raise ConfigError(f"--threads {threads}; give 1 or more")
    if is_network and samples is None:
        raise ConfigError(f"{source} is a network, which is sampled: give --samples, such as 1e5")
    if not is_network and samples is not None:
        raise ConfigError(
            f"{source} is no run of dlm federate; an ARPA file gives exact counts: leave --samples"
        )
    check_reads("SOURCE", source, folders=True)
    check_reads("--topology", topology, folders=True)
    check_writes("--output", output)
    paths = {"topology": topology} if is_network else {"source": source, "topology": topology}
    counts = {}
    for role, path in paths.items():
        with ArpaReader(path) as reader:
            counts[role] = tuple(reader.counts)
    limit = available_bytes() if memory is None else parse_size(memory)
    # Both models, their union, and some float64 columns beside each n-gram of the union.
    needed = sum(2 * memory_bytes(count) + 100 * sum(count) for count in counts.values())
    if needed > limit:
        raise ConfigError(
            f"{' and '.join(map(str, paths.values()))} have {sum(map(sum, counts.values())):,} "
            f"n-grams, which take about {needed:,} bytes to distill, and the limit is {limit:,}; "
            "raise --memory, or prune them first"
        )
    read = {}
    for role, path in paths.items():
        tell(f"reading {path}")
        read[role] = ModelColumns.read(path)
    inputs: list[dict[str, object]] = [
        {
            "name": paths[role].name,
            "as": role,
            "counts": list(counts[role]),
            "comments": columns.comments,
        }
        for role, columns in read.items()
    ]
    comments = {f"the {role} {paths[role]}": columns.comments for role, columns in read.items()}
    about: dict[str, object]
    if is_network:
        from dlm.distill.sampled import distill_samples
        from dlm.distill.source import NetworkSource

        tell(f"reading {source}")
        network = NetworkSource(source)
        comments = {f"the network {source}": [network.record.line], **comments}
        inputs.insert(0, {"name": source.name, "as": "network", "rounds": network.rounds})
        about = {"method": "relative entropy, samples", "samples": int(samples or 0), "seed": seed}
        made = distill_samples(
            network,
            read.pop("topology"),
            samples=int(samples or 0),
            seed=seed,
            prior=prior,
            threads=threads,
            progress=tell,
        )
    else:
        from dlm.distill.backoff import distill_backoff

        about = {"method": "relative entropy, exact counts"}
        made = distill_backoff(
            read.pop("source"), read.pop("topology"), threads=threads, progress=tell
        )
    if made.dropped:
        tell(
            f"{made.dropped:,} n-grams of the topology were left out: they have some of its "
            f"{made.foreign_words:,} words that {source} does not know"
        )
    model = made.fit.model
    tell(f"writing {sum(model.counts):,} n-grams to {output}")
    lines = [
        provenance_line("distill", **about, inputs=inputs),
        *merged_record(comments, [], public, step="distill"),
    ]
    model.write(output, comments=lines)
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
