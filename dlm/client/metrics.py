"""Every event that a client logs under `dlm.client` (`*` stands for one word), and its metrics."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
)
from dlm.families import Family
from dlm.histogram import SECONDS, SIZES, Histogram
from dlm.logs import DeclaredEvent

EVENTS: dict[str, DeclaredEvent] = {
    "client.model.changed": DeclaredEvent("New utterances use another model.", ("before", "after")),
    "client.model.kept": DeclaredEvent(
        "The servers lack shards of the model that cluster.toml names; the client keeps its model.",
        ("named", "model"),
    ),
    "client.model.gone": DeclaredEvent(
        "An open utterance uses a model that no server holds any longer, so the client's 2-grams "
        "answer its queries. Open a new utterance. Logged once per model.",
        ("model", "error"),
    ),
    "client.model.not_loaded": DeclaredEvent(
        "The low orders of the next model could not be fetched.", ("model", "error")
    ),
    "client.rollout.changed": DeclaredEvent(
        "A share of new utterances started or stopped using the model that is being rolled out.",
        ("model", "share"),
    ),
    "client.cluster_file.read": DeclaredEvent(
        "The client read cluster.toml, or found that the servers changed.",
        ("shard_set", "shards_known"),
    ),
    "client.cluster_file.rejected": DeclaredEvent(
        "cluster.toml could not be read, a host name could not be resolved, or a new client would "
        "reject the file.",
        ("error",),
    ),
    "client.setting.needs_restart": DeclaredEvent(
        "`token_file`, `tls.*` or `local_fallback` changed; they take effect when the client "
        "restarts.",
        ("setting", "advice"),
    ),
    "client.certificates.kept": DeclaredEvent(
        "A certificate or key file changed, but its new content is unusable; the client keeps the "
        "old one. Logged once per error.",
        ("error",),
    ),
    "client.token.kept": DeclaredEvent(
        "The token file changed, but its new content is unusable; the client keeps the old token. "
        "Logged once per error.",
        ("error",),
    ),
    "client.mode.changed": DeclaredEvent(
        "New utterances switched between the full model and the local fallback. `messages`, "
        "`failed` and `slow_shards` are those of the old mode. Logged as a warning, unless the "
        "new mode is full.",
        ("to", "reason", "messages", "failed", "slow_shards"),
    ),
    "client.server.changed": DeclaredEvent(
        "The health of a server changed. Logged as a warning when the server can no longer be "
        "asked, and when it is up again after that. A missed heartbeat is no warning: the server "
        "is `suspect` for the reason `silent`, until it is `down`. `before` and `after`: `up`, "
        "`not_ready`, `suspect` or `down`. `reason`: `silent`, `lost`, `draining`, `warming`, "
        "`unauthenticated` or `answered`.",
        ("address", "shard", "before", "after", "reason"),
    ),
    "client.bigram_fallback.started": DeclaredEvent(
        "The client started to answer from its 2-grams. `shard` is set if a shard was asked; "
        "`error` is the kind of error.",
        ("shard", "error"),
    ),
    "client.bigram_fallback.changed": DeclaredEvent(
        "The cause of the fallback became `StaleShardSet`, which does not end by itself: open a "
        "new utterance.",
        ("shard", "before", "error"),
    ),
    "client.bigram_fallback.ended": DeclaredEvent(
        "A message was answered, and for ten seconds no score came from the 2-grams.",
        ("seconds", "queries"),
    ),
    "client.local_fallback.started": DeclaredEvent(
        "A new client begins with the local fallback, since servers or their low orders could not "
        "be reached: `error` says why.",
        ("local_fallback", "error"),
    ),
    "client.connection.renewed": DeclaredEvent("A silent connection was replaced.", ("address",)),
    "client.server.restarted": DeclaredEvent("A server was restarted.", ("address",)),
    "client.fork.on_loop": DeclaredEvent(
        "A callback forked the process; the child's client can send nothing.", ("thread",)
    ),
    "client.*.failed": DeclaredEvent(
        "A fault in dlm, or in a callback of the program. `*` is one of `callback`, `cascade`, "
        "`loop`, `message` (with `shard`), `reply`, `resume`, `retry`.",
        ("shard", "error"),
    ),
}


# -------------------------------------------------------------------------------------------------
# The counters of a client. Counting is cheap: two microseconds per message.


STAGES = ("plan", "queue", "encode", "wire", "decode")
OK, CANCELLED, FAILED = "ok", "cancelled", "failed"
# An error is labelled by the first of these classes that it is an instance of, or else FAILED.
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
    """The counts of a client since it was created (or since the fork).

    queries        queries that callers asked; a context block counts as one query
    local_hits     queries that the low orders answered, without any message
    duplicates     queries that repeat another query of a call or message, and so were not sent
    sent_queries   distinct queries sent to servers; these, messages and bytes are counted when
                   the messages come back
    retries        failed messages that were sent again to another replica
    hedges         late messages that were also sent to a second replica
    hedges_won     hedged messages that the second replica answered first
    bytes_sent, bytes_received  bytes of messages, without gRPC's own framing
    bigram_fallback  distinct queries that the bigram fallback answered
    refreshes      how often the table of servers was fetched again
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


FOLDED = 256  # maximum number of messages that wait to be counted


class ClientMetrics:
    """Counters of one process; a forked child starts from zero. Any thread may count, under a lock
    that is reentrant, since a signal handler may run while its own thread counts. Since callers
    wait while a message ends, its end is only noted; readers call `now` to count what is noted."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ended: deque[tuple[Any, ...]] = deque()
        self.stats = Stats()
        self.calls = Counter({OK: 0})
        self.messages = Counter({OK: 0})
        self.message_queries = Histogram(SIZES)
        self.gathered_calls = Histogram(SIZES)
        self.sent_to: Counter[int] = Counter()  # distinct queries, by shard
        self.stages = {stage: Histogram(SECONDS) for stage in STAGES}

    def now(self) -> Stats:
        with self._lock:
            while self._ended:
                self._add(*self._ended.popleft())
            return replace(self.stats)

    def planned(self, queries: int, local_hits: int = 0, duplicates: int = 0) -> None:
        with self._lock:
            self.stats.queries += queries
            self.stats.local_hits += local_hits
            self.stats.duplicates += duplicates

    def fell_back(self, queries: int) -> None:
        with self._lock:
            self.stats.bigram_fallback += queries

    def call(self, result: str, plan_s: float) -> None:
        """Counts a call that ended with `result`; `plan_s` is the seconds that its checks,
        grouping, low orders and routing took."""
        with self._lock:
            self.calls[result] += 1
            self.stages["plan"].add(plan_s)

    def message(self, *ended: Any) -> None:
        """On the loop: notes a message that ended, answered or not; arguments as in `_add`."""
        self._ended.append(ended)
        if len(self._ended) >= FOLDED:
            self.now()

    def _add(
        self,
        result: str,
        shard: int,
        queries: int,
        duplicates: int,
        calls: int,
        sent: int,
        received: int,
        stages: tuple[float, ...],
    ) -> None:
        """Counts a message; `duplicates` are queries that its calls share; `stages` has the seconds
        of all STAGES but the first; without a reply, decoding takes 0."""
        stats = self.stats
        stats.messages += 1
        stats.failed += result not in (OK, CANCELLED)
        stats.sent_queries += queries
        stats.duplicates += duplicates
        stats.bytes_sent += sent
        stats.bytes_received += received
        self.sent_to[shard] += queries
        self.messages[result] += 1
        self.message_queries.add(queries)
        self.gathered_calls.add(calls)
        for stage, seconds in zip(STAGES[1:], stages, strict=True):
            self.stages[stage].add(seconds)


# Every family that a client exports. DO NOT CHANGE names or labels: dashboards and alerts use them.
FAMILIES: dict[str, Family] = {
    "dlm_client_queries_total": Family(
        "Queries by source of the answer. local: the client's 1- and 2-grams; shard: distinct "
        "queries sent; duplicate: repeats; bigram_fallback: the low orders only, because no shard "
        "answered in time; local_fallback: the client's local model.",
        ("answered_by",),
    ),
    "dlm_client_calls_total": Family(
        "Calls by result: ok, cancelled, shard_down, deadline_exceeded, overloaded, "
        "stale_shard_set, protocol_error, authentication_error; failed: other errors.",
        ("result",),
    ),
    "dlm_client_messages_total": Family("Messages by result, as for calls.", ("result",)),
    "dlm_client_hedges_total": Family(
        "Late messages that were also sent to a second server; won: the second server answered "
        "first.",
        ("result",),
    ),
    "dlm_client_message_queries": Family("Distinct queries per message.", ("le",)),
    "dlm_client_coalesced_calls": Family("Calls that share a message.", ("le",)),
    "dlm_client_stage_seconds": Family(
        "Seconds in each stage: plan, by call; queue, encode, wire and decode, by message.",
        ("stage", "le"),
    ),
    "dlm_client_in_flight": Family("Messages in flight, by shard.", ("shard",)),
    "dlm_client_queue_depth": Family("Parts of calls waiting to be sent, by shard.", ("shard",)),
    "dlm_client_servers": Family(
        "Servers of the model by health, as heartbeats report it.", ("health",)
    ),
    "dlm_client_mode": Family("1 for the mode in which new utterances begin.", ("mode",)),
    "dlm_client_mode_switches_total": Family("Switches to each mode.", ("mode", "reason")),
    "dlm_client_probes_total": Family("Probes by result; ok: every shard answered.", ("result",)),
    "dlm_client_local_fallback": Family("1 if there is a local fallback to switch to, else 0."),
    "dlm_client_cache_bytes": Family("Bytes of the vocabulary and low orders of the model in use."),
    "dlm_client_info": Family("Always 1.", ("version",)),
}
