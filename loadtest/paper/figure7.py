"""Figure 7: query time and messages per second of audio against servers; dlm and the baselines."""

from __future__ import annotations

import asyncio

import numpy as np

from dlm.client import AsyncClient, ClientConfig
from loadtest.baselines.client import BaselineClient
from loadtest.baselines.server import running
from loadtest.baselines.systems import SYSTEMS, Counts, Placed, counted
from loadtest.paper.clusters import serving
from loadtest.paper.result import COMPUTED, LINES, MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.timed import Timing, fitted, timed, work_of
from loadtest.paper.workload import Asked, Model, histories, model_of, recorded
from loadtest.run.worker import precise_loop
from loadtest.traces.trace import read_trace

PAPER: list[Row] = [
    {
        "where": "4.2.1, Figure 7: few messages, slightly more with more servers",
        "system": "dlm",
    },
    {
        "where": "4.2.1, Figure 7: more messages than DLM, about the same time",
        "system": "A",
    },
    {
        "where": "4.2.1, Figure 7: far more messages and time, the same for any number of servers",
        "system": "B",
    },
    {"where": "section 4: overhead of DLM", "system": "dlm", "query_s": 0.1},
]
# Systems whose calls are timed, and which are computed for more servers.
TIMED = ("dlm", "A", "B", "B-batched")
# dlm without one technique, and the systems before it.
ABLATED = ("dlm-hash", "dlm-one-word", "dlm-uncached", "dlm-unbatched", "srilm")
BY_HISTORY = ("dlm", "dlm-paper", "A", "A-paper", "B", "B-paper")
OWN, PLACED = "dlm", "dlm, on servers of the baselines"
SERVERS = (1, 2, 4, 8, 16, 32, 64)
DEADLINE_S = 60.0


def run(setup: Setup) -> Result:
    """Messages are computed for all cluster sizes, and measured, with time, where they fit."""
    setup.progress.tell("figure-7: reading the model")
    model, asked = model_of(setup), recorded(setup)
    every = SERVERS[:3] if setup.quick else SERVERS
    rows: list[Row] = []
    for name in (*TIMED, *ABLATED):
        setup.progress.tell(f"figure-7: {name}, computed")
        sizes = every[:1] if name == "srilm" else every
        counts = {size: count(model, asked, name, size) for size in sizes}
        timings: dict[str, dict[int, Timing]] = {name: {}}
        for size in [n for n in setup.servers if n in sizes and name in TIMED]:
            setup.progress.tell(f"figure-7: {name} on {size} servers")
            shown = PLACED if name == OWN else name
            timings.setdefault(shown, {})[size] = on_baseline(setup, model, name, size)
            if name == OWN:
                timings[OWN][size] = on_dlm(setup, size)
        for shown, measured in timings.items():
            rows += [measured_row(shown, asked, size, one) for size, one in measured.items()]
            rows += [computed_row(shown, asked, size, counts, measured) for size in sizes]
    whole = histories(setup)
    for name in BY_HISTORY:
        setup.progress.tell(f"figure-7: {name}, whole histories")
        for size in every:
            counts = {size: count(model, whole, name, size)}
            rows.append(computed_row(name, whole, size, counts, {}))
    return Result(
        name="figure-7",
        title="Figure 7: dlm and the baselines",
        paper=PAPER,
        columns=[
            ("line", "system and queries", ""),
            ("system", "system", ""),
            ("queries", "queries of", ""),
            ("servers", "servers", ""),
            ("messages", "messages per second of audio", "1/s"),
            ("ablated", "the same, without one technique", "1/s"),
            ("query_s", "query time per second of audio", "s"),
            ("rounds", "rounds of messages per call", ""),
        ],
        rows=rows,
        plot=[
            {
                "kind": LINES,
                "x": "servers",
                "y": "query_s",
                "series": "line",
                "labels": {"x": "servers", "y": "seconds per second of audio"},
                "title": "Query time per second of audio",
                "log": True,
            },
            {
                "kind": LINES,
                "x": "servers",
                "y": "messages",
                "series": "line",
                "labels": {"x": "servers", "y": "messages per second of audio"},
                "title": "Messages per second of audio",
                "log": True,
            },
            {
                "kind": LINES,
                "x": "servers",
                "y": "ablated",
                "series": "line",
                "labels": {"x": "servers", "y": "messages per second of audio"},
                "title": "The same, dlm without one technique",
                "log": True,
            },
        ],
        notes=[
            *(f"{name}: {SYSTEMS[name].title}." for name in (*TIMED, *ABLATED, *BY_HISTORY[1::2])),
            "A sends a whole call in one round, weights along with probabilities; B goes down one "
            "order at a time, with one look-up per message; B-batched sends all look-ups of a call "
            "together. All have the same cache of 1- and 2-grams. -paper: without the bit that "
            "marks pairs after which nothing is stored.",
            "Measured: one decoder, one call after another, servers on this machine; the median "
            "of each call over the passes, summed. 'dlm' is dlm itself; all other systems run on "
            "the same small servers and client, which answer from hash tables.",
            "Computed: messages exactly, by the client's own plan; time by a linear fit to the "
            "measured calls, with a cost per call, round, message and look-up. Servers share two "
            "cores here, so a message costs more time than on a separate machine: with many "
            "servers the fit is an upper bound.",
        ],
    )


def count(model: Model, asked: Asked, name: str, servers: int) -> Counts:
    placed = Placed(SYSTEMS[name], model.ngrams, servers)
    return counted(asked.calls, placed, model.cache, model.whole, asked.audio_s)


def computed_row(
    name: str, asked: Asked, servers: int, counts: dict[int, Counts], measured: dict[int, Timing]
) -> Row:
    found = counts[servers]
    row: Row = {
        "basis": COMPUTED,
        "line": f"{name}, {asked.name}",
        "system": name,
        "queries": asked.name,
        "servers": servers,
        "ablated" if name in ABLATED else "messages": found.per_audio_s,
        "rounds": found.rounds / max(found.calls, 1),
    }
    if name == OWN and measured:  # beside the others of the same queries
        row["ablated"] = row["messages"]
    if measured:
        known = [size for size in measured if size in counts]
        work = np.concatenate([work_of(counts[size].per_call) for size in known])
        seconds = np.concatenate([measured[size].call_s for size in known])
        costs = fitted(work, seconds)
        row["query_s"] = float((work_of(found.per_call) @ costs).sum()) / asked.audio_s
    return row


def measured_row(name: str, asked: Asked, servers: int, found: Timing) -> Row:
    return {
        "basis": MEASURED,
        "line": f"{name}, {asked.name}",
        "system": name,
        "queries": asked.name,
        "servers": servers,
        "messages": found.messages / asked.audio_s,
        "query_s": float(found.call_s.sum()) / asked.audio_s,
    }


def on_baseline(setup: Setup, model: Model, name: str, servers: int) -> Timing:
    trace = read_trace(setup.trace)
    placed = Placed(SYSTEMS[name], model.ngrams, servers)

    async def ask(addresses: list[str]) -> Timing:
        client = BaselineClient(
            addresses, placed, model.cache, model.vocabulary, model.order, DEADLINE_S
        )
        async with client:
            # One message per look-up: a pass takes as long as ten of the others, so one is enough.
            batched = placed.system.batched
            return await timed(client, trace, passes(setup) if batched else 1, int(batched))

    with running(model.file, name, servers) as found:
        return _run(ask(list(found.addresses)))


def on_dlm(setup: Setup, servers: int) -> Timing:
    """The same calls on dlm's own servers, with its own client."""
    trace = read_trace(setup.trace)
    config = ClientConfig(DEADLINE_S, DEADLINE_S, cache_dir=setup.work / "cache")
    with serving(setup, servers) as cluster:

        async def ask() -> Timing:
            async with AsyncClient.connect(cluster, config) as client:
                return await timed(client, trace, passes(setup))

        return _run(ask())


def passes(setup: Setup) -> int:
    return 1 if setup.quick else 3


def _run(asking: object) -> Timing:
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        found: Timing = runner.run(asking)  # type: ignore[arg-type]
        return found
