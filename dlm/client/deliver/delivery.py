"""The parts of calls on their way: into the lane of their shard, out in a message, and back.

All of it runs on the loop, one step after another: callers and whoever else has something to say
leave it in the inbox. So no step finds a message, a lane or a server half changed. Here are the
steps; what they decide is in `lane`, `replicas` and `usual`.

One file past 500 lines: a message may end at any of these steps, and must end exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from dlm.client.api.config import ClientConfig
from dlm.client.api.metrics import CANCELLED, result_of
from dlm.client.deliver import fork, loop
from dlm.client.deliver.asks import SCORES, Asks
from dlm.client.deliver.call import Call, Part
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.message import Attempt, Message
from dlm.client.deliver.pace import PATIENCE, late_after
from dlm.client.deliver.replicas import choose, may_hedge
from dlm.client.deliver.runtime import LOOK_AGAIN_S, Links, Place, Runtime, Snapshot, closed_error
from dlm.client.deliver.security import Metadata
from dlm.client.deliver.transport import Connection
from dlm.client.health.cascade import MOVING_S
from dlm.client.health.membership import behind
from dlm.client.plan import router
from dlm.client.plan.partial import Outage, allows_fallback
from dlm.client.plan.table import Table
from dlm.client.plan.topology import dedupe_faults
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.logs import EventLog
from dlm.tracing import Tracer
from dlm.wire.status import MOVING_REASONS

log = EventLog(__name__)

MAX_REROUTES = 2  # a table that is stale twice in one call is not going to settle within it
# Between two rounds of a message that waits for a replica which is about to be there.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
# A message ends so long after its deadline where nobody told that it did, and is looked for as
# often: connections end what they took by its deadline, give or take what a busy machine needs.
LOST_S = 1.0
AVOID_S = 1.0  # for so long, a server where a message found nobody is asked after all others


class Delivery:
    """Sends what is asked of shards, and ends it.

    Args
        table   what says who has which shard
        tracer  None where calls are no spans
        home    where it runs: the loop of the process
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
        self._tracer = tracer
        self._home = home

    # -- in any thread ------------------------------------------------------------------------

    def post(self, call: Call) -> None:
        """Has a call's parts asked; its future ends."""
        self.tell(self._take, call)

    def overload(
        self, snapshot: Snapshot, queries: int, deadline: float, asks: Asks = SCORES
    ) -> Overloaded | None:
        """What a call is told at once where a shard has too much to do already, before any work:
        whoever refuses many calls must have time left for those it answers.

        Args
            queries  of each shard of `snapshot`
        """
        lanes, now = self._links.runtime.lanes, self._clock()
        for shard in range(snapshot.topology.manifest.shards):
            lane = lanes.get(Place(snapshot.shard_set, shard, asks.name))
            if lane is not None and lane.refuses(queries, deadline, now):
                return _too_much(shard, lane, queries, deadline - now)
        return None

    def count_partial(self, call: Call, queries: int, error: DlmError, shard: int | None) -> None:
        """So many were answered by the partial model; told once, when that begins, and once more
        where it turns out that it will not end.

        Args
            shard  that did not answer
        """
        runtime, now = self._links.runtime, self._clock()
        known_now = self._table.known
        if known_now is not None and self._table.of(call.model) is None:
            # Whatever became of the message: to ask again would not help.
            error = other_model(known_now.model, call.model)
            self._table.note_gone(call.model, error)
        kind = type(error).__name__
        runtime.counts.fell_back(queries)
        with runtime.lock:
            known = runtime.outage
            lasts = known is not None and known.lasts(error)
            if known is None:
                runtime.outage = Outage(now, now, queries, kind)
            else:
                extended = known.extended(queries, now)
                runtime.outage = extended._replace(error=kind) if lasts else extended
        if known is None:
            log.warning("client.partial.began", extra={"shard": shard, "error": kind})
        elif lasts:
            fields = {"shard": shard, "before": known.error, "error": kind}
            log.warning("client.partial.changed", extra=fields)

    def tell(self, step: Callable[..., None], *args: Any) -> None:
        """Has the loop carry out a step; from any thread."""
        runtime = self._links.runtime
        runtime.inbox.append((step, args))
        now = time.monotonic()
        # Whoever was to wake the loop may have been cut off by a signal's handler: then the next
        # does, in a moment.
        if now >= runtime.woken_until:
            runtime.woken_until = now + loop.WAKE_S
            self._wake()

    def _wake(self) -> None:
        if self._home.post(self._open_inbox):
            return
        try:
            fork.wake(self)
        except RuntimeError as exc:  # no thread can be started
            self.give_up(exc)

    # -- across forks -------------------------------------------------------------------------

    def suspend(self) -> None:
        """See `fork.Streams`: connections keep what is in flight, and the inbox what has come."""

    def resume(self) -> None:
        """See `fork.Streams`."""
        self._home.post(self._open_inbox)  # else the loop ends already for another fork

    def give_up(self, cause: Exception) -> None:
        """See `fork.Streams`: calls end; the rest waits for the next loop."""
        runtime = self._links.runtime
        runtime.woken_until = 0.0  # first: what comes from here on wakes the loop again
        inbox = runtime.inbox
        for _ in range(len(inbox)):
            try:
                step, args = inbox.popleft()
            except IndexError:  # another thread was quicker
                return
            if step == self._take:
                args[0].give_up(_as_dlm_error(cause))
            else:
                inbox.append((step, args))

    # -- on the loop --------------------------------------------------------------------------

    def keep(self, step: Callable[[], None]) -> None:
        """A step after which timers run: the loop is started again after a fork."""
        fork.add(self)
        step()

    def _open_inbox(self) -> None:
        """Carries out what came, and then sends what can be sent: so what came at once leaves
        together."""
        runtime = self._links.runtime
        runtime.woken_until = 0.0  # first, as above
        inbox, was = runtime.inbox, runtime.sending
        runtime.sending = True
        try:
            while inbox:
                step, args = inbox.popleft()
                self._step(step, *args)
        finally:
            runtime.sending = was
        self._send_ready(runtime)

    def _step(self, step: Callable[..., None], *args: Any) -> None:
        """A step, whose failure harms no other."""
        try:
            step(*args)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error, subject = _as_dlm_error(exc), args[0] if args else None
            if isinstance(subject, Call):
                subject.give_up(error)
                subject.fail(error)  # unless the partial model has ended it
            elif isinstance(subject, Attempt):
                self._abort(subject.message, error)
            elif isinstance(subject, Message):
                self._abort(subject, error)

    def _take(self, call: Call) -> None:
        """The parts of a call go to their lanes, or none does."""
        if self._links.closed:
            call.fail(closed_error())
            return
        parts = call.parts  # a caller whose time is up lets go of them
        if not parts or call.done():
            return
        runtime, now = self._links.runtime, self._clock()
        lanes = [self._lane(runtime, part) for part in parts]
        refused: dict[int, Overloaded] = {}
        if not call.let_in:
            asked: dict[int, int] = {}
            for part in parts:
                asked[part.shard] = asked.get(part.shard, 0) + part.queries
            for part, lane in zip(parts, lanes, strict=True):
                self._make_room(lane, now)  # before more is let in
                queries = asked.pop(part.shard, None)
                if queries is not None and lane.refuses(queries, part.deadline, now):
                    late = part.deadline - now
                    refused[part.shard] = _too_much(part.shard, lane, queries, late)
            if refused and not self._config.partial:
                # What one shard answers is of no use where another refuses.
                call.fail(next(iter(refused.values())))
                return
        for part, lane in zip(parts, lanes, strict=True):
            if part.shard in refused:
                call.miss(part, refused[part.shard])
            else:
                self._submit(runtime, part, lane, now)

    def _submit(self, runtime: Runtime, part: Part, lane: Lane[Part], now: float) -> None:
        if part.deadline <= now:
            self._expired(part)
            return
        lane.submit(part)
        if lane.wants_a_look(now):
            runtime.ready[Place(part.shard_set, part.shard, part.call.asks.name)] = lane

    def _lane(self, runtime: Runtime, part: Part) -> Lane[Part]:
        place = Place(part.shard_set, part.shard, part.call.asks.name)
        lane = runtime.lanes.get(place)
        if lane is None:
            snapshot = self._table.of_set(part.shard_set) or self._table.snapshot()
            lane = Lane(self._config.window, self.max_queries(snapshot), late_after((), 0.0))
            runtime.lanes[place] = lane
            fork.add(self)  # the loop that follows after a fork looks into the inbox
        return lane

    def max_queries(self, snapshot: Snapshot) -> int:
        """Queries of a message to the servers of a shard set."""
        return min(self._config.max_queries, snapshot.topology.max_queries)

    def _send_ready(self, runtime: Runtime) -> None:
        """Sends what lanes have ready. What follows at once (a message that fails while it is sent)
        is found by the outermost of these, so that it takes no stack."""
        if runtime.sending:
            return
        runtime.sending = True
        try:
            while runtime.ready:
                place, lane = runtime.ready.popitem()
                try:
                    self._advance(runtime, place, lane)
                except Exception as exc:  # noqa: BLE001 - the other lanes must go on
                    self._abandon(lane, _as_dlm_error(exc, place.shard))
        finally:
            runtime.sending = False

    def _advance(self, runtime: Runtime, place: Place, lane: Lane[Part]) -> None:
        now = self._clock()
        self._make_room(lane, now)
        taken = lane.take(now)
        if taken is not None:
            if lane.waiting:
                runtime.ready[place] = lane
            try:
                self._send(runtime, place, lane, *taken)
            except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
                error = _as_dlm_error(exc, place.shard)
                for part in taken[1]:
                    part.call.miss(part, error)
                self._over(runtime, place, lane, taken[0], answered=False)
            return
        self._set_alarm(runtime, place, lane, now)

    def _make_room(self, lane: Lane[Part], now: float) -> None:
        """Ends the parts whose deadline passed while they waited."""
        for part in lane.expire(now):
            self._count_failed(DeadlineExceeded(), part.queued)
            self._expired(part)

    def _set_alarm(self, runtime: Runtime, place: Place, lane: Lane[Part], now: float) -> None:
        at = lane.ready_at()
        if at < lane.alarm:
            lane.alarm = at
            self._home.later(at - now, self._look, runtime, place, lane, at)

    def _look(self, runtime: Runtime, place: Place, lane: Lane[Part], at: float) -> None:
        """A message may be late by now; mostly another has left since the alarm was set."""
        if lane.alarm != at:
            return  # an earlier one was set after this
        lane.alarm = inf
        now = self._clock()
        if lane.earliest <= now or lane.ready_at() <= now:
            runtime.ready[place] = lane
            self._send_ready(runtime)
        else:
            self._set_alarm(runtime, place, lane, now)

    def _abandon(self, lane: Lane[Part], error: DlmError) -> None:
        """What waits in a lane that could not be looked at ends."""
        for part in lane.clear():
            part.call.miss(part, error)

    def _expired(self, part: Part) -> None:
        late = DeadlineExceeded(f"shard {part.shard}: the deadline passed before the message left")
        part.call.miss(part, late)

    def _send(
        self, runtime: Runtime, place: Place, lane: Lane[Part], number: int, parts: list[Part]
    ) -> None:
        """One message for all of `parts` that still want it; all of one shard set, so of one
        model."""
        snapshot = self._table.of(parts[0].call.model)
        wanted = []
        for part in parts:
            if part.ended or part.call.done():
                continue  # its caller gave up, or another part of it failed
            # Ids of one model must never reach the servers of another, which would answer
            # plausibly.
            if snapshot is None:
                found = self._table.snapshot().model
                part.call.miss(part, other_model(found, part.call.model))
            elif place.shard_set != snapshot.shard_set:
                self._route(runtime, snapshot, part)  # the table changed meanwhile
            else:
                wanted.append(part)
        if not wanted or snapshot is None:
            self._over(runtime, place, lane, number, answered=False)
            return
        message = Message(runtime, place, lane, number, snapshot, wanted)
        runtime.under_way.add(message)
        self._watch(runtime)
        runtime.budget.earn()
        runtime.hedging.earn()
        watch = runtime.watch
        watched = watch is not None and self._table.known is snapshot
        if watch is not None and watched and place.shard in watch.gone and self._config.partial:
            # Their deadlines are better spent on what comes next.
            self._end(message, ShardDown(f"no server of shard {place.shard} answers heartbeats"))
            return
        self._transmit(message)

    def _over(
        self,
        runtime: Runtime,
        place: Place,
        lane: Lane[Part],
        number: int,
        *,
        answered: bool,
        gone: bool = False,
    ) -> None:
        """A message has ended; what gathered meanwhile may leave."""
        lane.done(number, self._clock(), answered=answered, gone=gone)
        if lane.waiting:
            runtime.ready[place] = lane
        self._send_ready(runtime)  # also what moved to other lanes

    def _route(self, runtime: Runtime, snapshot: Snapshot, part: Part) -> None:
        """Queues a part where it belongs by the table of `snapshot`."""
        manifest, now = snapshot.topology.manifest, self._clock()
        limit = self.max_queries(snapshot)
        pieces = router.route(part.groups, manifest.slots, manifest.shards, limit)
        for one in part.call.replace(part, pieces, snapshot.shard_set):
            try:
                self._submit(runtime, one, self._lane(runtime, one), now)
            except Exception as exc:  # noqa: BLE001 - the others must be asked, and this one ends
                one.call.miss(one, _as_dlm_error(exc, one.shard))

    # -- to a server --------------------------------------------------------------------------

    def _transmit(self, message: Message, *, hedge: bool = False) -> None:
        """Sends a message to one of the servers of its shard; what goes wrong settles it."""
        try:
            address = self._choose(message)
            message.tried.append(address)
            connection = message.runtime.connections.get(address)
            if connection is None:
                self._connect(message, address, hedge)
            else:
                self._write(message, address, connection, hedge)
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self._failed(message, _as_dlm_error(exc, message.shard))

    def _choose(self, message: Message) -> str:
        runtime, snapshot, now = message.runtime, message.snapshot, self._clock()
        replicas = snapshot.topology.addresses.get(message.shard, ())
        if len(replicas) == 1:
            return replicas[0]
        missed = frozenset(a for a, at in runtime.missed.items() if now - at < AVOID_S)
        avoided, slow = missed, self._slow(runtime, replicas, now)
        if runtime.watch is not None:
            avoided, slow = avoided | runtime.watch.avoided, slow | runtime.watch.slow
        address = choose(
            replicas,
            runtime.outstanding,
            avoided,
            runtime.chance,
            slow,
            missed=missed,
            tried=frozenset(message.tried),
        )
        if address is None:
            known = "; ".join(dedupe_faults(snapshot.topology.faults.items()))
            raise ShardDown(
                f"no server is known to hold shard {message.shard} of shard set "
                f"{snapshot.shard_set}" + (f" ({known})" if known else "")
            )
        return address

    def _slow(self, runtime: Runtime, replicas: Any, now: float) -> frozenset[str]:
        """Of the servers of a shard, those whose answers lately took far longer than another's."""
        medians = {a: runtime.usual[a].median_s for a in replicas if runtime.usual[a].known(now)}
        least = min(medians.values(), default=0.0)
        beating = self._config.beating
        return frozenset(a for a, median in medians.items() if behind(median, least, beating))

    def _connect(self, message: Message, address: str, hedge: bool) -> None:
        """Sends a message once there is a connection."""

        def reached(made: Connection | Exception) -> None:
            if isinstance(made, Exception):
                self._step(self._failed, message, _as_dlm_error(made, message.shard))
            else:
                self._step(self._write, message, address, made, hedge)

        self._links.reach(address, self.tell, reached)

    def _write(self, message: Message, address: str, connection: Connection, hedge: bool) -> None:
        if message.ended:
            return  # while the connection was made
        runtime, queries = message.runtime, len(message.groups.words)
        attempt = Attempt(message, address, self._clock(), hedge=hedge)
        if not message.request:
            manifest = message.snapshot.topology.manifest
            message.request, message.checksum = message.asks.encode(
                manifest, message.shard, message.groups
            )
            message.encode_s = time.perf_counter() - attempt.since_s
        stats = runtime.counts.stats
        stats.messages += 1
        stats.sent_queries += queries
        if message.place_of is not None:
            runtime.counts.gathered(len(message.place_of) - queries)
        stats.bytes_sent += len(message.request)
        runtime.outstanding[address] += queries
        message.out.append(attempt)
        timeout_s = max(message.deadline - attempt.since, 0.0)
        try:
            traced = () if self._tracer is None else (self._trace(message),)
            attempt.withdraw = message.asks.post(connection)(
                message.request, timeout_s, partial(self._reply, attempt), *traced
            )
        except Exception as exc:  # noqa: BLE001 - as a reply, which ends what was counted above
            self._reply(attempt, None, _as_dlm_error(exc, message.shard))
            return
        if attempt.replied:
            attempt.withdraw = None
        if self._config.hedging and not hedge and not message.ended:
            replicas = message.snapshot.topology.addresses.get(message.shard, ())
            if len(replicas) > 1:
                late_s = late_after((runtime.usual[a] for a in replicas), attempt.since)
                if attempt.since + late_s < message.deadline:
                    self._home.later(late_s, self._hedge, attempt)

    def _trace(self, message: Message) -> Metadata:
        """The context of the first call in the message that is sampled: a server's span has one
        parent, so of calls that share a message one shows it."""
        spans = []
        for part in message.parts:
            part.call.messages += 1
            spans.append(part.call.span)
        sampled = next((span for span in spans if span is not None and span.sampled), None)
        return () if sampled is None or self._tracer is None else self._tracer.metadata(sampled)

    def _hedge(self, attempt: Attempt) -> None:
        """A message is late: another server is asked as well, where one is well and few are late.
        The first answer counts."""
        message = attempt.message
        runtime, watch, now = message.runtime, message.runtime.watch, self._clock()
        if message.ended or attempt.replied or len(message.out) != 1 or self._links.closed:
            return
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        avoided = {a for a, at in runtime.missed.items() if now - at < AVOID_S}
        avoided |= self._slow(runtime, replicas, now)
        if watch is not None:
            avoided |= watch.avoided | watch.slow
        all_slow = watch is not None and message.shard in watch.slow_shards
        if not may_hedge(replicas, message.tried, avoided, runtime.hedging, all_slow=all_slow):
            return
        runtime.counts.stats.hedges += 1
        self._transmit(message, hedge=True)

    # -- and back -----------------------------------------------------------------------------

    def _reply(self, attempt: Attempt, data: bytes | None, error: DlmError | None) -> None:
        """Any thread may bring one; one that is raised after it was given counts for nothing."""
        if self._home.is_here():
            self._step(self._came, attempt, data, error)
        else:
            self.tell(self._came, attempt, data, error)

    def _came(self, attempt: Attempt, data: bytes | None, error: DlmError | None) -> None:
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
                error = _as_dlm_error(exc, message.shard)
                error.add_note(f"from {address}")
            else:
                self._answered(message, attempt, answers, now)
        stats.failed += error is not None and not too_late
        watch = runtime.watch
        if isinstance(error, ShardDown):
            runtime.missed[address] = now
            if is_moving(error):
                runtime.moving[address] = now
            if watch is not None:
                watch.lost(address)
        elif error is None:
            runtime.missed.pop(address, None)
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
            self._failed(message, error)
        self._settle(message)

    def _answered(self, message: Message, attempt: Attempt, answers: Any, now: float) -> None:
        runtime = message.runtime
        message.ended = True
        if message.place_of is not None:
            answers = message.asks.take(answers, message.place_of)
        # Before its calls end: whoever waits for one may look at the counts at once.
        if attempt.hedge:
            runtime.counts.stats.hedges_won += 1
        begin = 0
        for part in message.parts:
            part.call.answer(part, answers, begin)
            begin += part.queries
        for other in message.out:
            if other.withdraw is not None:
                other.withdraw()
        outage = runtime.outage
        if outage is not None and outage.is_over(self._clock()):
            runtime.outage = None
            fields = {"seconds": round(outage.seconds, 3), "queries": outage.queries}
            log.info("client.partial.ended", extra=fields)
        if runtime.watch is not None:
            runtime.watch.count(failed=False)
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        message.lane.usual_s = late_after((runtime.usual[a] for a in replicas), now)
        self._over(runtime, message.place, message.lane, message.number, answered=True)

    def _failed(self, message: Message, error: DlmError) -> None:
        """Ends a message that failed: by another server, or a fresh table, where that can help."""
        if message.ended or message.out:
            return  # another server has it still
        runtime, now = message.runtime, self._clock()
        due = now - runtime.looked >= LOOK_AGAIN_S
        if self._ask_another(message, error, now) or self._ask_later(message, error, now):
            return
        try:
            self._links.check_open()
            if isinstance(error, StaleShardSet) or (not message.tried and due):
                runtime.helper.submit(self._look_for, message, error)
                return
            if due and isinstance(error, (ShardDown, DeadlineExceeded)):
                # It may have come back elsewhere; the next calls will know.
                runtime.looked = now
                runtime.helper.submit(self._table.refresh_quietly, message.snapshot)
        except (RuntimeError, ShardDown):
            if self._links.closed:
                error = closed_error()
        self._end(message, error)

    def _ask_another(self, message: Message, error: DlmError, now: float) -> bool:
        """Sends a message that failed to another replica, once; whether it did.

        Where the server said that it drains or warms up, to one after the other, and at no cost of
        the budget: that is no failure, and there are only so many.
        Also where what came was damaged: its host, or the way to it, may be what is wrong. Its
        place in the lane stays its own. A Score changes nothing, so that it does no harm where
        the first is answered after all.
        """
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        runtime = message.runtime
        if (
            not isinstance(error, (UnavailableError, ProtocolError))
            or (len(message.tried) != 1 and not is_moving(error))
            or not set(replicas).difference(message.tried)
            or now >= message.deadline
            or self._links.closed
            or not (is_moving(error) or runtime.budget.spend())
        ):
            return False
        runtime.counts.stats.retries += 1
        self._transmit(message)
        return True

    def _ask_later(self, message: Message, error: DlmError, now: float) -> bool:
        """Has a message that no server takes asked again in a moment, while there is time; whether
        it does.

        Only where a server of the shard drains or warms up, or did so lately: somebody rolls them,
        and one that has just become ready is not known to be so yet. Where servers are gone without
        a word, callers learn it at once.
        """
        runtime = message.runtime
        pause = min(FIRST_PAUSE_S * 2.0**message.rounds, MAX_PAUSE_S)
        if not isinstance(error, ShardDown) or now + pause >= message.deadline:
            return False
        moving = {a for a, at in runtime.moving.items() if now - at < MOVING_S}
        if runtime.watch is not None:
            moving |= runtime.watch.moving
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        if self._links.closed or moving.isdisjoint(replicas):
            return False
        message.tried, message.rounds = [], message.rounds + 1
        self._home.later(pause, self._step, self._ask_now, message, error)
        return True

    def _ask_now(self, message: Message, error: DlmError) -> None:
        """After a pause: sends a message again, by the table of now."""
        runtime = message.runtime
        if message.ended:
            return
        if self._clock() - runtime.looked >= LOOK_AGAIN_S:
            self._table.refresh_later()
        if self._links.closed or all(part.call.done() for part in message.parts):
            self._end(message, error)
            return
        fresh = self._table.of(message.snapshot.model)
        if fresh is None or fresh.shard_set != message.snapshot.shard_set:
            self._move(message, error)
        else:
            runtime.counts.stats.retries += 1
            message.snapshot = fresh
            self._transmit(message)

    def _look_for(self, message: Message, error: DlmError) -> None:
        """On the helper thread: fetches the table, by which the parts are sent where they belong
        now."""
        try:
            if self._table.of(message.snapshot.model) is message.snapshot:
                # Half of the time that is left, so that the other half is there for asking again.
                allowed = max((message.deadline - self._clock()) / 2, 0.05)
                self._table.refresh(message.snapshot, min(allowed, self._config.connect_s))
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            error.add_note(f"and no fresh table could be had: {exc}")
            self.tell(self._end, message, error)
        else:
            self.tell(self._move, message, error)

    def _move(self, message: Message, error: DlmError) -> None:
        """Gives the place of a message back, and sends its parts where they belong by the table of
        now."""
        if message.ended:
            return
        fresh = self._table.of(message.snapshot.model)
        for part in message.parts:
            try:
                if fresh is None:
                    found = self._table.snapshot().model
                    part.call.miss(part, other_model(found, part.call.model))
                elif part.reroutes >= MAX_REROUTES:
                    part.call.miss(part, error)
                elif not part.ended:
                    part.reroutes += 1
                    self._route(message.runtime, fresh, part)
            except Exception as exc:  # noqa: BLE001 - the other parts must end, too
                part.call.miss(part, _as_dlm_error(exc, message.shard))
        self._close(message, error)

    def _end(self, message: Message, error: DlmError) -> None:
        if message.ended:
            return
        self._count_failed(error, message.queued)
        for part in message.parts:
            part.call.miss(part, error)
        self._close(message, error)

    def _close(self, message: Message, error: DlmError) -> None:
        message.ended = True
        gone = isinstance(error, (ShardDown, AuthenticationError))
        self._over(
            message.runtime,
            message.place,
            message.lane,
            message.number,
            answered=False,
            gone=gone,
        )
        self._settle(message)

    def _abort(self, message: Message, error: DlmError) -> None:
        """A step of a message was cut off: whatever it had done by then, the message is over."""
        message.ended = True
        for part in message.parts:
            part.call.miss(part, error)
        lane, runtime = message.lane, message.runtime
        lane.drop(message.number)
        self._settle(message)
        if lane.waiting:
            runtime.ready[message.place] = lane
            self._send_ready(runtime)

    def _settle(self, message: Message) -> None:
        """Forgets a message that has ended, once no server has it any more."""
        if message.ended and not message.out:
            message.runtime.under_way.discard(message)

    def _watch(self, runtime: Runtime) -> None:
        """While messages are under way, looks for those whose end was never reported."""
        if not runtime.watching:
            runtime.watching = True
            self._home.later(LOST_S, self._look_for_lost, runtime)

    def _look_for_lost(self, runtime: Runtime) -> None:
        runtime.watching = False
        now = self._clock()
        for message in list(runtime.under_way):
            if message.deadline + LOST_S <= now:
                self._step(self._lose, message)
        if runtime.under_way:
            self._watch(runtime)

    def _lose(self, message: Message) -> None:
        """Its deadline is long past: a connection was silent, or made for too long."""
        lost = DeadlineExceeded(f"shard {message.shard}: nobody told what became of a message")
        for attempt in list(message.out):
            if attempt.withdraw is not None:
                attempt.withdraw()
            self._came(attempt, None, lost)
        self._end(message, lost)
        message.runtime.under_way.discard(message)

    def _count_failed(self, error: DlmError, queued: float) -> None:
        """Tells the cascade of a message that nobody answered; not of one that had no time."""
        watch = self._links.runtime.watch
        if watch is None:
            return
        had_s = time.perf_counter() - queued
        if not isinstance(error, DeadlineExceeded) or had_s >= self._config.switching.fair_s:
            watch.count(failed=allows_fallback(error))


def is_moving(error: DlmError) -> bool:
    """Whether a server refused because it is being stopped or started."""
    return getattr(error, "reason", None) in MOVING_REASONS


def _too_much(shard: int, lane: Lane[Part], queries: int, left_s: float) -> Overloaded:
    work_s = lane.pace.seconds(lane.ahead)
    asked_s = lane.pace.seconds(lane.ahead + queries)
    left_s = max(left_s, 0.0)
    error = Overloaded(
        f"shard {shard}: {len(lane.in_flight)} messages are in flight and {len(lane.waiting)} "
        f"wait, with {lane.ahead} queries; with the {queries} of this call that is {asked_s:.3g} s "
        f"of work at the present pace, and a call with {left_s:.3g} s left may find "
        f"{PATIENCE * left_s:.3g} s. Ask less at once, or later"
    )
    error.retry_after_s = work_s or None
    return error


def _as_dlm_error(error: Exception, shard: int | None = None) -> DlmError:
    if isinstance(error, DlmError):
        return error
    # Where a partial model answers instead, nobody else is told.
    log.error("client.message.failed", extra={"shard": shard, "error": type(error).__name__})
    where = "" if shard is None else f"shard {shard}: "
    wrapped = DlmError(f"{where}a message could not be made or read: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def other_model(found: str, expected: str) -> StaleShardSet:
    """What a handle on a model that the servers do not hold any more gets."""
    now = "no server holds it any more" if found == expected else f"the servers hold {found} now"
    return StaleShardSet(f"this handle was opened on model {expected}; {now}. Open a new utterance")
