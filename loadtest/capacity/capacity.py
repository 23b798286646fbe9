"""Finds the capacity of a cluster: the highest rate before p99, CPU or errors cross a limit.

The rate is doubled until a run crosses a limit; then the range between good and bad is halved.
The next rate depends only on the measurements so far, so an interrupted search can continue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError
from dlm.files import write_whole
from loadtest.report.provenance import read_document
from loadtest.report.report import Report
from loadtest.report.table import LATE_MS

FORMAT, VERSION = "dlm capacity report", 1
FILE = "capacity.json"
LEAST_RATE = 0.5  # requests per second; the search does not halve the rate to less than this
MAX_POINTS = 40
FAILED_SHARE = 0.01
OTHERS_SHARE = 0.15  # share of the machine that other work may use without a warning
P99, CPU, FAILURES, DRIVER = "p99", "cpu", "failures", "driver"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a run crosses if its rate is too high.

    p99_ms     p99 of the latency, which counts from the planned time
    cpu_share  CPU use of clients and servers, as a share of their machine; or, if they have several
               machines, of the busiest server process, as a share of one core
    """

    p99_ms: float = 50.0
    cpu_share: float = 0.75

    def __post_init__(self) -> None:
        if not self.p99_ms > 0:
            raise ConfigError(f"--p99 is {self.p99_ms:g}; expected a time above 0, in milliseconds")
        if not 0 < self.cpu_share <= 1:
            raise ConfigError(
                f"--cpu is {100 * self.cpu_share:g}; expected a percentage above 0, up to 100"
            )


@dataclass(frozen=True, slots=True)
class Point:
    """The result of a run at one rate.

    rate       planned requests per second; `sent_per_s`: those sent, counted by when they were due
    cpu_share  the share that is compared with the limit
    crossed    the limit that the run crossed, or empty;  why  the same in words
    """

    rate: float
    sent_per_s: float
    answered_per_s: float
    audio_s_per_s: float
    messages_per_s: float
    messages_per_audio_s: float | None
    queries_per_message: float | None
    p50_ms: float | None
    p99_ms: float | None
    late_p99_ms: float | None
    failed_share: float
    server_cores: float | None
    busiest_server_cores: float | None
    client_cores: float
    machine_cpu_share: float | None
    cpu_share: float | None
    server_cpu_us_per_message: float | None
    client_cpu_ms_per_audio_s: float | None
    crossed: str
    why: str


def is_shared(report: Report) -> bool:
    hosts = {one["address"].rsplit(":", 1)[0].strip("[]") for one in report["servers"]}
    return all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)


def judged(rate: float, report: Report, limits: Limits) -> Point:
    r = report["results"]
    shared = is_shared(report)
    cpu = r["busiest_server_cores"]
    if shared and r["server_cores"] is not None:
        cores = report["provenance"]["machine"]["cores"]
        cpu = ((r["client_cores"] or 0.0) + r["server_cores"]) / cores
    latency, late = r["latency"], r["late"]
    crossed, why = _crossed(report, cpu, limits)
    if crossed == CPU:
        what = (
            "of the machine, by clients and servers"
            if shared
            else "of a core, by the busiest server process"
        )
        why = f"{100 * (cpu or 0):.0f} % {what}; the limit is {100 * limits.cpu_share:g} %"
    audio_s, messages = r["audio_s"], r["messages"]
    return Point(
        rate,
        r["requests_per_s"] or 0.0,
        r["answered_per_s"] or 0.0,
        r["audio_s_per_s"] or 0.0,
        messages / r["seconds"] if r["seconds"] else 0.0,
        r["messages_per_audio_s"],
        r["queries_per_message"],
        latency["p50_ms"],
        latency["p99_ms"],
        late["p99_ms"],
        r["failed_share"] or 0.0,
        r["server_cores"],
        r["busiest_server_cores"],
        r["client_cores"] or 0.0,
        r["machine_cpu_share"],
        cpu,
        1e6 * r["server_cpu_s"] / messages if messages else None,
        1e3 * r["client_cpu_s"] / audio_s if audio_s else None,
        crossed,
        why,
    )


def _crossed(report: Report, cpu: float | None, limits: Limits) -> tuple[str, str]:
    r = report["results"]
    p99, late, service = r["latency"]["p99_ms"], r["late"]["p99_ms"], r["service"]["p50_ms"]
    if (r["failed_share"] or 0.0) > FAILED_SHARE:
        text = next(iter(report["errors"].values()), "")
        return FAILURES, f"{100 * r['failed_share']:.2g} % of the requests failed: {text}"
    if cpu is not None and cpu > limits.cpu_share:
        return CPU, ""
    if report["driver"]["is_bottleneck"]:
        share = 100 * report["driver"]["share_of_client_cpu"]
        return DRIVER, f"the driver took {share:.0f} % of the clients' CPU; use more --processes"
    if p99 is not None and p99 > limits.p99_ms:
        if (late or 0.0) > max(LATE_MS, service or 0.0, p99 / 2):
            return DRIVER, (
                f"requests were sent up to {late:.0f} ms late (p99): the client processes had no "
                "CPU in time; give more --processes, or another machine"
            )
        return P99, f"p99 is {p99:.0f} ms; the limit is {limits.p99_ms:g} ms"
    return "", ""


def others_share(points: Sequence[Point], cores: int) -> float:
    """The largest share of the machine that work other than clients and servers used."""
    return max(
        (
            p.machine_cpu_share - (p.client_cores + (p.server_cores or 0.0)) / cores
            for p in points
            if p.machine_cpu_share is not None
        ),
        default=0.0,
    )


def next_rate(points: Sequence[Point], first: float, precision: float, most: float) -> float | None:
    """The rate to measure next; None when the knee is known.

    Args  first      rate at which the search begins
          precision  share by which the lowest bad rate may exceed the highest good one
          most       highest rate that is tried
    """
    well = [point.rate for point in points if not point.crossed]
    badly = [point.rate for point in points if point.crossed]
    if not points:
        return min(first, most)
    if len(points) >= MAX_POINTS:
        return None
    if not badly:
        return None if max(well) >= most else min(2 * max(well), most)
    high = min(badly)
    below = [rate for rate in well if rate < high]
    if not below:
        return high / 2 if high / 2 >= LEAST_RATE else None
    low = max(below)
    if high / low <= 1 + precision:
        return None
    return float(f"{math.sqrt(low * high):.4g}")


def knee(points: Sequence[Point]) -> tuple[Point | None, Point | None]:
    """Returns the highest point below the lowest bad one, and that bad one; None if missing."""
    badly = min((p for p in points if p.crossed), key=lambda p: p.rate, default=None)
    below = [p for p in points if not p.crossed and (badly is None or p.rate < badly.rate)]
    return max(below, key=lambda p: p.rate, default=None), badly


def verdict(points: Sequence[Point], ended: str) -> str:
    best, badly = knee(points)
    if best is None:
        if badly is None:
            return f"nothing was measured: {ended}"
        return f"{badly.rate:g} requests/s are already too many: {badly.why}"
    found = (
        f"{best.rate:g} requests/s, {best.audio_s_per_s:.3g} streams at a time, p99 "
        f"{best.p99_ms or 0.0:.3g} ms"
    )
    if badly is None:
        return f"at least {found}; no limit was crossed"
    if badly.crossed == DRIVER:
        return f"at least {found}; at {badly.rate:g} the driver was the bottleneck: {badly.why}"
    return f"{found}; at {badly.rate:g} {badly.why}"


def build_capacity(
    settings: dict[str, Any],
    limits: Limits,
    points: Sequence[Point],
    ended: str,
    report: Report | None,
) -> dict[str, Any]:
    """The content of capacity.json.

    Args  settings  settings of the search, which resumes only with the same settings
          ended     "found", or why the search ended early
          report    report of the last run, for facts that all runs share
    """
    best, badly = knee(points)
    warnings = []
    if report is not None:
        others = others_share(points, report["provenance"]["machine"]["cores"])
        if others > OTHERS_SHARE:
            warnings.append(
                f"other work took up to {100 * others:.0f} % of the clients' machine: without it, "
                "the cluster would handle more"
            )
    return {
        "format": FORMAT,
        "version": VERSION,
        "ended": ended,
        "complete": ended == "found",
        "verdict": verdict(points, ended),
        "warnings": warnings,
        "settings": settings,
        "limits": asdict(limits),
        "knee": None if best is None else asdict(best),
        "beyond": None if badly is None else asdict(badly),
        "points": [asdict(point) for point in sorted(points, key=lambda p: p.rate)],
        "provenance": None if report is None else report["provenance"],
        "trace": None if report is None else report["trace"],
        "target": None if report is None else report["target"],
        "servers": None if report is None else len(report["servers"]),
        "is_shared": None if report is None else is_shared(report),
    }


def read_capacity(path: Path) -> dict[str, Any]:
    """Reads a capacity.json, or the one in a folder; ConfigError for anything else."""
    path = path / FILE if path.is_dir() else path
    found = read_document(path, FORMAT, VERSION)
    try:
        [Point(**one) for one in found["points"]]
    except (TypeError, KeyError) as exc:
        raise ConfigError(
            f"{path} lacks the measured points; `python -m loadtest capacity` writes a new file"
        ) from exc
    return found


def points_to_go_on_with(
    found: dict[str, Any], settings: dict[str, Any], limits: Limits
) -> list[Point]:
    """The points of an interrupted search; ConfigError if it had other settings."""
    for name, value in {**settings, **asdict(limits)}.items():
        before = {**found["settings"], **found["limits"]}.get(name)
        if before != value:
            raise ConfigError(
                f"the search to resume had {name} {before!r}, but this one has {value!r}; use the "
                "same options, or leave --resume out"
            )
    return [Point(**one) for one in found["points"]]


def search(
    measure: Callable[[float], Report],
    keep: Callable[[list[Point], str, Report | None], None],
    points: list[Point],
    limits: Limits,
    *,
    first: float,
    precision: float,
    most: float,
) -> str:
    """Measures rate after rate until the knee is known; returns "found", or why it ended early.

    Args  measure  runs a load test at a rate
          keep     called after each run: all points, "running" or why the search ended, the report
          points   known points; new ones are added
    """
    report: Report | None = None
    while (rate := next_rate(points, first, precision, most)) is not None:
        report = measure(rate)
        if not report["complete"]:
            keep(points, report["ended"], report)
            return str(report["ended"])
        points.append(judged(rate, report, limits))
        keep(points, "running", report)
    keep(points, "found", report)
    return "found"


def write_capacity(folder: Path, found: dict[str, Any]) -> None:
    write_whole(folder / FILE, (json.dumps(found, indent=1) + "\n").encode())
