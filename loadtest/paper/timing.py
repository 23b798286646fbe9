"""Tables 2 and 5: times of a message by stage, and of searches in the tree and in hash tables."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from dlm.client import Client, ClientConfig
from dlm.client.cluster_file import write_cluster_file
from dlm.cluster.processes import free_port, running_servers
from dlm.errors import DlmError
from dlm.files import scratch_folder
from dlm.index.layout import read_manifest
from dlm.index.search.local import LocalModel
from dlm.ngram.query import Answers, QueryGroups
from loadtest.baselines.systems import Call
from loadtest.paper.clusters import DEADLINE_S, prepared
from loadtest.paper.result import BARS, MEASURED, Result, Row, Setup
from loadtest.paper.workload import Asked, Model, histories, model_of, recorded
from loadtest.traces.trace import read_trace

CLIENT, SERVER = "dlm_client_stage_seconds", "dlm_server_stage_seconds"
# (side, stage) -> the stage's meaning, and where the paper's Table 2 would count the stage.
CODING, SENDING, SEARCH = "Decoding & encoding", "Transmission", "Local index search"
STAGES = {
    ("client", "plan"): ("check, group, low orders, route (per request)", "-"),
    ("client", "queue"): ("wait for room in the window", "-"),
    ("client", "encode"): ("arrays to bytes", CODING),
    ("server", "queue"): ("wait to be started", SENDING),
    ("server", "decode"): ("bytes to arrays", CODING),
    ("server", "search"): ("check ids, walk the suffix tree", SEARCH),
    ("server", "encode"): ("answers to bytes", CODING),
    ("client", "decode"): ("bytes to arrays, merge, hand out", CODING),
}
PAPER_US = {CODING: 60, SENDING: 130, SEARCH: 10}


def stages_of(families: Iterable[Any], name: str) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for model_info in families:
        if model_info.name == name:
            for sample in model_info.samples:
                if sample.name.endswith(("_sum", "_count")):
                    both = found.setdefault(sample.labels["stage"], [0.0, 0.0])
                    both[int(sample.name.endswith("_count"))] += sample.value
                elif sample.name.endswith("_bucket") and sample.labels["le"] == "+Inf":
                    found.setdefault(sample.labels["stage"], [0.0, 0.0])[1] = sample.value
    return {stage: (seconds, count) for stage, (seconds, count) in found.items()}


def table_2(setup: Setup) -> Result:
    """Makes Table 2, with one decoder and one server, so that each message is alone."""
    seconds = 1.0 if setup.quick else 8.0
    port = int(free_port())
    with (
        running_servers([setup.model], first_metrics_port=port) as servers,
        scratch_folder(None, "dlm-table2") as scratch,
    ):
        file = scratch / "cluster.toml"
        write_cluster_file(file, [s.endpoint for s in servers])
        config = ClientConfig(DEADLINE_S, cache_dir=setup.work / "cache")
        setup.progress.tell("table 2: one decoder asks one server")
        client_side, server_side, queries = _ask(setup, file, config, port, seconds)
    us = {("client", name): _mean_us(one) for name, one in client_side.items()}
    us |= {("server", name): _mean_us(one) for name, one in server_side.items()}
    inside = sum(us["server", name] for name in ("queue", "decode", "search", "encode"))
    network = max(us["client", "wire"] - inside, 0.0)
    rows: list[Row] = [
        {"stage": f"{side}: {name}", "what": what, "group": group, "us": us[side, name],
         "basis": MEASURED}
        for (side, name), (what, group) in STAGES.items()
    ]  # fmt: skip
    rows.insert(3, {
        "stage": "network and gRPC",
        "what": "both ways, with wake-ups: the client's wire stage minus the server's stages",
        "group": SENDING,
        "us": network,
        "basis": MEASURED,
    })  # fmt: skip
    for group in (CODING, SENDING, SEARCH):
        total = sum(row["us"] for row in rows if row["group"] == group)
        rows.append({"stage": group, "what": "sum", "group": "", "us": total, "basis": MEASURED})
    return Result(
        "table-2",
        "Table 2: time of a message by stage",
        [{"where": "4.2.1, Table 2", "stage": g, "us": us} for g, us in PAPER_US.items()],
        [("stage", "stage", ""), ("what", "what", ""), ("group", "in the paper", ""),
         ("us", "time", "us")],
        rows,
        {"kind": "bars", "x": "stage", "y": "us", "series": None,
         "labels": {"x": "stage", "y": "us"}},
        [
            f"{queries:.0f} distinct queries per message on average, one server, one decoder that "
            "waits for each answer; the mean wall-clock time of each stage.",
            "Client and server share this machine: the network is the loopback, and wake-ups of "
            "both count as network and gRPC. The paper had 10 Gbps between machines, and phxrpc.",
        ],
    )  # fmt: skip


def _ask(
    setup: Setup, cluster: Path, config: ClientConfig, port: int, seconds: float
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]], float]:
    with Client.connect(cluster, config) as client:
        handle = client.utterance()
        asked = [one for _, *one in prepared(handle, read_trace(setup.trace))]
        for states, words in asked[:50]:
            handle.extend(states, words)
        before = stages_of(client.metrics.collect(), CLIENT), _server(port)
        begun = client.stats
        until = time.monotonic() + seconds
        for states, words in cycle(asked):
            handle.extend(states, words)
            if time.monotonic() > until:
                break
        after = stages_of(client.metrics.collect(), CLIENT), _server(port)
        ended = client.stats
    messages = max(ended.messages - begun.messages, 1)
    queries = (ended.sent_queries - begun.sent_queries) / messages
    return _less(after[0], before[0]), _less(after[1], before[1]), queries


def _less(
    after: dict[str, tuple[float, float]], before: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    return {
        name: (seconds - before[name][0], count - before[name][1])
        for name, (seconds, count) in after.items()
    }


def _mean_us(of: tuple[float, float]) -> float:
    return 1e6 * of[0] / max(of[1], 1.0)


def _server(port: int) -> dict[str, tuple[float, float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return stages_of(families, SERVER)


TABLE_5: list[Row] = [
    {
        "where": "4.2.3, Table 5",
        "index": "DLM local index",
        "searches": 732,
        "search_us": 6.5,
        "total_ms": 4.76,
    },
    {
        "where": "4.2.3, Table 5",
        "index": "hash index",
        "searches": 1663,
        "search_us": 4.0,
        "total_ms": 6.65,
    },
]
TREE, TREE_WHOLE, HASH = "suffix tree", "suffix tree, contexts shared", "hash tables"


def table_5(setup: Setup) -> Result:
    """Makes Table 5, for queries of the trace and of whole histories that reach a server."""
    setup.progress.tell("table-5: reading the model")
    model = model_of(setup)
    tree = LocalModel.open(setup.model)
    size = sum(file.bytes for file in read_manifest(setup.model).files if file.kind != "vocabulary")
    rows: list[Row] = []
    for asked in (recorded(setup), histories(setup)):
        setup.progress.tell(f"table-5: {asked.name}")
        rows += _index_rows(model, tree, size, asked, 3 if setup.quick else 9)
    return Result(
        name="table-5",
        title="Table 5: the local index against a hash index",
        paper=TABLE_5,
        columns=[
            ("queries", "queries of", ""),
            ("index", "index", ""),
            ("ngrams", "queries", ""),
            ("searches", "searches", ""),
            ("searches_each", "searches per query", ""),
            ("search_us", "time per search", "µs"),
            ("total_ms", "total time", "ms"),
            ("query_us", "time per query", "µs"),
            ("bytes", "size", "bytes"),
            ("ngram_bytes", "size per n-gram", "bytes"),
        ],
        rows=rows,
        plot={
            "kind": BARS,
            "x": "index",
            "y": "query_us",
            "series": "queries",
            "labels": {"x": "index", "y": "µs per query"},
        },
        notes=[
            "Queries are those that clients send to servers, distinct within a call, in the order "
            "of the calls; both indexes answer with the same bits. Processor time of one thread, "
            "the best of several passes.",
            "A search of the tree is a query, as in the paper: one walk finds everything. Hash "
            "tables are searched for a probability or a weight at each step of Algorithm 1; "
            "1-grams are read from arrays, and count as searches.",
            "Servers get the words of one context together and share their walk (3.3): the row of "
            "shared contexts.",
            "Hash tables have 64-bit keys instead of words, and 1.5 places per n-gram. Their "
            "kernel fetches one n-gram at a time from memory, the tree's kernel a block of them; "
            "so this compares two implementations.",
        ],
    )


def _index_rows(model: Model, tree: LocalModel, size: int, asked: Asked, passes: int) -> list[Row]:
    contexts, lengths, words = remote_queries(model, asked)
    if not len(words):
        return []
    single = _groups(contexts, lengths, np.ones(len(words), np.uint32), words)
    change = np.ones(len(words), np.bool_)
    change[1:] = (contexts[1:] != contexts[:-1]).any(axis=1) | (lengths[1:] != lengths[:-1])
    first = np.flatnonzero(change)
    counts = np.diff([*first.tolist(), len(words)]).astype(np.uint32)
    shared = _groups(contexts[first], lengths[first], counts, words)
    found: dict[str, NDArray[np.float32]] = {}
    searches = {TREE: len(words), TREE_WHOLE: len(first), HASH: 0}

    def by_tree(name: str, groups: QueryGroups) -> Callable[[], None]:
        def ask() -> None:
            answers: Answers = tree.score_groups(groups)
            found[name] = answers.log10_prob

        return ask

    def by_hash() -> None:
        found[HASH], _, searches[HASH] = model.whole.score(contexts, lengths, words)

    rows: list[Row] = []
    grams = sum(model.ngrams.counts)
    for name, ask, held in (
        (TREE, by_tree(TREE, single), size),
        (TREE_WHOLE, by_tree(TREE_WHOLE, shared), size),
        (HASH, by_hash, model.whole.bytes),
    ):
        seconds = best_s(ask, passes)
        rows.append(
            {
                "basis": MEASURED,
                "queries": asked.name,
                "index": name,
                "ngrams": len(words),
                "searches": searches[name],
                "searches_each": searches[name] / len(words),
                "search_us": seconds / searches[name] * 1e6,
                "total_ms": seconds * 1e3,
                "query_us": seconds / len(words) * 1e6,
                "bytes": held,
                "ngram_bytes": held / grams,
            }
        )
    if any(one.tobytes() != found[HASH].tobytes() for one in found.values()):
        raise DlmError(
            "the suffix tree and the hash tables give different scores. This is a bug in dlm; "
            "report it"
        )
    return rows


def remote_queries(
    model: Model, asked: Asked
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32]]:
    """Returns contexts, lengths, words of queries to servers, one row each, distinct per call."""
    parts = [_remote(model, call) for call in asked.calls]
    contexts, lengths, words = (np.concatenate(one) for one in zip(*parts, strict=True))
    return np.ascontiguousarray(contexts), lengths, words


def _remote(
    model: Model, call: Call
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32]]:
    sent = model.cache.asks_servers(call)[call.row]
    row = call.row[sent]
    return call.contexts[row], call.lengths[row], call.words[sent]


def _groups(
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> QueryGroups:
    width = contexts.shape[1]
    has = np.arange(width) >= width - lengths[:, None].astype(np.int64)
    return QueryGroups(lengths, contexts[has], counts, words)


def best_s(ask: Callable[[], None], passes: int) -> float:
    """CPU seconds of the fastest pass, after an untimed one that compiles and loads data."""
    ask()
    best = float("inf")
    for _ in range(passes):
        began = time.process_time()
        ask()
        best = min(best, time.process_time() - began)
    return best
