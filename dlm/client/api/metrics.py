"""The counters of a client as Prometheus metrics; families are built when they are collected.

The library registers nothing itself; the application chooses the registry::

    prometheus_client.REGISTRY.register(client.metrics)

Labels are shard numbers and closed sets of results and stages; never words, ids or addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.deliver.counts import FAILED, OK, ClientMetrics, Stats
from dlm.client.health.cascade import CascadeMonitor
from dlm.client.health.membership import Liveness
from dlm.client.health.modes import Mode

# Every family that a client shows, and its labels. DO NOT CHANGE: dashboards and alerts name them.
FAMILIES: dict[str, tuple[str, ...]] = {
    "dlm_client_queries_total": ("answered_by",),
    "dlm_client_calls_total": ("result",),
    "dlm_client_messages_total": ("result",),
    "dlm_client_hedges_total": ("result",),
    "dlm_client_message_queries": ("le",),
    "dlm_client_coalesced_calls": ("le",),
    "dlm_client_stage_seconds": ("stage", "le"),
    "dlm_client_in_flight": ("shard",),
    "dlm_client_queue_depth": ("shard",),
    "dlm_client_servers": ("health",),
    "dlm_client_mode": ("mode",),
    "dlm_client_mode_switches_total": ("mode", "reason"),
    "dlm_client_probes_total": ("result",),
    "dlm_client_local_fallback": (),
    "dlm_client_cache_bytes": (),
    "dlm_client_info": ("version",),
}


class Counted(Protocol):
    """What a collector reads of a client."""

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

    def __init__(self, core: Counted, fallback: Counted | None = None) -> None:
        self._core = core
        self._fallback = fallback

    def describe(self) -> Iterable[Metric]:
        """The families of `collect`, so that a second client is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The current families; asks no server."""
        core = self._core
        counts, stats = core.counts, core.stats
        yield _queries(stats, 0 if self._fallback is None else self._fallback.stats.queries)
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
            ("coalesced_calls", "Calls that share a message.", counts.gathered_calls),
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
        yield _gauge(
            "queue_depth", "Parts of calls waiting to be sent, by shard.", "shard", waiting
        )
        if watch := core.watch():  # without heartbeats, nothing is known of servers
            yield from _cascade(watch)
        yield GaugeMetricFamily(
            "dlm_client_local_fallback",
            "1 if there is a local fallback to switch to, else 0.",
            value=int(self._fallback is not None),
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
    probes = {OK: watch.probes[True], FAILED: watch.probes[False]}
    yield _counter("probes", "Probes by result; ok: every shard answered.", "result", probes)


def _gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    model_info = GaugeMetricFamily(f"dlm_client_{name}", documentation, labels=(label,))
    for value, number in values.items():
        model_info.add_metric((value,), number)
    return model_info


def _counter(name: str, documentation: str, label: str, counts: Mapping[str, int]) -> Metric:
    model_info = CounterMetricFamily(f"dlm_client_{name}", documentation, labels=(label,))
    for value, count in dict(counts).items():
        model_info.add_metric((value,), count)
    return model_info


def _queries(stats: Stats, fallback: int) -> Metric:
    """All but the fallbacks add up to the queries to the full model, once none is in progress,
    unless some were sent again or refused unsent; `bigram_fallback` ones were mostly sent before.
    """
    return _counter(
        "queries",
        "Queries by source of the answer; shard: distinct queries sent; "
        "bigram_fallback: the low orders only, because no shard answered in time; "
        "local_fallback: the client's local model.",
        "answered_by",
        {
            "local": stats.local_hits,
            "shard": stats.sent_queries,
            "duplicate": stats.duplicates,
            "bigram_fallback": stats.bigram_fallback,
            "local_fallback": fallback,
        },
    )
