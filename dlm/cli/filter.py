"""`dlm filter`: a model reduced to the words of a list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.progress import stage_printer


def filter_(
    model: Annotated[Path, typer.Argument(help="ARPA file: plain, .gz, .zst or .xz.")],
    vocab: Annotated[Path, typer.Option(help="File of words, between white space.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="ARPA file; .gz, .zst or .xz compresses it.")
    ],
    contexts: Annotated[
        bool, typer.Option("--contexts", help="Test all but the last word: no word is removed.")
    ] = False,
    renormalise: Annotated[
        bool,
        typer.Option(
            "--renormalise", help="Make every context sum to 1 again; takes the model into memory."
        ),
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Limit with --renormalise, as 2G; what is free if not given.")
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for what is kept; beside the output if not given.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Keep the n-grams of a model whose words are all in a list.

    Words in angle brackets are always kept. Values stay as they are, as with KenLM's `filter
    single`: text of these words scores the same, and what the others had is given to nobody.

    Example: dlm filter model.arpa.zst --vocab words.txt --output small.arpa.zst
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
    from dlm.ngram.arpa import ArpaReader, provenance_line, write_arpa
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
            "--contexts removes no word, and so no probability, from what is predicted; "
            "--renormalise has nothing to do with it: give one of the two"
        )
    if memory is not None and not renormalise:
        raise ConfigError(
            "--memory is for --renormalise; without it the words are all that is held"
        )
    check_reads("MODEL", model, folders=True)
    check_reads("--vocab", vocab)
    check_writes("--output", output, arpa=True)
    check_folder("--tmp", tmp)
    words = read_words(vocab)
    if not renormalise:
        found = filter_arpa(
            model, output, words, contexts=contexts, tmp=tmp, comment=comment, progress=tell
        )
    else:
        limit = available_bytes() if memory is None else parse_size(memory)
        with ArpaReader(model) as reader:
            needed = renormalised_bytes(reader.counts)
        if needed > limit:
            raise ConfigError(
                f"--renormalise takes {needed:,} bytes for {model}, and the limit is {limit:,}; "
                "raise --memory, or prune the model first"
            )
        tell(f"reading {model}")
        columns = ModelColumns.read(model)
        vocabulary, sections, missing = renormalised(columns, words, path=str(model))
        first = len(sections[0][0]) - (not vocabulary.unk_in_model)
        counts = (first, *(len(section[0]) for section in sections[1:]))
        tell(f"writing {sum(counts):,} of {sum(columns.counts):,} n-grams to {output}")
        comments = comment(columns.comments, columns.counts, counts)
        write_arpa(output, vocabulary, sections, comments=comments)
        found = FilterResult(columns.counts, counts, missing)
    if not quiet:
        for order, (before, after) in enumerate(
            zip(found.counts_before, found.counts, strict=True), 1
        ):
            print(f"order {order}: {after:,} of {before:,} n-grams")
        if found.words_missing:
            print(f"{found.words_missing:,} words of {vocab} are not in the model")
