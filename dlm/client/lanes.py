"""The lanes of a client: parts of calls go into the lane of their shard, and messages come out.
Runs on the loop, except `overload`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from dlm.client import router
from dlm.client.after import late_after
from dlm.client.call import SCORES, Asks, Call, Part, Place, own_copy
from dlm.client.config import ClientConfig
from dlm.client.loop import Inbox
from dlm.client.router import allows_fallback
from dlm.client.runtime import PATIENCE, Lane, Links, Runtime, Snapshot, closed_error
from dlm.client.server import Withdraw
from dlm.client.table import Table, other_model
from dlm.errors import DeadlineExceeded, DlmError, Overloaded, ShardDown
from dlm.logs import EventLog

# -------------------------------------------------------------------------------------------------
# A message and its attempts at servers; used only on the loop.


log = EventLog(__name__)

NAMED = 8  # most servers listed in an error


class Message:
    """Parts that travel together, from their lane to their end.

    Attributes
        place_of the places of its parts' queries in `groups`, if they share any
        tried    addresses that it was sent to since the last wait for servers
        soonest  the earliest deadline of its parts
        rounds   times that all servers were tried in vain, and waited for
        out      servers that have it now: one, or two if it was late
        failure  the last of a server
        taken_over  another server was asked after half of its time, which happens once
    """

    __slots__ = (
        *("asks", "checksum", "deadline", "encode_s", "ended", "failure", "groups", "lane"),
        *("number", "out", "parts", "place", "place_of", "queued", "replicas", "request"),
        *("rounds", "runtime", "shard", "snapshot", "soonest", "taken_over", "tried"),
    )

    def __init__(
        self,
        runtime: Runtime,
        place: Place,
        lane: Lane,
        number: int,
        snapshot: Snapshot,
        parts: list[Part],
    ) -> None:
        self.runtime, self.place, self.lane, self.number = runtime, place, lane, number
        self.parts = parts
        self.shard, self.asks = place.shard, parts[0].call.asks
        # The latest deadline among them: an earlier caller stops waiting by itself.
        deadlines = [part.deadline for part in parts]
        self.deadline, self.soonest = max(deadlines), min(deadlines)
        self.queued = min([part.queued for part in parts])
        self.groups, self.place_of = router.gather([part.groups for part in parts])
        self.request, self.checksum = b"", 0
        self.encode_s = 0.0
        self.use(snapshot)
        self.tried: list[str] = []
        self.rounds = 0
        self.out: list[Attempt] = []
        self.failure: DlmError | None = None
        self.ended = self.taken_over = False

    def use(self, snapshot: Snapshot) -> None:
        """Sends it by this table, which has the same shards."""
        self.snapshot = snapshot
        self.replicas: Sequence[str] = snapshot.topology.addresses.get(self.shard, ())

    @property
    def untried(self) -> set[str]:
        return set(self.replicas).difference(self.tried)


class Attempt:
    """A message at one server, or on its way to it; `hedge` if it is the second server. `since` is
    when it was sent or, until there is a connection, started; `late_at`, when to decide whether
    another server is asked as well, inf for never."""

    __slots__ = (
        *("address", "hedge", "late", "late_at", "message", "queue_s", "replied", "sent", "since"),
        *("since_s", "withdraw"),
    )

    def __init__(self, message: Message, address: str, since: float, *, hedge: bool) -> None:
        self.message, self.address, self.since, self.hedge = message, address, since, hedge
        self.since_s = self.queue_s = 0.0
        self.late_at = inf
        self.sent = self.replied = self.late = False
        self.withdraw: Withdraw | None = None


def naming_shard(error: DlmError, message: Message) -> DlmError:
    """A `ShardDown` with its shard, the shard's servers, what was found, and what to do."""
    if type(error) is not ShardDown:
        return error  # also if the client was closed
    topology, found = message.snapshot.topology, str(error).rstrip(".")
    servers = message.replicas
    if servers:
        more = f" and {len(servers) - NAMED} more" if len(servers) > NAMED else ""
        found = f"none of its servers ({', '.join(servers[:NAMED])}{more}) answers: {found}"
    said = own_copy(error)
    said.args = (
        f"shard {message.shard} of shard set {topology.manifest.shard_set}: {found}. Run `dlm "
        "status` to see their state, and start one",
    )
    return said


def as_dlm_error(error: Exception, shard: int | None = None) -> DlmError:
    """The error for a message if something was raised; logs it unless it is a `DlmError`."""
    if isinstance(error, DlmError):
        return error
    # If a bigram fallback answers instead, this is the only report.
    log.error("client.message.failed", extra={"shard": shard, "error": type(error).__name__})
    where = "" if shard is None else f"shard {shard}: "
    wrapped = DlmError(
        f"{where}a message could not be encoded or decoded: {error!r}; retry, and report it if it "
        "stays"
    )
    wrapped.__cause__ = error
    return wrapped


@dataclass(eq=False)
class Lanes:
    _config: ClientConfig
    _links: Links
    _table: Table
    _clock: Callable[[], float]
    _inbox: Inbox

    def overload(
        self, snapshot: Snapshot, queries: int, deadline: float, asks: Asks = SCORES
    ) -> DlmError | None:
        """In any thread: the error for a call of so many queries per shard, if one has too much to
        do: found before any work, since a client that refuses many needs its time for those it
        answers."""
        lanes, now = self._links.runtime.lanes, self._clock()
        for shard in range(snapshot.topology.manifest.shards):
            lane = lanes.get(Place(snapshot.shard_set, shard, asks.name))
            if lane is not None and lane.refuses(queries, deadline, now):
                return _too_much(shard, lane, queries, deadline - now)
        return None

    def max_queries(self, snapshot: Snapshot) -> int:
        return min(self._config.max_queries, snapshot.topology.max_queries)

    # -- in -----------------------------------------------------------------------------------

    def take(self, call: Call) -> None:
        """Queues all parts of a call in their lanes, or none."""
        if self._links.closed:
            call.fail(closed_error())
            return
        parts = call.parts  # a caller whose time is up drops them
        if not parts or call.done():
            return
        runtime, now = self._links.runtime, self._clock()
        lanes = [self._lane(runtime, part) for part in parts]
        refused: dict[int, DlmError] = {}
        if not call.let_in:
            asked: dict[int, int] = {}
            for part in parts:
                asked[part.shard] = asked.get(part.shard, 0) + part.queries
            for part, lane in zip(parts, lanes, strict=True):
                if lane.earliest <= now:
                    self._make_room(lane, now)  # before more is let in
                queries = asked.pop(part.shard, None)
                if queries is not None and lane.refuses(queries, part.deadline, now):
                    late = part.deadline - now
                    refused[part.shard] = _too_much(part.shard, lane, queries, late)
            if refused and not self._config.bigram_fallback:
                # The answers of one shard are useless if another refuses.
                call.fail(next(iter(refused.values())))
                return
        for part, lane in zip(parts, lanes, strict=True):
            if part.shard in refused:
                call.miss(part, refused[part.shard])
            else:
                self._submit(runtime, part, lane, now)

    def route(self, snapshot: Snapshot, part: Part) -> None:
        """Queues a part in the lane that the table of `snapshot` gives."""
        runtime, now = self._links.runtime, self._clock()
        manifest, limit = snapshot.topology.manifest, self.max_queries(snapshot)
        pieces = router.route(part.groups, manifest.slots, manifest.shards, limit)
        for one in part.call.replace(part, pieces, snapshot.shard_set):
            try:
                self._submit(runtime, one, self._lane(runtime, one), now)
            except Exception as exc:  # noqa: BLE001 - this part ends, the others are still sent
                one.call.miss(one, as_dlm_error(exc, one.shard))

    def _submit(self, runtime: Runtime, part: Part, lane: Lane, now: float) -> None:
        if part.deadline <= now:
            _miss_late(part)
            return
        lane.submit(part)
        due = lane.due()
        if due <= now:
            runtime.ready[part.place] = lane
        else:
            self._inbox.check_by(due)

    def _lane(self, runtime: Runtime, part: Part) -> Lane:
        lane = runtime.lanes.get(part.place)
        if lane is None:
            snapshot = self._table.of_set(part.place.shard_set) or self._table.snapshot()
            lane = Lane(self._config.window, self.max_queries(snapshot), late_after((), 0.0))
            runtime.lanes[part.place] = lane
        return lane

    # -- out ----------------------------------------------------------------------------------

    def next(self, runtime: Runtime) -> Message | None:
        """A message to send now, if the next lane has one."""
        place, lane = runtime.ready.popitem()
        try:
            return self._next(runtime, place, lane)
        except Exception as exc:  # noqa: BLE001 - the other lanes must go on
            self._miss_all(lane.clear(), as_dlm_error(exc, place.shard))
            return None

    def _next(self, runtime: Runtime, place: Place, lane: Lane) -> Message | None:
        now = self._clock()
        self._make_room(lane, now)
        taken = lane.take(now)
        if taken is None:
            self._inbox.check_by(lane.due())
            return None
        number, parts = taken
        message = None
        try:
            snapshot = self._table.of(parts[0].call.model)
            wanted = self._wanted(place, snapshot, parts)
            if wanted and snapshot is not None:
                message = Message(runtime, place, lane, number, snapshot, wanted)
        except Exception as exc:  # noqa: BLE001 - the place in the lane must not be lost
            self._miss_all(parts, as_dlm_error(exc, place.shard))
        if message is None:
            lane.drop(number)
        if lane.waiting:
            runtime.ready[place] = lane
        return message

    def _wanted(self, place: Place, snapshot: Snapshot | None, parts: list[Part]) -> list[Part]:
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
                self.route(snapshot, part)  # the table changed meanwhile
            else:
                wanted.append(part)
        return wanted

    def _miss_all(self, parts: list[Part], error: DlmError) -> None:
        for part in parts:
            part.call.miss(part, error)

    # -- in time ------------------------------------------------------------------------------

    def _make_room(self, lane: Lane, now: float) -> None:
        for part in lane.expire(now):
            self.count_failed(DeadlineExceeded(), part.queued)
            _miss_late(part)

    def count_failed(self, error: DlmError, queued: float) -> None:
        """Reports an unanswered message to the cascade, unless it had no time."""
        watch = self._links.runtime.watch
        if watch is None:
            return
        had_s = time.perf_counter() - queued
        if not isinstance(error, DeadlineExceeded) or had_s >= self._config.failover_config.fair_s:
            watch.count(failed=allows_fallback(error))

    def check(self, runtime: Runtime, now: float) -> float:
        """Finds the lanes that have something to send or to end by now; returns the next time."""
        next_at = inf
        for place, lane in runtime.lanes.items():
            due = lane.due()
            if due <= now:
                runtime.ready[place] = lane
            else:
                next_at = min(next_at, due)
        return next_at


def _miss_late(part: Part) -> None:
    part.call.miss(part, _late(part.shard))


def _late(shard: int) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"shard {shard}: the deadline passed before the message was sent; retry later, or raise "
        "the deadline"
    )


def _too_much(shard: int, lane: Lane, queries: int, left_s: float) -> DlmError:
    if left_s <= 0.0:
        return _late(shard)
    work_s = lane.pace.seconds(lane.ahead)
    asked_s = lane.pace.seconds(lane.ahead + queries)
    error = Overloaded(
        f"shard {shard} is overloaded: {lane.ahead} queries are ahead, in {len(lane.in_flight)} "
        f"messages in flight and {len(lane.waiting)} waiting parts of calls. With the {queries} "
        f"of this call that is {asked_s:.3g} s of work at the current pace; a call with "
        f"{left_s:.3g} s left accepts {PATIENCE * left_s:.3g} s. Send smaller calls, or retry later"
    )
    error.retry_after_s = work_s or None
    return error
