"""`python -m loadtest plan`: how large a cluster is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dlm.errors import ConfigError
from loadtest.cli.run import DEMO_TRACE

GIB = 1 << 30


def plan(
    streams: Annotated[float, typer.Option(help="Audio streams decoded at the same time.")],
    trace: Annotated[
        Path | None, typer.Option(help="Trace of decoders; default: the packaged one.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Shard set of the model, for its sizes and shard shares.")
    ] = None,
    ngrams: Annotated[
        str, typer.Option(help="Instead, its n-grams: by order 200k,1.5M,4M, or in all 100M.")
    ] = "",
    encoding: Annotated[str, typer.Option(help="Of --ngrams: exact or compact.")] = "exact",
    costs: Annotated[
        Path | None, typer.Option(help="Result of `capacity`; default: packaged figures.")
    ] = None,
    memory: Annotated[float, typer.Option(help="Memory per server, GiB.")] = 16.0,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes per server, one core each.")
    ] = 1,
    replicas: Annotated[
        int, typer.Option(min=1, max=16, help="Minimum number of servers per shard.")
    ] = 2,
    cpu: Annotated[float, typer.Option(help="Percent of its cores to use.")] = 75.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a cluster: servers, memory, messages per second, CPU.

    Needs no servers. Messages are counted request by request with --model; with --ngrams they are
    those of the measured trace. What the plan assumes is printed with it.

    Example: python -m loadtest plan --streams 500 --model shards/model --trace t.parquet
    """
    from rich.console import Console
    from rich.table import Table

    from loadtest.capacity.plan import (
        Traffic,
        Wishes,
        assumptions,
        costs_of,
        fitting,
        heaviest_share,
        model_of,
        model_of_counts,
        plan_of,
        rows_of,
        traffic_of,
    )
    from loadtest.traces.routes import routes
    from loadtest.traces.trace import BLOCKS, CALLS, read_trace

    if (model is None) == (not ngrams):
        raise ConfigError("expected exactly one of --model DIR and --ngrams COUNTS")
    wishes = Wishes(streams, memory * GIB, cpu / 100, processes, replicas)
    found, place = costs_of(costs), trace or DEMO_TRACE
    asked = read_trace(place)
    requests = float(asked.asks.sum()) / asked.audio_s
    sizes = model_of_counts(ngrams, encoding) if model is None else model_of(model)
    has_blocks = bool((asked.call[asked.asks] == CALLS.index(BLOCKS)).any())
    heaviest: float | None = None
    counted = model is not None and not has_blocks
    if counted and model is not None:
        slotted = routes(asked, model)
        traffic = traffic_of(slotted, asked.audio_s)
        heaviest = heaviest_share(slotted)
    else:
        per_audio_s = found.messages_per_audio_s
        if per_audio_s is None or found.trace != place.name:
            why = (
                f"{place} asks for context blocks, whose messages depend on what clients cache"
                if has_blocks
                else f"without --model, messages are those measured with {found.trace}"
            )
            raise ConfigError(
                f"{why}; run `python -m loadtest capacity {place}` and give its folder as --costs"
            )

        def traffic(shards: int) -> Traffic:
            return Traffic(per_audio_s, 1 / shards, found.queries_per_message)

    cluster = fitting(wishes, sizes, found, traffic, requests)
    texts = assumptions(found, traffic(cluster.shards), heaviest, model is None, counted)
    if as_json:
        print(json.dumps(plan_of(cluster, wishes, sizes, found, texts), indent=1))
        return
    title = f"{streams:g} audio streams, as in {place.name}"
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column()
    for name, value in rows_of(cluster, wishes, sizes):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    for text in texts:
        console.print(f"- {text}", markup=False)
