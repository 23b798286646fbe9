"""The counts of `metrics.py` as Prometheus metrics, built on request.

No query text, word or id is ever a label: labels are ids of models and shard sets (their first
12 hex digits), numbers of shards and workers, and the closed sets of reasons, stages and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.index.layout import Manifest
from dlm.server.health import ServingState
from dlm.server.metrics import LABELS, ServerMetrics
from dlm.server.process import Process
from dlm.wire.status import Reason

ID_DIGITS = 12
STAGES = ("queue", "decode", "search", "encode", "write")


@dataclass(frozen=True)
class Served:
    """A shard that this process serves, and its counts.

    state   called at every scrape
    shards  number of shards in the whole shard set, on all servers
    """

    model: str
    shard_set: str
    shard: int
    order: int
    metrics: ServerMetrics
    state: Callable[[], ServingState]
    shards: int

    def labels(self, worker: int) -> tuple[str, str, str, str]:
        return (
            self.model[:ID_DIGITS],
            self.shard_set[:ID_DIGITS],
            str(self.shard),
            str(worker),
        )


def process_labels(manifest: Manifest, shard: int) -> dict[str, str]:
    """Labels of metrics of a whole process, except the worker; `manifest` of its default model."""
    values = (manifest.model[:ID_DIGITS], manifest.shard_set[:ID_DIGITS], str(shard))
    return dict(zip(LABELS, values, strict=False))


class ServerCollector(Collector):
    """The metric families of one process.

    Args  served  what it serves, called at every scrape, the default first: metrics of the whole
                  process (memory, version) have its labels
    """

    def __init__(
        self,
        served: Callable[[], Sequence[Served]],
        process: Process | None = None,
    ) -> None:
        self._served = served
        self._process = process or Process()

    def describe(self) -> Iterable[Metric]:
        return self._families([])

    def collect(self) -> Iterable[Metric]:
        return self._families(self._served())

    def _families(self, served: Sequence[Served]) -> Iterator[Metric]:
        labelled = [(s.labels(self._process.worker), s) for s in served]
        yield from _requests(labelled)
        yield from _histograms(labelled)
        for name, documentation in (
            ("in_flight", "Score requests in progress."),
            ("streams", "Open Exchange streams."),
            ("downloads", "Open Download streams."),
        ):
            gauge = GaugeMetricFamily(f"dlm_server_{name}", documentation, labels=LABELS)
            for labels, s in labelled:
                gauge.add_metric(labels, getattr(s.metrics, name))
            yield gauge
        state = GaugeMetricFamily(
            "dlm_server_state", "1 for the state the server is in.", labels=(*LABELS, "state")
        )
        for labels, s in labelled:
            now = s.state()
            for known in ServingState:
                state.add_metric((*labels, known.name.lower()), known is now)
        yield state
        shards = GaugeMetricFamily(
            "dlm_server_shards", "Shards in the shard set, on all servers.", labels=LABELS
        )
        for labels, s in labelled:
            shards.add_metric(labels, s.shards)
        yield shards
        memory = GaugeMetricFamily(
            "dlm_server_memory_bytes",
            "Private memory of the process, without pages shared with other processes.",
            labels=LABELS,
        )
        restarts = CounterMetricFamily(
            "dlm_server_worker_restarts", "Times this worker was restarted.", labels=LABELS
        )
        open_files = GaugeMetricFamily(
            "dlm_server_open_files", "Open files and connections of the process.", labels=LABELS
        )
        max_files = GaugeMetricFamily(
            "dlm_server_max_files", "Limit of open files of the process.", labels=LABELS
        )
        trouble = GaugeMetricFamily(
            "dlm_server_not_ready",
            "1 for each cause that makes the server not ready although it answers.",
            labels=(*LABELS, "cause"),
        )
        rejected = GaugeMetricFamily(
            "dlm_server_sets_rejected",
            "1 while the list of shard sets differs from what is served, since it was rejected.",
            labels=LABELS,
        )
        info = GaugeMetricFamily("dlm_server_info", "Always 1.", labels=(*LABELS, "version"))
        for labels, _ in labelled[:1]:
            memory.add_metric(labels, self._process.memory.bytes())
            restarts.add_metric(labels, self._process.restarts)
            info.add_metric((*labels, __version__), 1)
            rejected.add_metric(labels, bool(self._process.rejected.read()))
            open_files.add_metric(labels, self._process.open_files.count())
            max_files.add_metric(labels, self._process.open_files.limit)
            for cause, text in self._process.trouble().items():
                trouble.add_metric((*labels, cause.value), bool(text))
        yield memory
        yield restarts
        yield open_files
        yield max_files
        yield trouble
        yield rejected
        yield info


Labelled = list[tuple[tuple[str, str, str, str], Served]]


def _requests(labelled: Labelled) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "dlm_server_requests",
        "Score requests by result (ok, the reason of a refusal, or abandoned), and calls of any "
        "kind refused before they were read.",
        labels=(*LABELS, "result"),
    )
    queries = CounterMetricFamily("dlm_server_queries", "Queries answered.", labels=LABELS)
    blocks = CounterMetricFamily(
        "dlm_server_context_blocks", "Contexts whose stored words were sent.", labels=LABELS
    )
    orders = CounterMetricFamily(
        "dlm_server_matched_order",
        "Queries answered, by the order of the longest n-gram found.",
        labels=(*LABELS, "order"),
    )
    for labels, s in labelled:
        counts = s.metrics
        requests.add_metric((*labels, "ok"), counts.messages)
        requests.add_metric((*labels, "abandoned"), counts.abandoned)
        # All reasons from the start: a rate over a series that began with its first refusal would
        # miss that one.
        for reason in Reason:
            requests.add_metric((*labels, reason.value), counts.refused_for(reason))
        queries.add_metric(labels, counts.queries)
        blocks.add_metric(labels, counts.blocks)
        for order in range(1, s.order + 1):
            orders.add_metric((*labels, str(order)), int(counts.matched_orders[order]))
    yield requests
    yield queries
    yield blocks
    yield orders


def _histograms(labelled: Labelled) -> Iterator[Metric]:
    batch = HistogramMetricFamily(
        "dlm_server_batch_queries", "Queries per Score request.", labels=LABELS
    )
    stages = HistogramMetricFamily(
        "dlm_server_stage_seconds", "Seconds per stage of a request.", labels=(*LABELS, "stage")
    )
    for labels, s in labelled:
        sizes = s.metrics.batch_queries
        batch.add_metric(labels, sizes.cumulative(), sizes.total)
        for stage in STAGES:
            seconds = getattr(s.metrics, f"{stage}_s")
            stages.add_metric((*labels, stage), seconds.cumulative(), seconds.total)
    yield batch
    yield stages
