"""Delivery: calls come in, messages go to servers, and replies end them.

All of it runs on the loop, one step after another (`inbox`). Parts of calls wait in `lanes`,
`sender` sends messages to servers, `retries` does what `after` decides about failed and late ones,
and `message.Ends` ends them. This module joins them: it starts messages and handles their replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlm.client.config.settings import ClientConfig
from dlm.client.deliver import loop
from dlm.client.deliver.after import is_moving
from dlm.client.deliver.call import Call
from dlm.client.deliver.counts import CANCELLED, result_of
from dlm.client.deliver.inbox import Inbox
from dlm.client.deliver.lanes import Lanes
from dlm.client.deliver.message import Attempt, Ends, Message, as_dlm_error
from dlm.client.deliver.retries import LOST_S, Retries
from dlm.client.deliver.runtime import Links, Runtime
from dlm.client.deliver.sender import Outcomes, Sender
from dlm.client.deliver.table import Table, other_model
from dlm.client.plan.bigram_fallback import Outage
from dlm.errors import AuthenticationError, DeadlineExceeded, DlmError, Overloaded, ShardDown
from dlm.logs import EventLog
from dlm.tracing import Tracer

log = EventLog(__name__)


class Delivery:
    """Sends calls to shards, and ends them.

    Args
        table   which server has which shard
        tracer  None if calls are not traced
        home    where it runs: the loop of the process
    Attributes
        inbox  the way to the loop; `tell`, its own
        overload, max_queries  see `Lanes`
    """

    def __init__(
        self,
        config: ClientConfig,
        links: Links,
        table: Table,
        clock: Callable[[], float],
        tracer: Tracer | None,
        home: loop.Home = loop,
    ) -> None:
        self._config = config
        self._links = links
        self._table = table
        self._clock = clock
        self._ends = ends = Ends(config, links, clock)
        self.inbox = inbox = Inbox(links, clock, home, ends.cut_off, self._send, self._look)
        self._lanes = lanes = Lanes(config, links, table, clock, inbox, ends)
        self._sender = sender = Sender(config, links, clock, inbox, tracer)
        self._retries = Retries(config, links, table, clock, inbox, lanes, sender, ends)
        sender.outcomes = Outcomes(self._replied, self._retries.failed)
        self.tell = inbox.tell
        self.overload, self.max_queries = lanes.overload, lanes.max_queries

    # -- in any thread ------------------------------------------------------------------------

    def post(self, call: Call) -> None:
        """Sends a call's parts; its future ends."""
        self.tell(self._lanes.take, call)

    def count_bigram_fallback(
        self, call: Call, queries: int, error: DlmError, shard: int | None
    ) -> None:
        """Counts queries that the bigram fallback answered.

        Args
            shard  that did not answer
        """
        self._links.runtime.counts.fell_back(queries)
        self.tell(self._note_fallback, call.model, queries, error, shard)

    # -- on the loop --------------------------------------------------------------------------

    def _note_fallback(self, model: str, queries: int, error: DlmError, shard: int | None) -> None:
        """Logs bigram-fallback scores once, when they begin, and once more if it turns out that
        they will not end."""
        runtime, now, known_now = self._links.runtime, self._clock(), self._table.known
        if known_now is not None and self._table.of(model) is None:
            # Whatever happened to the message, asking again would not help.
            error = other_model(known_now.model, model)
            self._table.note_gone(model, error)
        kind, outage = type(error).__name__, runtime.outage
        if outage is None:
            runtime.outage = Outage(now, now, queries, kind)
            log.warning("client.bigram_fallback.started", extra={"shard": shard, "error": kind})
            return
        runtime.outage = outage.extended(queries, now)
        if outage.lasts(error):
            runtime.outage = runtime.outage._replace(error=kind)
            fields = {"shard": shard, "before": outage.error, "error": kind}
            log.warning("client.bigram_fallback.changed", extra=fields)

    def _send(self, runtime: Runtime) -> None:
        message = self._lanes.next(runtime)
        if message is not None:
            self.inbox.step(self._begin, message)

    def _begin(self, message: Message) -> None:
        runtime, watch = message.runtime, message.runtime.watch
        runtime.under_way.add(message)
        self.inbox.look_by(message.deadline + LOST_S)
        runtime.retrying.earn()
        runtime.hedging.earn()
        watched = watch is not None and self._table.known is message.snapshot
        if (
            watch is not None
            and watched
            and message.shard in watch.gone
            and self._config.bigram_fallback
        ):
            # Better to spend the time left on a fallback.
            self._ends.fail(message, ShardDown("no heartbeat was answered"))
            return
        self._sender.send(message)

    def _replied(self, attempt: Attempt, data: bytes | None, error: DlmError | None) -> None:
        if attempt.replied:
            return
        came, now = time.perf_counter(), self._clock()
        message, address = attempt.message, attempt.address
        runtime, stats = message.runtime, message.runtime.counts.stats
        attempt.replied, attempt.withdraw = True, None
        message.out.remove(attempt)
        runtime.outstanding[address] -= len(message.groups.words)
        too_late = message.ended
        if data is not None:
            stats.bytes_received += len(data)
            if error is None:
                runtime.usual[address].note(now - attempt.since, now)
        if error is None and not too_late:
            try:
                manifest = message.snapshot.topology.manifest
                answers = message.asks.decode(
                    data or b"", manifest, message.shard, message.groups, message.checksum
                )
            except Exception as exc:  # noqa: BLE001 - another server may do better
                error = as_dlm_error(exc, message.shard)
                error.add_note(f"from {address}")
            else:
                self._ends.succeed(message, attempt, answers, now)
        stats.failed += error is not None and attempt.sent and not too_late
        watch = runtime.watch
        if isinstance(error, (ShardDown, AuthenticationError)):
            runtime.missed[address] = now
            if is_moving(error):
                runtime.moving[address] = now
            if watch is not None:
                watch.lost(address, error)
        elif error is None:
            runtime.missed.pop(address, None)
        elif isinstance(error, (DeadlineExceeded, Overloaded)):
            runtime.usual[address].miss(now)
        if attempt.sent:
            runtime.counts.message(
                CANCELLED if too_late else result_of(error),
                len(message.groups.words),
                len({id(part.call) for part in message.parts}) if len(message.parts) > 1 else 1,
                attempt.queue_s,
                message.encode_s,
                came - attempt.since_s - message.encode_s,
                time.perf_counter() - came if data is not None else 0.0,
            )
        if error is not None and not too_late:
            self._retries.failed(message, error)
        self._ends.settle(message)

    def _look(self) -> float:
        runtime, now = self._links.runtime, self._clock()
        return min(self._lanes.look(runtime, now), self._retries.look(runtime, now))
