"""Figure 6: messages per minute against servers, for the trace as it is and with servers in turn.

The costs are measured first, with one client process and few decoders: on one server, requests
have 1/3, 1 and 3 times their recorded width; on the largest cluster, they are as recorded. `Costs`
are fitted to processor seconds, by least squares of relative errors; the rest of a single decoder's
wait is idle time. `simulation` compares the simulation with real clusters.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.layout import read_manifest
from dlm.ngram.partition import balanced_slot_table
from loadtest.baselines.systems import slot_bytes
from loadtest.paper.clusters import (
    DECODERS,
    PROCESSES,
    closed,
    closed_loop,
    cores_here,
    fitted,
    kept,
    loaded,
    serving,
    shard_set,
)
from loadtest.paper.result import LINES, MEASURED, SIMULATED, Result, Row, Setup
from loadtest.paper.simulate import Costs, Layout, Outcome, Simulation
from loadtest.paper.workload import model_of
from loadtest.report.report import Report
from loadtest.traces.routes import Routed, Slotted, routes
from loadtest.traces.schedule import shuffled
from loadtest.traces.synth import write_synthetic
from loadtest.traces.trace import Trace, read_trace

SERVERS, QUICK_SERVERS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
CPU = 0.75  # share of the busiest server's cores, as in the paper
CLIENT_CPU = 0.5  # enough clients run to keep each client below this
PEAK_PER_MINUTE = 100e6  # the paper's peak
MESSAGES, QUICK_MESSAGES = 60_000, 3_000  # number of messages simulated per point
WIDTHS = (1 / 3, 1.0, 3.0)  # factors for the number of contexts in a request
FEW_DECODERS = 4  # few enough that the window is never full, so each message has one request
THROUGHPUT_AT = (1, 2)  # numbers of servers
WITHIN = 0.15  # allowed error, as a share of the measured value


def figure_6(setup: Setup) -> Result:
    """Makes Figure 6: real clusters if this machine has room, and a simulation up to 64 servers."""
    costs = costs_of(setup)
    trace = read_trace(setup.trace)
    slotted = routes(trace, setup.model)
    rows: list[Row] = []
    for servers in setup.servers:
        rows += _real(setup, costs, slotted, servers)
    load = slot_bytes(model_of(setup).ngrams)
    sizes = QUICK_SERVERS if setup.quick else SERVERS
    for servers in sizes:
        setup.progress.tell(f"figure 6: {servers} servers, simulated")
        routed = slotted.to(balanced_slot_table(load, servers), servers)
        for workload, balanced in (("real", False), ("balanced", True)):
            layout = Layout(1, servers, balanced=balanced)
            rows.append({"workload": workload, **_point(setup, costs, slotted, routed, layout)})
    routed = slotted.to(balanced_slot_table(load, sizes[-1]), sizes[-1])
    rows.append(_peak(setup, costs, slotted, routed, rows))
    notes = [
        f"Own: each server has its own core, the busiest at {CPU:.0%}, and clients have theirs; "
        "simulated with the costs of this machine (the experiment simulation checks how well).",
        f"Shared: {PROCESSES} client processes with {DECODERS} decoders each, in a closed loop, "
        "and all servers share the cores of this machine. With more servers this shows the cost "
        "of smaller messages, not scaling.",
        "Requests arrive one by one at random; the paper does not say how its clients sent them. "
        "Real: slots are balanced by n-grams, and messages go where the trace's requests need "
        f"them. The trace has {trace.audio_s:.0f} s of audio, so contexts are few and spread less "
        "evenly than many would.",
        "The paper had one process per machine with many cores. The last row has servers with "
        f"several workers: as many as {PEAK_PER_MINUTE / 1e6:.0f} million messages per minute "
        "need.",
    ]
    return Result(
        "figure-6",
        "Figure 6: throughput against servers",
        [
            {
                "where": "4.2.1, Figure 6",
                "workload": "both grow evenly, real slightly below balanced (a plot, no numbers)",
            },
            {
                "where": "abstract and 1",
                "workload": "peak of WeChat",
                "per_minute": PEAK_PER_MINUTE / 1e6,
            },
        ],
        [
            ("workload", "workload", ""),
            ("machines", "cores", ""),
            ("servers", "servers", ""),
            ("workers", "processes per server", ""),
            ("per_minute", "messages per minute", "million"),
            ("per_server", "per server and minute", "million"),
            ("queries", "queries per message", ""),
            ("cpu", "busiest server", "%"),
            ("p99", "p99", "ms"),
        ],
        rows,
        {
            "kind": LINES,
            "x": "servers",
            "y": "per_minute",
            "series": "workload",
            "labels": {"x": "servers", "y": "million messages per minute"},
            "log": True,
        },
        notes,
    )


def _real(setup: Setup, costs: Costs, slotted: Slotted, servers: int) -> list[Row]:
    r = closed_loop(setup, servers)
    found = shared_machine(setup, read_trace(setup.trace), slotted, costs, servers)
    per_minute = 60 * float(found.messages.sum()) / found.seconds
    row = {"workload": "shared cores", "machines": "shared", "servers": servers, "workers": 1}
    return [
        {
            **row,
            "per_minute": r["messages_per_minute"] / 1e6,
            "per_server": r["messages_per_minute"] / 1e6 / servers,
            "queries": r["queries_per_message"],
            "p99": r["service"]["p99_ms"],
            "basis": MEASURED,
        },
        {
            **row,
            "per_minute": per_minute / 1e6,
            "per_server": per_minute / 1e6 / servers,
            "queries": found.queries / max(int(found.messages.sum()), 1),
            "p99": found.percentile_ms(99),
            "basis": SIMULATED,
        },
    ]


def busiest_s(costs: Costs, routed: Routed, requests: NDArray[np.int64], balanced: bool) -> float:
    chosen = np.zeros(len(routed.asked), np.bool_)
    chosen[requests] = True
    of = np.repeat(np.arange(len(routed.asked)), np.diff(routed.first))
    kept = chosen[of]
    seconds = costs.server_message_s + costs.server_query_s * routed.queries[kept]
    each = np.bincount(routed.server[kept], seconds, routed.servers) / len(requests)
    return float(each.mean() if balanced else each.max())


def _point(setup: Setup, costs: Costs, slotted: Slotted, routed: Routed, layout: Layout) -> Row:
    """Simulates load at the rate that should bring the busiest server's CPU use to `CPU`."""
    requests = slotted.requests
    each_s = busiest_s(costs, routed, requests, layout.balanced)
    per_s = CPU * layout.workers / each_s
    pieces = len(routed.server) / len(requests)
    client_s = costs.request_s + costs.message_s * pieces
    client_s += costs.query_s * float(routed.asked[requests].mean())
    clients = max(math.ceil(per_s * client_s / CLIENT_CPU), 1)
    count = QUICK_MESSAGES if setup.quick else MESSAGES
    seconds = max(count / (per_s * pieces), 0.06)
    warmup_s = 0.3 * seconds
    sim = Simulation(replace(layout, clients=clients), costs, routed, setup.seed, warmup_s)
    found = sim.open_loop(requests, per_s, seconds)
    messages = float(found.messages.sum())
    per_minute = 60 * messages / found.seconds / 1e6
    return {
        "machines": "own",
        "servers": layout.servers,
        "workers": layout.workers,
        "per_minute": per_minute,
        "per_server": per_minute / layout.servers,
        "queries": found.queries / messages,
        "cpu": 100 * found.utilisation(layout.workers),
        "p99": found.percentile_ms(99),
        "basis": SIMULATED,
    }


def _peak(setup: Setup, costs: Costs, slotted: Slotted, routed: Routed, rows: list[Row]) -> Row:
    """Simulates the largest cluster with enough processes per server for the paper's peak."""
    last = next(row for row in reversed(rows) if row["workload"] == "real")
    workers = math.ceil(PEAK_PER_MINUTE / 1e6 / last["per_minute"])
    if setup.quick:
        workers = min(workers, 4)
    setup.progress.tell(f"figure 6: {routed.servers} servers of {workers} processes, simulated")
    layout = Layout(1, routed.servers, workers)
    point = _point(setup, costs, slotted, routed, layout)
    return {"workload": "real, several processes", **point}


def costs_of(setup: Setup) -> Costs:
    return Costs(**kept(setup, "costs", lambda: asdict(fit(_measured_loads(setup)))))


def _measured_loads(setup: Setup) -> list[dict[str, Any]]:
    seconds = 1.0 if setup.quick else 6.0
    rows = []
    few = tuple((width, FEW_DECODERS) for width in (WIDTHS[::2] if setup.quick else WIDTHS))
    for servers, loads in ((1, ((1.0, 1), *few)), (setup.servers[-1], ((1.0, FEW_DECODERS),))):
        with serving(setup, servers) as cluster:
            for width, decoders in loads:
                setup.progress.tell(f"costs: {servers} servers, requests {width:.2g} times as wide")
                trace = widened(setup, width)
                name = f"costs-{servers}-{width:.2g}-{decoders}"
                report = loaded(setup, name, cluster, trace, closed(decoders, seconds))
                rows.append(_load_row(servers, width, decoders, report))
    return rows


def widened(setup: Setup, width: float) -> Path:
    if width == 1.0:
        return setup.trace
    path = setup.work / f"{setup.trace.stem}-{width:.2g}.parquet"
    if not path.exists():
        write_synthetic(path, read_trace(setup.trace), contexts=width, seed=setup.seed)
    return path


def _load_row(servers: int, width: float, decoders: int, report: Report) -> dict[str, Any]:
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
    """Fits the costs that explain the processor seconds of some loads.

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


def simulation(setup: Setup) -> Result:
    """Compares measured and simulated values, quantity by quantity."""
    costs = costs_of(setup)
    trace = read_trace(setup.trace)
    slotted = routes(trace, setup.model)
    rows: list[Row] = []
    for servers in setup.servers:
        rows += _loads(setup, trace, slotted, costs, servers)
    checked = [row for row in rows if row.get("off") is not None]
    worst = max(checked, key=lambda row: abs(row["off"]))
    other = max(closed_loop(setup, servers)["other_cores"] for servers in setup.servers)
    notes = [
        f"Predicted from costs per request, message and query, measured with one client process; "
        f"the checks ran {PROCESSES} client processes with {DECODERS} decoders each, on "
        f"{cores_here()} cores shared by clients and servers. No figure here is fitted to another.",
        f"Other work on this machine used up to {other:.2f} cores meanwhile (by the kernel's "
        "count, minus clients and servers); the simulated machine has that many fewer.",
        f"Largest error: {worst['quantity']}, {worst['servers']} servers, {worst['off']:+.0f} % "
        f"(the aim is {100 * WITHIN:.0f} %).",
        f"Costs: request {1e6 * costs.request_s:.0f} us, query asked "
        f"{1e6 * costs.query_s:.2f} us, message {1e6 * costs.message_s:.0f} us on the client; "
        f"message {1e6 * costs.server_message_s:.0f} us, query {1e6 * costs.server_query_s:.2f} us "
        "on the server.",
    ]
    return Result(
        "simulation",
        "The simulation and the real cluster",
        [],
        [
            ("quantity", "quantity", ""),
            ("servers", "servers", ""),
            ("value", "value", ""),
            ("unit", "unit", ""),
            ("off", "off", "%"),
        ],
        rows,
        None,
        notes,
    )


def _loads(setup: Setup, trace: Trace, slotted: Slotted, costs: Costs, servers: int) -> list[Row]:
    r = closed_loop(setup, servers)
    found = shared_machine(setup, trace, slotted, costs, servers)
    messages, cpu_s = float(found.messages.sum()), found.client_s + float(found.busy_s.sum())
    real_cpu_s = r["client_cpu_s"] + r["server_cpu_s"]
    pairs = [
        ("messages per request", "messages", r["messages"] / r["answered"],
         messages / found.requests),
        ("processor time per request", "us", 1e6 * real_cpu_s / r["answered"],
         1e6 * cpu_s / found.requests),
    ]  # fmt: skip
    if servers in THROUGHPUT_AT:
        pairs += [
            ("throughput", "requests/s", r["answered_per_s"], found.requests / found.seconds),
            ("throughput", "messages/min", r["messages_per_minute"],
             60 * messages / found.seconds),
        ]  # fmt: skip
    rows: list[Row] = []
    for quantity, unit, measured, simulated in pairs:
        row = {"quantity": quantity, "servers": servers, "unit": unit}
        off = 100 * (simulated / measured - 1) if measured else None
        rows.append({**row, "value": measured, "off": None, "basis": MEASURED})
        rows.append({**row, "value": simulated, "off": off, "basis": SIMULATED})
    return rows


def shared_machine(
    setup: Setup, trace: Trace, slotted: Slotted, costs: Costs, servers: int
) -> Outcome:
    """Simulates two client processes in a closed loop, and servers, on the free cores."""
    cores = max(cores_here() - closed_loop(setup, servers)["other_cores"], 0.1)
    table = read_manifest(shard_set(setup, servers)).slots
    layout = Layout(PROCESSES, servers, cores=cores)
    sim = Simulation(layout, costs, slotted.to(table, servers), setup.seed, warmup_s=1.0)
    rng = np.random.default_rng(setup.seed)
    orders = [[_order(trace, rng) for _ in range(DECODERS)] for _ in range(PROCESSES)]
    return sim.closed_loop(orders, 2.0 if setup.quick else 7.0)


def _order(trace: Trace, rng: np.random.Generator) -> NDArray[np.int64]:
    """Orders requests as a decoder of a closed loop sends them: utterances in random order."""
    spoken = shuffled(len(trace.names), len(trace.names), rng)
    first = trace.first_request
    each = [np.arange(first[one], first[one + 1]) for one in spoken.tolist()]
    found: NDArray[np.int64] = np.concatenate(each)
    return found[trace.asks[found]]
