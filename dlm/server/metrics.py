"""Counts what a server does, and exports the counts to Prometheus.

No query text, word or id is ever a label: labels are ids of models and shard sets (their first
12 hex digits), shard numbers, and the closed sets of reasons, stages and states.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.families import Family, family
from dlm.histogram import SECONDS, SIZES, Histogram
from dlm.index.layout import MAX_ORDER
from dlm.ngram.partition import SLOTS
from dlm.server.health import ServingState
from dlm.server.process import Process
from dlm.wire.status import Reason

LABELS = ("model", "shard_set", "shard")
# Every family that a server exports. DO NOT CHANGE names or labels: dashboards and alerts use them.
FAMILIES: dict[str, Family] = {
    "dlm_server_requests_total": Family(
        "Score and ContextBlock requests by result: ok, abandoned, or the reason for a refusal. "
        "UNAUTHENTICATED, CLIENT_LIMIT and OVERLOADED count all calls that were refused unread.",
        (*LABELS, "result"),
    ),
    "dlm_server_queries_total": Family("Queries answered.", LABELS),
    "dlm_server_context_blocks_total": Family(
        "Contexts whose stored words were sent; each of these words also counts as a query.", LABELS
    ),
    "dlm_server_matched_order_total": Family(
        "Queries answered, by the order of the longest n-gram found; 0 stands for all orders below "
        "3, which the client looks up itself.",
        (*LABELS, "order"),
    ),
    "dlm_server_batch_queries": Family("Queries per request.", (*LABELS, "le")),
    "dlm_server_stage_seconds": Family(
        "Seconds per stage of a request: queue (until work begins), decode, search, encode, write "
        "(on a stream, only its first reply and replies above 16 KiB).",
        (*LABELS, "stage", "le"),
    ),
    "dlm_server_in_flight": Family("Score requests in progress.", LABELS),
    "dlm_server_streams": Family("Open Exchange streams.", LABELS),
    "dlm_server_downloads": Family("Open Download streams.", LABELS),
    "dlm_server_state": Family(
        "1 for the state the server is in: warming, ready or draining.", (*LABELS, "state")
    ),
    "dlm_server_default": Family(
        "1 for the shard set that answers calls that name none, 0 for the others; it shows how far "
        "a roll-out has come.",
        LABELS,
    ),
    "dlm_server_shards": Family(
        "Shards in the shard set, on all servers; each needs a ready server.", LABELS
    ),
    "dlm_server_memory_bytes": Family(
        "Private memory of the process, without pages shared with other processes.", LABELS
    ),
    "dlm_server_open_files": Family("Open files and connections of the process.", LABELS),
    "dlm_server_max_files": Family("Limit on open files of the process.", LABELS),
    "dlm_server_not_ready": Family(
        "1 for each cause (open_files) that makes the server not ready although it answers.",
        (*LABELS, "cause"),
    ),
    "dlm_server_sets_rejected": Family(
        "1 while the server does not serve its list of shard sets, because it rejected the list.",
        LABELS,
    ),
    "dlm_server_certificate_days": Family(
        "Days until the server's certificate, or one that signed it, expires; absent without TLS.",
        LABELS,
    ),
    "dlm_server_info": Family("Always 1.", (*LABELS, "version")),
}


ID_DIGITS = 12
STAGES = ("queue", "decode", "search", "encode", "write")


def _seconds() -> Histogram:
    return Histogram(SECONDS)


class SlotQueries:
    """Queries answered for each slot; each thread has its own array, so counting needs no lock."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._each: list[NDArray[np.int64]] = []

    def own(self) -> NDArray[np.int64]:
        """Returns the counts (4096,) of this thread, to which the caller adds."""
        try:
            counts: NDArray[np.int64] = self._local.counts
        except AttributeError:
            counts = self._local.counts = np.zeros(SLOTS, np.int64)
            self._each.append(counts)
        return counts

    def total(self) -> NDArray[np.int64]:
        """Returns the sum (4096,) over all threads; any thread may call this."""
        total = np.zeros(SLOTS, np.int64)
        for counts in list(self._each):
            total += counts
        return total


@dataclass(slots=True)
class CallCounts:
    """The counts of calls of a server or a gateway since the start of the process.

    The counts change only on the event loop, so there is no lock; any thread may read them, and the
    numbers that it reads are at most one message apart.

    unauthenticated  calls of any method refused because they have no valid token
    client_limits    calls of any method refused because their client had too many calls open
    clients    calls accepted, by the name of their token; one entry per name in the tokens file
    """

    refusals: Counter[Reason] = field(default_factory=Counter)
    in_flight: int = 0
    unauthenticated: int = 0
    client_limits: int = 0
    clients: Counter[str] = field(default_factory=Counter)

    def refused_for(self, reason: Reason) -> int:
        """Score requests, and calls not read yet, that were refused for `reason`."""
        early = {
            Reason.UNAUTHENTICATED: self.unauthenticated,
            Reason.CLIENT_LIMIT: self.client_limits,
        }
        return self.refusals[reason] + early.get(reason, 0)


@dataclass(slots=True)
class ServerMetrics(CallCounts):
    """Counts of one shard set.

    messages   Score requests answered; a ContextBlock counts as a Score of its words
    blocks     contexts answered in ContextBlocks
    abandoned  requests whose client disconnected before the answer
    matched_orders  (16,)  queries answered by matched order; orders below 3 count as 0
    slot_queries    queries answered by slot; counted in the threads that answer
    queue_s, decode_s, search_s, encode_s, write_s  seconds of each stage of a request: waiting to
               start; decoding; checking ids and looking them up; encoding; handing the bytes to
               gRPC (streams only: for a unary call gRPC does that itself)
    """

    messages: int = 0
    queries: int = 0
    blocks: int = 0
    streams: int = 0
    downloads: int = 0
    abandoned: int = 0
    matched_orders: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(MAX_ORDER + 1, np.int64)
    )
    slot_queries: SlotQueries = field(default_factory=SlotQueries)
    batch_queries: Histogram = field(default_factory=lambda: Histogram(SIZES))
    queue_s: Histogram = field(default_factory=_seconds)
    decode_s: Histogram = field(default_factory=_seconds)
    search_s: Histogram = field(default_factory=_seconds)
    encode_s: Histogram = field(default_factory=_seconds)
    write_s: Histogram = field(default_factory=_seconds)

    def answered(
        self,
        queries: int,
        by_order: NDArray[np.int64],
        queue_s: float,
        decode_s: float,
        search_s: float,
        encode_s: float,
    ) -> None:
        """Counts a request that was answered; `by_order` (16,) has its queries by matched order."""
        self.messages += 1
        self.queries += queries
        self.batch_queries.add(queries)
        self.queue_s.add(queue_s)
        self.decode_s.add(decode_s)
        self.search_s.add(search_s)
        self.encode_s.add(encode_s)
        self.matched_orders += by_order


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

    def labels(self) -> tuple[str, str, str]:
        return self.model[:ID_DIGITS], self.shard_set[:ID_DIGITS], str(self.shard)


class ServerCollector(Collector):
    """The metric families of one process.

    Args  served  returns what the process serves, the default first; called at every scrape.
                  Metrics of the whole process (memory, version) have the default's labels
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
        labelled = [(s.labels(), s) for s in served]
        yield from _requests(labelled)
        yield from _histograms(labelled)
        for name, attribute in (
            ("queries_total", "queries"),
            ("context_blocks_total", "blocks"),
            ("in_flight", "in_flight"),
            ("streams", "streams"),
            ("downloads", "downloads"),
        ):
            plain = _family(name)
            for labels, s in labelled:
                plain.add_metric(labels, getattr(s.metrics, attribute))
            yield plain
        state = _family("state")
        for labels, s in labelled:
            now = s.state()
            for known in ServingState:
                state.add_metric((*labels, known.name.lower()), known is now)
        yield state
        shards, default = _family("shards"), _family("default")
        for labels, s in labelled:
            shards.add_metric(labels, s.shards)
            default.add_metric(labels, s is labelled[0][1])
        yield shards
        yield default
        yield from self._of_process([labels for labels, _ in labelled[:1]])

    def _of_process(self, whose: Sequence[tuple[str, ...]]) -> Iterator[Metric]:
        process = self._process
        for name, number in (
            ("memory_bytes", process.memory.bytes()),
            ("open_files", process.open_files.count()),
            ("max_files", process.open_files.limit),
            ("sets_rejected", process.rejected),
        ):
            plain = _family(name)
            for labels in whose:
                plain.add_metric(labels, number)
            yield plain
        trouble, info = _family("not_ready"), _family("info")
        certificate = _family("certificate_days")
        for labels in whose:
            if process.certificate_days is not None:
                certificate.add_metric(labels, process.certificate_days())
            info.add_metric((*labels, __version__), 1)
            trouble.add_metric((*labels, "open_files"), bool(process.open_files.trouble))
        yield trouble
        yield certificate
        yield info


def _family(name: str) -> Any:
    return family(FAMILIES, f"dlm_server_{name}")


Labelled = list[tuple[tuple[str, str, str], Served]]


def _requests(labelled: Labelled) -> Iterator[Metric]:
    requests = _family("requests_total")
    orders = _family("matched_order_total")
    for labels, s in labelled:
        counts = s.metrics
        requests.add_metric((*labels, "ok"), counts.messages)
        requests.add_metric((*labels, "abandoned"), counts.abandoned)
        # All reasons are present from the start: a rate over a series that began with its first
        # refusal would miss that refusal.
        for reason in Reason:
            requests.add_metric((*labels, reason.value), counts.refused_for(reason))
        for order in (0, *range(3, s.order + 1)):
            orders.add_metric((*labels, str(order)), int(counts.matched_orders[order]))
    yield requests
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
