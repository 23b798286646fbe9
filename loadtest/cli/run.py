"""`python -m loadtest run`: runs a load test, and shows its report."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.errors import ConfigError
from loadtest.cli.options import Cluster, DefaultTrace, Shards, ShardSet
from loadtest.run import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadtest.traces.schedule import Load

DEMO_TRACE = Path(__file__).parents[1] / "traces/rescoring.parquet"
CTRL_C = 130  # exit status: 128 plus the signal's number


def run(
    trace: DefaultTrace = None,
    cluster: Cluster = None,
    shard_set: ShardSet = None,
    shards: Shards = 2,
    replicas: Annotated[
        int,
        typer.Option(
            min=0, max=16, help="Servers per shard to start here; 0: as many as --faults needs."
        ),
    ] = 0,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second (open loop), sent when they are due.  [default: 50]"
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(min=0, help="Instead of a rate: decoders that await answers (closed loop)."),
    ] = 0,
    arrival_pattern: Annotated[
        str | None,
        typer.Option(help="How utterances arrive: constant or poisson.  [default: poisson]"),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Rates one after another, for --duration each: 50,100,200.")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds to measure.")] = 100.0,
    warmup: Annotated[float, typer.Option(help="Seconds of warm-up, not measured.")] = 10.0,
    window: Annotated[float, typer.Option(help="Seconds per window of figures.")] = 5.0,
    processes: Annotated[int, typer.Option(help="Client processes.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds until a request's deadline.")] = 2.0,
    partial: Annotated[
        bool, typer.Option("--bigram-fallback", help="Clients answer from 2-grams if shards fail.")
    ] = False,
    local_fallback: Annotated[
        Path | None, typer.Option(help="Shard set that clients switch to while servers fail.")
    ] = None,
    gateway: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Query the servers of --cluster through this gateway (gRPC).",
        ),
    ] = "",
    faults: Annotated[
        str,
        typer.Option(
            help="Faults during the run: replica-killed, shard-gone, slow-network, stalled-server, "
            "rollout, reshard, or a file of lines `at SECONDS command` (run/CHAOS.md)."
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(
            help="Shard set that --faults rollout rolls out.  [default: the packaged model, "
            "quantised]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and utterance order.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the results; default: named after the time.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the report.")] = False,
) -> None:
    """Run a load test and write a report: JSON, CSV, HTML.

    Without options, a test takes two minutes, on a cluster started on this machine. The exit
    status is 1 if nothing could be measured, or the run ended early by itself; 130 after Ctrl-C.

    Example: python -m loadtest run --cluster cluster.toml --request-rate 200
    """
    from dlm.cli.output import stage_printer
    from loadtest.report.session import measure, new_results, write_report
    from loadtest.run.driver import RunSettings
    from loadtest.run.faults import (
        MOVING,
        REPLICA_KILLED,
        ROLLOUT,
        check_named,
        faults as breaking,
        moving,
        read_plan,
    )
    from loadtest.run.latency import check_installed
    from loadtest.run.local_cluster import local_servers, quantised
    from loadtest.run.worker import ClientSettings
    from loadtest.traces.trace import read_trace

    load = _load(request_rate, concurrency, arrival_pattern, steps, duration, warmup)
    if cluster is not None and shard_set is not None:
        raise ConfigError("--cluster and --shard-set were both given; expected only one of them")
    if cluster is not None and replicas:
        raise ConfigError("--replicas and --cluster were both given; expected only one of them")
    if gateway and cluster is None:
        raise ConfigError("--gateway needs the --cluster file of the servers behind the gateway")
    if gateway and (partial or local_fallback is not None):
        raise ConfigError(
            "with --gateway, the gateway's own options control its fallback; leave out "
            "--bigram-fallback and --local-fallback"
        )
    # Report wrong values of these options before servers start.
    if faults:
        check_named(faults)
    moves = faults in MOVING
    if moves and cluster is not None:
        raise ConfigError(
            f"--faults {faults} replaces models or servers, which only the load test that started "
            "the servers may do; leave out --cluster"
        )
    if faults == ROLLOUT and shard_set is not None and to is None:
        raise ConfigError("--faults rollout with --shard-set needs --to, the set to roll out")
    used = trace or DEMO_TRACE
    read_trace(used)
    settings = RunSettings(
        cluster or Path(),
        used,
        load,
        ClientSettings(
            deadline,
            partial,
            None if local_fallback is None else str(local_fallback.absolute()),
            gateway=gateway,
        ),
        processes,
        window,
        seed,
    )
    check_installed()
    tell = stage_printer(quiet=quiet)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(new_results(output))
        own = None
        if cluster is None:
            count = replicas or 1 + (faults == REPLICA_KILLED)
            own = stack.enter_context(
                local_servers(shard_set, shards, tell, replicas=count, follow=moves)
            )
            cluster = own.cluster
        broken = None
        if moves and own is not None:
            new = (to or quantised(own, tell)) if faults == ROLLOUT else own.beside("resharded")
            oracles = (own.folder, *([new] if faults == ROLLOUT else []))
            settings = replace(settings, oracles=oracles)
            broken = stack.enter_context(moving(faults, own, new, load.seconds, window))
        elif faults:
            plan = read_plan(faults, cluster, load.seconds, window, own=own is not None)
            start = None if own is None else own.start
            broken = stack.enter_context(breaking(plan, cluster, seed, start))
        settings = replace(settings, cluster=cluster)
        report = measure(settings, folder, tell, broken)
    show_report(report)
    write_report(report, folder)
    print(f"wrote {folder}/report.html, report.json, report.csv")
    if report["ended"] == INTERRUPTED:
        raise typer.Exit(CTRL_C)
    if not report["complete"]:
        raise typer.Exit(1)


def _load(
    rate: float | None,
    concurrency: int,
    pattern: str | None,
    steps: str,
    duration: float,
    warmup: float,
) -> Load:
    from loadtest.traces.schedule import POISSON, Load, Segment

    paced = {
        "--request-rate": rate is not None,
        "--steps": bool(steps),
        "--arrival-pattern": pattern is not None,
    }
    for name, is_given in paced.items():
        if is_given and concurrency:
            raise ConfigError(
                f"{name} and --concurrency were both given; with --concurrency, a decoder sends "
                "its next request as soon as it has an answer. Leave out --concurrency to send at "
                f"a fixed rate, or {name} to let the answers set the rate"
            )
    if rate is not None and steps:
        raise ConfigError("--request-rate and --steps were both given; expected only one of them")
    rate = 50.0 if rate is None else rate
    try:
        rates = [float(one) for one in steps.split(",")] if steps else [rate]
    except ValueError:
        raise ConfigError(f"--steps is {steps}; expected rates separated by commas") from None
    segments = tuple(Segment(duration, one) for one in rates)
    return Load(segments, concurrency, pattern or POISSON, warmup)


def print_table(names: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Prints a table without lines between cells, so that ten columns fit into 80 characters; in a
    pipe, it is not cut. If all names are empty, there is no heading."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0),
        show_header=any(names),
    )  # fmt: skip
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 10_000).print(table)


def show_report(report: dict[str, Any]) -> None:
    """Prints the figures of a report, then its warnings."""
    from loadtest.report.table import rows_of, tables_of, warnings_of

    print_table(("", ""), rows_of(report), "Load test")
    for title, names, rows in tables_of(report):
        print_table(names, rows, title)
    for text in warnings_of(report):
        print(f"! {text}")
