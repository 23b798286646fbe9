"""`dlm prune`, `dlm reduce` and `dlm filter`: make a model smaller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import READ, READ_ANY, SCRATCH
from dlm.cli.options import (
    ArpaModel,
    ArpaOutput,
    Json,
    Memory,
    Options,
    Silent,
    Skip,
    TextColumn,
    Threads,
    Tmp,
)
from dlm.cli.output import print_answer, stage_printer
from dlm.cli.scoring import open_text
from dlm.errors import ConfigError
from dlm.estimate.goal import PruneSettings
from dlm.progress import compiling_notice
from dlm.resources import available_bytes, parse_size
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.estimate.prune import PerplexityChange, PruneResult
    from dlm.estimate.text import Reader


def prune(
    model: ArpaModel,
    output: ArpaOutput,
    settings: Annotated[PruneSettings, Options()],
    history: Annotated[
        Path | None,
        typer.Option(
            "--history-lm",
            metavar="FILE",
            help="ARPA file for history probabilities (not Kneser-Ney).  [default: MODEL]",
        ),
        READ_ANY,
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text, one sentence per line, on which to measure the loss."
        ),
        READ,
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

    Give one of --threshold, --ngrams and --bytes. Words are kept, and so is every prefix of a kept
    n-gram; backoff weights are recomputed. The score of an n-gram is e^D - 1, where D is the
    relative entropy, in nats per word, of the model with only that n-gram
    removed. With --text, the perplexity of the text before and after is printed.

    Examples:
        dlm prune model.arpa.zst --threshold 1e-8 --output small.arpa.zst
        dlm prune model.arpa.zst --ngrams 1000 --text heldout.txt -o small.arpa.zst
    """
    from dlm.estimate.prune import prune_file

    began = time.monotonic()
    tell = stage_printer(quiet=quiet)
    reader = None if text is None else open_text([text], skip, column)
    done = prune_file(
        model,
        output,
        settings.goal,
        history=history,
        keep_suffixes=settings.keep_suffixes,
        text=None if reader is None else _blocks(reader, lambda: tell(f"scoring {text}")),
        memory_bytes=memory,
        tmp=tmp,
        threads=threads,
        progress=tell,
    )
    if reader is not None and skip:
        tell(f"skipped lines: {reader.totals.left_out()}")
    seconds = time.monotonic() - began
    facts = _facts(done.result, done.measured, seconds)
    lines = _summary(done.result, done.measured, seconds, compiling_notice.spent_s)
    print_answer(facts, lines, as_json=as_json, quiet=quiet)


def _blocks(reader: Reader, began: Callable[[], None]) -> Iterator[bytes]:
    began()
    yield from (block.lines for block in reader.read() if block.size)


def _facts(
    result: PruneResult, measured: PerplexityChange | None, seconds: float
) -> dict[str, Any]:
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
) -> Iterator[str]:
    yield f"{'order':>7} {'n-grams':>15} {'kept':>15}"
    rows = list(zip(result.counts_before, result.counts, strict=True))
    for k, (before, after) in enumerate(rows, 1):
        yield f"{k:>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}"
    before, after = sum(result.counts_before), sum(result.counts)
    yield f"{'all':>7} {before:>15,} {after:>15,} {after / max(before, 1):>7.1%}"
    if measured is None:
        yield (
            f"criterion, summed over the pruned n-grams as if each were pruned alone: "
            f"{result.ln_divergence:.4g} nats per word; --text measures the loss on text"
        )
    else:
        for name, (old, new) in (
            ("including", measured.with_oovs),
            ("excluding", measured.without_oovs),
        ):
            yield (
                f"perplexity {name} OOVs: {old:.6f} before, {new:.6f} after, {new / old - 1:+.2%}"
            )
        yield f"measured on {counted(measured.tokens, 'token')}, {measured.oovs:,} of them OOVs"
    if result.without_mass:
        have = "context has" if result.without_mass == 1 else "contexts have"
        yield f"{result.without_mass:,} {have} no probability left for unlisted words"
    rate = f"{before / max(seconds, 1e-9):,.0f} n-grams per second"
    if compiling_s >= 1.0:
        rate = f"{compiling_s:.1f} s of it compiling kernels"
    yield f"{seconds:.1f} s, {rate}"


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
    from dlm.estimate.reduce import reduce_arpa
    from dlm.ngram.arpa import provenance_line

    about = {
        "method": "lower orders as they are",
        "order": order,
        "from": model.name,
    }
    result = reduce_arpa(
        model,
        order,
        output,
        memory_bytes=available_bytes() if memory is None else memory,
        comment=provenance_line("reduce", **about),
        progress=stage_printer(quiet=quiet),
    )
    facts = {"counts_before": list(result.counts_before), "counts": list(result.counts)}
    before, after = sum(result.counts_before), counted(sum(result.counts), "n-gram")
    line = f"order {len(result.counts_before)} cut to {order}; {before:,} reduced to {after}"
    print_answer(facts, [line], as_json=as_json, quiet=quiet)


def filter_(
    model: ArpaModel,
    vocab: Annotated[
        Path, typer.Option(metavar="FILE", help="Words to keep, separated by white space."), READ
    ],
    output: ArpaOutput,
    contexts: Annotated[
        bool,
        typer.Option(
            "--contexts",
            help="Check only the context of an n-gram, not its last word; every word stays.",
        ),
    ] = False,
    renormalise: Annotated[
        bool,
        typer.Option(
            "--renormalise",
            help="Renormalise every context to sum to 1; needs the model in memory.",
        ),
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit with --renormalise, such as 2G.  [default: the free memory]",
        ),
    ] = None,
    tmp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for intermediate files.  [default: beside the output]"
        ),
        SCRATCH,
    ] = None,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Keep the n-grams of a model whose words are all in a list.

    Words in angle brackets are always kept. Values do not change, as in KenLM's `filter single`:
    text made of the listed words scores the same, and the probability of the dropped words is not
    redistributed.

    Examples:
        dlm filter model.arpa.zst --vocab words.txt --output listed.arpa.zst
        dlm filter model.arpa.zst --vocab words.txt --renormalise -o sums.arpa
    """
    from dlm.estimate.columns import ModelColumns
    from dlm.estimate.filter import (
        FilterResult,
        filter_arpa,
        read_words,
        renormalised,
        renormalised_bytes,
    )
    from dlm.kenlm.open import open_ngrams
    from dlm.ngram.arpa import provenance_line, write_arpa

    tell = stage_printer(quiet=quiet)

    def comment(comments: list[str], before: tuple[int, ...], _after: tuple[int, ...]) -> list[str]:
        about = {
            "method": "the n-grams of a vocabulary",
            "vocabulary": vocab.name,
            "contexts": contexts,
            "renormalised": renormalise,
            "from": model.name,
            "from_ngrams": before,
        }
        return [*comments, provenance_line("filter", **about)]

    if contexts and renormalise:
        raise ConfigError(
            "--contexts and --renormalise were both given; with --contexts, the probabilities "
            "after every context still sum to 1. Give one of the two"
        )
    if memory is not None and not renormalise:
        raise ConfigError(
            "--memory applies only with --renormalise; otherwise only the words are held in "
            "memory. Leave --memory out, or add --renormalise"
        )
    words = read_words(vocab)
    if not renormalise:
        found = filter_arpa(
            model, output, words, contexts=contexts, tmp=tmp, comment=comment, progress=tell
        )
    else:
        limit = available_bytes() if memory is None else memory
        with open_ngrams(model) as reader:
            needed = renormalised_bytes(reader.counts)
        if needed > limit:
            raise ConfigError(
                f"--renormalise needs {needed:,} bytes of memory for {model}, but the limit is "
                f"{limit:,}; raise --memory, or prune the model first"
            )
        tell(f"reading {model}")
        columns = ModelColumns.read(model, search_bytes=limit // 4, progress=tell)
        vocabulary, sections, missing = renormalised(columns, words, path=str(model))
        first = len(sections[0][0]) - (not vocabulary.unk_in_model)
        counts = (first, *(len(section[0]) for section in sections[1:]))
        tell(f"writing {sum(counts):,} of {counted(sum(columns.counts), 'n-gram')} to {output}")
        comments = comment(columns.comments, columns.counts, counts)
        write_arpa(output, vocabulary, sections, comments=comments)
        found = FilterResult(columns.counts, counts, missing)
    facts = {
        "counts_before": list(found.counts_before),
        "counts": list(found.counts),
        "words_missing": found.words_missing,
    }
    lines = [
        f"order {order}: kept {after:,} of {counted(before, 'n-gram')}"
        for order, (before, after) in enumerate(
            zip(found.counts_before, found.counts, strict=True), 1
        )
    ]
    if found.words_missing:
        lines.append(f"not in the model: {counted(found.words_missing, 'word')} of {vocab}")
    print_answer(facts, lines, as_json=as_json, quiet=quiet)
