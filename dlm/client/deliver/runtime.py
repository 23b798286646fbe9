"""What the loop owns: a client's state in each process (connections, lanes, servers, counters). It
is made anew after a fork."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any

from dlm.client.config.settings import HeartbeatConfig
from dlm.client.deliver import loop
from dlm.client.deliver.after import is_moving
from dlm.client.deliver.call import Part, Place
from dlm.client.deliver.counts import ClientMetrics, Stats
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.replicas import Heard, TokenBucket, Usual, choose
from dlm.client.deliver.transport import Connect, Connection
from dlm.client.health.cascade import MOVING_S, CascadeMonitor
from dlm.client.health.membership import Topology, behind
from dlm.client.plan.lowgrams import LowGrams, Outage
from dlm.errors import (
    AuthenticationError,
    ClientClosed,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ShardDown,
)
from dlm.logs import EventLog

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
        self.lanes: dict[Place, Lane[Part]] = {}
        self.ready: dict[Place, Lane[Part]] = {}  # lanes that may have something to send
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
