"""A model approximated, from files to a file: what `dlm distill` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlm.distill.fit import DistilledModel
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.columns import memory_bytes as model_bytes
from dlm.federated.model_record import merged_record
from dlm.federated.run_folder import CHECKPOINT
from dlm.ngram.arpa import ArpaReader, provenance_line
from dlm.resources import available_bytes


def is_network(source: Path) -> bool:
    """Whether it is the folder of a run of `dlm federate`, or its checkpoint."""
    return source.name == CHECKPOINT or (source / CHECKPOINT).exists()


def distill_files(
    source: Path,
    topology: Path,
    output: Path,
    *,
    samples: float | None = None,
    seed: int = 0,
    prior: float = 0.01,
    public: str = "",
    memory_bytes: int | None = None,
    threads: int = 2,
    progress: Callable[[str], None] = lambda line: None,
) -> DistilledModel:
    """Writes the model with the n-grams of a topology that is nearest to a source.

    Args
        source        an ARPA file, or the folder of a run of `dlm federate`
        topology      ARPA file, whose values do not matter
        output        ARPA file, compressed by its suffix; its header carries the composed records
        samples       sentences to sample from a network; None for an ARPA file
        seed, prior   of sampling; as `sampled.distill_samples`
        public        who says that what has no privacy record is of no user's text
        memory_bytes  limit; what is free if None
        progress      is called with what happens, a line at a time
    Raises
        ConfigError   samples of an ARPA file, or none of a network; models beyond the memory
        FormatError, PrivacyError  a file or a record that cannot be read
    Guarantees
        the same files and settings give the same bytes; the output is whole or as it was
    """
    network = is_network(source)
    _check(source, samples, threads, network=network)
    paths = {"topology": topology} if network else {"source": source, "topology": topology}
    counts = _counts_within(paths, memory_bytes)
    read = {}
    for role, path in paths.items():
        progress(f"reading {path}")
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
    comments = {f"the {role} {paths[role].name}": found.comments for role, found in read.items()}
    about: dict[str, Any]
    if network:
        from dlm.distill.sampled import distill_samples
        from dlm.distill.source import NetworkSource

        progress(f"reading {source}")
        trained = NetworkSource(source)
        comments = {f"the network {source.name}": [trained.record.line], **comments}
        inputs.insert(0, {"name": source.name, "as": "network", "rounds": trained.rounds})
        about = {"method": "relative entropy, samples", "samples": int(samples or 0), "seed": seed}
        made = distill_samples(
            trained,
            read.pop("topology"),
            samples=int(samples or 0),
            seed=seed,
            prior=prior,
            threads=threads,
            progress=progress,
        )
    else:
        from dlm.distill.backoff import distill_backoff

        about = {"method": "relative entropy, exact counts"}
        made = distill_backoff(
            read.pop("source"), read.pop("topology"), threads=threads, progress=progress
        )
    if made.dropped:
        progress(
            f"{made.dropped:,} n-grams of the topology were left out: they have some of its "
            f"{made.foreign_words:,} words that {source} does not know"
        )
    model = made.fit.model
    progress(f"writing {sum(model.counts):,} n-grams to {output}")
    lines = [
        provenance_line("distill", **about, inputs=inputs),
        *merged_record(comments, [], public, step="distill"),
    ]
    model.write(output, comments=lines)
    return made


def _check(source: Path, samples: float | None, threads: int, *, network: bool) -> None:
    if threads < 1:
        raise ConfigError(f"--threads {threads}; give 1 or more")
    if network and samples is None:
        raise ConfigError(f"{source} is a network, which is sampled: give --samples, such as 1e5")
    if not network and samples is not None:
        raise ConfigError(
            f"{source} is no run of dlm federate; an ARPA file gives exact counts: leave --samples"
        )


def _counts_within(paths: dict[str, Path], limit: int | None) -> dict[str, tuple[int, ...]]:
    """The n-grams of each model by order; refused where both do not fit into memory."""
    counts = {}
    for role, path in paths.items():
        with ArpaReader(path) as reader:
            counts[role] = tuple(reader.counts)
    limit = available_bytes() if limit is None else limit
    # Both models, their union, and some float64 columns beside each n-gram of the union.
    needed = sum(2 * model_bytes(count) + 100 * sum(count) for count in counts.values())
    if needed > limit:
        raise ConfigError(
            f"{' and '.join(map(str, paths.values()))} have {sum(map(sum, counts.values())):,} "
            f"n-grams, which take about {needed:,} bytes to distill, and the limit is {limit:,}; "
            "raise --memory, or prune them first"
        )
    return counts
