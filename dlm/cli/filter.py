"""`dlm filter`: keeps the n-grams of a model whose words are all in a list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import ArpaModel, ArpaOutput, Json, Silent
from dlm.cli.progress import stage_printer
from dlm.units import counted


def filter_(
    model: ArpaModel,
    vocab: Annotated[
        Path, typer.Option(metavar="FILE", help="Words to keep, separated by white space.")
    ],
    output: ArpaOutput,
    contexts: Annotated[
        bool,
        typer.Option(
            "--contexts",
            help="Check only the context of an n-gram, not its last word; drops no word.",
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
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory limit with --renormalise, such as 2G.  [default: the free memory]",
        ),
    ] = None,
    tmp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for intermediate files.  [default: beside the output]"
        ),
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
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.errors import ConfigError
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
    from dlm.resources import available_bytes, parse_size

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
            "--contexts and --renormalise were both given; --contexts drops no word, so every "
            "context still sums to 1. Give one of the two"
        )
    if memory is not None and not renormalise:
        raise ConfigError(
            "--memory applies only with --renormalise; without it, only the words are in memory. "
            "Leave --memory out, or add --renormalise"
        )
    check_reads("MODEL", model, folders=True)
    check_reads("--vocab", vocab)
    check_writes("--output", output, arpa=True, inputs=(model, vocab))
    check_folder("--tmp", tmp)
    words = read_words(vocab)
    if not renormalise:
        found = filter_arpa(
            model, output, words, contexts=contexts, tmp=tmp, comment=comment, progress=tell
        )
    else:
        limit = available_bytes() if memory is None else parse_size(memory)
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
    if as_json:
        print_json(
            {
                "counts_before": list(found.counts_before),
                "counts": list(found.counts),
                "words_missing": found.words_missing,
            }
        )
    elif not quiet:
        for order, (before, after) in enumerate(
            zip(found.counts_before, found.counts, strict=True), 1
        ):
            print(f"order {order}: {after:,} of {counted(before, 'n-gram')}")
        if found.words_missing:
            print(f"not in the model: {counted(found.words_missing, 'word')} of {vocab}")
