"""`dlm merge`: interpolates models, or adds their expected counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ, READ_ANY, numbers_of, parsed
from dlm.cli.options import (
    ArpaOutput,
    Json,
    Memory,
    Public,
    Silent,
    Skip,
    TextColumn,
    Threads,
)
from dlm.cli.output import print_json, stage_printer
from dlm.cli.scoring import open_text
from dlm.errors import ConfigError
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.merge import MergedModel, Union
    from dlm.estimate.text import Reader

Tell = Callable[[str], None]


def merge(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Models: ARPA files or KenLM binaries."),
        READ_ANY,
    ],
    output: ArpaOutput,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="W1,W2,...", help="One weight per model, such as 0.6,0.4; they must sum to 1."
        ),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT", help="Held-out text to tune the weights on, one sentence per line."
        ),
        READ,
    ] = None,
    by_counts: Annotated[
        bool,
        typer.Option(
            "--by-counts",
            help="Weight whole sentences, not words: add the models' expected counts.",
        ),
    ] = False,
    skip: Skip = False,
    column: TextColumn = "text",
    memory: Memory = None,
    threads: Threads = 2,
    public: Public = "",
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Mix models into one, with given or tuned weights.

    The mixture has every n-gram of every model; its backoff weights are recomputed. A word that
    a model lacks has probability 0 in that model. --tune finds the weights that make the text most
    probable, and prints the perplexity of each model and of the mixture.

    With --by-counts, each sentence comes from one model, chosen by its weight. The models' expected
    counts are added, and the new model is the one nearest to that mixture.

    If models carry privacy records, these are composed. A model or tuning text without one leaves
    the mixture without a guarantee, unless --public-attested-by NAME attests that it is public.

    Examples:
        dlm merge model.arpa.zst model5.arpa --weights 0.6,0.4 --output mixed.arpa.zst
        dlm merge model.arpa.zst model5.arpa --tune heldout.txt -o mixed.arpa.zst
    """
    from dlm.estimate.columns import ModelColumns, memory_bytes
    from dlm.estimate.merge import check_weights, unite
    from dlm.estimate.merge.mixture import needed_bytes
    from dlm.federated.account.records import merged_record
    from dlm.kenlm.open import open_ngrams
    from dlm.ngram.arpa import provenance_line
    from dlm.resources import available_bytes

    tell = stage_printer(quiet=quiet)

    if weights is None and tune is None:
        raise ConfigError("give --weights, one per model, or --tune with held-out text")
    if weights is not None and tune is not None:
        raise ConfigError("--weights and --tune were both given; give one of them")
    if by_counts and tune is not None:
        raise ConfigError("--tune and --by-counts were both given; give --weights with --by-counts")
    shares: Sequence[float] = []
    if weights is not None:
        given = parsed(
            "--weights", weights, numbers_of, "numbers separated by commas, such as 0.6,0.4"
        )
        shares = check_weights(given, len(models)).tolist()
    counts = []
    for model in models:
        with open_ngrams(model) as reader:
            counts.append(reader.counts)
    limit = available_bytes() if memory is None else memory
    # Renumbering a model's words sorts a copy while the original is still in memory.
    needed = sum(map(memory_bytes, counts)) + max(map(memory_bytes, counts)) + needed_bytes(counts)
    if by_counts:  # each n-gram of the union needs several float64 columns
        needed += 130 * sum(map(sum, counts))
    if needed > limit:
        raise ConfigError(
            f"merging these {counted(sum(map(sum, counts)), 'n-gram')} needs about {needed:,} "
            "bytes of "
            f"memory, but the limit is {limit:,}; raise --memory, or prune the models first"
        )
    read = []
    for model in models:
        tell(f"reading {model}")
        read.append(ModelColumns.read(model, search_bytes=limit // 4, progress=tell))
    comments = [columns.comments for columns in read]
    tuned = None
    merged: MergedModel | ModelColumns
    if by_counts:
        from dlm.distill.fitting.mixture import merge_by_counts

        merged = merge_by_counts(read, shares, threads=threads, progress=tell).model
    else:
        union = unite(read)
        read.clear()
        if tune is not None:
            shares, tuned = _tuned(
                union, open_text([tune], skip, column), models, tell, quiet or as_json
            )
        merged = _interpolated(union, shares, threads, tell)
    about = {
        "method": "expected counts" if by_counts else "static linear interpolation",
        "weights": [round(share, 9) for share in shares],
        "tuned": tuned,
        "inputs": [
            {"name": model.name, "counts": list(count), "comments": comment}
            for model, count, comment in zip(models, counts, comments, strict=True)
        ],
    }
    tell(f"writing {counted(sum(merged.counts), 'n-gram')} to {output}")
    lines = {
        f"model {place}, {model.name}": found
        for place, (model, found) in enumerate(zip(models, comments, strict=True), 1)
    }
    text = [] if tune is None else [f"the tuning text {tune.name}"]
    privacy = merged_record(lines, text, public)
    merged.write(output, comments=[provenance_line("merge", **about), *privacy])
    if as_json:
        print_json(
            {
                "counts": list(merged.counts),
                "models": [str(model) for model in models],
                "weights": list(shares),
                "tuned": tuned,
            }
        )
    tell("done")


def _interpolated(union: Union, shares: Sequence[float], threads: int, tell: Tell) -> MergedModel:
    """Mixes the probabilities; reports contexts that had to be scaled to sum to 1."""
    from dlm.estimate.merge import merge_models

    merged = merge_models(union, shares, threads=threads, progress=tell)
    if abs(merged.word_sum - 1) > 1e-6:
        tell(
            f"the word probabilities sum to {merged.word_sum:.6f} and were scaled to 1: one of the "
            "models was filtered, or its values are not probabilities"
        )
    if merged.lacking or merged.scaled:
        tell(
            f"{merged.lacking:,} contexts did not sum to 1 with the models' own backoff weights "
            f"and were corrected; in {merged.scaled:,} of them, the n-grams were scaled"
        )
    return merged


def _tuned(
    union: Union, text: Reader, models: list[Path], tell: Tell, quiet: bool
) -> tuple[Sequence[float], dict[str, object]]:
    """Tunes the weights and prints a table; returns them, and the fields for the model's header."""
    from dlm.estimate.merge import read_heldout, tune

    (name,) = text.sources
    tell(f"scoring {name}")
    heldout = read_heldout(union, (block.lines for block in text.read() if block.size))
    if text.totals.skipped:
        tell(f"skipped lines: {text.totals.left_out()}")
    tuned = tune(heldout)
    fits = [heldout.of_model(i) for i in range(len(models))]
    mixture = heldout.of_mixture(tuned.weights)
    if not quiet:
        print("weight\tperplexity\twithout_oovs\toovs\tmodel")
        for weight, fit, model in zip(tuned.weights, fits, models, strict=True):
            print(
                f"{weight:.6f}\t{fit.perplexity:.6f}\t{fit.perplexity_without_oovs:.6f}\t"
                f"{fit.oovs}\t{model}"
            )
        print(
            f"1\t{mixture.perplexity:.6f}\t{mixture.perplexity_without_oovs:.6f}\t{mixture.oovs}\t"
            f"the mixture, {counted(tuned.iterations, 'iteration')}, "
            f"{counted(heldout.tokens, 'token')}"
        )
    return tuned.weights, {
        "text": Path(name).name,
        "tokens": heldout.tokens,
        "iterations": tuned.iterations,
        "perplexity_without_oovs": round(mixture.perplexity_without_oovs, 6),
    }
