"""Table 2: where the time of a message goes, by the clocks of client and server."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dlm.client import Client, ClientConfig
from dlm.client.cluster_file import write_cluster_file
from dlm.cluster.processes import free_port, running_servers
from dlm.files import scratch_folder
from loadtest.paper.clusters import DEADLINE_S, prepared
from loadtest.paper.result import MEASURED, Result, Row
from loadtest.paper.setup import Setup
from loadtest.traces.trace import read_trace

CLIENT, SERVER = "dlm_client_stage_seconds", "dlm_server_stage_seconds"
# (side, stage): its meaning, and where the paper's Table 2 would count it.
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


def run(setup: Setup) -> Result:
    """One decoder, one server: each message is alone."""
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
