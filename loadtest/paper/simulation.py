"""Compares the simulation with real clusters, at the sizes that fit on this machine.

It predicts messages per request on each size of cluster, the requests and messages per second that
two client processes get from one server and from two on shared cores, and the time added by a round
trip. The costs are not predicted: they are measured with one client process (`calibration`).
"""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dlm.client import Client, ClientConfig
from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.files import scratch_folder
from dlm.index.layout import read_manifest
from loadtest.paper.calibration import costs_of
from loadtest.paper.clusters import (
    DEADLINE_S,
    DECODERS,
    PROCESSES,
    closed_loop,
    prepared,
    serving,
    shard_set,
)
from loadtest.paper.result import MEASURED, SIMULATED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.simulate import Costs, Layout, Outcome, Simulation
from loadtest.run.proxy import Proxies
from loadtest.traces.routes import Slotted, routes
from loadtest.traces.schedule import shuffled
from loadtest.traces.trace import Trace, read_trace

THROUGHPUT_AT = (1, 2)  # servers
ROUND_TRIPS_MS = (0.2, 1.0)
WITHIN = 0.15  # of the measured value
REPEATS, QUICK_REPEATS = 25, 3
# The proxy's least delay each way, in every round: so all rounds include its timers, and cores that
# fall asleep meanwhile.
HELD_S = 500e-6


def run(setup: Setup) -> Result:
    """Measured and simulated, quantity by quantity."""
    costs, _ = costs_of(setup)
    trace = read_trace(setup.trace)
    slotted = routes(trace, setup.model)
    rows: list[Row] = []
    for servers in setup.servers:
        rows += _loads(setup, trace, slotted, costs, servers)
    rows += _round_trips(setup, trace, slotted, costs)
    checked = [row for row in rows if row.get("off") is not None]
    worst = max(checked, key=lambda row: abs(row["off"]))
    other = max(closed_loop(setup, servers)["other_cores"] for servers in setup.servers)
    notes = [
        f"Predicted from costs per request, message and query, measured with one client process; "
        f"the checks ran {PROCESSES} client processes with {DECODERS} decoders each, on "
        f"{_cores()} cores shared by clients and servers. No figure here is fitted to another.",
        f"Other work on this machine used up to {other:.2f} cores meanwhile (by the kernel's "
        "count, minus clients and servers); the simulated machine has that many fewer.",
        f"Largest error: {worst['quantity']}, {worst['servers']} servers, {worst['off']:+.0f} % "
        f"(the aim is {100 * WITHIN:.0f} %).",
        f"Round trips are in addition to the {2e3 * HELD_S:g} ms by which the proxy delays "
        "everything; each request counts with the least of its rounds.",
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


def _pair(quantity: str, servers: int, unit: str, measured: float, simulated: float) -> list[Row]:
    row = {"quantity": quantity, "servers": servers, "unit": unit}
    off = 100 * (simulated / measured - 1) if measured else None
    return [
        {**row, "value": measured, "off": None, "basis": MEASURED},
        {**row, "value": simulated, "off": off, "basis": SIMULATED},
    ]


def _loads(setup: Setup, trace: Trace, slotted: Slotted, costs: Costs, servers: int) -> list[Row]:
    r = closed_loop(setup, servers)
    found = shared_machine(setup, trace, slotted, costs, servers)
    messages = float(found.messages.sum())
    rows = _pair(
        "messages per request",
        servers,
        "messages",
        r["messages"] / r["answered"],
        messages / found.requests,
    )
    rows += _pair(
        "processor time per request",
        servers,
        "us",
        1e6 * (r["client_cpu_s"] + r["server_cpu_s"]) / r["answered"],
        1e6 * (found.client_s + float(found.busy_s.sum())) / found.requests,
    )
    if servers in THROUGHPUT_AT:
        rows += _pair(
            "throughput",
            servers,
            "requests/s",
            r["answered_per_s"],
            found.requests / found.seconds,
        )
        rows += _pair(
            "throughput",
            servers,
            "messages/min",
            r["messages_per_minute"],
            60 * messages / found.seconds,
        )
    return rows


def shared_machine(
    setup: Setup, trace: Trace, slotted: Slotted, costs: Costs, servers: int
) -> Outcome:
    """Two client processes in a closed loop, and servers, on the cores that other work leaves."""
    cores = max(_cores() - closed_loop(setup, servers)["other_cores"], 0.1)
    table = read_manifest(shard_set(setup, servers)).slots
    layout = Layout(PROCESSES, servers, cores=cores)
    sim = Simulation(layout, costs, slotted.to(table, servers), setup.seed, warmup_s=1.0)
    rng = np.random.default_rng(setup.seed)
    orders = [[_order(trace, rng) for _ in range(DECODERS)] for _ in range(PROCESSES)]
    return sim.closed_loop(orders, 2.0 if setup.quick else 7.0)


def _order(trace: Trace, rng: np.random.Generator) -> NDArray[np.int64]:
    """The requests of utterances in a random order, as a decoder of a closed loop asks them."""
    spoken = shuffled(len(trace.names), len(trace.names), rng)
    first = trace.first_request
    each = [np.arange(first[one], first[one + 1]) for one in spoken.tolist()]
    found: NDArray[np.int64] = np.concatenate(each)
    return found[trace.asks[found]]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _round_trips(setup: Setup, trace: Trace, slotted: Slotted, costs: Costs) -> list[Row]:
    """The time that a network delay adds to a request, from the same requests with and without."""
    measured = _delayed(setup, trace, slotted)
    routed = slotted.to(np.zeros(len(slotted.load()), np.uint16), 1)
    asked = np.flatnonzero(np.diff(routed.first) == 1)
    rows = []
    median_ms = {}
    for round_trip_ms in (0.0, *ROUND_TRIPS_MS):
        layout = Layout(1, 1, cores=_cores(), round_trip_s=round_trip_ms / 1e3)
        sim = Simulation(layout, costs, routed, setup.seed, warmup_s=0.0)
        median_ms[round_trip_ms] = sim.closed_loop([[asked]], 2.0).percentile_ms(50)
    for round_trip_ms in ROUND_TRIPS_MS:
        rows += _pair(
            f"added by a round trip of {round_trip_ms:g} ms",
            1,
            "ms",
            measured[round_trip_ms],
            median_ms[round_trip_ms] - median_ms[0.0],
        )
    return rows


def _delayed(setup: Setup, trace: Trace, slotted: Slotted) -> dict[float, float]:
    """Milliseconds that each round trip adds, with a proxy between one decoder and one server:
    the median, over requests, of the least time with it minus the least without."""
    repeats = QUICK_REPEATS if setup.quick else REPEATS
    sends = set(slotted.request.tolist())
    setup.progress.tell("simulation: round trips by a proxy")
    with serving(setup, 1) as cluster, scratch_folder(None, "dlm-delays") as scratch:
        target = ClusterToml(cluster).servers()[0]
        with Proxies([target.address], precise=True) as proxies:
            file = scratch / "cluster.toml"
            endpoint = Endpoint(proxies.addresses[0], target.shard)
            write_cluster_file(file, [endpoint])
            config = ClientConfig(DEADLINE_S, cache_dir=setup.work / "cache")
            with Client.connect(file, config) as client:
                handle = client.utterance()
                asked = [one for number, *one in prepared(handle, trace) if number in sends][:60]
                took: dict[float, list[list[float]]] = {}
                for at in range(repeats + 1):
                    for round_trip_ms in (0.0, *ROUND_TRIPS_MS):
                        proxies.set(0, delay_s=HELD_S + round_trip_ms / 2e3)
                        times = []
                        for states, words in asked:
                            began = time.perf_counter()
                            handle.extend(states, words)
                            times.append(1e3 * (time.perf_counter() - began))
                        if at:  # the first round warms up
                            took.setdefault(round_trip_ms, []).append(times)
    # The least time of each request over all rounds: it excludes other work of the machine.
    least = {ms: np.array(rounds).min(axis=0) for ms, rounds in took.items()}
    return {ms: median((least[ms] - least[0.0]).tolist()) for ms in ROUND_TRIPS_MS}
