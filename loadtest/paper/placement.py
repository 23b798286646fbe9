"""Table 3 and Figures 7 to 9: messages, their time and their balance, for dlm and the baselines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client import AsyncClient, Client, ClientConfig
from dlm.index.layout import read_manifest
from loadtest.baselines.client import BaselineClient
from loadtest.baselines.server import running
from loadtest.baselines.systems import SYSTEMS, Caller, Counts, Placed, counted, imbalance
from loadtest.paper.clusters import fitted, prepared, serving, shard_set
from loadtest.paper.result import BARS, COMPUTED, LINES, MEASURED, Result, Row, Setup
from loadtest.paper.workload import Asked, Model, histories, model_of, recorded
from loadtest.run.worker import precise_loop
from loadtest.traces.trace import Trace, read_trace

DEADLINE_S = 60.0
TABLE_3: list[Row] = [
    {"where": "4.2.2, Table 3", "order": order, "share": share, "hit": hit}
    for order, share, hit in (
        ("2", 16.09, 16.09),
        ("3", 13.51, 10.6),
        ("4", 13.49, 4.2),
        ("5", 56.89, 2.5),
        ("all", 100.0, 33.39),
    )
]


def table_3(setup: Setup) -> Result:
    """Makes Table 3, for the trace and for whole histories."""
    setup.progress.tell("table-3: reading the model")
    model = model_of(setup)
    rows: list[Row] = []
    for asked in (recorded(setup), histories(setup)):
        setup.progress.tell(f"table-3: {asked.name}")
        rows += _distribution(model, asked)
    return Result(
        name="table-3",
        title="Table 3: distribution of queries",
        paper=TABLE_3,
        columns=[
            ("queries", "queries of", ""),
            ("order", "n-gram", ""),
            ("share", "of all queries", "%"),
            ("hit", "with hit gram", "%"),
            ("free", "without a message", "%"),
            ("free_paper", "of these, by 1- and 2-grams", "%"),
        ],
        rows=rows,
        plot={
            "kind": BARS,
            "x": "order",
            "y": "share",
            "series": "queries",
            "labels": {"x": "order of the query's n-gram", "y": "% of queries"},
        },
        notes=[
            "A query's order is its context's length plus one; shares are of all queries, as in "
            "the paper. A hit gram is the query's own n-gram, found in the model.",
            "The trace's contexts are states, without the words that can no longer matter, so its "
            "queries are shorter and hit more often. The histories are whole, as in the paper: "
            "10 hypotheses by 10 candidates at each word of the same audio. Candidates are the "
            "frequent words with the most similar spelling.",
            "A query needs no message if the client's 1- and 2-grams are enough. In the paper that "
            "is true only of two-word queries; dlm's clients also know the pairs after which "
            "nothing longer is stored.",
        ],
    )


def _distribution(model: Model, asked: Asked) -> list[Row]:
    counts = np.zeros((4, model.order + 1), np.int64)  # rows: share, hit, free, free_paper
    callers = [
        Caller(Placed(SYSTEMS[name], model.ngrams, 1), model.cache, model.order)
        for name in ("dlm", "dlm-paper")
    ]
    for call, times in asked.queries():
        lengths = call.lengths[call.row]
        _, orders, _ = model.whole.score(call.contexts[call.row], lengths, call.words)
        order = lengths.astype(np.int64) + 1
        wanted = [np.ones(len(order), bool), orders == order]
        wanted += [~caller.remote(call)[call.row] for caller in callers]
        for row, which in enumerate(wanted):
            counts[row] += np.bincount(
                order[which], weights=times[which], minlength=model.order + 1
            ).astype(np.int64)
    share = 100.0 * counts / counts[0].sum()
    names = [(str(n), share[:, n]) for n in range(1, model.order + 1)]
    return [
        {
            "basis": COMPUTED,
            "queries": asked.name,
            "order": name,
            **dict(zip(("share", "hit", "free", "free_paper"), values.tolist(), strict=True)),
        }
        for name, values in [*names, ("all", share.sum(axis=1))]
        if values[0] > 0
    ]


FIGURE_7: list[Row] = [
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
# Systems whose calls are timed on small clusters; times on larger ones are computed.
TIMED = ("dlm", "A", "B", "B-batched")
# Variants of dlm, each without one technique, and an older system.
ABLATED = ("dlm-hash", "dlm-one-word", "dlm-uncached", "dlm-unbatched", "srilm")
BY_HISTORY = ("dlm", "dlm-paper", "A", "A-paper", "B", "B-paper")
OWN, PLACED = "dlm", "dlm, on servers of the baselines"
SERVERS = (1, 2, 4, 8, 16, 32, 64)
PASSES = 3


def figure_7(setup: Setup) -> Result:
    """Makes Figure 7: messages computed for all cluster sizes, and messages and times measured
    on the setup's clusters."""
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
        paper=FIGURE_7,
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
        "rounds": found.rounds / max(len(found.per_call), 1),
    }
    if name == OWN and measured:  # also shown beside the ablated systems
        row["ablated"] = row["messages"]
    if measured:
        known = [size for size in measured if size in counts]
        work = np.concatenate([work_of(counts[size]) for size in known])
        seconds = np.concatenate([measured[size].call_s for size in known])
        costs = fitted(work, seconds)
        row["query_s"] = float((work_of(found) @ costs).sum()) / asked.audio_s
    return row


def work_of(counts: Counts) -> NDArray[np.float64]:
    """Returns (calls, 4): for each call, a 1, and its rounds, messages and look-ups."""
    return np.column_stack([np.ones(len(counts.per_call)), np.array(counts.per_call)])


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


@dataclass(frozen=True, eq=False)
class Timing:
    """Each call's median seconds over the passes, call_s (calls,), and the messages per pass."""

    call_s: NDArray[np.float64]
    messages: float


async def timed(client: Any, trace: Trace, passes: int, warmups: int = 1) -> Timing:
    """Times each call of a trace, one after another, in `passes` passes after `warmups`."""
    handle = client.utterance()
    calls = prepared(handle, trace)
    seconds = np.zeros((warmups + passes, len(calls)))
    before = client.stats.messages
    for row in seconds:
        for at, (_, states, words) in enumerate(calls):
            began = time.perf_counter()
            await handle.extend(states, words)
            row[at] = time.perf_counter() - began
    await asyncio.sleep(0)
    sent = (client.stats.messages - before) / len(seconds)
    return Timing(np.median(seconds[warmups:], axis=0), sent)


def on_baseline(setup: Setup, model: Model, name: str, servers: int) -> Timing:
    placed = Placed(SYSTEMS[name], model.ngrams, servers)
    # With one message per look-up, a pass takes as long as ten batched ones, so only one is made.
    batched = placed.system.batched
    passes = PASSES if batched and not setup.quick else 1

    async def ask(addresses: list[str]) -> Timing:
        async with BaselineClient(
            addresses, placed, model.cache, model.vocabulary, model.order, DEADLINE_S
        ) as client:
            return await timed(client, read_trace(setup.trace), passes, int(batched))

    with running(model.file, name, servers) as addresses:
        return _run(ask(addresses))


def on_dlm(setup: Setup, servers: int) -> Timing:
    """Times the trace's calls on dlm's own servers, with dlm's own client."""
    config = ClientConfig(DEADLINE_S, DEADLINE_S, cache_dir=setup.work / "cache")

    async def ask() -> Timing:
        async with AsyncClient.connect(cluster, config) as client:
            return await timed(client, read_trace(setup.trace), 1 if setup.quick else PASSES)

    with serving(setup, servers) as cluster:
        return _run(ask())


def _run(asking: Coroutine[Any, Any, Timing]) -> Timing:
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(asking)


FIGURE_8: list[Row] = [
    {"where": "4.2.3, Figure 8: two words are more balanced than one", "placement": "one word"},
    {"where": "4.2.3, Figure 8: two words are more balanced than one", "placement": "two words"},
]
NAMES = {
    "dlm-one-word": "one word",
    "dlm-hash": "two words",
    "dlm": "two words, slots",
    "A": "baseline A",
    "B": "baseline B",
}
BALANCE_SERVERS = (2, 4, 8, 16, 32, 64)


def figure_8(setup: Setup) -> Result:
    """Makes Figure 8: computed for up to 64 servers, and measured in files of real shard sets."""
    setup.progress.tell("figure-8: reading the model")
    model, asked = model_of(setup), recorded(setup)
    rows: list[Row] = []
    for servers in BALANCE_SERVERS[:2] if setup.quick else BALANCE_SERVERS:
        setup.progress.tell(f"figure-8: {servers} servers")
        rows += [row_of(model, asked, name, servers) for name in NAMES]
    built = [n for n in setup.servers if n in BALANCE_SERVERS] + ([] if setup.quick else [16, 64])
    rows += [real_row(setup, servers) for servers in built]
    return Result(
        name="figure-8",
        title="Figure 8: balance",
        paper=FIGURE_8,
        columns=[
            ("placement", "placed by", ""),
            ("servers", "servers", ""),
            ("bytes", "(max - avg) / avg of bytes", ""),
            ("messages", "(max - avg) / avg of messages", ""),
        ],
        rows=rows,
        plot=[
            {
                "kind": LINES,
                "x": "servers",
                "y": what,
                "series": "placement",
                "labels": {"x": "servers", "y": f"(max - avg) / avg of {what}"},
                "title": what.capitalize(),
            }
            for what in ("bytes", "messages")
        ],
        notes=[
            "Computed: 8 bytes for each probability and each weight that only one server holds; "
            "what all servers hold (1-grams and, unless placed by one word, 2-grams) is left out. "
            f"Messages are those of {asked.name}, one call after another.",
            "Measured: file sizes of shard sets that dlm built with slots. dlm balances an "
            "estimate with fixed sizes per n-gram and per node; packed lists differ from it, which "
            "shows in the shards of 64 servers, of some 200 kB each.",
            "Slots are balanced by bytes, not by messages: 4,096 slots can be distributed evenly, "
            "hash % B cannot. A shard set can be balanced by recorded queries instead.",
            "The paper shows curves without numbers.",
        ],
    )


def row_of(model: Model, asked: Asked, name: str, servers: int) -> Row:
    placed = Placed(SYSTEMS[name], model.ngrams, servers)
    return {
        "basis": COMPUTED,
        "placement": NAMES[name],
        "servers": servers,
        "bytes": imbalance(placed.records(model.ngrams)),
        "messages": imbalance(count(model, asked, name, servers).messages),
    }


def real_row(setup: Setup, servers: int) -> Row:
    manifest = read_manifest(shard_set(setup, servers))
    sizes = [file.bytes for file in manifest.files if file.kind == "shard"]
    return {
        "basis": MEASURED,
        "placement": NAMES["dlm"],
        "servers": servers,
        "bytes": imbalance(np.array(sizes)),
    }


FIGURE_9: list[Row] = [
    {"where": "4.2.4, Figure 9, both sets of queries", "batching": "none", "saved": 0.0},
    {"where": "4.2.4: almost half are eliminated", "batching": "by server", "saved": 50.0},
]
NONE, BY_CONTEXT, BY_SERVER = "none", "by context", "by server"
BATCHING_SERVERS = (4, 64)


def figure_9(setup: Setup) -> Result:
    """Makes Figure 9: computed for up to 64 servers, measured on the setup's largest cluster."""
    setup.progress.tell("figure-9: reading the model")
    model = model_of(setup)
    sets = recorded(setup), histories(setup)
    rows: list[Row] = []
    for asked in sets:
        for servers in BATCHING_SERVERS[:1] if setup.quick else BATCHING_SERVERS:
            setup.progress.tell(f"figure-9: {asked.name}, {servers} servers")
            rows += computed(model, asked, servers)
    servers = setup.servers[-1]
    with serving(setup, servers) as cluster:
        for asked in sets:
            setup.progress.tell(f"figure-9: {asked.name} on {servers} real servers")
            found = {}
            for name, most in ((NONE, 1), (BY_SERVER, ClientConfig().max_queries)):
                config = ClientConfig(
                    DEADLINE_S, DEADLINE_S, max_queries=most, cache_dir=setup.work / "cache"
                )
                with Client.connect(cluster, config) as client:
                    found[name] = sent(client, model, asked)
            rows += _batching(MEASURED, asked, servers, found)
    return Result(
        name="figure-9",
        title="Figure 9: batching",
        paper=FIGURE_9,
        columns=[
            ("queries", "queries of", ""),
            ("servers", "servers", ""),
            ("batching", "batching", ""),
            ("set", "queries and servers", ""),
            ("messages", "messages", ""),
            ("messages_per_audio_s", "per second of audio", "1/s"),
            ("saved", "saved", "%"),
        ],
        rows=rows,
        plot={
            "kind": BARS,
            "x": "batching",
            "y": "messages_per_audio_s",
            "series": "set",
            "labels": {"x": "batching", "y": "messages per second of audio"},
            "log": True,
        },
        notes=[
            "Batching by context puts the words of one context into a message; batching by server "
            "adds those of the call's other contexts on the same server (3.3, Figures 2 and 3). "
            "Calls are one after another, so nothing is batched across utterances.",
            "Measured: messages counted by dlm's own client, with at most one query per message "
            "and with its default; it does not batch by context only.",
            "The paper does not say how many servers it had, nor how wide its calls were. With "
            "more words and contexts per call, messages are larger.",
        ],
    )


def computed(model: Model, asked: Asked, servers: int) -> list[Row]:
    counts = count(model, asked, "dlm", servers)
    found = {
        NONE: int(counts.looked_up.sum()),
        BY_CONTEXT: counts.contexts,
        BY_SERVER: int(counts.messages.sum()),
    }
    return _batching(COMPUTED, asked, servers, found)


def _batching(basis: str, asked: Asked, servers: int, found: dict[str, int]) -> list[Row]:
    return [
        {
            "basis": basis,
            "queries": asked.name,
            "servers": servers,
            "batching": name,
            "set": f"{asked.name}, {servers}",
            "messages": messages,
            "messages_per_audio_s": messages / asked.audio_s,
            "saved": 100.0 * (1 - messages / max(found[NONE], 1)),
        }
        for name, messages in found.items()
    ]


def sent(client: Client, model: Model, asked: Asked) -> int:
    handle = client.utterance()
    before = client.stats.messages
    width = model.order - 1
    for call in asked.calls:
        rows = [
            ids[width - length :]
            for ids, length in zip(call.contexts.tolist(), call.lengths.tolist(), strict=True)
        ]
        handle.score([rows[row] for row in call.row.tolist()], call.words.tolist())
    return client.stats.messages - before
