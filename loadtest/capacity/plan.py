"""Sizes a cluster: the number of servers and their memory for a number of audio streams of a trace.

Every figure is computed from the trace, the model and the measured cost of a message. All functions
but `costs_of` and `model_of` are pure; `assumptions` states their assumptions in words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlm.errors import ConfigError
from dlm.index.describe import PROCESS_MIB
from dlm.index.layout import Manifest, read_manifest
from dlm.ngram.partition import balanced_slot_table
from dlm.units import counted, size_text
from loadtest.traces.routes import Slotted

FORMAT, VERSION = "dlm cluster plan", 1
COSTS = Path(__file__).parent / "costs.json"
MIB = 1 << 20
# Bytes per word or 2-gram, and per longer n-gram, in books5 (4.0 M n-grams, exact); and the assumed
# share of words and 2-grams, near a large model's (5 % of 283 M n-grams; books5 has 51 %).
LOW_BYTES, HIGH_BYTES, LOW_SHARE = 6.4, 6.3, 0.1
ENCODINGS = {"exact": 1.0, "compact": 0.57}  # bytes / exact bytes, at 6 bits (dlm/index/README.md)
MOST_SHARDS, MOST_REPLICAS = 256, 32


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs, and where they were measured.

    server_us_per_message   CPU of servers, at `queries_per_message`
    client_ms_per_request   CPU of clients
    measured                where and how they were measured, in words
    """

    server_us_per_message: float
    client_ms_per_request: float
    queries_per_message: float | None
    messages_per_audio_s: float | None
    trace: str
    measured: str


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes that servers and clients hold.

    shards      bytes of all shards together
    low_orders  bytes that each host of clients holds: words and 1- and 2-grams
    largest     size of the largest shard, divided by the mean size
    """

    name: str
    ngrams: int
    shards: int
    low_orders: int
    largest: float = 1.0

    def server_bytes(self, shards: int, processes: int) -> float:
        """Memory of the server of the largest shard, including mapped pages."""
        return self.shards / shards * self.largest + processes * PROCESS_MIB * MIB


@dataclass(frozen=True, slots=True)
class Traffic:
    """The cost of one second of audio on all shards, and on the shard with the most messages."""

    messages_per_audio_s: float
    busiest_share: float
    queries_per_message: float | None


@dataclass(frozen=True, slots=True)
class Wishes:
    """The requirements: the streams, and limits on each server's memory and share of its cores."""

    streams: float
    memory_bytes: float
    cpu_share: float = 0.75
    processes: int = 1
    replicas: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.streams <= 1e7:
            raise ConfigError(
                f"--streams is {self.streams:g}; expected a number above 0, up to 10 million"
            )
        if not 0 < self.cpu_share <= 1:
            raise ConfigError(
                f"--cpu is {100 * self.cpu_share:g}; expected a percentage above 0, up to 100"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster size that fits.

    cpu_share       CPU use of the busiest server, as a share of its processes' cores
    degraded_share  the same while a replica of its shard is gone; None for a single replica
    """

    shards: int
    replicas: int
    servers: int
    server_bytes: float
    messages_per_s: float
    messages_per_audio_s: float
    cpu_share: float
    degraded_share: float | None
    server_cores: float
    client_cores: float


def costs_of(path: Path | None) -> Costs:
    """Returns a capacity report's costs, or the packaged costs; ConfigError if it has none."""
    from loadtest.capacity.capacity import read_capacity

    if path is None:
        return Costs(**json.loads(COSTS.read_text(encoding="utf-8")))
    found = read_capacity(path)
    knee = found["knee"]
    if knee is None or knee["server_cpu_us_per_message"] is None or not knee["sent_per_s"]:
        raise ConfigError(
            f"{path} has no rate that stayed within its limits, or no CPU use of servers; give "
            "another report to --costs"
        )
    machine, commit = found["provenance"]["machine"], found["provenance"]["commit"]
    return Costs(
        knee["server_cpu_us_per_message"],
        knee["client_cpu_ms_per_audio_s"] * knee["audio_s_per_s"] / knee["sent_per_s"],
        knee["queries_per_message"],
        knee["messages_per_audio_s"],
        found["trace"]["name"],
        f"{machine['cores']} cores of {machine['cpu']}, {found['provenance']['at'][:10]}, commit "
        f"{(commit or 'unknown')[:12]}, at {knee['rate']:g} requests/s",
    )


def model_of(shard_set: Path) -> Model:
    return model_of_manifest(shard_set.name, read_manifest(shard_set))


def model_of_manifest(name: str, manifest: Manifest) -> Model:
    shards = [file.bytes for file in manifest.files if file.kind == "shard"]
    low_orders = sum(file.bytes for file in manifest.files if file.kind != "shard")
    largest = max(shards) * len(shards) / sum(shards)
    return Model(name, sum(manifest.counts), sum(shards), low_orders, largest)


def model_of_counts(text: str, encoding: str) -> Model:
    """Returns the model for numbers of n-grams by order, such as `200k,1.5M,4M`, or in total, such
    as `100M`; raises `ConfigError` for other text."""
    if encoding not in ENCODINGS:
        raise ConfigError(f"--encoding is {encoding}; expected {' or '.join(ENCODINGS)}")
    counts = [_count(part) for part in text.split(",")]
    total = sum(counts)
    low = sum(counts[:2]) if len(counts) > 1 else LOW_SHARE * total
    size = ENCODINGS[encoding]
    return Model(
        f"{text} n-grams, {encoding}",
        round(total),
        round((total - low) * HIGH_BYTES * size),
        round(low * LOW_BYTES * size),
    )


def _count(text: str) -> float:
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    try:
        value = float(text.strip().rstrip("kMG")) * units.get(text.strip()[-1:], 1.0)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e13:
        raise ConfigError(
            f"--ngrams has {text!r}; expected numbers above 0 and below 10^13, such as 250k or 1.5M"
        )
    return value


def traffic_of(slotted: Slotted, audio_s: float) -> Callable[[int], Traffic]:
    """Makes a function that returns a trace's cost on N shards, with slots balanced by queries."""
    load = slotted.load()

    def at(shards: int) -> Traffic:
        routed = slotted.to(balanced_slot_table(load, shards), shards)
        messages = np.bincount(routed.server, minlength=shards)
        total = int(messages.sum())
        return Traffic(
            total / audio_s,
            float(messages.max()) / total if total else 1.0 / shards,
            float(routed.queries.sum()) / total if total else None,
        )

    return at


def heaviest_share(slotted: Slotted) -> float:
    """The largest share of the queries in one slot, which no number of shards splits."""
    load = slotted.load()
    total = int(load.sum())
    return float(load.max()) / total if total else 0.0


def fitting(
    wishes: Wishes,
    model: Model,
    costs: Costs,
    traffic: Callable[[int], Traffic],
    requests_per_audio_s: float,
) -> Cluster:
    """Finds the cluster with fewest servers, then fewest shards, that suffices even with one gone.

    Raises  ConfigError  no number of servers fits: the smallest shard and the processes exceed a
                         server's memory, or the traffic is too high
    """
    least = model.server_bytes(MOST_SHARDS, wishes.processes)
    if least > wishes.memory_bytes:
        raise ConfigError(
            f"a server needs at least {size_text(round(least))}: {PROCESS_MIB} MiB per process, "
            f"and the largest shard of a split into {MOST_SHARDS}; --memory is only "
            f"{size_text(round(wishes.memory_bytes))}. Raise it, or lower --processes"
        )
    best: Cluster | None = None
    for shards in _sizes():
        if best is not None and shards * wishes.replicas > best.servers:
            break
        if model.server_bytes(shards, wishes.processes) > wishes.memory_bytes:
            continue
        one = traffic(shards)
        for replicas in range(wishes.replicas, MOST_REPLICAS + 1):
            found = _cluster(wishes, model, costs, one, shards, replicas, requests_per_audio_s)
            if found.cpu_share <= wishes.cpu_share and (found.degraded_share or 0.0) <= 1:
                if best is None or found.servers < best.servers:
                    best = found
                break
    if best is None:
        raise ConfigError(
            f"no cluster of up to {MOST_SHARDS} shards with {MOST_REPLICAS} replicas can serve "
            f"{wishes.streams:g} streams; use more --processes, or several clusters"
        )
    return best


def _sizes() -> Sequence[int]:
    return [*range(1, 33), 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, MOST_SHARDS]


def _cluster(
    wishes: Wishes,
    model: Model,
    costs: Costs,
    one: Traffic,
    shards: int,
    replicas: int,
    requests_per_audio_s: float,
) -> Cluster:
    messages = wishes.streams * one.messages_per_audio_s
    busiest = messages * one.busiest_share * costs.server_us_per_message / 1e6
    requests = wishes.streams * requests_per_audio_s
    return Cluster(
        shards,
        replicas,
        shards * replicas,
        model.server_bytes(shards, wishes.processes),
        messages,
        one.messages_per_audio_s,
        busiest / replicas / wishes.processes,
        None if replicas == 1 else busiest / (replicas - 1) / wishes.processes,
        messages * costs.server_us_per_message / 1e6,
        requests * costs.client_ms_per_request / 1e3,
    )


def rows_of(cluster: Cluster, wishes: Wishes, model: Model) -> list[tuple[str, str]]:
    shards = counted(cluster.shards, "shard")
    degraded, core = cluster.degraded_share, "core" if wishes.processes == 1 else "cores"
    return [
        ("servers", f"{cluster.servers}: {shards} x {counted(cluster.replicas, 'replica')}"),
        ("memory of a server", size_text(round(cluster.server_bytes))),
        (
            "model",
            f"{model.name}: {size_text(model.shards)} in shards, {size_text(model.low_orders)} of "
            "low orders on each client's host",
        ),
        ("messages per second", f"{cluster.messages_per_s:,.0f}"),
        ("messages per minute", f"{60 * cluster.messages_per_s:,.0f}"),
        ("messages per second of audio", f"{cluster.messages_per_audio_s:.3g}"),
        ("busiest server", f"{100 * cluster.cpu_share:.0f} % of {wishes.processes} {core}"),
        (
            "while a replica of it is gone",
            "nobody answers for its shard" if degraded is None else f"{100 * degraded:.0f} %",
        ),
        ("CPU of all servers", f"{cluster.server_cores:.3g} cores"),
        ("CPU of clients", f"{cluster.client_cores:.3g} cores"),
    ]


def assumptions(
    costs: Costs, traffic: Traffic, heaviest: float | None, estimated: bool, counted: bool
) -> list[str]:
    """The assumptions of the plan, one sentence each.

    Args  heaviest   share of the heaviest slot, if the trace was routed
          estimated  whether bytes are computed from numbers of n-grams
          counted    whether messages were counted request by request
    """
    found = [
        f"A message costs a server {costs.server_us_per_message:.0f} us of CPU and a request costs "
        f"a client {costs.client_ms_per_request:.2g} ms, as measured with {costs.trace} on "
        f"{costs.measured}; other machines differ."
    ]
    per, then = traffic.queries_per_message, costs.queries_per_message
    if per is not None and then is not None:
        found.append(
            f"The cost is for {then:.3g} queries per message; this plan has {per:.3g}. More "
            "queries cost more, about a microsecond each."
        )
    if counted:
        found.append(
            "Messages are those of each request alone; requests of one client at the same time "
            "share messages, so there may be fewer."
        )
    else:
        found.append(
            f"Messages per second of audio are those that {costs.trace} had when costs were "
            "measured, whatever the number of shards, and shards get equal parts."
        )
    if heaviest is not None:
        found.append(
            f"The heaviest slot has {100 * heaviest:.2g} % of the queries and stays on one shard: "
            f"beyond {1 / heaviest:.0f} shards, only replicas help."
            if heaviest
            else "No request of the trace needs a server."
        )
    if estimated:
        found.append(
            f"Sizes are those of a model of 4 M n-grams: {LOW_BYTES} bytes per word and 2-gram, "
            f"{HIGH_BYTES} per longer one (exact; compact takes {ENCODINGS['compact']:.2g} of it). "
            f"If only a total was given, {100 * LOW_SHARE:.0f} % are words and 2-grams; small and "
            "pruned models have more, and smaller shards."
        )
    found.append(
        f"A server's memory is the whole file of its shard, and {PROCESS_MIB} MiB per process. "
        "Streams ask like the trace, all the time, evenly; leave room for peaks."
    )
    return found


def plan_of(
    cluster: Cluster, wishes: Wishes, model: Model, costs: Costs, texts: list[str]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "cluster": asdict(cluster),
        "wishes": asdict(wishes),
        "model": asdict(model),
        "costs": asdict(costs),
        "assumptions": texts,
    }
