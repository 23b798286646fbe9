"""The counts of `metrics.py` as Prometheus metrics, built on request.

No query text, word or id is ever a label: labels are ids of models and shard sets (their first
12 hex digits), numbers of shards and workers, and the closed sets of reasons, stages and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.families import family
from dlm.index.layout import Manifest
from dlm.server.health import ServingState
from dlm.server.metrics import FAMILIES, LABELS, ServerMetrics
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
        for name in ("in_flight", "streams", "downloads"):
            gauge = _family(name)
            for labels, s in labelled:
                gauge.add_metric(labels, getattr(s.metrics, name))
            yield gauge
        state = _family("state")
        for labels, s in labelled:
            now = s.state()
            for known in ServingState:
                state.add_metric((*labels, known.name.lower()), known is now)
        yield state
        shards = _family("shards")
        for labels, s in labelled:
            shards.add_metric(labels, s.shards)
        yield shards
        memory = _family("memory_bytes")
        restarts = _family("worker_restarts_total")
        open_files = _family("open_files")
        max_files = _family("max_files")
        trouble = _family("not_ready")
        rejected = _family("sets_rejected")
        info = _family("info")
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


def _family(name: str) -> Any:
    return family(FAMILIES, f"dlm_server_{name}")


Labelled = list[tuple[tuple[str, str, str, str], Served]]


def _requests(labelled: Labelled) -> Iterator[Metric]:
    requests = _family("requests_total")
    queries = _family("queries_total")
    blocks = _family("context_blocks_total")
    orders = _family("matched_order_total")
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
    batch = _family("batch_queries")
    stages = _family("stage_seconds")
    for labels, s in labelled:
        sizes = s.metrics.batch_queries
        batch.add_metric(labels, sizes.cumulative(), sizes.total)
        for stage in STAGES:
            seconds = getattr(s.metrics, f"{stage}_s")
            stages.add_metric((*labels, stage), seconds.cumulative(), seconds.total)
    yield batch
    yield stages
