"""`dlm distill`: a model approximated by one that has the n-grams of another."""

from __future__ import annotations

import json as json_text
import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.progress import stage_printer


def distill(
    source: Annotated[
        str,
        typer.Argument(
            help="What to approximate: an ARPA file, a run of dlm federate, or module:factory, a "
            "Python object with vocabulary and log_probs."
        ),
    ],
    topology: Annotated[
        str,
        typer.Option(
            help="ARPA file whose n-grams the new model has, its values do not matter; self: "
            "n-grams that the source says; self+FILE: both."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="ARPA file to write; .gz, .zst, .xz compress. Without it, counts stay in --work.",
        ),
    ] = None,
    samples: Annotated[
        float | None,
        typer.Option(help="Sentences to sample, such as 1e5; an ARPA file needs none."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text, a sentence a line, whose contexts count in place of samples."),
    ] = None,
    order: Annotated[int, typer.Option(help="Of the n-grams of --topology self, 1 to 5.")] = 3,
    ngrams: Annotated[
        int | None,
        typer.Option(help="How many --topology self keeps, of all orders; all if not given."),
    ] = None,
    interpolated: Annotated[
        bool,
        typer.Option(
            "--interpolated",
            help="With self+FILE: write the interpolation of the models on either, not the model "
            "made anew on its n-grams.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for counts, with which the same command goes on after a kill."),
    ] = None,
    part: Annotated[
        str, typer.Option(help="I/N: count the I-th of N parts alone, into --work.")
    ] = "1/1",
    counts: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a part's --work, once for each part: add up, count nothing."),
    ] = None,
    prior: Annotated[
        float | None,
        typer.Option(help="Visits added to each context that samples visited; 0.01 for words."),
    ] = None,
    capitalize: Annotated[
        Path | None,
        typer.Option(help="ARPA file of cased text, for a network of words in lower case."),
    ] = None,
    unigrams: Annotated[
        Path | None,
        typer.Option(help="Counts of words (dlm unigrams) that replace the model's unigrams."),
    ] = None,
    unigram_weight: Annotated[
        float, typer.Option(help="Of these counts; the rest stays with the model's unigrams.")
    ] = 1.0,
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
    """Approximate a model on another's n-grams, or on its own.

    Of all models with the n-grams of --topology, the new one is nearest to the source by relative
    entropy. The source's words are all in; n-grams with words that it does not know are left out.
    A network of wordpieces knows the topology's words.

    An ARPA file gives its expected counts itself, without text or samples. Other sources are
    sampled, and so is an ARPA file with --samples: at each history that a sentence visits, the
    whole distribution counts. Where source or topology carries a privacy record, the records are
    composed; without one the new model has no guarantee, unless --public NAME vouches.

    --capitalize splits what the network gives to a word over its cased spellings, as a model of
    public cased text has them. --unigrams takes the frequencies of words, and words that the
    network lacks, from counts; with --capitalize they are split as well.

    Example: dlm distill big.arpa.zst --topology pruned.arpa.zst --output small.arpa.zst
    """
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.distill.files import distill_files
    from dlm.distill.request import DistillRequest
    from dlm.resources import parse_size

    began = time.monotonic()
    request = DistillRequest(
        source=source, topology=topology, output=output, samples=samples, text=text, order=order,
        ngrams=ngrams, interpolated=interpolated, seed=seed, part=_part(part), work=work,
        counts=tuple(counts or ()), prior=prior, capitalize=capitalize, unigrams=unigrams,
        unigram_weight=unigram_weight, public=public, threads=threads,
        memory_bytes=None if memory is None else parse_size(memory),
    )  # fmt: skip
    if request.kind == "object":
        sys.path.insert(0, str(Path.cwd()))  # as python -m has it
    else:
        check_reads("SOURCE", source, folders=True)
    check_reads("--topology", request.external, folders=True)
    check_reads("--text", text)
    check_reads("--capitalize", capitalize, folders=True)
    check_reads("--unigrams", unigrams)
    check_reads("--counts", *request.counts, folders=True)
    check_writes("--output", output, arpa=True)
    check_folder("--work", work, made=True)
    made = distill_files(request, progress=stage_printer(quiet=quiet))
    if made is None:
        if not quiet:
            print(f"counted; add with --counts {work}")
        return
    model = made.fit.model
    known = not math.isnan(made.entropy)
    figures = {
        "ngrams": list(model.counts),
        "source_perplexity": math.exp(made.entropy) if known else None,
        "perplexity": made.fit.perplexity,
        "relative_entropy_nats": made.relative_entropy if known else None,
        "steps": made.fit.steps,
        "residual": made.fit.residual,
        "unvisited_contexts": made.fit.unvisited,
        "seconds": round(time.monotonic() - began, 3),
    }
    if json:
        print(json_text.dumps(figures))
        return
    said = f"perplexity of text from the source: {made.fit.perplexity:.4f} by the new model"
    if known:
        said = (
            f"perplexity of text from the source: {figures['source_perplexity']:.4f} by the "
            f"source, {made.fit.perplexity:.4f} by the new model "
            f"({made.relative_entropy:.4g} nats per word)"
        )
    print(said)
    print(f"{sum(model.counts):,} n-grams, at most {made.fit.steps} steps per context")


def _part(text: str) -> tuple[int, int]:
    """(I, N) of --part."""
    from dlm.errors import ConfigError

    place, _, parts = text.partition("/")
    try:
        return int(place), int(parts)
    except ValueError as exc:
        raise ConfigError(f"--part {text} is not I/N, such as 2/4") from exc
