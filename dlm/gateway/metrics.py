"""A gateway's counts, for Prometheus and for its traffic page. No text, word, id or address is ever
a label: labels come only from closed sets, such as calls, protocols and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client import AsyncClient
from dlm.families import Family, family
from dlm.histogram import SECONDS, Histogram
from dlm.server.health import ServingState
from dlm.server.metrics import CallCounts
from dlm.server.process import Process
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason

OK = "ok"
ABANDONED = "abandoned"


MAX_SHARDS = 1024  # maximum number of shards shown; the rest are left out
_CALLS = len(SECONDS) + 1
# Every family that a gateway exports. DO NOT CHANGE names or labels: dashboards and alerts use
# them.
FAMILIES: dict[str, Family] = {
    "dlm_gateway_calls_total": Family(
        "Calls by result: ok, abandoned, or the reason for a refusal.", ("call", "door", "result")
    ),
    "dlm_gateway_queries_total": Family("Words scored."),
    "dlm_gateway_fallbacks_total": Family("Words scored by a fallback."),
    "dlm_gateway_call_seconds": Family("Seconds per answered call.", ("call", "door", "le")),
    "dlm_gateway_refused_total": Family(
        "Calls refused before being read, because of load or because of their token.", ("reason",)
    ),
    "dlm_gateway_in_flight": Family("Calls being answered."),
    "dlm_gateway_connections": Family("Open HTTP connections."),
    "dlm_gateway_state": Family("1 for the state the gateway is in.", ("state",)),
    "dlm_gateway_certificate_days": Family(
        "Days until the gateway's certificate, or one that signed it, expires; absent without TLS."
    ),
    "dlm_gateway_info": Family("Always 1.", ("version",)),
}


@dataclass(slots=True)
class GatewayMetrics(CallCounts):
    """Counts of a gateway: calls, by (call, door, result); seconds of answered calls, by (call,
    door); words scored, in all and by fallbacks; and open HTTP connections."""

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    queries: int = 0
    fallbacks: int = 0
    connections: Sized = ()

    def ended(self, call: str, door: str, result: str, took_s: float) -> None:
        self.calls[call, door, result] += 1
        if result == OK:
            if (call, door) not in self.seconds:
                self.seconds[call, door] = Histogram(SECONDS)
            self.seconds[call, door].add(took_s)


class GatewayCollector(Collector):
    """Collects the families of a gateway and, once its client is connected, those of the client."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        state: Callable[[], ServingState],
        client: Callable[[], Collector | None],
        process: Process,
    ) -> None:
        self._metrics, self._state, self._client = metrics, state, client
        self._process = process

    def collect(self) -> Iterable[Metric]:
        yield from self._own()
        client = self._client()
        if client is not None:
            yield from client.collect()

    def _own(self) -> Iterator[Metric]:
        counts = self._metrics
        calls = _family("calls_total")
        for key, number in sorted(counts.calls.items()):
            calls.add_metric(key, number)
        yield calls
        seconds = _family("call_seconds")
        for pair, histogram in sorted(counts.seconds.items()):
            seconds.add_metric(pair, histogram.cumulative(), histogram.total)
        yield seconds
        refused = _family("refused_total")
        for reason in Reason:
            refused.add_metric((reason.value,), counts.refused_for(reason))
        yield refused
        for name, number in (
            ("queries_total", counts.queries),
            ("fallbacks_total", counts.fallbacks),
            ("in_flight", counts.in_flight),
            ("connections", len(counts.connections)),
        ):
            plain = _family(name)
            plain.add_metric((), number)
            yield plain
        state = _family("state")
        for known in ServingState:
            state.add_metric((known.name.lower(),), known is self._state())
        yield state
        certificate, info = _family("certificate_days"), _family("info")
        if self._process.certificate_days is not None:
            certificate.add_metric((), self._process.certificate_days())
        yield certificate
        info.add_metric((__version__,), 1)
        yield info


def _family(name: str) -> Any:
    return family(FAMILIES, f"dlm_gateway_{name}")


def traffic(metrics: GatewayMetrics, client: AsyncClient, shards: int) -> Any:
    calls = np.zeros(_CALLS, np.uint64)
    for (call, _), histogram in metrics.seconds.items():
        if call != "Models":  # monitoring uses `Models`
            calls += np.array(histogram.counts, np.uint64)
    sent_to = client.sent_to
    return pb.Traffic(
        queries=metrics.queries,
        local_hits=client.stats.local_hits,
        fallbacks=metrics.fallbacks,
        calls=calls.tolist(),
        within_s=SECONDS,
        shards=[sent_to.get(shard, 0) for shard in range(min(shards, MAX_SHARDS))],
    )
