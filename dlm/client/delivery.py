"""Messages go to servers, and replies, errors and time end them.

All of it runs on the loop, one step after another. `after` decides what is done about a message,
and `Delivery._do` does that, here and nowhere else. A message has ended when all of its parts have,
and its place in the lane is free. If a step raises, `_cut_off` ends what it was about: ending
anything twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from dlm.client import loop
from dlm.client.after import (
    Decision,
    Elsewhere,
    Failed,
    GiveUp,
    Late,
    Later,
    Look,
    Looked,
    Move,
    NotYet,
    after,
    late_after,
)
from dlm.client.call import Call
from dlm.client.census import dedupe_faults
from dlm.client.cluster_file import Metadata
from dlm.client.config import ClientConfig
from dlm.client.lanes import Attempt, Lanes, Message, as_dlm_error, naming_shard
from dlm.client.loop import Inbox, log_failure
from dlm.client.metrics import CANCELLED, result_of
from dlm.client.runtime import LOOK_AGAIN_S, Links, Runtime, closed_error
from dlm.client.server import Connection
from dlm.client.table import Table, other_model
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    ShardDown,
    StaleShardSet,
)
from dlm.tracing import Tracer

MAX_REROUTES = 2  # a table that is stale twice in one call will not settle within it
# A message is lost this long after its deadline: connections end messages by their deadline, plus
# the time that a busy machine needs.
LOST_S = 1.0
EARLY_S = 0.001  # a timer may be early by this much
_LATE = DeadlineExceeded("a server has not answered yet")


class Delivery:
    """Sends calls to shards, and ends them. `post` is how a call's parts get in, and `inbox` the
    way to the loop of the process."""

    def __init__(
        self,
        config: ClientConfig,
        links: Links,
        table: Table,
        clock: Callable[[], float],
        tracer: Tracer | None,
        home: Any = loop,
    ) -> None:
        self._config = config
        self._links = links
        self._table = table
        self._clock = clock
        self._tracer = tracer
        steps = self._give_up, self._cut_off, self._next, self._check
        self.inbox = inbox = Inbox(links, clock, home, *steps)
        self._lanes = lanes = Lanes(config, links, table, clock, inbox)
        self.tell = inbox.tell
        self.post = partial(inbox.tell, lanes.take)
        self.overload, self.max_queries = lanes.overload, lanes.max_queries

    # -- in any thread ------------------------------------------------------------------------

    def count_bigram_fallback(
        self, call: Call, queries: int, error: DlmError, shard: int | None
    ) -> None:
        self._links.runtime.counts.fell_back(queries)
        self.tell(self._note_fallback, call.model, queries, error, shard)

    def _note_fallback(self, model: str, queries: int, error: DlmError, shard: int | None) -> None:
        runtime, now, known_now = self._links.runtime, self._clock(), self._table.known
        if known_now is not None and self._table.of(model) is None:
            # Whatever happened to the message, asking again would not help.
            error = other_model(known_now.model, model)
            self._table.note_gone(model, error)
        runtime.note_fallback(queries, error, shard, now)

    # -- to a server --------------------------------------------------------------------------

    def _next(self) -> None:
        message = self._lanes.next(self._links.runtime)
        if message is not None:
            try:
                self._begin(message)
            except Exception as exc:  # noqa: BLE001 - the other messages must be sent
                self._cut_off(message, exc)

    def _begin(self, message: Message) -> None:
        runtime, watch = message.runtime, message.runtime.watch
        runtime.under_way.add(message)
        self.inbox.check_by(message.deadline + LOST_S)
        runtime.retrying.earn()
        runtime.hedging.earn()
        if (
            watch is not None
            and message.shard in watch.gone
            and self._config.bigram_fallback
            and self._table.known is message.snapshot
        ):
            # Better to spend the time left on a fallback.
            self._fail(message, ShardDown("no heartbeat was answered"))
        else:
            self._send(message)

    def _send(
        self, message: Message, *, hedge: bool = False, among: Sequence[str] | None = None
    ) -> None:
        runtime, replicas = message.runtime, message.replicas
        try:
            address = runtime.choose(
                replicas if among is None else among,
                frozenset(message.tried),
                self._clock(),
                self._config.heartbeat_config,
            )
            if address is None:
                known = "; ".join(dedupe_faults(message.snapshot.topology.faults.items()))
                raise ShardDown(
                    "no known server holds it" + (f" ({known})" if known else "; start one")
                )
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self._failed(message, as_dlm_error(exc, message.shard))
            return
        attempt = Attempt(message, address, self._clock(), hedge=hedge)
        message.tried.append(address)
        message.out.append(attempt)
        runtime.outstanding[address] += len(message.groups.words)
        connection = runtime.connections.get(address)
        if connection is not None:
            self._write(attempt, connection)
        else:
            step = partial(self.inbox.step, self._write, attempt)
            self._links.reach(address, self.inbox.tell, step)
        if len(replicas) > 1 and not (hedge or attempt.replied):
            late_s = (message.soonest - attempt.since) / 2
            if self._config.hedging:
                late_s = min(late_s, self._late_after(message, attempt.since))
            attempt.late_at = attempt.since + late_s
            self.inbox.check_by(attempt.late_at)

    def _late_after(self, message: Message, now: float) -> float:
        usual = message.runtime.usual
        return late_after([usual[address] for address in message.replicas], now)

    def _write(self, attempt: Attempt, connection: Connection | Exception) -> None:
        message = attempt.message
        runtime, asks, queries = message.runtime, message.asks, len(message.groups.words)
        if message.ended or attempt.replied:  # while the connection was made
            self._replied(attempt, None, DlmError("withdrawn before it was sent"))
            return
        try:
            if isinstance(connection, Exception):
                raise connection
            attempt.since, attempt.since_s = self._clock(), time.perf_counter()
            attempt.queue_s = attempt.since_s - message.queued
            if not message.request:
                manifest = message.snapshot.topology.manifest
                encoded = asks.encode(manifest, message.shard, message.groups)
                message.request, message.checksum = encoded
                message.encode_s = time.perf_counter() - attempt.since_s
            attempt.sent = True
            repeats = 0 if message.place_of is None else len(message.place_of) - queries
            runtime.counts.sent(queries, len(message.request), repeats, message.shard)
            withdraw = asks.post(connection)(
                message.request,
                max(message.deadline - attempt.since, 0.0),
                partial(self.inbox.carry_out, self._replied, attempt),
                *(() if self._tracer is None else (self._trace(self._tracer, message),)),
            )
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self._replied(attempt, None, as_dlm_error(exc, message.shard))
        else:
            if not attempt.replied:
                attempt.withdraw = withdraw

    def _trace(self, tracer: Tracer, message: Message) -> Metadata:
        """The trace context of the first sampled call in the message: a server's span has one
        parent, so only one of the calls that share a message shows it."""
        spans = []
        for part in message.parts:
            part.call.messages += 1
            spans.append(part.call.span)
        sampled = next((span for span in spans if span is not None and span.sampled), None)
        return () if sampled is None else tracer.metadata(sampled)

    # -- and back -----------------------------------------------------------------------------

    def _replied(self, attempt: Attempt, data: bytes | None, error: DlmError | None) -> None:
        if attempt.replied:
            return
        came, now = time.perf_counter(), self._clock()
        message, address = attempt.message, attempt.address
        runtime, counts = message.runtime, message.runtime.counts
        attempt.replied, attempt.withdraw = True, None
        message.out.remove(attempt)
        runtime.outstanding[address] -= len(message.groups.words)
        too_late = message.ended
        if data is not None:
            counts.stats.bytes_received += len(data)
            if error is None:
                runtime.usual[address].note(now - attempt.since, now)
        if error is None and not too_late:
            try:
                answers = message.asks.decode(
                    data or b"",
                    message.snapshot.topology.manifest,
                    message.shard,
                    message.groups,
                    message.checksum,
                )
            except Exception as exc:  # noqa: BLE001 - another server may do better
                error = as_dlm_error(exc, message.shard)
                error.add_note(f"from {address}")
            else:
                self._succeed(message, attempt, answers, now)
        runtime.note(address, error, now)
        if attempt.sent:
            counts.stats.failed += error is not None and not too_late
            counts.message(
                CANCELLED if too_late else result_of(error),
                len(message.groups.words),
                len({id(part.call) for part in message.parts}) if len(message.parts) > 1 else 1,
                attempt.queue_s,
                message.encode_s,
                came - attempt.since_s - message.encode_s,
                time.perf_counter() - came if data is not None else 0.0,
            )
        if error is not None and not too_late:
            self._failed(message, error)
        self._settle(message)

    # -- what is done about a message that failed or is late ------------------------------------

    def _failed(self, message: Message, error: DlmError) -> None:
        runtime, now = message.runtime, self._clock()
        message.failure = error
        outcome = Failed(
            error,
            retries=runtime.retrying.saved,
            moving=runtime.is_moving(message.replicas, now),
            due=self._may_look(runtime),
            closed=self._links.closed,
        )
        self._do(after(outcome, message, now), message, error)

    def _may_look(self, runtime: Runtime) -> bool:
        return self._clock() - runtime.looked >= LOOK_AGAIN_S

    def _looked(self, message: Message, error: DlmError, stale: bool = False) -> None:
        fresh = self._table.of(message.snapshot.model)
        wanted = not (self._links.closed or all(part.call.done() for part in message.parts))
        same = fresh is not None and fresh.shard_set == message.snapshot.shard_set
        if fresh is not None and same and wanted and not (stale or message.ended):
            message.use(fresh)
        self._do(after(Looked(stale, same, wanted), message, self._clock()), message, error)

    def _late(self, attempt: Attempt) -> None:
        message, now = attempt.message, self._clock()
        runtime, watch = message.runtime, message.runtime.watch
        waited_s = now - attempt.since
        is_late = waited_s >= self._late_after(message, now) - EARLY_S  # not only for its callers
        if attempt.sent and not attempt.late and is_late:  # none stalls that is being connected
            attempt.late = True
            runtime.usual[attempt.address].late(waited_s, now)
        _, avoided, slow = runtime.unwell(message.replicas, now, self._config.heartbeat_config)
        outcome = Late(
            since=attempt.since,
            # A part whose time is over no longer waits.
            until=min([p.deadline for p in message.parts if p.deadline > now], default=now),
            hedges=runtime.hedging.saved if self._config.hedging else 0.0,
            avoided=avoided,
            slow=slow,
            all_slow=watch is not None and message.shard in watch.slow_shards,
            heard=lambda others: {one: runtime.heard(one, now) for one in others},
            closed=self._links.closed,
        )
        self._do(after(outcome, message, now), message)

    def _do(self, decision: Decision, message: Message, error: DlmError = _LATE) -> None:
        """Carries out a decision of `after`; `error` says why, if the message failed."""
        runtime = message.runtime
        match decision:
            case Elsewhere():  # it keeps its place in the lane
                if decision.limited:
                    (runtime.hedging if decision.hedge else runtime.retrying).spend()
                if decision.hedge:
                    runtime.counts.stats.hedges += 1
                else:
                    runtime.counts.stats.retries += 1
                message.taken_over = message.taken_over or decision.among is not None
                self._send(message, hedge=decision.hedge, among=decision.among)
            case NotYet():
                attempt = message.out[0]  # one server has it
                attempt.late_at = min(attempt.late_at, decision.at)
                self.inbox.check_by(attempt.late_at)
            case Later():
                message.tried, message.rounds = [], message.rounds + 1
                self.inbox.later(decision.pause_s, self._ask_again, message, error)
            case Move():
                self._move(message, error)
            case Look():
                if not self._help(self._look_for, message, error):
                    self._fail(message, error)
            case GiveUp():
                if decision.look:
                    runtime.looked = self._clock()
                    self._help(self._table.refresh_quietly, message.snapshot)
                self._fail(message, error)

    def _help(self, step: Callable[..., None], *args: Any) -> bool:
        try:
            self._links.runtime.helper.submit(step, *args)
        except RuntimeError:
            return False
        return True

    def _ask_again(self, message: Message, error: DlmError) -> None:
        if not message.ended and self._may_look(message.runtime):
            self._table.refresh_later()
        self._looked(message, error)

    def _look_for(self, message: Message, error: DlmError) -> None:
        stale = isinstance(error, StaleShardSet)
        try:
            if self._table.of(message.snapshot.model) is message.snapshot and (
                stale or self._may_look(message.runtime)
            ):
                # Half of the time left, so that the other half remains for asking again.
                allowed = max((message.deadline - self._clock()) / 2, 0.05)
                self._table.refresh(message.snapshot, min(allowed, self._config.connect_s))
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            if type(exc) is not type(error):  # otherwise it says the same
                error.add_note(f"looking for the servers again failed too: {exc}")
            self.tell(self._fail, message, error)
        else:
            self.tell(self._looked, message, error, stale)

    def _move(self, message: Message, error: DlmError) -> None:
        fresh = self._table.of(message.snapshot.model)
        for part in message.parts:
            try:
                if fresh is None:
                    found = self._table.snapshot().model
                    part.call.miss(part, other_model(found, part.call.model))
                elif part.reroutes >= MAX_REROUTES:
                    part.call.miss(part, naming_shard(error, message))
                elif not part.ended:
                    part.reroutes += 1
                    self._lanes.route(fresh, part)
            except Exception as exc:  # noqa: BLE001 - the other parts must end, too
                part.call.miss(part, as_dlm_error(exc, message.shard))
        self._fail(message, error, counts=False)

    # -- the end of a message -------------------------------------------------------------------

    def _succeed(self, message: Message, attempt: Attempt, answers: Any, now: float) -> None:
        runtime = message.runtime
        message.ended = True
        # Before its calls end: a waiting caller may read the counters at once.
        if attempt.hedge:
            runtime.counts.stats.hedges_won += 1
        begin, place_of = 0, message.place_of
        for part in message.parts:
            where = slice(begin, begin := begin + part.queries)
            part.call.answer(part, answers, where if place_of is None else place_of[where])
        for other in message.out:
            if other.withdraw is not None:
                other.withdraw()
        runtime.note_answer(now)
        if runtime.watch is not None:
            runtime.watch.count(failed=False)
        message.lane.usual_s = self._late_after(message, now)
        message.lane.done(message.number, self._clock(), answered=True)
        self._free(message)

    def _fail(self, message: Message, error: DlmError, *, counts: bool = True) -> None:
        if message.ended:
            return
        message.ended = True
        error = closed_error() if self._links.closed else naming_shard(error, message)
        if counts:
            self._lanes.count_failed(error, message.queued)
        for part in message.parts:
            part.call.miss(part, error)
        gone = isinstance(error, (ShardDown, AuthenticationError))
        message.lane.done(message.number, self._clock(), answered=False, gone=gone)
        self._free(message)

    def _cut_off(self, subject: Any, cause: Exception) -> None:
        """A step of a call, a message or an attempt raised: whatever it had done, that is over."""
        message = subject.message if isinstance(subject, Attempt) else subject
        if not isinstance(message, Message):
            self._give_up(subject, cause)
            return
        message.ended = True
        error = as_dlm_error(cause)
        for part in message.parts:
            part.call.miss(part, error)
        message.lane.drop(message.number)
        self._free(message)

    def _give_up(self, subject: Any, cause: Exception) -> None:
        if isinstance(subject, Call):
            error = as_dlm_error(cause)
            subject.give_up(error)
            subject.fail(error)  # unless the bigram fallback has ended it
        else:  # nobody waits for it
            log_failure(cause)

    def _free(self, message: Message) -> None:
        if message.lane.waiting:
            message.runtime.ready[message.place] = message.lane
        self._settle(message)

    def _settle(self, message: Message) -> None:
        if message.ended and not message.out:
            message.runtime.under_way.discard(message)

    def _check(self) -> float:
        """Finds what is to be sent, late or lost by now; returns the next time."""
        runtime, now = self._links.runtime, self._clock()
        next_at = self._lanes.check(runtime, now)
        for message in list(runtime.under_way):
            for attempt in list(message.out):
                if attempt.late_at <= now:
                    attempt.late_at = inf
                    self.inbox.step(self._late, attempt)
                next_at = min(next_at, attempt.late_at)
            lost_at = message.deadline + LOST_S
            if lost_at <= now:
                self.inbox.step(self._lose, message)
            else:
                next_at = min(next_at, lost_at)
        return next_at

    def _lose(self, message: Message) -> None:
        lost = DeadlineExceeded(
            f"shard {message.shard}: found no reply {LOST_S:g} s after the deadline; retry, and "
            "run dlm status"
        )
        for attempt in list(message.out):
            if attempt.withdraw is not None:
                attempt.withdraw()
            self._replied(attempt, None, lost)
        # One that waits for a look at the servers, or for a replica, ends with what it waits for.
        self._fail(message, message.failure or lost)
