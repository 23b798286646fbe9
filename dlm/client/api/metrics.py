"""The counters of a client, also as Prometheus metrics.

Counting is cheap: two microseconds per message. Metric families are built when they are collected.
The library registers nothing itself; the application chooses the registry::

    prometheus_client.REGISTRY.register(client.metrics)

Labels are shard numbers and closed sets of results and stages; never words, ids or addresses.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.health.cascade import CascadeMonitor
from dlm.client.health.membership import Liveness
from dlm.client.health.modes import Mode
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
)
from dlm.histogram import SECONDS, SIZES, Histogram

STAGES = ("plan", "queue", "encode", "wire", "decode")
OK, CANCELLED, FAILED = "ok", "cancelled", "failed"
# Every family that a client shows, and its labels. DO NOT CHANGE: dashboards and alerts name them.
FAMILIES: dict[str, tuple[str, ...]] = {
    "dlm_client_queries_total": ("source",),
    "dlm_client_calls_total": ("result",),
    "dlm_client_messages_total": ("result",),
    "dlm_client_hedges_total": ("result",),
    "dlm_client_message_queries": ("le",),
    "dlm_client_gathered_calls": ("le",),
    "dlm_client_stage_seconds": ("stage", "le"),
    "dlm_client_in_flight": ("shard",),
    "dlm_client_waiting": ("shard",),
    "dlm_client_servers": ("health",),
    "dlm_client_mode": ("mode",),
    "dlm_client_mode_switches_total": ("mode", "reason"),
    "dlm_client_canaries_total": ("result",),
    "dlm_client_small_model": (),
    "dlm_client_cache_bytes": (),
    "dlm_client_info": ("version",),
}

# The first that an error is an instance of; every other error is FAILED.
_RESULTS: tuple[tuple[type[DlmError], str], ...] = (
    (ShardDown, "shard_down"),
    (DeadlineExceeded, "deadline_exceeded"),
    (Overloaded, "overloaded"),
    (StaleShardSet, "stale_shard_set"),
    (ProtocolError, "protocol_error"),
    (AuthenticationError, "authentication_error"),
)


def result_of(error: BaseException | None) -> str:
    """How a call or message ended, as a label from a closed set."""
    if error is None:
        return OK
    return next((name for kind, name in _RESULTS if isinstance(error, kind)), FAILED)


@dataclass
class Stats:
    """What a client has counted since it was made (or since the fork).

    queries        queries asked by callers; a context block counts as one
    zero_message   of these, answered from the low orders, without any message
    duplicates     of these, repeated within a call or a message, and sent once
    sent_queries   distinct queries sent to servers
    messages       messages sent
    failed         messages that failed
    retries        failed messages that were sent again to another replica
    hedges         late messages that were sent to a second replica too
    hedges_won     of these, those that the second replica answered first
    bytes_sent, bytes_received  bytes of these messages, without gRPC's own framing
    partial        distinct queries that the partial model answered
    refreshes      times the table was stale and was fetched again
    """

    queries: int = 0
    zero_message: int = 0
    duplicates: int = 0
    sent_queries: int = 0
    messages: int = 0
    failed: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    partial: int = 0
    refreshes: int = 0


class ClientMetrics:
    """Counters of one process; one thread each counts those of `stats` that are not here.

    Any thread may count: a lock, taken once per call and once per message, keeps counts consistent.
    It is reentrant, since a signal handler may run while its own thread counts. A forked child
    starts with its own counters.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.stats = Stats()
        self.calls = Counter({OK: 0})
        self.messages = Counter({OK: 0})
        self.message_queries = Histogram(SIZES)
        self.gathered_calls = Histogram(SIZES)
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}

    def now(self) -> Stats:
        """The current `stats`."""
        with self._lock:
            return replace(self.stats)

    def planned(self, queries: int, zero_message: int = 0, duplicates: int = 0) -> None:
        """Counts the queries to this client; see `Stats`."""
        with self._lock:
            self.stats.queries += queries
            self.stats.zero_message += zero_message
            self.stats.duplicates += duplicates

    def gathered(self, duplicates: int) -> None:
        """Counts repeats among the calls of a message."""
        with self._lock:
            self.stats.duplicates += duplicates

    def fell_back(self, queries: int) -> None:
        """Counts queries that the partial model answered."""
        with self._lock:
            self.stats.partial += queries

    def call(self, result: str, plan_s: float) -> None:
        """Counts a call that ended.

        Args
            result  `result_of` its error, or CANCELLED if its caller gave up
            plan_s  seconds from the caller to the queues: checks, grouping, low orders, routing
        """
        with self._lock:
            self.calls[result] += 1
            self.stages["plan"].add(plan_s)

    def message(
        self,
        result: str,
        queries: int,
        calls: int,
        queue_s: float,
        encode_s: float,
        wire_s: float,
        decode_s: float,
    ) -> None:
        """Counts a message that ended, with or without success.

        Args
            queries   distinct queries in it
            calls     calls that it carried parts of
            queue_s   the longest wait of one of its parts in the lane, in seconds
            encode_s  arrays to bytes
            wire_s    from sending the bytes to receiving the reply: network, server and gRPC
            decode_s  bytes to arrays, and to the callers; 0 without a reply
        """
        with self._lock:
            self.messages[result] += 1
            self.message_queries.add(queries)
            self.gathered_calls.add(calls)
            stages = self.stages
            stages["queue"].add(queue_s)
            stages["encode"].add(encode_s)
            stages["wire"].add(wire_s)
            stages["decode"].add(decode_s)


class Counted(Protocol):
    """The parts of a client that a collector reads."""

    @property
    def counts(self) -> ClientMetrics:
        """The counters behind this process's metrics."""

    @property
    def stats(self) -> Stats:
        """The current counters of this process."""

    def load(self) -> dict[int, tuple[int, int]]:
        """For each shard asked so far: messages in flight, and parts that wait."""

    def cache_bytes(self) -> int:
        """Bytes of the model's vocabulary and low orders in use."""

    def watch(self) -> CascadeMonitor | None:
        """The monitor of the servers; None if there is none."""


class ClientCollector(Collector):
    """The metric families of one client.

    A registry accepts one client, since the families of two have the same names. Give each client
    its own registry, or let threads share a client.
    """

    def __init__(self, core: Counted, small: Counted | None = None) -> None:
        self._core = core
        self._small = small

    def describe(self) -> Iterable[Metric]:
        """The same families as `collect`, so that a second client is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The current families; asks no server."""
        core = self._core
        counts, stats = core.counts, core.stats
        yield _queries(stats, 0 if self._small is None else self._small.stats.queries)
        yield _counter("calls", "Calls by result.", "result", counts.calls)
        yield _counter("messages", "Messages by result.", "result", counts.messages)
        yield _counter(
            "hedges",
            "Late messages sent to a second server too; won: the second server answered first.",
            "result",
            {"won": stats.hedges_won, "lost": stats.hedges - stats.hedges_won},
        )
        for name, documentation, sizes in (
            ("message_queries", "Distinct queries per message.", counts.message_queries),
            ("gathered_calls", "Calls that share a message.", counts.gathered_calls),
        ):
            yield HistogramMetricFamily(
                f"dlm_client_{name}",
                documentation,
                buckets=sizes.cumulative(),
                sum_value=sizes.total,
            )
        stages = HistogramMetricFamily(
            "dlm_client_stage_seconds",
            "Seconds in each stage: plan is measured per call, the others per message.",
            labels=("stage",),
        )
        for stage, seconds in counts.stages.items():
            stages.add_metric((stage,), seconds.cumulative(), seconds.total)
        yield stages
        load = sorted(core.load().items())
        in_flight = {str(shard): sent for shard, (sent, _) in load}
        waiting = {str(shard): queued for shard, (_, queued) in load}
        yield _gauge("in_flight", "Messages in flight, by shard.", "shard", in_flight)
        yield _gauge("waiting", "Parts of calls waiting to be sent, by shard.", "shard", waiting)
        if watch := core.watch():  # without heartbeats, nothing is known of servers
            yield from _cascade(watch)
        yield GaugeMetricFamily(
            "dlm_client_small_model",
            "1 if there is a small model to switch to, else 0.",
            value=int(self._small is not None),
        )
        yield GaugeMetricFamily(
            "dlm_client_cache_bytes",
            "Bytes of the vocabulary and low orders of the model in use.",
            value=core.cache_bytes(),
        )
        yield _gauge("info", "Always 1.", "version", {__version__: 1})


def _cascade(watch: CascadeMonitor) -> Iterator[Metric]:
    status = watch.status()
    servers = Counter(one.health for one in status.servers)
    yield _gauge(
        "servers",
        "Servers of the model by health, as heartbeats report it.",
        "health",
        {health: servers[health] for health in Liveness},
    )
    yield _gauge(
        "mode",
        "1 for the model that new utterances use.",
        "mode",
        {mode: int(status.mode is mode) for mode in Mode},
    )
    switches = CounterMetricFamily(
        "dlm_client_mode_switches", "Switches to each mode.", labels=("mode", "reason")
    )
    for (to, reason), times in sorted(status.switches.items()):
        switches.add_metric((to, reason), times)
    yield switches
    canaries = {OK: watch.canaries[True], FAILED: watch.canaries[False]}
    yield _counter("canaries", "Canaries by result; ok: every shard answered.", "result", canaries)


def _gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"dlm_client_{name}", documentation, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _counter(name: str, documentation: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"dlm_client_{name}", documentation, labels=(label,))
    for value, count in dict(counts).items():
        family.add_metric((value,), count)
    return family


def _queries(stats: Stats, small: int) -> Metric:
    """All but `partial` and `small` add up to the queries to the full model, once none is in
    progress, and unless some were sent again or refused unsent; `partial` ones were mostly sent
    before."""
    return _counter(
        "queries",
        "Queries by source of the answer; shard: distinct queries sent; "
        "partial: the low orders only, because no shard answered in time; "
        "small: the local small model.",
        "source",
        {
            "low_orders": stats.zero_message,
            "shard": stats.sent_queries,
            "duplicate": stats.duplicates,
            "partial": stats.partial,
            "small": small,
        },
    )
