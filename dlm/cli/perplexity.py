"""`dlm perplexity`: how well a model predicts text, from an ARPA file, a shard set or servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json_line
from dlm.cli.options import Quiet, ServedModel, Skip, TextColumn, Threads
from dlm.cli.progress import stage_printer
from dlm.cli.scoring import open_here, open_text, print_summary
from dlm.scoring import SERVED_BYTES, ScoreSummary, scored_by_servers, scored_here
from dlm.units import counted


def perplexity(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL [TEXT]...",
            help="An ARPA or KenLM binary file, or the folder of a shard set (leave it out with "
            "--cluster), then texts, one sentence per line: plain, .gz, .zst, .xz, .bz2 or "
            "parquet. Without a text, or for -, standard input.",
        ),
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="cluster.toml of the servers to query, instead of a MODEL."
        ),
    ] = None,
    model: ServedModel = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, `summary`.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory limit for an ARPA file, such as 800M.  [default: half of the free memory]",
        ),
    ] = None,
    tmp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the shards of an ARPA file.  [default: the system's]"
        ),
    ] = None,
    skip: Skip = False,
    column: TextColumn = "text",
    threads: Threads = 2,
    deadline: Annotated[float, typer.Option(help="Time limit per batch, in seconds.")] = 30.0,
    quiet: Quiet = False,
) -> None:
    """Compute the perplexity of text, and the matches per order.

    The summary, with and without OOVs, is that of `dlm score`. An ARPA file is first sharded into a
    temporary folder, at about 12 bytes per n-gram, which is removed afterwards. TLS and tokens for
    servers come from cluster.toml.

    Examples:
        dlm perplexity model.arpa.zst heldout.txt
        dlm perplexity shards/model heldout.txt --json
        dlm perplexity --cluster cluster.toml heldout.txt
    """
    from dlm.cli.paths import check_reads
    from dlm.errors import ConfigError

    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    tell = stage_printer(quiet=quiet)

    with ExitStack() as stack:
        if cluster is not None:
            from dlm.cli.compiling import compile_kernels
            from dlm.client import Client, ClientConfig
            from dlm.client.deliver.warm import KERNELS as ASKING

            if memory is not None or tmp is not None:
                raise ConfigError(
                    "--memory and --tmp apply to an ARPA file; leave them out with --cluster"
                )
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
                raise ConfigError("--model applies to servers only; add --cluster, or leave it out")
            check_reads("MODEL", paths[0], folders=True)
            check_reads("TEXT", *paths[1:])
            opened = open_here(paths[0], memory, tmp, stack, tell)
            reader = open_text(paths[1:], skip, column)
            order = opened.order
            scored = scored_here(opened, reader.read(), threads)
        found = ScoreSummary(by_order=[0] * order)
        for _, some in scored:
            some.add_to(found)
    tell(f"{counted(found.tokens, 'token')} scored")
    if as_json:
        facts = {**found.facts(), "hits": found.by_order}
        if skip:
            facts["skipped"] = reader.totals.skipped
        print_json_line({"summary": facts})
        return
    print_summary(found, reader, skip)
    for k, hits in enumerate(found.by_order, 1):
        share = 100 * hits / found.tokens if found.tokens else 0.0
        print(f"Hits of order {k}:\t{hits}\t{share:.2f} %")
