"""What `metrics` counts in the form of Prometheus, made when somebody asks.

A library registers nothing by itself, so an application says where the families belong::

    prometheus_client.REGISTRY.register(client.metrics)

Labels are numbers of shards and closed sets of results and stages; never words, ids or addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.api.metrics import FAILED, OK, Stats
from dlm.client.api.scorer import Scorer
from dlm.client.health.cascade import CascadeMonitor
from dlm.client.health.membership import Liveness
from dlm.client.health.modes import Mode

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


class ClientCollector(Collector):
    """The families of one client.

    A registry takes one client: the families of two have the same names. Give each its own
    registry, or let threads share a client.
    """

    def __init__(self, core: Scorer, small: Scorer | None = None) -> None:
        self._core = core
        self._small = small

    def describe(self) -> Iterable[Metric]:
        """The same families without what changes, so that a second client is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The families as they stand now; asks no server."""
        core = self._core
        counts = core.counts
        yield _queries(core.stats, 0 if self._small is None else self._small.stats.queries)
        yield _counter("calls", "Calls by how they ended.", "result", counts.calls)
        yield _counter("messages", "Messages by how they ended.", "result", counts.messages)
        stats = core.stats
        hedges = {"won": stats.hedges_won, "lost": stats.hedges - stats.hedges_won}
        yield _counter(
            "hedges",
            "Messages that were late and asked of a second server too; won: it answered first.",
            "result",
            hedges,
        )
        for name, documentation, sizes in (
            ("message_queries", "Distinct queries of a message.", counts.message_queries),
            ("gathered_calls", "Calls that a message carries parts of.", counts.gathered_calls),
        ):
            yield HistogramMetricFamily(
                f"dlm_client_{name}",
                documentation,
                buckets=sizes.cumulative(),
                sum_value=sizes.total,
            )
        stages = HistogramMetricFamily(
            "dlm_client_stage_seconds",
            "Seconds a call spent being planned, a message in each other stage.",
            labels=("stage",),
        )
        for stage, seconds in counts.stages.items():
            stages.add_metric((stage,), seconds.cumulative(), seconds.total)
        yield stages
        load = core.load()
        for place, (name, documentation) in enumerate(
            (
                ("in_flight", "Messages on their way, by shard."),
                ("waiting", "Parts of calls that wait for a message, by shard."),
            )
        ):
            gauge = GaugeMetricFamily(f"dlm_client_{name}", documentation, labels=("shard",))
            for shard, numbers in sorted(load.items()):
                gauge.add_metric((str(shard),), numbers[place])
            yield gauge
        yield from _cascade(core.watch())
        small = GaugeMetricFamily(
            "dlm_client_small_model", "1 with a small model to go over to, 0 without."
        )
        small.add_metric((), int(self._small is not None))
        yield small
        cache = GaugeMetricFamily(
            "dlm_client_cache_bytes", "Vocabulary and low orders of the model in use."
        )
        cache.add_metric((), core.cache_bytes())
        yield cache
        info = GaugeMetricFamily("dlm_client_info", "Always 1.", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info


def _cascade(watch: CascadeMonitor | None) -> Iterator[Metric]:
    """Nothing where the client sends no heartbeats."""
    if watch is None:
        return
    status = watch.status()
    servers = GaugeMetricFamily(
        "dlm_client_servers",
        "Servers of the model by what heartbeats say of them.",
        labels=("health",),
    )
    for health in Liveness:
        servers.add_metric((health,), sum(one.health is health for one in status.servers))
    yield servers
    mode = GaugeMetricFamily(
        "dlm_client_mode", "1 for the model that new utterances go to.", labels=("mode",)
    )
    for one in Mode:
        mode.add_metric((one,), int(status.mode is one))
    yield mode
    switches = CounterMetricFamily(
        "dlm_client_mode_switches", "Times that a mode was entered.", labels=("mode", "reason")
    )
    for (to, reason), times in sorted(status.switches.items()):
        switches.add_metric((to, reason), times)
    yield switches
    canaries = CounterMetricFamily(
        "dlm_client_canaries", "Canaries by whether every shard answered.", labels=("result",)
    )
    for answered, result in ((True, OK), (False, FAILED)):
        canaries.add_metric((result,), watch.canaries[answered])
    yield canaries


def _counter(name: str, documentation: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"dlm_client_{name}", documentation, labels=(label,))
    for value, count in dict(counts).items():
        family.add_metric((value,), count)
    return family


def _queries(stats: Stats, small: int) -> Metric:
    """All but `partial` and `small` sum to the queries asked of the full model, once nothing is
    under way and nothing was sent again or refused before it was sent; those that became `partial`
    were mostly sent before."""
    return _counter(
        "queries",
        "Queries by where the answer came from; shard: distinct ones that were sent; "
        "partial: from the low orders alone, since no shard answered in time; "
        "small: from the local small model.",
        "source",
        {
            "low_orders": stats.zero_message,
            "shard": stats.sent_queries,
            "duplicate": stats.duplicates,
            "partial": stats.partial,
            "small": small,
        },
    )
