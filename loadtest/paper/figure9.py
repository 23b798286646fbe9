"""Figure 9: messages with batching and without, for two sets of queries."""

from __future__ import annotations

from dlm.client import Client, ClientConfig
from loadtest.baselines.systems import SYSTEMS, Placed, counted
from loadtest.paper.clusters import serving
from loadtest.paper.result import BARS, COMPUTED, MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.workload import Asked, Model, histories, model_of, recorded

PAPER: list[Row] = [
    {"where": "4.2.4, Figure 9, both sets of queries", "batching": "none", "saved": 0.0},
    {"where": "4.2.4: almost half are eliminated", "batching": "by server", "saved": 50.0},
]
NONE, BY_CONTEXT, BY_SERVER = "none", "by context", "by server"
SERVERS = (4, 64)
DEADLINE_S = 60.0


def run(setup: Setup) -> Result:
    """Computed for up to 64 servers; measured on the largest cluster of the setup."""
    setup.progress.tell("figure-9: reading the model")
    model = model_of(setup)
    sets = recorded(setup), histories(setup)
    rows: list[Row] = []
    for asked in sets:
        for servers in SERVERS[:1] if setup.quick else SERVERS:
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
            rows += _rows(MEASURED, asked, servers, found)
    return Result(
        name="figure-9",
        title="Figure 9: batching",
        paper=PAPER,
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
    placed = Placed(SYSTEMS["dlm"], model.ngrams, servers)
    counts = counted(asked.calls, placed, model.cache, model.whole, asked.audio_s)
    found = {
        NONE: int(counts.looked_up.sum()),
        BY_CONTEXT: counts.contexts,
        BY_SERVER: int(counts.messages.sum()),
    }
    return _rows(COMPUTED, asked, servers, found)


def _rows(basis: str, asked: Asked, servers: int, found: dict[str, int]) -> list[Row]:
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
