"""Figure 8: balance of servers, by one word, by two words, and by slots."""

from __future__ import annotations

import numpy as np

from dlm.index.layout import read_manifest
from loadtest.baselines.systems import SYSTEMS, Placed, counted, imbalance
from loadtest.paper.clusters import shard_set
from loadtest.paper.result import COMPUTED, LINES, MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.paper.workload import Asked, Model, model_of, recorded

PAPER: list[Row] = [
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
SERVERS = (2, 4, 8, 16, 32, 64)


def run(setup: Setup) -> Result:
    """Computed for up to 64 servers, and the files of real shard sets."""
    setup.progress.tell("figure-8: reading the model")
    model, asked = model_of(setup), recorded(setup)
    rows: list[Row] = []
    for servers in SERVERS[:2] if setup.quick else SERVERS:
        setup.progress.tell(f"figure-8: {servers} servers")
        rows += [row_of(model, asked, name, servers) for name in NAMES]
    built = [n for n in setup.servers if n in SERVERS] + ([] if setup.quick else [16, 64])
    rows += [real_row(setup, servers) for servers in built]
    return Result(
        name="figure-8",
        title="Figure 8: balance",
        paper=PAPER,
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
            "what all servers hold (1-grams and, except by one word, 2-grams) is left out. "
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
    counts = counted(asked.calls, placed, model.cache, model.whole, asked.audio_s)
    return {
        "basis": COMPUTED,
        "placement": NAMES[name],
        "servers": servers,
        "bytes": imbalance(placed.records(model.ngrams)),
        "messages": counts.balance,
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
