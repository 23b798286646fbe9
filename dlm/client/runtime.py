"""What the loop owns: a client's state in each process (connections, lanes, servers, counters). It
is made anew after a fork.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from dlm.client import loop
from dlm.client.after import Heard, TokenBucket, Usual, choose, is_moving
from dlm.client.call import Place
from dlm.client.cascade import MOVING_S, CascadeMonitor
from dlm.client.config import HeartbeatConfig
from dlm.client.membership import Topology, behind
from dlm.client.metrics import ClientMetrics, Stats
from dlm.client.router import LowGrams, Outage
from dlm.client.server import Connect, Connection
from dlm.errors import (
    AuthenticationError,
    ClientClosed,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ShardDown,
)
from dlm.logs import EventLog

# -------------------------------------------------------------------------------------------------
# Decides when a message is sent: the lane of a shard has its waiting parts and messages in flight.
#
# Nothing here waits or knows the time: the loop, which alone uses lanes, passes it in.
#
# An idle shard is asked at once. While a message is in flight, parts of other calls gather, and
# are sent together when it comes back: so batching needs no timer. If a message takes longer than
# the shard usually does, another is sent, up to `limit`: a stall must not hold up the others.
#
# =========  ======================================  =============================================
# event      while                                   then
# =========  ======================================  =============================================
# submit     nothing is in flight                    `take` gives it at once
# submit     something is in flight                  it waits
# submit     too much waits already                  refused, unless a part of its call was let in
# done       something waits                         `take` gives it, as much as a message holds
# time       the last message is older than usual    `take` gives what waits, up to `limit` messages
# time       what waits is past its deadline         `expire` gives it
# =========  ======================================  =============================================
#
# The queue is bounded: in queries, by the size of a few messages; in time, by how fast the shard
# has answered lately (`Pace`). If the queries ahead would take half of the time that a new call
# has left, the call is refused at once, while its caller still has time for a fallback. Nothing is
# refused while nothing is in flight, so a shard that was slow is found to be fast again.
#
# Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is
# ours.


MAX_QUEUED_ITEMS = 4096  # waiting parts, however small: each is a caller
# Queries that may wait for a shard: a few messages' worth, and a minimum if messages are small.
MAX_WAITING_MESSAGES = 4
MIN_WAITING = 4096
# Busy seconds after which an observation counts half: much longer than one message, and much
# shorter than the minute in which an operator reacts.
HORIZON_S = 1.0
# The first answers are ignored: they include connecting, and waking up.
FIRST_ANSWERS = 8
# A message takes as long as so many queries, even if it has fewer: what waits goes in larger ones.
LEAST_QUERIES = 256
# By the estimate, waiting may take this share of the time left; the rest covers its error.
PATIENCE = 0.5


class Pace(NamedTuple):
    """Decayed sums over the time in which anything was in flight: messages answered since the
    start; their queries and busy seconds, with older ones counting less; and when that was last up
    to date."""

    answers: int = 0
    queries: float = 0.0
    busy_s: float = 0.0
    at: float = 0.0

    def passed(self, now: float, busy: bool) -> Pace:
        answers, queries, busy_s, at = self
        if not busy:
            return Pace(answers, queries, busy_s, now)
        busy_s += now - at
        if busy_s > HORIZON_S:
            # However long nothing came, keep half a horizon, and the queries in proportion.
            keep = 0.5 * HORIZON_S / busy_s
            return Pace(answers, queries * keep, busy_s * keep, now)
        return Pace(answers, queries, busy_s, now)

    def answered(self, queries: int) -> Pace:
        answers = self.answers + 1
        if answers <= FIRST_ANSWERS:
            return Pace(answers, 0.0, 0.0, self.at)
        return Pace(answers, self.queries + max(queries, LEAST_QUERIES), self.busy_s, self.at)

    def seconds(self, queries: int, since_s: float = 0.0) -> float:
        """How long `queries` queries will take, with `since_s` busy seconds after `at`; 0 while too
        little is known."""
        return queries * (self.busy_s + since_s) / self.queries if self.queries > 0.0 else 0.0


class Lane:
    """One shard's queue of parts of calls, or whatever has `queries` and a `deadline`.

    Args
        limit        messages in flight, at most
        max_queries  of one message; larger work is sent alone
        usual_s      how long a message to this shard usually takes
    Attributes
        in_flight  number of the message -> its queries; `asked` in all
        earliest   no waiting work has a deadline before this
    """

    __slots__ = (
        *("asked", "earliest", "in_flight", "limit", "max_queries", "max_waiting", "pace"),
        *("queued", "usual_s", "waiting", "_last", "_next"),
    )

    def __init__(self, limit: int, max_queries: int, usual_s: float = inf) -> None:
        self.limit = limit
        self.usual_s = usual_s
        self.max_queries = max_queries
        self.max_waiting = max(MAX_WAITING_MESSAGES * max_queries, MIN_WAITING)
        self.waiting: deque[Any] = deque()
        self.queued = self.asked = 0
        self.in_flight: dict[int, int] = {}
        self.earliest = inf
        self.pace = Pace()
        self._last = -inf  # when a message was last sent
        self._next = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.in_flight

    @property
    def ahead(self) -> int:
        return self.queued + self.asked

    def refuses(self, queries: int, deadline: float, now: float) -> bool:
        """Whether new work would be refused; any thread may ask."""
        if not self.in_flight:
            return False
        if self.queued >= self.max_waiting or len(self.waiting) >= MAX_QUEUED_ITEMS:
            return self.earliest > now  # late work makes room
        ahead, pace = self.queued + self.asked + queries, self.pace
        return pace.seconds(ahead, now - pace.at) > PATIENCE * (deadline - now)

    def submit(self, work: Any) -> None:
        """Queues `work`; the caller has asked `refuses`."""
        self.waiting.append(work)
        self.queued += work.queries
        if work.deadline < self.earliest:
            self.earliest = work.deadline

    def expire(self, now: float) -> list[Any]:
        if self.earliest > now:
            return []
        late = [work for work in self.waiting if work.deadline <= now]
        self.waiting = deque(work for work in self.waiting if work.deadline > now)
        self.queued = sum(work.queries for work in self.waiting)
        self.earliest = min((work.deadline for work in self.waiting), default=inf)
        return late

    def ready_at(self) -> float:
        """When a message may be sent; inf if nothing waits or too many are in flight."""
        if not self.waiting or len(self.in_flight) >= self.limit:
            return inf
        return self._last + self.usual_s if self.in_flight else -inf

    def due(self) -> float:
        """When to look at the queue; inf if nothing waits."""
        return min(self.ready_at(), self.earliest)

    def take(self, now: float) -> tuple[int, list[Any]] | None:
        """The next message, if one may be sent: its number, for `done`, and its parts."""
        if self.ready_at() > now:
            return None
        self.pace = self.pace.passed(now, busy=bool(self.in_flight))
        waiting, works, queries = self.waiting, list[Any](), 0
        while waiting and (not works or queries + waiting[0].queries <= self.max_queries):
            work = waiting.popleft()
            works.append(work)
            queries += work.queries
        self.queued -= queries
        self.asked += queries
        if not waiting:
            self.earliest = inf
        number = self._next
        self._next += 1
        self._last = now
        self.in_flight[number] = queries
        return number, works

    def done(self, number: int, now: float, *, answered: bool = True, gone: bool = False) -> bool:
        """A message came back; False if it had already. Only if `answered` does it show the shard's
        pace; if it is `gone`, since no server took it or lets this client in, the known pace ends
        with the servers."""
        queries = self.in_flight.pop(number, None)
        if queries is None:
            return False
        self.pace = self.pace.passed(now, busy=True)
        self.asked -= queries
        if gone:
            self.pace = Pace(at=now)
        elif answered:
            self.pace = self.pace.answered(queries)
        return True

    def drop(self, number: int) -> None:
        """Ends a message that shows nothing about the pace; it may have ended already."""
        self.asked -= self.in_flight.pop(number, 0)

    def clear(self) -> list[Any]:
        works = list(self.waiting)
        self.waiting.clear()
        self.queued, self.earliest = 0, inf
        return works


log = EventLog(__name__)

AVOID_S = 1.0  # for this long, a server that a message did not reach is asked after all others
LOOK_AGAIN_S = 1.0  # seconds between searches for servers while a shard is down


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A shard set, the places of its shards, and its low orders."""

    topology: Topology
    grams: LowGrams

    @cached_property
    def model(self) -> str:
        """Id of the model; the same in every sharding of it."""
        return self.topology.manifest.model

    @cached_property
    def shard_set(self) -> str:
        return self.topology.manifest.shard_set

    @property
    def low_bytes(self) -> int:
        manifest = self.topology.manifest
        return sum(manifest.file(kind).bytes for kind in ("vocabulary", "low_orders"))

    @cached_property
    def replicated(self) -> bool:
        return any(len(addresses) > 1 for addresses in self.topology.addresses.values())


# Called with a connection, or with the error that prevented it.
Connected = Callable[[Connection | Exception], None]
Tell = Callable[..., None]  # makes the loop carry out a step, with its arguments; from any thread


def closed_error() -> ClientClosed:
    return ClientClosed("this client is closed; open another")


# Share of messages that may be sent again when they fail, and the size of a burst.
RETRIED, RETRY_BURST = 0.1, 20.0
# Share of messages that may be sent to a second server when they are late, likewise.
HEDGED, HEDGE_BURST = 0.05, 100.0


class Runtime:
    """The state of one process: connections, a lane per shard, and a thread for refreshing.

    Fields below "of the loop" are used only there; `lock` guards the rest. It is reentrant, since a
    signal handler may run while its own thread has it. The parent process's watch, `before`, keeps
    its mode until there is one here.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.refreshing: Future[Snapshot] | None = None
        self.queued: Future[Snapshot] | None = None  # the last refresh, which many may share
        self.looked = -LOOK_AGAIN_S
        self.fetcher = ThreadPoolExecutor(1, thread_name_prefix="dlm-fetch")
        self.fetching: Future[None] | None = None  # low orders of the next model
        self.fetched: dict[str, LowGrams] = {}  # those fetched, until they are in use
        self.counts = ClientMetrics()
        # of the loop:
        self.lanes: dict[Place, Lane] = {}
        self.ready: dict[Place, Lane] = {}  # lanes that may have something to send
        self.connecting: dict[str, list[Connected]] = {}  # who waits for a connection, by address
        self.busy = False  # a step is running, which looks at these at its end
        self.flushing = False  # they are looked at after the steps that wait now
        self.under_way: set[Any] = set()  # messages that have not ended, or that a server still has
        self.alarms: list[float] = []  # when lanes and messages are checked; the next is last
        self.chance = random.Random()
        self.retrying = TokenBucket(RETRIED, RETRY_BURST)
        self.hedging = TokenBucket(HEDGED, HEDGE_BURST)
        self.outstanding: Counter[str] = Counter()  # queries in flight, by address
        self.usual: defaultdict[str, Usual] = defaultdict(Usual)  # by address
        self.missed: dict[str, float] = {}  # address -> when a message last failed to reach it
        self.moving: dict[str, float] = {}  # address -> when it was last draining or warming
        self.outage: Outage | None = None  # the current period of bigram-fallback scores
        # of any thread, as single values:
        self.watch: CascadeMonitor | None = None
        self.before: CascadeMonitor | None = None
        self.looking = False  # quietly, on the helper thread
        self.ended = False

    # -- on the loop: what is known of servers ------------------------------------------------

    def choose(
        self, replicas: Sequence[str], tried: frozenset[str], now: float, config: HeartbeatConfig
    ) -> str | None:
        if len(replicas) == 1:
            return replicas[0]
        missed, avoided, slow = self.unwell(replicas, now, config)
        stalling = frozenset(a for a in replicas if self.usual[a].stalls(now))
        known = {"missed": missed, "tried": tried, "stalling": stalling}
        return choose(replicas, self.outstanding, avoided, self.chance, slow, **known)

    def unwell(
        self, replicas: Sequence[str], now: float, config: HeartbeatConfig
    ) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Servers that were not reached lately; these and all others to avoid; and those that are
        far slower than another of these replicas."""
        missed = avoided = frozenset(a for a, at in self.missed.items() if now - at < AVOID_S)
        usual = {a: self.usual[a] for a in replicas}
        answer = [a for a, one in usual.items() if one.known(now) and not one.stalls(now)]
        medians = {a: usual[a].median_s for a in answer}
        least = min(medians.values(), default=0.0)
        slow = frozenset(a for a, median in medians.items() if behind(median, least, config))
        if self.watch is not None:
            avoided, slow = avoided | self.watch.avoided, slow | self.watch.slow
        return missed, avoided, slow

    def heard(self, address: str, now: float) -> Heard:
        usual = self.usual[address]
        within_s = usual.within_s(now)
        if within_s is None:
            within_s = inf if self.watch is None else self.watch.delay_s(address)
        oldest = min(
            (a.since for m in self.under_way for a in m.out if a.sent and a.address == address),
            default=now,
        )
        return Heard(within_s, now - max(oldest, usual.at), usual.misses(now))

    def is_moving(self, replicas: Sequence[str], now: float) -> bool:
        moving = {a for a, at in self.moving.items() if now - at < MOVING_S}
        if self.watch is not None:
            moving |= self.watch.moving
        return not moving.isdisjoint(replicas)

    def note(self, address: str, error: DlmError | None, now: float) -> None:
        if error is None:
            self.missed.pop(address, None)
        elif isinstance(error, (ShardDown, AuthenticationError)):
            self.missed[address] = now
            if is_moving(error):
                self.moving[address] = now
            if self.watch is not None:
                self.watch.lost(address, error)
        elif isinstance(error, (DeadlineExceeded, Overloaded)):
            self.usual[address].miss(now)

    def note_fallback(self, queries: int, error: DlmError, shard: int | None, now: float) -> None:
        """Logs bigram-fallback scores once, when they begin, and once more if it turns out that
        they will not end."""
        kind, outage = type(error).__name__, self.outage
        if outage is None:
            self.outage = Outage(now, now, queries, kind)
            log.warning("client.bigram_fallback.started", extra={"shard": shard, "error": kind})
            return
        self.outage = outage.extended(queries, now)
        if outage.lasts(error):
            self.outage = self.outage._replace(error=kind)
            fields = {"shard": shard, "before": outage.error, "error": kind}
            log.warning("client.bigram_fallback.changed", extra=fields)

    def note_answer(self, now: float) -> None:
        outage = self.outage
        if outage is not None and outage.is_over(now):
            self.outage = None
            fields = {"seconds": round(outage.seconds, 3), "queries": outage.queries}
            log.info("client.bigram_fallback.ended", extra=fields)

    # -- its life -----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to release: it never began, or has ended."""
        return not self.connections and (self.watch is None or self.ended)

    def end(self) -> None:
        with self.lock:
            self.ended = True
            if self.watch is not None:
                self.watch.stop()
            connections = list(self.connections.values())
            self.connections.clear()
        if not loop.leave(self.end_waiting):
            self.end_waiting()
        for connection in connections:
            connection.close()
        self.helper.shutdown(wait=False)
        self.fetcher.shutdown(wait=False)

    def end_waiting(self) -> None:
        for lane in list(self.lanes.values()):
            for part in list(lane.waiting):
                part.call.fail(closed_error())
        self.lanes.clear()
        self.ready.clear()

    def forget(self, shard_sets: Set[str], addresses: Set[str]) -> None:
        """Keeps the lanes of these shard sets, and what is known of the servers at these addresses;
        of others, only what is in flight."""
        for place, lane in list(self.lanes.items()):
            if place.shard_set not in shard_sets and lane.idle:
                del self.lanes[place]
        asked = {address for address, queries in self.outstanding.items() if queries}
        for known in (self.usual, self.missed, self.moving, self.outstanding):
            for address in known.keys() - addresses - asked:
                del known[address]


def _let_go(runtime: Runtime) -> None:
    """Ends a runtime that nobody can use. The garbage collector may call this in any thread, with
    any lock held, so it waits for nothing."""
    if not runtime.is_idle:
        loop.leave(runtime.end)


class Links:
    """The runtime of this process (a forked child gets its own), and its connections."""

    def __init__(self, connect: Connect) -> None:
        self.closed = False
        self._connect = connect
        self._begin()
        _links.add(self)

    def _begin(self) -> None:
        self.runtime = Runtime()
        self._end = weakref.finalize(self, _let_go, self.runtime)
        self._end.atexit = False

    def begin_in_child(self) -> None:
        """After a fork: replaces the parent's runtime."""
        self._end.detach()
        inherited = self.runtime
        _INHERITED.append(inherited)
        self._begin()
        self.runtime.before = inherited.watch or inherited.before

    def stats(self) -> Stats:
        return self.runtime.counts.now()

    def check_open(self) -> None:
        if self.closed:
            raise closed_error()

    def connection(self, address: str) -> Connection:
        runtime = self.runtime
        with runtime.lock:
            self.check_open()
            found = runtime.connections.get(address)
        if found is not None:
            return found
        # Outside the lock: resolving a name may take seconds, and closing the client would wait. If
        # another thread was faster, its connection is used: this one has opened nothing yet.
        made = self._connect(address)
        with runtime.lock:
            self.check_open()
            return runtime.connections.setdefault(address, made)

    def reach(self, address: str, tell: Tell, then: Connected) -> None:
        """On the loop: calls `then` there, in a step of its own, with the connection to `address`,
        once there is one. A thread makes it, since resolving a name may take seconds."""
        runtime = self.runtime
        found = runtime.connections.get(address)
        if found is not None:
            then(found)
            return
        waiting = runtime.connecting.setdefault(address, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def reached(made: Connection | Exception) -> None:
            for each in runtime.connecting.pop(address, ()):
                tell(each, made)

        def connect() -> None:
            made: Connection | Exception
            try:
                made = self.connection(address)
            except Exception as exc:  # noqa: BLE001 - those that wait must get it
                made = exc
            tell(reached, made)

        try:
            threading.Thread(target=connect, name="dlm-connect", daemon=True).start()
        except RuntimeError as exc:  # no thread can be started
            reached(exc)

    def renew(self, address: str) -> None:
        """On the loop: gives up the connection to `address`; later messages use another."""
        found = self.runtime.connections.pop(address, None)
        if found is not None:
            found.close()

    def forget_others(self, snapshots: Sequence[Snapshot]) -> None:
        """Forgets all shard sets and servers but these."""
        shard_sets = {each.shard_set for each in snapshots}
        replicas = (a for each in snapshots for a in each.topology.addresses.values())
        loop.leave(self.runtime.forget, shard_sets, frozenset(chain.from_iterable(replicas)))

    def close(self) -> None:
        runtime = self.runtime
        with runtime.lock:
            self.closed = True
        runtime.end()


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# their helper threads were not copied.
_INHERITED: list[Runtime] = []
_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for links in list(_links):
        links.begin_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
