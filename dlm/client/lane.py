"""A lane owns the queue of one shard, and the shard's messages at servers, and handles both.

All steps but `overload` run on the loop, one after another. `after` decides what to do about a
message, and only `Lane._do` does it. A message ends with the last of its parts, and frees its place
in the queue. If a step raises, `cut_off` ends the object that the step handled; a second end
changes nothing. This module has over 600 lines, since it covers a message's whole life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from dlm.client import router
from dlm.client.call import Part, Place, as_dlm_error, own_copy
from dlm.client.census import dedupe_faults
from dlm.client.cluster_file import Metadata
from dlm.client.metrics import CANCELLED, result_of
from dlm.client.router import Snapshot, allows_fallback
from dlm.client.rules import (
    EACH,
    PATIENCE,
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
    Queue,
    Usual,
    after,
    late_after,
)
from dlm.client.runtime import Runtime
from dlm.client.server import Connection, Withdraw, client_closed
from dlm.client.stream import NotSent
from dlm.client.table import other_model
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ShardDown,
    StaleShardSet,
)
from dlm.tracing import Tracer

NAMED = 8  # maximum number of servers listed in an error
MAX_REROUTES = 2  # maximum reroutes of a part: a table stale even then will not settle in time
# A message counts as lost this many seconds after its deadline: connections end messages at their
# deadlines, or a little later on a busy machine.
LOST_S = 1.0
EARLY_S = 0.001  # a timer may be early by this much
_LATE = DeadlineExceeded("no server has answered yet")


class Message:
    """Parts of calls that travel together, from the queue to their end.

    Attributes
        place_of each query's index in `groups`; None if no two parts share a context
        tried    addresses that the message was sent to since the last wait for servers
        rounds   how often the message waited after all servers were tried in vain
        out      attempts in progress: one, or two if the message was late
        taken_over  whether another server was asked after half of the message's time
    """

    __slots__ = (
        *(
            "checksum",
            "deadline",
            "encode_s",
            "ended",
            "failure",
            "groups",
            "lane",
            "number",
            "out",
        ),
        *("parts", "place_of", "queries", "queued", "replicas", "request", "rounds", "snapshot"),
        *("soonest", "taken_over", "tried"),
    )

    def __init__(self, lane: Lane, number: int, snapshot: Snapshot, parts: list[Part]) -> None:
        self.lane, self.number, self.parts = lane, number, parts
        # The latest of all deadlines: a caller with an earlier deadline stops waiting by itself.
        deadlines = [part.deadline for part in parts]
        self.deadline, self.soonest = max(deadlines), min(deadlines)
        self.queued = min([part.queued for part in parts])
        self.groups, self.place_of = router.gather([part.groups for part in parts])
        self.queries = len(self.groups.words)
        self.request, self.checksum = b"", 0
        self.encode_s = 0.0
        self.use(snapshot)
        self.tried: list[str] = []
        self.rounds = 0
        self.out: list[Attempt] = []
        self.failure: DlmError | None = None
        self.ended = self.taken_over = False

    def use(self, snapshot: Snapshot) -> None:
        """Makes the message use this snapshot of the lane's shard set."""
        self.snapshot = snapshot
        addresses = snapshot.topology.addresses
        self.replicas: Sequence[str] = addresses.get(self.lane.place.shard, ())

    @property
    def untried(self) -> set[str]:
        return set(self.replicas).difference(self.tried)

    def miss(self, error: DlmError) -> None:
        """Ends the message's parts without an answer from their shard."""
        for part in self.parts:
            part.call.miss(part, error)

    def cut_off(self, cause: Exception) -> None:
        self.lane.end(self, as_dlm_error(cause))

    def naming_shard(self, error: DlmError) -> DlmError:
        """Returns a `ShardDown` that names the shard, its servers, the fault, and what to do."""
        if type(error) is not ShardDown:
            return error  # e.g. the error of a closed client
        found, servers, place = str(error).rstrip("."), self.replicas, self.lane.place
        if servers:
            more = f" and {len(servers) - NAMED} more" if len(servers) > NAMED else ""
            named = ", ".join(servers[:NAMED])
            found = f"none of the shard's servers ({named}{more}) answers: {found}"
        said = own_copy(error)
        said.args = (
            f"shard {place.shard} of shard set {place.shard_set}: {found}. Run `dlm status` to see "
            "the state of its servers, and start one",
        )
        return said


class Attempt:
    """A message at a server, or on its way there. `hedge`: the server is the message's second.
    `since`: when the message was sent or, until there is a connection, when the attempt began.
    `late_at`: when to decide whether to ask another server as well; inf for never."""

    __slots__ = (
        *("address", "hedge", "late", "late_at", "message", "replied", "sent", "since", "since_s"),
        "withdraw",
    )

    def __init__(self, message: Message, address: str, since: float, *, hedge: bool) -> None:
        self.message, self.address, self.since, self.hedge = message, address, since, hedge
        self.since_s = 0.0
        self.late_at = inf
        self.sent = self.replied = self.late = False
        self.withdraw: Withdraw | None = None

    def cut_off(self, cause: Exception) -> None:
        self.message.cut_off(cause)


class Lane:
    """Queues and sends messages of one kind to one shard of a shard set."""

    def __init__(self, client: Runtime, place: Place, max_queries: int) -> None:
        self.client, self.place = client, place
        every = reversed(client.lanes.items())  # newest first: lanes of this set come early
        peers = (s for at, s in every if at._replace(shard=place.shard) == place)
        self.peers: list[Lane] = next((peer.peers for peer in peers), [])  # the lanes of its set
        round_ = self.peers[0].queue.round if self.peers else None
        self.peers.append(self)
        self.queue: Queue = Queue(client.config.window, max_queries, late_after((), 0.0), round_)
        self._answers = 0
        self.messages: set[Message] = set()  # messages that have not ended or are at a server

    def cut_off(self, cause: Exception) -> None:
        self._miss_all(self.queue.clear(), as_dlm_error(cause, self.place.shard))

    # -- its queue ----------------------------------------------------------------------------

    def overload(self, queries: int, deadline: float, now: float) -> DlmError | None:
        """In any thread: returns an error if the shard is too busy for `queries` more queries."""
        queue, left_s = self.queue, deadline - now
        if not queue.refuses(queries, deadline, now):
            return None
        if left_s <= 0.0:
            return self._not_sent()
        asked_s = queue.pace.seconds(queue.ahead + queries)
        error = Overloaded(
            f"shard {self.place.shard} is overloaded: {queue.ahead} queries are ahead of this "
            f"call, in {len(queue.in_flight)} messages in flight and {len(queue.waiting)} waiting "
            f"parts of calls. With this call's {queries} queries, the work takes {asked_s:.3g} s "
            f"at the current pace; a call with {left_s:.3g} s left waits for at most "
            f"{PATIENCE * left_s:.3g} s of work. Send smaller calls, or retry later"
        )
        error.retry_after_s = queue.pace.seconds(queue.ahead) or None
        return error

    def submit(self, part: Part, now: float) -> None:
        if part.deadline <= now:
            part.call.miss(part, self._not_sent())
            return
        self.look(now, self.queue.submit(part))

    def look(self, now: float, due: float) -> None:
        # Checks the queue now, or when it is due.
        if due <= now:
            self.client.ready[self.place] = self
        else:
            self.client.check_by(due)

    def make_room(self, now: float) -> None:
        """Ends the parts that have waited past their deadline."""
        for part in self.queue.expire(now):
            self._count_failed(DeadlineExceeded(), part.queued)
            part.call.miss(part, self._not_sent())

    def _not_sent(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"shard {self.place.shard}: the deadline passed before the message was sent; retry "
            "later, or raise the deadline"
        )

    def next(self) -> None:
        """Sends a message, if one may be sent now."""
        now, message = self.client.clock(), None
        self.make_room(now)
        taken = self.queue.take(now)
        if taken is None:
            self.look(now, self.queue.due())
            return
        number, parts = taken
        try:
            snapshot = self.client.table.of(parts[0].call.model)
            wanted = self._wanted(snapshot, parts)
            if wanted and snapshot is not None:
                message = Message(self, number, snapshot, wanted)
        except Exception as exc:  # noqa: BLE001 - the place in the queue must not be lost
            self._miss_all(parts, as_dlm_error(exc, self.place.shard))
        if message is None:
            self.queue.drop(number)
        self.go_on()
        if message is not None:
            self.client.attempt(self._begin, message)

    def _wanted(self, snapshot: Snapshot | None, parts: list[Part]) -> list[Part]:
        wanted = []
        for part in parts:
            if part.ended or part.call.done():
                continue  # the caller gave up, or another part of the call failed
            # Ids of one model must never reach the servers of another model, whose answers would
            # look plausible.
            if snapshot is None:
                found = self.client.table.snapshot().model
                part.call.miss(part, other_model(found, part.call.model))
            elif self.place.shard_set != snapshot.shard_set:
                self.client.route(snapshot, part)  # the table changed meanwhile
            else:
                wanted.append(part)
        return wanted

    def _miss_all(self, parts: list[Part], error: DlmError) -> None:
        for part in parts:
            part.call.miss(part, error)

    # -- to a server --------------------------------------------------------------------------

    def _begin(self, message: Message) -> None:
        client, watch = self.client, self.client.watch
        self.messages.add(message)
        client.check_by(message.deadline + LOST_S)
        client.retrying.earn()
        client.hedging.earn()
        if (
            watch is not None
            and self.place.shard in watch.gone
            and client.config.bigram_fallback
            and client.table.known is message.snapshot
        ):
            # The remaining time is better spent on a fallback than on this shard.
            self._fail(message, ShardDown("no heartbeat was answered"))
        else:
            self._send(message)

    def _send(
        self, message: Message, *, hedge: bool = False, among: Sequence[str] | None = None
    ) -> None:
        client, replicas, now = self.client, message.replicas, self.client.clock()
        try:
            known = replicas if among is None else among
            address = client.choose(known, frozenset(message.tried), now)
            if address is None:
                faults = "; ".join(dedupe_faults(message.snapshot.topology.faults.items()))
                raise ShardDown(
                    "no known server has this shard" + (f" ({faults})" if faults else "; start one")
                )
        except Exception as exc:  # noqa: BLE001 - the place in the queue must not be lost
            self._failed(message, as_dlm_error(exc, self.place.shard))
            return
        attempt = Attempt(message, address, now, hedge=hedge)
        message.tried.append(address)
        message.out.append(attempt)
        client.outstanding[address] += message.queries
        connection = client.connections.get(address)
        if connection is not None:
            self._write(attempt, connection)
        else:
            step = partial(client.step, self._write, attempt)
            client.reach(address, step)
        if len(replicas) > 1 and not (hedge or attempt.replied):
            late_s = (message.soonest - attempt.since) / 2
            if client.config.hedging:
                late_s = min(late_s, self._late_after(message, attempt.since))
            attempt.late_at = attempt.since + late_s
            client.check_by(attempt.late_at)

    def _late_after(self, message: Message, now: float) -> float:
        usual = self.client.usual
        return late_after([usual[address] for address in message.replicas], now)

    def _write(self, attempt: Attempt, connection: Connection | Exception) -> None:
        message, client, place = attempt.message, self.client, self.place
        if message.ended or attempt.replied:  # both can happen while the connection is made
            self._replied(attempt, None, NotSent())
            return
        try:
            if isinstance(connection, Exception):
                raise connection
            attempt.since, attempt.since_s = client.clock(), time.perf_counter()
            asks = message.parts[0].call.asks
            if not message.request:
                manifest = message.snapshot.topology.manifest
                encoded = asks.encode(manifest, place.shard, message.groups)
                message.request, message.checksum = encoded
                message.encode_s = time.perf_counter() - attempt.since_s
            attempt.sent = True
            withdraw = asks.send(
                connection,
                message.request,
                max(message.deadline - attempt.since, 0.0),
                partial(client.carry_out, self._replied, attempt),
                *(() if client.tracer is None else (self._trace(client.tracer, message),)),
            )
        except Exception as exc:  # noqa: BLE001 - the place in the queue must not be lost
            self._replied(attempt, None, as_dlm_error(exc, place.shard))
        else:
            if not attempt.replied:
                attempt.withdraw = withdraw

    def _trace(self, tracer: Tracer, message: Message) -> Metadata:
        """Returns the trace context of the message's first sampled call: a span has one parent."""
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
        came, now, answers = time.perf_counter(), self.client.clock(), None
        message, address = attempt.message, attempt.address
        attempt.replied, attempt.withdraw = True, None
        message.out.remove(attempt)
        self.client.outstanding[address] -= message.queries
        too_late = message.ended
        if data is not None and error is None:
            self._note_time(message, self.client.usual[address], now - attempt.since, now)
        if error is None and not too_late:
            try:
                answers = message.parts[0].call.asks.decode(
                    data or b"",
                    message.snapshot.topology.manifest,
                    self.place.shard,
                    message.groups,
                    message.checksum,
                )
            except Exception as exc:  # noqa: BLE001 - another server may do better
                error = as_dlm_error(exc, self.place.shard)
                error.add_note(f"from {address}")
        if attempt.sent and not isinstance(error, NotSent):
            parts, place_of = message.parts, message.place_of
            self.client.counts.message(
                CANCELLED if too_late else result_of(error),
                self.place.shard,
                message.queries,
                0 if place_of is None else len(place_of) - message.queries,
                len({id(part.call) for part in parts}) if len(parts) > 1 else 1,
                len(message.request),
                len(data or b""),
                (
                    attempt.since_s - message.queued,
                    message.encode_s,
                    came - attempt.since_s - message.encode_s,
                    time.perf_counter() - came if data is not None else 0.0,
                ),
            )
        if error is None and not too_late:
            self._succeed(message, attempt, answers, now)
        self.client.note(address, error, now)
        if error is not None and not too_late:
            self._failed(message, error)
        self._settle(message)

    def _note_time(self, message: Message, usual: Usual, took_s: float, now: float) -> None:
        usual.note(took_s, now)
        self._answers += 1
        if self._answers % EACH == 0:
            self.queue.usual_s = self._late_after(message, now)
            self.queue.holds_s = min(2 * usual.median_s, self.queue.usual_s)

    # -- what is done about a message that failed or is late ------------------------------------

    def _failed(self, message: Message, error: DlmError) -> None:
        client, now = self.client, self.client.clock()
        message.failure = error
        outcome = Failed(
            error,
            retries=client.retrying.saved,
            moving=client.is_moving(message.replicas, now),
            due=client.table.may_look(),
            closed=client.closed,
        )
        self._do(after(outcome, message, now), message, error)

    def looked(self, message: Message, error: DlmError, stale: bool = False) -> None:
        """Continues once the servers have said again what they hold, or the message has waited."""
        client = self.client
        fresh = client.table.of(message.snapshot.model)
        wanted = not (client.closed or all(part.call.done() for part in message.parts))
        same = fresh is not None and fresh.shard_set == message.snapshot.shard_set
        if fresh is not None and same and wanted and not (stale or message.ended):
            message.use(fresh)
        self._do(after(Looked(stale, same, wanted), message, client.clock()), message, error)

    def _late(self, attempt: Attempt) -> None:
        message, client, now = attempt.message, self.client, self.client.clock()
        watch, waited_s = client.watch, now - attempt.since
        # Unless `is_late`, this runs because half of the time is over. Slow connecting is no stall.
        is_late = waited_s >= self._late_after(message, now) - EARLY_S
        if attempt.sent and not attempt.late and is_late:
            attempt.late = True
            client.usual[attempt.address].late(waited_s, now)
        _, avoided, slow = client.unwell(message.replicas, now)
        outcome = Late(
            since=attempt.since,
            # A part whose time is over no longer waits.
            until=min([p.deadline for p in message.parts if p.deadline > now], default=now),
            hedges=client.hedging.saved if client.config.hedging else 0.0,
            avoided=avoided,
            slow=slow,
            all_slow=watch is not None and self.place.shard in watch.slow_shards,
            heard=lambda others: {one: client.heard(one, now) for one in others},
            closed=client.closed,
        )
        self._do(after(outcome, message, now), message)

    def _do(self, decision: Decision, message: Message, error: DlmError = _LATE) -> None:
        """Carries out a decision of `after`; `error` says why, if the message failed."""
        client, stats = self.client, self.client.counts.stats
        match decision:
            case Elsewhere():  # the message keeps its place in the queue
                if decision.limited:
                    (client.hedging if decision.hedge else client.retrying).spend()
                if decision.hedge:
                    stats.hedges += 1
                else:
                    stats.retries += 1
                message.taken_over = message.taken_over or decision.among is not None
                self._send(message, hedge=decision.hedge, among=decision.among)
            case NotYet():
                attempt = message.out[0]  # the only server that has the message
                attempt.late_at = min(attempt.late_at, decision.at)
                client.check_by(attempt.late_at)
            case Later():
                message.tried, message.rounds = [], message.rounds + 1
                client.later(decision.pause_s, self._ask_again, message, error)
            case Move():
                self._move(message, error)
            case Look():
                if not client.help(self._look_for, message, error):
                    self._fail(message, error)
            case GiveUp():
                if decision.look:
                    client.table.look_quietly(message.snapshot)
                self._fail(message, error)

    def _ask_again(self, message: Message, error: DlmError) -> None:
        table = self.client.table
        if not message.ended and table.may_look():
            table.refresh_later()
        self.looked(message, error)

    def _look_for(self, message: Message, error: DlmError) -> None:
        """Looks for the servers, on a helper thread."""
        client, stale = self.client, isinstance(error, StaleShardSet)
        try:
            # The search gets half of the time left; the other half remains for asking again.
            left_s = max((message.deadline - client.clock()) / 2, 0.05)
            client.table.look(message.snapshot, min(left_s, client.config.connect_s), stale)
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            if type(exc) is not type(error):  # otherwise the note would say nothing new
                error.add_note(f"a new attempt to reach the servers failed too: {exc}")
            client.tell(self._fail, message, error)
        else:
            client.tell(self.looked, message, error, stale)

    def _move(self, message: Message, error: DlmError) -> None:
        table = self.client.table
        fresh = table.of(message.snapshot.model)
        for part in message.parts:
            try:
                if fresh is None:
                    found = table.snapshot().model
                    part.call.miss(part, other_model(found, part.call.model))
                elif part.reroutes >= MAX_REROUTES:
                    part.call.miss(part, message.naming_shard(error))
                elif not part.ended:
                    part.reroutes += 1
                    self.client.route(fresh, part)
            except Exception as exc:  # noqa: BLE001 - the other parts must end, too
                part.call.miss(part, as_dlm_error(exc, self.place.shard))
        self._fail(message, error, counts=False)

    # -- the end of a message -------------------------------------------------------------------

    def _succeed(self, message: Message, attempt: Attempt, answers: Any, now: float) -> None:
        client, queue = self.client, self.queue
        message.ended = True
        # Count before the calls end: a waiting caller may read the counters at once.
        if attempt.hedge:
            client.counts.stats.hedges_won += 1
        begin, place_of = 0, message.place_of
        for part in message.parts:
            where = slice(begin, begin := begin + part.queries)
            part.call.answer(part, answers, where if place_of is None else place_of[where])
        queue.round.answered(sum([part.call.done() for part in message.parts]), now)
        for other in message.out:
            if other.withdraw is not None:
                other.withdraw()
        client.note_answer(now)
        if client.watch is not None:
            client.watch.count(failed=False)
        queue.done(message.number, client.clock(), answered=True)
        self.go_on()
        self._settle(message)

    def _fail(self, message: Message, error: DlmError, *, counts: bool = True) -> None:
        if message.ended:
            return
        error = client_closed() if self.client.closed else message.naming_shard(error)
        if counts:
            self._count_failed(error, message.queued)
        gone = isinstance(error, (ShardDown, AuthenticationError))
        self.queue.done(message.number, self.client.clock(), answered=False, gone=gone)
        self.end(message, error)

    def end(self, message: Message, error: DlmError) -> None:
        """Ends a message without answers: ends its parts, and frees its place in the queue."""
        message.ended = True
        message.miss(error)
        self.queue.drop(message.number)
        self.go_on()
        self._settle(message)

    def _count_failed(self, error: DlmError, queued: float) -> None:
        """Reports an unanswered message to the cascade, unless it had too little time."""
        watch, fair_s = self.client.watch, self.client.config.failover_config.fair_s
        if watch is None:
            return
        had_s = time.perf_counter() - queued
        if not isinstance(error, DeadlineExceeded) or had_s >= fair_s:
            watch.count(failed=allows_fallback(error))

    def go_on(self) -> None:
        """Checks the queues: a place may be free now, and the round may be over."""
        now = self.client.clock()
        for lane in (self,) if self.queue.round.under_way else self.peers:
            if lane.queue.waiting:
                lane.look(now, lane.queue.due())

    def _settle(self, message: Message) -> None:
        if message.ended and not message.out:
            self.messages.discard(message)

    # -- timers -------------------------------------------------------------------------------

    def check(self, now: float, step: Callable[..., None]) -> float:
        """Handles a due queue and, by `step`, late or lost messages; returns when to check next."""
        next_at = self.queue.due()
        if next_at <= now:
            self.client.ready[self.place] = self
            next_at = inf
        for message in list(self.messages):
            for attempt in list(message.out):
                if attempt.late_at <= now:
                    attempt.late_at = inf
                    step(self._late, attempt)
                next_at = min(next_at, attempt.late_at)
            lost_at = message.deadline + LOST_S
            if lost_at <= now:
                step(self._lose, message)
            else:
                next_at = min(next_at, lost_at)
        return next_at

    def _lose(self, message: Message) -> None:
        lost = DeadlineExceeded(
            f"shard {self.place.shard}: no reply arrived within {LOST_S:g} s after the deadline; "
            "retry, and run dlm status"
        )
        for attempt in list(message.out):
            if attempt.withdraw is not None:
                attempt.withdraw()
            self._replied(attempt, None, lost)
        # A message that waits for news of the servers, or for a replica, keeps its last error.
        self._fail(message, message.failure or lost)
