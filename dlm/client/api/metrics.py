"""What a client counts: plain numbers, which cost two microseconds a message."""

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

    queries        queries asked by callers; a context whose stored words are asked is one
    zero_message   of these, answered from the low orders, without any message
    duplicates     of these, asked more than once within a call or a message, and sent once
    sent_queries   distinct queries sent to servers
    messages       messages sent
    failed         messages that failed
    retries        messages that were sent to another replica after that
    hedges         messages that were late, and asked of another replica as well
    hedges_won     of these, answered by that one first
    bytes_sent, bytes_received  bytes of these messages, without gRPC's own framing
    partial        distinct queries that the partial model answered
    refreshes      times the table was found stale and fetched anew
    """

    queries: int = 0
    zero_message: int = 0
    duplicates: int = 0
    sent_queries: int = 0
    messages: int = 0
    failed: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    partial: int = 0
    refreshes: int = 0


class ClientMetrics:
    """Counts of one process; what of `stats` is not counted here has one thread that counts it.

    Any thread may count: a lock, taken once a call and once a message, holds what belongs together.
    It is reentrant, since a signal handler may ask while its own thread counts. A forked child
    begins with counts of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.stats = Stats()
        self.calls = Counter({OK: 0})
        self.messages = Counter({OK: 0})
        self.message_queries = Histogram(SIZES)
        self.gathered_calls = Histogram(SIZES)
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}

    def now(self) -> Stats:
        """`stats` as they stand now."""
        with self._lock:
            return replace(self.stats)

    def planned(self, queries: int, zero_message: int = 0, duplicates: int = 0) -> None:
        """Counts what is asked of this client; see `Stats`."""
        with self._lock:
            self.stats.queries += queries
            self.stats.zero_message += zero_message
            self.stats.duplicates += duplicates

    def gathered(self, duplicates: int) -> None:
        """Counts what several calls of a message asked."""
        with self._lock:
            self.stats.duplicates += duplicates

    def fell_back(self, queries: int) -> None:
        """Counts what the partial model answered."""
        with self._lock:
            self.stats.partial += queries

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
            queue_s   seconds that the part that waited longest waited in its lane
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
