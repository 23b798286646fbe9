"""The counters of a client as Prometheus metrics; families are built when they are collected.

The library registers nothing itself; the application chooses the registry::

    prometheus_client.REGISTRY.register(client.metrics)

Labels are shard numbers and closed sets of results and stages; never words, ids or addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.deliver.counts import FAILED, OK, ClientMetrics, Stats
from dlm.client.health.cascade import CascadeMonitor
from dlm.client.health.membership import Liveness
from dlm.client.health.modes import Mode
from dlm.families import Family, family

# Every family that a client shows. DO NOT CHANGE names or labels: dashboards and alerts use them.
FAMILIES: dict[str, Family] = {
    "dlm_client_queries_total": Family(
        "Queries by source of the answer. local: the client's 1- and 2-grams; shard: distinct "
        "queries sent; duplicate: repeats; bigram_fallback: the low orders only, because no shard "
        "answered in time; local_fallback: the client's local model.",
        ("answered_by",),
    ),
    "dlm_client_calls_total": Family(
        "Calls by result: ok, failed, cancelled, or an error: shard_down, deadline_exceeded, "
        "overloaded, stale_shard_set, protocol_error, authentication_error.",
        ("result",),
    ),
    "dlm_client_messages_total": Family("Messages by result, as for calls.", ("result",)),
    "dlm_client_hedges_total": Family(
        "Late messages sent to a second server too; won: the second server answered first.",
        ("result",),
    ),
    "dlm_client_message_queries": Family("Distinct queries per message.", ("le",)),
    "dlm_client_coalesced_calls": Family("Calls that share a message.", ("le",)),
    "dlm_client_stage_seconds": Family(
        "Seconds in each stage: plan per call; queue, encode, wire, decode per message.",
        ("stage", "le"),
    ),
    "dlm_client_in_flight": Family("Messages in flight, by shard.", ("shard",)),
    "dlm_client_queue_depth": Family("Parts of calls waiting to be sent, by shard.", ("shard",)),
    "dlm_client_servers": Family(
        "Servers of the model by health, as heartbeats report it.", ("health",)
    ),
    "dlm_client_mode": Family("1 for the model that new utterances use.", ("mode",)),
    "dlm_client_mode_switches_total": Family("Switches to each mode.", ("mode", "reason")),
    "dlm_client_probes_total": Family("Probes by result; ok: every shard answered.", ("result",)),
    "dlm_client_local_fallback": Family("1 if there is a local fallback to switch to, else 0."),
    "dlm_client_cache_bytes": Family("Bytes of the vocabulary and low orders of the model in use."),
    "dlm_client_info": Family("Always 1.", ("version",)),
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
        yield _labelled("calls_total", counts.calls)
        yield _labelled("messages_total", counts.messages)
        hedges = {"won": stats.hedges_won, "lost": stats.hedges - stats.hedges_won}
        yield _labelled("hedges_total", hedges)
        for name, sizes in (
            ("message_queries", counts.message_queries),
            ("coalesced_calls", counts.gathered_calls),
        ):
            histogram = _family(name)
            histogram.add_metric((), sizes.cumulative(), sizes.total)
            yield histogram
        stages = _family("stage_seconds")
        for stage, seconds in counts.stages.items():
            stages.add_metric((stage,), seconds.cumulative(), seconds.total)
        yield stages
        load = sorted(core.load().items())
        yield _labelled("in_flight", {str(shard): sent for shard, (sent, _) in load})
        yield _labelled("queue_depth", {str(shard): queued for shard, (_, queued) in load})
        if watch := core.watch():  # without heartbeats, nothing is known of servers
            yield from _cascade(watch)
        for name, value in (
            ("local_fallback", int(self._fallback is not None)),
            ("cache_bytes", core.cache_bytes()),
        ):
            gauge = _family(name)
            gauge.add_metric((), value)
            yield gauge
        yield _labelled("info", {__version__: 1})


def _family(name: str) -> Any:
    return family(FAMILIES, f"dlm_client_{name}")


def _labelled(name: str, values: Mapping[str, float]) -> Metric:
    out = _family(name)
    for value, number in dict(values).items():
        out.add_metric((value,), number)
    return cast("Metric", out)


def _cascade(watch: CascadeMonitor) -> Iterator[Metric]:
    status = watch.status()
    servers = Counter(one.health for one in status.servers)
    yield _labelled("servers", {health: servers[health] for health in Liveness})
    yield _labelled("mode", {mode: int(status.mode is mode) for mode in Mode})
    switches = _family("mode_switches_total")
    for (to, reason), times in sorted(status.switches.items()):
        switches.add_metric((to, reason), times)
    yield switches
    probes = {OK: watch.probes[True], FAILED: watch.probes[False]}
    yield _labelled("probes_total", probes)


def _queries(stats: Stats, fallback: int) -> Metric:
    """All but the fallbacks add up to the queries to the full model, once none is in progress,
    unless some were sent again or refused unsent; `bigram_fallback` ones were mostly sent before.
    """
    return _labelled(
        "queries_total",
        {
            "local": stats.local_hits,
            "shard": stats.sent_queries,
            "duplicate": stats.duplicates,
            "bigram_fallback": stats.bigram_fallback,
            "local_fallback": fallback,
        },
    )
