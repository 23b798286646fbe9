"""`python -m loadtest capacity` and `plan`: find the highest rate that a cluster can take, and the
size of cluster that a load needs."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.errors import ConfigError, DlmError
from loadtest.cli.options import Cluster, DefaultTrace, Shards, ShardSet
from loadtest.cli.run import CTRL_C, DEMO_TRACE, print_table
from loadtest.run import INTERRUPTED

GIB = 1 << 30


def capacity(
    trace: DefaultTrace = None,
    cluster: Cluster = None,
    shard_set: ShardSet = None,
    shards: Shards = 2,
    p99: Annotated[float, typer.Option(help="Limit on p99 latency, in milliseconds.")] = 50.0,
    cpu: Annotated[
        float,
        typer.Option(
            help="Limit on CPU use, in percent: of the machine if clients and servers share it, "
            "else of one core for the busiest server process."
        ),
    ] = 75.0,
    first_rate: Annotated[
        float, typer.Option(help="First rate of the search, requests per second.")
    ] = 25.0,
    max_rate: Annotated[float, typer.Option(help="Highest rate to try.")] = 100_000.0,
    precision: Annotated[
        float, typer.Option(help="Stop once a good rate and a bad one are within this percentage.")
    ] = 10.0,
    duration: Annotated[float, typer.Option(help="Seconds measured at each rate.")] = 20.0,
    warmup: Annotated[float, typer.Option(help="Seconds of warm-up at each rate.")] = 3.0,
    arrival_pattern: Annotated[
        str, typer.Option(help="How utterances arrive: constant or poisson.")
    ] = "constant",
    processes: Annotated[int, typer.Option(help="Client processes.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds until a request's deadline.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and utterance order.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the results; default: named after the time.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of an interrupted search to resume.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:
    """Find the highest rate that a cluster can take.

    At higher rates, p99 or CPU crosses its limit, or requests fail. The rate doubles until a limit
    is crossed, then the range is halved; each rate is a separate run. Ctrl-C, or a cluster that
    vanishes, ends the search; --resume continues it. The exit status is 1 if the search did not
    end, and 130 after Ctrl-C.

    Example: python -m loadtest capacity --cluster cluster.toml --p99 30
    """
    from dlm.cli.output import stage_printer
    from dlm.files import write_whole
    from loadtest.capacity.capacity import (
        Limits,
        Point,
        build_capacity,
        points_to_go_on_with,
        read_capacity,
        search,
        write_capacity,
    )
    from loadtest.capacity.page import capacity_page
    from loadtest.report.report import Report
    from loadtest.report.session import (
        measure,
        new_results,
        results_folder,
        write_report,
    )
    from loadtest.run.driver import RunSettings
    from loadtest.run.latency import check_installed
    from loadtest.run.local_cluster import local_servers
    from loadtest.run.worker import ClientSettings
    from loadtest.traces.schedule import Load, Segment
    from loadtest.traces.trace import read_trace

    limits = Limits(p99, cpu / 100)
    if cluster is not None and shard_set is not None:
        raise ConfigError("--cluster and --shard-set were both given; expected only one of them")
    if resume is not None and output is not None:
        raise ConfigError(
            "--resume and --output were both given; --resume writes to the folder that it resumes. "
            "Leave --output out"
        )
    if not 0 < first_rate <= max_rate:
        raise ConfigError(
            f"--first-rate is {first_rate:g}; expected above 0, up to {max_rate:g} (--max-rate)"
        )
    if not 1 <= precision <= 100:
        raise ConfigError(f"--precision is {precision:g}; expected a percentage from 1 to 100")
    used = trace or DEMO_TRACE
    served = str(cluster or shard_set or f"the packaged model in {shards} shards")
    settings: dict[str, Any] = {
        "trace": used.name,
        "servers": served,
        "duration_s": duration,
        "warmup_s": warmup,
        "arrival_pattern": arrival_pattern,
        "processes": processes,
        "deadline_s": deadline,
        "seed": seed,
    }
    client = ClientSettings(deadline)

    def load_at(rate: float) -> Load:
        segments = (Segment(duration, rate),)
        return Load(segments, pattern=arrival_pattern, warmup_s=warmup)

    load_at(first_rate)  # reports wrong settings before servers start
    read_trace(used)
    points: list[Point] = []
    known: dict[str, Any] = {}
    if resume is not None:
        known = read_capacity(resume)
        points = points_to_go_on_with(known, settings, limits)
    check_installed()
    tell = stage_printer(quiet=quiet)

    def keep(points: list[Point], ended: str, report: Report | None) -> None:
        found = build_capacity(settings, limits, points, ended, report)
        if report is None:  # no run of this search ended: use the earlier report
            found.update({name: known[name] for name in found if not found[name] and name in known})
        known.update(found)
        write_capacity(folder, found)
        if points and ended == "running":
            newest = points[-1]
            what = f"crossed {newest.crossed}: {newest.why}"
            said = what if newest.crossed else "within the limits"
            tell(f"{newest.rate:g} requests/s: {said}")

    with contextlib.ExitStack() as stack:
        folder = resume or stack.enter_context(new_results(output, "capacity-"))
        found = cluster or stack.enter_context(local_servers(shard_set, shards, tell)).cluster

        def run(rate: float) -> Report:
            tell(f"rate {rate:g}: {duration:g} s after {warmup:g} s of warm-up")
            place = results_folder(_free(folder, rate))
            window = max(duration / 4, 0.1)
            one = RunSettings(found, used, load_at(rate), client, processes, window, seed)
            report = measure(one, place, tell)
            write_report(report, place)
            return report

        ended = INTERRUPTED
        try:
            ended = search(
                run,
                keep,
                points,
                limits,
                first=first_rate,
                precision=precision / 100,
                most=max_rate,
            )
        except KeyboardInterrupt:
            keep(points, ended, None)
        except DlmError as exc:
            if not points:
                raise
            ended = str(exc)
            keep(points, ended, None)
    _show(known)
    write_whole(folder / "capacity.html", capacity_page(known).encode())
    print(f"wrote {folder}/capacity.html, capacity.json, and a folder for each rate")
    if ended != "found":
        print(f"loadtest: {ended}", file=sys.stderr)
        if points:
            print(f"resume the search with --resume {folder}", file=sys.stderr)
        raise typer.Exit(CTRL_C if ended == INTERRUPTED else 1)


def _free(folder: Path, rate: float) -> Path:
    """Returns a folder for a run at this rate, unused by earlier runs, such as interrupted ones."""
    for number in range(1, 1000):
        place = folder / (f"{rate:g}" if number == 1 else f"{rate:g}-{number}")
        if not place.exists():
            return place
    raise ConfigError(
        f"{folder} already has a thousand runs at {rate:g} requests/s; choose another folder"
    )


def _show(found: dict[str, Any]) -> None:
    from loadtest.capacity.page import NAMES, NOTE, rows_of

    print_table(NAMES, rows_of(found))
    print(NOTE)
    for text in found["warnings"]:
        print(f"! {text}")
    print(found["verdict"])


def plan(
    streams: Annotated[float, typer.Option(help="Audio streams decoded at the same time.")],
    trace: Annotated[
        Path | None, typer.Option(help="Trace of decoders; default: the packaged one.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Shard set of the model, for its sizes and shard shares.")
    ] = None,
    ngrams: Annotated[
        str,
        typer.Option(
            help="Instead of a model, its numbers of n-grams: by order 200k,1.5M,4M or total 100M."
        ),
    ] = "",
    encoding: Annotated[
        str, typer.Option(help="Encoding for --ngrams: exact or compact.")
    ] = "exact",
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
    cpu: Annotated[float, typer.Option(help="Percent of a server's cores to use.")] = 75.0,
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
        raise ConfigError("give either --model DIR or --ngrams COUNTS, and not both")
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
