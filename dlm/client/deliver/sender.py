"""Sends a message to a server: chooses the server, and the connection.

Runs on the loop. `replicas` decides which server is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from dlm.client.config.credentials import Metadata
from dlm.client.config.settings import ClientConfig
from dlm.client.deliver.inbox import Inbox
from dlm.client.deliver.message import Attempt, Message, as_dlm_error
from dlm.client.deliver.pace import late_after
from dlm.client.deliver.replicas import choose
from dlm.client.deliver.runtime import Links
from dlm.client.deliver.transport import Connection, Withdraw
from dlm.client.health.membership import behind
from dlm.client.plan.census import dedupe_faults
from dlm.errors import DlmError, ShardDown
from dlm.tracing import Tracer

AVOID_S = 1.0  # for this long, a server that a message did not reach is asked after all others


class Outcomes(NamedTuple):
    """Callbacks, on the loop, for the outcome of a message.

    replied  for an attempt: the bytes of its reply, or an error; once
    failed   for a message that could not be sent
    """

    replied: Callable[[Attempt, bytes | None, DlmError | None], None]
    failed: Callable[[Message, DlmError], None]


@dataclass(eq=False)
class Sender:
    """Sends messages to servers.

    Args
        tracer  None if calls are not traced
    """

    _config: ClientConfig
    _links: Links
    _clock: Callable[[], float]
    _inbox: Inbox
    _tracer: Tracer | None
    outcomes: Outcomes = field(init=False)  # set before the first message

    def send(
        self, message: Message, *, hedge: bool = False, among: Sequence[str] | None = None
    ) -> None:
        """Sends a message to one of the servers of its shard, or of those `among` them."""
        try:
            address = self._choose(message, message.replicas if among is None else among)
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self.outcomes.failed(message, as_dlm_error(exc, message.shard))
            return
        runtime = message.runtime
        attempt = Attempt(message, address, self._clock(), hedge=hedge)
        message.tried.append(address)
        message.out.append(attempt)
        runtime.outstanding[address] += len(message.groups.words)
        connection = runtime.connections.get(address)
        if connection is not None:
            self._write(attempt, connection)
        else:
            self._links.reach(address, self._inbox.tell, partial(self._reached, attempt))
        replicas = message.replicas
        if not (hedge or attempt.replied) and len(replicas) > 1:
            late_s = (message.soonest - attempt.since) / 2
            if self._config.hedging:
                usual_s = late_after((runtime.usual[a] for a in replicas), attempt.since)
                late_s = min(late_s, usual_s)
            attempt.late_at = attempt.since + late_s
            self._inbox.look_by(attempt.late_at)

    def _choose(self, message: Message, replicas: Sequence[str]) -> str:
        snapshot = message.snapshot
        if len(replicas) == 1:
            return replicas[0]
        missed, avoided, slow = self.unwell(message)
        address = choose(
            replicas,
            message.runtime.outstanding,
            avoided,
            message.runtime.chance,
            slow,
            missed=missed,
            tried=frozenset(message.tried),
        )
        if address is None:
            known = "; ".join(dedupe_faults(snapshot.topology.faults.items()))
            raise ShardDown("no known server holds it" + (f" ({known})" if known else ""))
        return address

    def unwell(self, message: Message) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Servers that were not reached lately; these and all others to avoid; and those that are
        far slower than another that could answer the message."""
        runtime, now = message.runtime, self._clock()
        missed = avoided = frozenset(a for a, at in runtime.missed.items() if now - at < AVOID_S)
        usual = {a: runtime.usual[a] for a in message.replicas}
        medians = {a: one.median_s for a, one in usual.items() if one.known(now)}
        least, heartbeat_config = min(medians.values(), default=0.0), self._config.heartbeat_config
        slow = frozenset(
            a for a, median in medians.items() if behind(median, least, heartbeat_config)
        )
        if (watch := runtime.watch) is not None:
            avoided, slow = avoided | watch.avoided, slow | watch.slow
        return missed, avoided, slow

    def _reached(self, attempt: Attempt, made: Connection | Exception) -> None:
        """Continues when there is a connection, or none can be made."""
        if isinstance(made, Exception):
            self._inbox.step(self._fail, attempt, made)
        else:
            self._inbox.step(self._write, attempt, made)

    def _write(self, attempt: Attempt, connection: Connection) -> None:
        message = attempt.message
        if message.ended or attempt.replied:  # while the connection was made
            self.outcomes.replied(attempt, None, DlmError("withdrawn before it was sent"))
            return
        try:
            withdraw = self._post(attempt, connection)
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self._fail(attempt, exc)
        else:
            if not attempt.replied:
                attempt.withdraw = withdraw

    def _post(self, attempt: Attempt, connection: Connection) -> Withdraw | None:
        message = attempt.message
        runtime, queries = message.runtime, len(message.groups.words)
        attempt.since, attempt.since_s = self._clock(), time.perf_counter()
        attempt.queue_s = attempt.since_s - message.queued
        if not message.request:
            manifest = message.snapshot.topology.manifest
            message.request, message.checksum = message.asks.encode(
                manifest, message.shard, message.groups
            )
            message.encode_s = time.perf_counter() - attempt.since_s
        attempt.sent, stats = True, runtime.counts.stats
        stats.messages += 1
        stats.sent_queries += queries
        if message.place_of is not None:
            runtime.counts.gathered(len(message.place_of) - queries)
        stats.bytes_sent += len(message.request)
        timeout_s = max(message.deadline - attempt.since, 0.0)
        traced = () if self._tracer is None else (self._trace(message),)
        return message.asks.post(connection)(
            message.request, timeout_s, partial(self._reply, attempt), *traced
        )

    def _fail(self, attempt: Attempt, cause: Exception) -> None:
        self._reply(attempt, None, as_dlm_error(cause, attempt.message.shard))

    def _trace(self, message: Message) -> Metadata:
        """The trace context of the first sampled call in the message: a server's span has one
        parent, so only one of the calls that share a message shows it."""
        spans = []
        for part in message.parts:
            part.call.messages += 1
            spans.append(part.call.span)
        sampled = next((span for span in spans if span is not None and span.sampled), None)
        return () if sampled is None or self._tracer is None else self._tracer.metadata(sampled)

    def _reply(self, attempt: Attempt, data: bytes | None, error: DlmError | None) -> None:
        """Records a reply, from any thread; an error after a reply is ignored."""
        self._inbox.carry_out(self.outcomes.replied, attempt, data, error)
