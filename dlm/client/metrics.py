"""What a client counts, and the same in the form of Prometheus.

`ClientMetrics` holds plain numbers that cost two microseconds a message; `ClientCollector` gives
them Prometheus's form when it is asked. A library registers nothing by itself, so an application
says where they belong::

    prometheus_client.REGISTRY.register(client.metrics)

Labels are numbers of shards and closed sets of results and stages; never words, ids or addresses.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.membership import Liveness
from dlm.client.modes import Mode
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

if TYPE_CHECKING:
    from dlm.client.cascade import CascadeMonitor
    from dlm.client.core import Core
    from dlm.client.runtime import Stats

# Every family that a client shows, and its labels. DO NOT CHANGE: dashboards and alerts name them.
FAMILIES: dict[str, tuple[str, ...]] = {
    "dlm_client_queries_total": ("source",),
    "dlm_client_calls_total": ("result",),
    "dlm_client_messages_total": ("result",),
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
STAGES = ("plan", "queue", "encode", "wire", "decode")
OK, CANCELLED, FAILED = "ok", "cancelled", "failed"
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


class ClientMetrics:
    """Counts of one process.

    Any thread may count: a lock, taken once a call and once a message, holds what belongs together.
    It is reentrant, since a signal handler may ask while its own thread counts. A forked child
    begins with counts of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.calls = Counter({OK: 0})
        self.messages = Counter({OK: 0})
        self.message_queries = Histogram(SIZES)
        self.gathered_calls = Histogram(SIZES)
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}

    def call(self, result: str, plan_s: float) -> None:
        """Counts a call that ended.

        Args
            result  `result_of` its error, or CANCELLED where its caller gave up
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
        """Counts a message that ended, well or badly.

        Args
            queries   distinct queries in it
            calls     calls that it carried parts of
            queue_s   seconds that the part that waited longest waited for the window
            encode_s  arrays to bytes
            wire_s    from the bytes' leaving to the reply's coming: network, server and gRPC
            decode_s  bytes to arrays, and to the callers; 0 where there was no reply
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


class ClientCollector(Collector):
    """The families of one client.

    A registry takes one client: the families of two have the same names. Give each its own
    registry, or let threads share a client.
    """

    def __init__(self, core: Core, small: Core | None = None) -> None:
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
