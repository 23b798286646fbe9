"""`dlm perplexity`: how well a model predicts text, from an ARPA file, a shard set or servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.progress import stage_printer
from dlm.cli.scoring import COLUMN, SKIP, open_text, print_summary, quick_start
from dlm.scoring import SERVED_BYTES, ScoreSummary, scored_by_servers, scored_here

if TYPE_CHECKING:
    from dlm.index.search.local import LocalModel


def perplexity(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL [TEXT]...",
            help="An ARPA file or the folder of a shard set, unless --cluster is given; then texts,"
            " one sentence per line: plain, .gz, .zst, .xz, .bz2 or parquet; standard input without"
            " one, or for -.",
        ),
    ],
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.toml of servers to ask: no MODEL is given then.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Which model of the servers: the first 6 digits of its id, or more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object `summary`.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Limit for an ARPA file, as 800M; half of what is free if not given."),
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for an ARPA file's n-grams; the system's if not.")
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help=SKIP)] = False,
    column: Annotated[str, typer.Option(help=COLUMN)] = "text",
    threads: Annotated[int, typer.Option(help="Threads that score.")] = 2,
    deadline: Annotated[float, typer.Option(help="Seconds a batch of sentences may take.")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Tell the perplexity of text, and which orders were found.

    The summary, with and without OOVs, is that of `dlm score`. An ARPA file is put into a shard set
    in a temporary folder first, of some 12 bytes an n-gram, which is removed afterwards. TLS and
    tokens of servers are those that cluster.toml names.

    Example: dlm perplexity model.arpa.zst heldout.txt
    """
    from dlm.cli.paths import check_reads
    from dlm.errors import ConfigError

    if threads < 1:
        raise ConfigError(f"--threads {threads}: give 1 or more")
    tell = stage_printer(quiet=quiet)

    with ExitStack() as stack:
        if cluster is not None:
            from dlm.cli.compiling import compile_kernels
            from dlm.client import Client, ClientConfig
            from dlm.client.warm import KERNELS as ASKING

            if memory is not None or tmp is not None:
                raise ConfigError("--memory and --tmp are for an ARPA file; --cluster asks servers")
            check_reads("--cluster", cluster)
            check_reads("TEXT", *paths)
            reader = open_text(paths, skip, column, SERVED_BYTES)
            compile_kernels(ASKING)
            client = Client.connect(cluster, ClientConfig(deadline_s=deadline), model=model)
            utterance = stack.enter_context(client).utterance()
            order = utterance.order
            scored = scored_by_servers(utterance, reader.read())
        else:
            if model is not None:
                raise ConfigError("--model chooses among what servers hold; give --cluster with it")
            check_reads("MODEL", paths[0], folders=True)
            check_reads("TEXT", *paths[1:])
            opened = _opened(paths[0], memory, tmp, stack, tell)
            reader = open_text(paths[1:], skip, column)
            order = opened.order
            scored = scored_here(opened, reader.read(), threads)
        found = ScoreSummary(by_order=[0] * order)
        for _, some in scored:
            some.add_to(found)
    tell(f"{found.tokens:,} tokens scored")
    if as_json:
        facts = {**found.facts(), "hits": found.by_order}
        if skip:
            facts["skipped"] = reader.totals.skipped
        print(json.dumps({"summary": facts}))
        return
    print_summary(found, reader, skip)
    for k, hits in enumerate(found.by_order, 1):
        share = 100 * hits / found.tokens if found.tokens else 0.0
        print(f"Hits of order {k}:\t{hits}\t{share:.2f} %")


def _opened(
    place: Path, memory: str | None, tmp: Path | None, stack: ExitStack, tell: Callable[[str], None]
) -> LocalModel:
    """The model at `place`; what has to be written for it goes with the `stack`."""
    from dlm.cli.compiling import compile_kernels
    from dlm.cli.paths import check_folder
    from dlm.errors import ConfigError

    with quick_start():
        from dlm.index.search.local import LocalModel
        from dlm.index.search.shard import OPENING
        from dlm.index.search.text.score import KERNELS as SCORING
        from dlm.ngram.arpa import is_parts_folder

        if place.is_dir() and not is_parts_folder(place):
            if memory is not None or tmp is not None:
                raise ConfigError(f"--memory and --tmp are for an ARPA file; {place} is a folder")
            compile_kernels((*SCORING, *OPENING))
            return LocalModel.open(place)
    from dlm.files import scratch_folder
    from dlm.index.build.shard_set import KERNELS as BUILDING
    from dlm.index.build.shard_set import build_shard_set
    from dlm.resources import parse_size

    check_folder("--tmp", tmp)
    limit = None if memory is None else parse_size(memory)
    compile_kernels((*BUILDING, *SCORING, *OPENING))
    output = stack.enter_context(scratch_folder(tmp, "dlm-perplexity")) / "set"
    build_shard_set(place, output, 1, memory_bytes=limit, progress=tell)
    return LocalModel.open(output, verify=False)  # it was written a moment ago
