"""Figure 6: messages per minute against servers, for the trace as it is and balanced by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlm.client.router import LowGrams
from dlm.errors import FormatError
from dlm.index.layout import read_manifest
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.partition import SLOTS, balanced_slot_table, slots_of
from loadtest.paper.calibration import costs_of
from loadtest.paper.clusters import DECODERS, PROCESSES, closed_loop
from loadtest.paper.result import MEASURED, SIMULATED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.simulate import Costs, Layout, Simulation, poisson_load
from loadtest.paper.simulation import shared_machine
from loadtest.traces.routes import Routed, Slotted, routes
from loadtest.traces.trace import read_trace

SERVERS, QUICK_SERVERS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
CPU = 0.75  # of the busiest server's cores, as in the paper
CLIENT_CPU = 0.5  # there are enough clients to keep each below this
PEAK_PER_MINUTE = 100e6  # the paper's peak
MESSAGES, QUICK_MESSAGES = 60_000, 3_000  # simulated per point


def run(setup: Setup) -> Result:
    """Real clusters where they fit, and the simulation up to 64 servers."""
    costs, _ = costs_of(setup)
    trace = read_trace(setup.trace)
    slotted = routes(trace, setup.model)
    rows: list[Row] = []
    for servers in setup.servers:
        rows += _real(setup, costs, slotted, servers)
    load = slot_ngrams(setup)
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
        f"them. The trace has {trace.audio_s:.0f} s of audio, so few contexts, which spread less "
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
            "kind": "lines",
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
    """Simulates the rate that is expected to bring the busiest server to `CPU`."""
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
    load = poisson_load(requests, per_s, clients, seconds, setup.seed)
    found = sim.open_loop(*load, seconds)
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
    """Processes per server for the paper's peak, on the largest cluster."""
    last = next(row for row in reversed(rows) if row["workload"] == "real")
    workers = math.ceil(PEAK_PER_MINUTE / 1e6 / last["per_minute"])
    if setup.quick:
        workers = min(workers, 4)
    setup.progress.tell(f"figure 6: {routed.servers} servers of {workers} processes, simulated")
    layout = Layout(1, routed.servers, workers)
    point = _point(setup, costs, slotted, routed, layout)
    return {"workload": "real, several processes", **point}


def slot_ngrams(setup: Setup) -> NDArray[np.int64]:
    """(4096,) n-grams of three words and more in each slot, by their context and as contexts of
    longer ones (DLM Algorithm 2): roughly the measure by which shard sets are balanced.

    Raises  FormatError  `setup.arpa` is not the model in `setup.model`
    """
    vocabulary = LowGrams.open(setup.model, read_manifest(setup.model)).vocabulary
    load, own = np.zeros(SLOTS, np.int64), np.zeros(0, np.uint32)
    with ArpaReader(setup.arpa) as reader:
        for batch in reader.batches():
            if batch.order > 2:
                own = own if len(own) else vocabulary.ids_of(reader.vocabulary.words)
                ids = own[batch.ids]
                load += np.bincount(slots_of(ids[:, -3], ids[:, -2]), minlength=SLOTS)
                if batch.order < reader.order:
                    load += np.bincount(slots_of(ids[:, -2], ids[:, -1]), minlength=SLOTS)
        if sorted(reader.vocabulary.words) != sorted(vocabulary.words):
            raise FormatError(
                f"{setup.arpa} and {setup.model} have different words; use the ARPA file that the "
                "shard set was built from"
            )
    return load
