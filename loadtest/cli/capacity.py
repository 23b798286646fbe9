"""`python -m loadtest capacity`: the highest rate that a cluster takes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.errors import ConfigError, DlmError
from loadtest.cli.options import Cluster, DefaultTrace, Shards, ShardSet
from loadtest.cli.run import CTRL_C, DEMO_TRACE, print_table
from loadtest.run.stopping import INTERRUPTED


def capacity(
    trace: DefaultTrace = None,
    cluster: Cluster = None,
    shard_set: ShardSet = None,
    shards: Shards = 2,
    p99: Annotated[float, typer.Option(help="Limit of p99, milliseconds.")] = 50.0,
    cpu: Annotated[
        float,
        typer.Option(
            help="Limit of CPU, percent: of the machine if clients and servers share one, else "
            "of one core, for the busiest server process."
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
        str, typer.Option(help="How utterances arrive: constant, poisson or gamma.")
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
    """Find the highest rate that a cluster takes.

    At higher rates, p99 or CPU crosses its limit, or requests fail. The rate doubles until a limit
    is crossed, then the range is halved; each rate is a run of its own. Ctrl-C, or a cluster that
    vanishes, ends the search; --resume goes on. Exit status 1 where the search did not end, 130
    after Ctrl-C.

    Example: python -m loadtest capacity --cluster cluster.toml --p99 30
    """
    from dlm.cli.output import stage_printer
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
        write_files,
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
        raise ConfigError("--resume and --output were both given; resume keeps its folder")
    if not 0 < first_rate <= max_rate:
        raise ConfigError(f"--first-rate is {first_rate:g}; expected above 0, up to --max-rate")
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
        segments = (Segment(duration, rate, rate),)
        return Load(segments, pattern=arrival_pattern, warmup_s=warmup)

    load_at(first_rate)  # what is wrong with it, or with the trace, is told before servers start
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
        if report is None:  # no run of this search ended: what all share is known from before
            found.update({name: known[name] for name in found if not found[name] and name in known})
        known.update(found)
        try:
            write_capacity(folder, found)
        except OSError as exc:
            tell(f"{folder}: {exc.strerror}; the search continues, with its points in memory")
        if points and ended == "running":
            newest = points[-1]
            what = f"crossed {newest.crossed}: {newest.why}"
            said = what if newest.crossed else "within the limits"
            tell(f"{newest.rate:g} requests/s: {said}")

    with contextlib.ExitStack() as stack:
        folder = resume or stack.enter_context(new_results(output, "capacity-"))
        found = cluster or stack.enter_context(local_servers(shard_set, shards, tell)).cluster

        def run(rate: float) -> Report:
            tell(f"rate {rate:g}: {duration:g} s after {warmup:g} s")
            place = results_folder(_free(folder, rate))
            window = max(duration / 4, 0.1)
            one = RunSettings(found, used, load_at(rate), client, processes, window, seed)
            report = measure(one, place, tell)
            write_report(report, place, tell)
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
    files = {"capacity.html": capacity_page(known)}
    whole = write_files(files, folder, lambda line: print(line, file=sys.stderr))
    if whole:
        print(f"wrote {folder}/capacity.html, capacity.json, and a folder for each rate")
    if ended != "found" or not whole:
        print(f"loadtest: {ended}", file=sys.stderr)
        if points:
            print(f"resume the search with --resume {folder}", file=sys.stderr)
        raise typer.Exit(CTRL_C if ended == INTERRUPTED else 1)


def _free(folder: Path, rate: float) -> Path:
    """A folder for a rate; a run that was broken off has one, too."""
    for number in range(1, 1000):
        place = folder / (f"{rate:g}" if number == 1 else f"{rate:g}-{number}")
        if not place.exists():
            return place
    raise ConfigError(f"{folder} has a thousand runs at {rate:g} requests/s; choose another")


def _show(found: dict[str, Any]) -> None:
    from loadtest.capacity.page import NAMES, NOTE, rows_of

    print_table(NAMES, rows_of(found))
    print(NOTE)
    for text in found["warnings"]:
        print(f"! {text}")
    print(found["verdict"])
