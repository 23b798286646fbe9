"""The counters of a client. Counting is cheap: two microseconds per message."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace

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

    queries        asked by callers; a context block counts as one
    local_hits     of these, answered from the low orders, without any message
    duplicates     of these, repeated within a call or a message, and sent once
    sent_queries   distinct queries sent to servers
    retries        failed messages that were sent again to another replica
    hedges         late messages that were sent to a second replica too
    hedges_won     of these, those that the second replica answered first
    bytes_sent, bytes_received  of messages, without gRPC's own framing
    bigram_fallback  distinct queries that the bigram fallback answered
    refreshes      times the table was stale and was fetched again
    """

    queries: int = 0
    local_hits: int = 0
    duplicates: int = 0
    sent_queries: int = 0
    messages: int = 0
    failed: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bigram_fallback: int = 0
    refreshes: int = 0


class ClientMetrics:
    """Counters of one process; a forked child starts from zero. Any thread may count, under a lock
    that is reentrant, since a signal handler may run while its own thread counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.stats = Stats()
        self.calls = Counter({OK: 0})
        self.messages = Counter({OK: 0})
        self.message_queries = Histogram(SIZES)
        self.gathered_calls = Histogram(SIZES)
        self.sent_to: Counter[int] = Counter()  # distinct queries, by shard
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}

    def now(self) -> Stats:
        with self._lock:
            return replace(self.stats)

    def planned(self, queries: int, local_hits: int = 0, duplicates: int = 0) -> None:
        with self._lock:
            self.stats.queries += queries
            self.stats.local_hits += local_hits
            self.stats.duplicates += duplicates

    def sent(self, queries: int, size: int, duplicates: int, shard: int) -> None:
        """On the loop: counts a message as it is sent, of `size` bytes, and repeats among its
        calls."""
        self.sent_to[shard] += queries
        stats = self.stats
        stats.messages += 1
        stats.sent_queries += queries
        stats.bytes_sent += size
        if duplicates:
            with self._lock:
                stats.duplicates += duplicates

    def fell_back(self, queries: int) -> None:
        with self._lock:
            self.stats.bigram_fallback += queries

    def call(self, result: str, plan_s: float) -> None:
        """Counts a call that ended, with `result_of` its error, or CANCELLED; `plan_s` is the time
        from the caller to the queues: checks, grouping, low orders, routing."""
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
            queue_s   the longest wait of one of its parts in the lane
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
