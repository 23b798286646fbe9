"""Measures what work costs on this machine, before anything is predicted.

The loads are of one client process with a few decoders: on one server with requests a third as
wide, as recorded, and three times as wide; and as recorded on the largest cluster, where a request
takes more messages. `Costs` are fitted to their processor seconds, by least squares of relative
errors; what a single decoder waits beyond them is idle time. Throughput is not used.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.paper.clusters import closed, kept, loaded, serving
from loadtest.paper.setup import Setup
from loadtest.paper.simulate import Costs
from loadtest.paper.timed import fitted
from loadtest.report.report import Report
from loadtest.traces.synth import Scale, about, compare, synthesise
from loadtest.traces.trace import read_trace, trace_of, write_trace

WIDTHS = (1 / 3, 1.0, 3.0)  # times the contexts of a request
DECODERS = 4  # so few that the window is never full, so each message has one request


def costs_of(setup: Setup) -> tuple[Costs, list[dict[str, Any]]]:
    found = kept(setup, "costs", lambda: _found(setup))
    return Costs(**found["costs"]), found["loads"]


def _found(setup: Setup) -> dict[str, Any]:
    rows = _measure(setup)
    return {"costs": asdict(fit(rows)), "loads": rows}


def _measure(setup: Setup) -> list[dict[str, Any]]:
    seconds = 1.0 if setup.quick else 6.0
    rows = []
    few = tuple((width, DECODERS) for width in (WIDTHS[::2] if setup.quick else WIDTHS))
    for servers, loads in ((1, ((1.0, 1), *few)), (setup.servers[-1], ((1.0, DECODERS),))):
        with serving(setup, servers) as cluster:
            for width, decoders in loads:
                setup.progress.tell(f"costs: {servers} servers, requests {width:.2g} times as wide")
                trace = widened(setup, width)
                name = f"costs-{servers}-{width:.2g}-{decoders}"
                report = loaded(setup, name, cluster, trace, closed(decoders, seconds))
                rows.append(_row(servers, width, decoders, report))
    return rows


def widened(setup: Setup, width: float) -> Path:
    if width == 1.0:
        return setup.trace
    path = setup.work / f"{setup.trace.stem}-{width:.2g}.parquet"
    if not path.exists():
        recorded = read_trace(setup.trace)
        scale = Scale(contexts=width)
        spoken = synthesise(recorded, scale, setup.seed)
        statistics = compare(recorded, trace_of(spoken))
        write_trace(path, spoken, about(recorded, scale, setup.seed, statistics))
    return path


def _row(servers: int, width: float, decoders: int, report: Report) -> dict[str, Any]:
    r = report["results"]
    return {
        "decoders": decoders,
        "servers": servers,
        "width": width,
        "requests": r["answered"],
        "asked": r["queries"],
        "messages": r["messages"],
        "queries": (r["queries_per_message"] or 0.0) * r["messages"],
        "client_s": r["client_cpu_s"],
        "server_s": r["server_cpu_s"],
        "driver_s": report["driver"]["cpu_us_per_request"] * r["answered"] / 1e6,
        "call_s": r["query_time_per_audio_s"] * r["audio_s"],
    }


def fit(rows: list[dict[str, Any]]) -> Costs:
    """The costs that explain the processor seconds of some loads.

    Args  rows  each with counts of `decoders`, `requests`, `asked`, `messages`, `queries`, and the
                seconds `client_s`, `server_s` and `call_s` (the decoders' total wait). Rows with
                several decoders give the costs, rows with one give `wait_s`
    """
    several = [row for row in rows if row["decoders"] > 1]
    alone = [row for row in rows if row["decoders"] == 1]
    request_s, query_s, message_s = _line(several, ("requests", "asked", "messages"), "client_s")
    server_message_s, server_query_s = _line(several, ("messages", "queries"), "server_s")
    waited = sum(row["call_s"] - row["client_s"] - row["server_s"] for row in alone)
    wait_s = max(waited, 0.0) / sum(row["messages"] for row in alone)
    return Costs(request_s, query_s, message_s, server_message_s, server_query_s, wait_s)


def _line(rows: list[dict[str, Any]], counts: tuple[str, ...], seconds: str) -> list[float]:
    """Non-negative coefficients that explain `seconds` by `counts`."""
    wanted = np.array([row[seconds] for row in rows])
    matrix = np.array([[row[name] for name in counts] for row in rows]) / wanted[:, None]
    return [float(one) for one in fitted(matrix, np.ones(len(rows)))]
