"""What all processes of a gateway have answered, in memory that they share.

Each writes a row of its own, once a second, so any of them can show the sum.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from dlm.client import AsyncClient
from dlm.gateway.metrics import GatewayMetrics
from dlm.histogram import SECONDS
from dlm.wire._pb import lm_pb2 as pb

MAX_SHARDS = 1024  # shown; later ones are not
_NUMBERS, _CALLS = 3, len(SECONDS) + 1
_WIDTH = _NUMBERS + _CALLS + MAX_SHARDS


class Traffic:
    """Counts of `workers` processes; make it before they are forked."""

    def __init__(self, workers: int = 1) -> None:
        size = workers * _WIDTH
        self._rows = np.frombuffer(mmap.mmap(-1, 8 * size), np.uint64).reshape(workers, _WIDTH)

    def writer(self, worker: int) -> TrafficWriter:
        """For a process that begins; it goes on where an earlier one of its number ended."""
        return TrafficWriter(self, self._rows[worker])

    def reply(self, shards: int) -> Any:
        """The sum, as a message."""
        total = self._rows.sum(axis=0).tolist()
        queries, local_hits, fallbacks = total[:_NUMBERS]
        first = _NUMBERS + _CALLS
        return pb.Traffic(
            queries=queries,
            local_hits=local_hits,
            fallbacks=fallbacks,
            calls=total[_NUMBERS:first],
            within_s=SECONDS,
            shards=total[first : first + min(shards, MAX_SHARDS)],
        )


class TrafficWriter:
    """One process's row."""

    def __init__(self, traffic: Traffic, row: Any) -> None:
        self.traffic = traffic
        self._row, self._before = row, row.copy()

    def write(self, metrics: GatewayMetrics, client: AsyncClient) -> None:
        """Counts until now."""
        stats, sent_to = client.stats, client.sent_to
        now = np.zeros(_WIDTH, np.uint64)
        now[:_NUMBERS] = metrics.queries, stats.local_hits, metrics.fallbacks
        for (call, _), histogram in metrics.seconds.items():
            if call == "Models":  # of those who watch
                continue
            now[_NUMBERS : _NUMBERS + _CALLS] += np.array(histogram.counts, np.uint64)
        for shard, queries in sent_to.items():
            if shard < MAX_SHARDS:
                now[_NUMBERS + _CALLS + shard] = queries
        self._row[:] = self._before + now
