"""One client in one process: its connections and threads, its steps on the loop, its knowledge of
its servers, and its budget for servers that fail or are late.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from math import inf
from typing import Any, TypeAlias

from dlm.client import loop
from dlm.client.cascade import MOVING_S, CascadeMonitor
from dlm.client.config import ClientConfig
from dlm.client.health import behind
from dlm.client.metrics import ClientMetrics
from dlm.client.router import Outage, Snapshot
from dlm.client.rules import Heard, TokenBucket, Usual, choose, is_moving
from dlm.client.server import Connect, Connection, client_closed
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ShardDown,
)
from dlm.logs import EventLog
from dlm.tracing import Tracer

log = EventLog(__name__)

AVOID_S = 1.0  # for this long after a message fails to reach a server, others are asked first
CHECK_S = 1.0  # seconds between checks of queues and messages, while there are any
# Share of messages that may be sent again when they fail, and the size of a burst.
RETRIED, RETRY_BURST = 0.1, 20.0
# Share of messages that may also go to a second server when they are late, and size of a burst.
HEDGED, HEDGE_BURST = 0.05, 100.0

# Called with a connection, or with the error that prevented it.
Connected: TypeAlias = Callable[[Connection | Exception], None]


class Runtime:
    """The state of one client. Only the loop uses the fields below "of the loop"; `lock` guards the
    rest, and is reentrant, since a signal handler may run while its own thread holds the lock.
    `before` is the parent process's watch, whose mode applies until this process has a watch;
    `ready` has the lanes that may have something to send."""

    # The subclass `core.Lanes` defines these attributes:
    table: Any  # `table.Table`
    tracer: Tracer | None
    route: Callable[[Snapshot, Any], None]

    def __init__(
        self, config: ClientConfig, connect: Connect, clock: Callable[[], float], home: Any = loop
    ) -> None:
        self.config, self.clock = config, clock
        self.connect, self._home = connect, home
        self.closed = False
        self.begin()

    def begin(self, before: CascadeMonitor | None = None) -> None:
        """Begins with nothing open or in flight; called at creation and in a forked child."""
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.fetcher = ThreadPoolExecutor(1, thread_name_prefix="dlm-fetch")
        self.counts = ClientMetrics()
        self.watch: CascadeMonitor | None = None
        self.before = before
        self._ended = False
        # of the loop:
        self.lanes: dict[Any, Any] = {}  # each `lane.Lane`, by its `Place`
        self.ready: dict[Any, Any] = {}
        self._connecting: dict[str, list[Connected]] = {}  # callbacks, by address
        self._busy = False  # whether a step is running, after which `ready` is sent
        self._flushing = False  # whether `_flush` is scheduled already
        self._alarms: list[float] = []  # when to check shards; the last entry is due next
        self._chance = random.Random()
        self.retrying = TokenBucket(RETRIED, RETRY_BURST)
        self.hedging = TokenBucket(HEDGED, HEDGE_BURST)
        self.outstanding: Counter[str] = Counter()  # queries in flight, by address
        self.usual: defaultdict[str, Usual] = defaultdict(Usual)  # by address
        self._missed: dict[str, float] = {}  # address -> when a message last failed to reach it
        self._moving: dict[str, float] = {}  # address -> when it was last draining or warming
        self._outage: Outage | None = None  # the current period of bigram-fallback scores

    def begin_in_child(self) -> None:
        """Begins anew after a fork, and leaves the parent's objects untouched."""
        _INHERITED.append(dict(vars(self)))
        self.begin(self.watch or self.before)

    def check_open(self) -> None:
        if self.closed:
            raise client_closed()

    def close(self) -> None:
        with self.lock:
            self.closed = True
        self.end()

    def let_go(self) -> None:
        """Closes a client that nobody can use any longer. The garbage collector may call this in
        any thread, with any lock held, so it waits for nothing."""
        if self.connections or (self.watch is not None and not self._ended):
            loop.leave_for_next(self.end)

    def end(self) -> None:
        with self.lock:
            self._ended = True
            if self.watch is not None:
                self.watch.stop()
            connections = list(self.connections.values())
            self.connections.clear()
        if not loop.leave(self._end_waiting):
            self._end_waiting()
        for connection in connections:
            connection.close()
        self.helper.shutdown(wait=False)
        self.fetcher.shutdown(wait=False)

    def _end_waiting(self) -> None:
        for lane in list(self.lanes.values()):
            for part in lane.queue.clear():
                part.call.fail(client_closed())

    def help(self, work: Callable[..., object], *args: Any) -> bool:
        """Runs `work` on the helper thread; False if the client is closed, or no thread starts."""
        try:
            self.helper.submit(work, *args)
        except RuntimeError:
            return False
        return True

    # -- connections --------------------------------------------------------------------------

    def connection(self, address: str) -> Connection:
        """Returns the connection to a server; can take seconds, so not for the loop's thread."""
        with self.lock:
            self.check_open()
            found = self.connections.get(address)
        if found is not None:
            return found
        # The connection is made outside the lock: resolving a name may take seconds, and closing a
        # client would have to wait for that. If another thread was faster, its connection is used;
        # this thread's connection, which has opened nothing yet, is dropped.
        made = self.connect(address)
        with self.lock:
            self.check_open()
            return self.connections.setdefault(address, made)

    def reach(self, address: str, then: Connected) -> None:
        """On the loop: calls `then` with the connection to `address`. If there is none, a thread
        makes it, since resolving a name may take seconds, and `then` is called in a later step."""
        found = self.connections.get(address)
        if found is not None:
            then(found)
            return
        waiting = self._connecting.setdefault(address, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def reached(made: Connection | Exception) -> None:
            for each in self._connecting.pop(address, ()):
                self.tell(each, made)

        loop.aside(partial(self.connection, address), partial(self.tell, reached))

    def renew(self, address: str) -> None:
        """On the loop: gives up the connection to `address`; later messages use another."""
        found = self.connections.pop(address, None)
        if found is not None:
            found.close()

    # -- steps run on the loop one by one, so none sees anything half changed -------------------

    def tell(self, step: Callable[..., None], *args: Any) -> None:
        """From any thread: makes the loop carry out a step. If the step raises, the `cut_off` of
        its first argument (or, without arguments, the step's object) is called with the error."""
        try:
            self._home.post(self._take, step, args)
        except Exception as exc:  # noqa: BLE001 - no loop can be started; the step waits for one
            loop.log_failure(exc)

    def carry_out(self, step: Callable[..., None], *args: Any) -> None:
        """Like `tell`, but at once if this is the loop's thread."""
        (self.step if self._home.is_here() else self.tell)(step, *args)

    def later(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        self._home.later(delay_s, self.step, step, *args)

    def check_by(self, at: float) -> None:
        """Schedules a check of shards for this time, but at most a second from now, since a
        scheduled check keeps alive even a client that nobody else references."""
        alarms = self._alarms
        if at < (alarms[-1] if alarms else inf):
            now = self.clock()
            at = min(at, now + CHECK_S)
            alarms.append(at)
            self.later(at - now, self._ring)

    def _ring(self) -> None:
        self._alarms.pop()
        now = self.clock()
        next_at = now + CHECK_S  # used if a check raises
        try:
            lanes = list(self.lanes.values())
            next_at = min([lane.check(now, self.step) for lane in lanes], default=inf)
        finally:
            self.check_by(next_at)

    def _take(self, step: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Carries out another thread's step. Messages that become ready are sent after all steps
        that are now waiting, so that simultaneous parts are sent together."""
        self._busy = True
        self.attempt(step, *args)
        self._busy = False
        if self.ready and not self._flushing:
            self._flushing = True
            self._home.post(self._flush)

    def step(self, step: Callable[..., None], *args: Any) -> None:
        """Carries out a step, and sends the messages that became ready. If steps nest, the
        outermost one sends, so immediate failures do not deepen the stack."""
        if self._busy:
            self.attempt(step, *args)
        else:
            self._busy = True
            self.attempt(step, *args)
            self._flush()

    def _flush(self) -> None:
        self._busy, self._flushing = True, False
        try:
            while self.ready:
                self.attempt(self.ready.popitem()[1].next)
        finally:
            self._busy = False

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            about = args[0] if args else getattr(step, "__self__", None)
            getattr(about, "cut_off", loop.log_failure)(exc)

    # -- on the loop: what is known about servers ---------------------------------------------

    def choose(self, replicas: Sequence[str], tried: frozenset[str], now: float) -> str | None:
        if len(replicas) == 1:
            return replicas[0]
        missed, avoided, slow = self.unwell(replicas, now)
        stalling = frozenset(a for a in replicas if self.usual[a].stalls(now))
        known = {"missed": missed, "tried": tried, "stalling": stalling}
        return choose(replicas, self.outstanding, avoided, self._chance, slow, **known)

    def unwell(
        self, replicas: Sequence[str], now: float
    ) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Returns the servers that were not reached recently, all servers to avoid, and the
        replicas that are far slower than another replica."""
        missed = avoided = frozenset(a for a, at in self._missed.items() if now - at < AVOID_S)
        usual = {a: self.usual[a] for a in replicas}
        answer = [a for a, one in usual.items() if one.known(now) and not one.stalls(now)]
        medians = {a: usual[a].median_s for a in answer}
        least, config = min(medians.values(), default=0.0), self.config.heartbeat_config
        slow = frozenset(a for a, median in medians.items() if behind(median, least, config))
        if self.watch is not None:
            avoided, slow = avoided | self.watch.avoided, slow | self.watch.slow
        return missed, avoided, slow

    def heard(self, address: str, now: float) -> Heard:
        usual = self.usual[address]
        within_s = usual.within_s(now)
        if within_s is None:
            within_s = inf if self.watch is None else self.watch.delay_s(address)
        messages = chain.from_iterable(lane.messages for lane in self.lanes.values())
        oldest = min(
            (a.since for m in messages for a in m.out if a.sent and a.address == address),
            default=now,
        )
        return Heard(within_s, now - max(oldest, usual.at), usual.misses(now))

    def is_moving(self, replicas: Sequence[str], now: float) -> bool:
        moving = {a for a, at in self._moving.items() if now - at < MOVING_S}
        if self.watch is not None:
            moving |= self.watch.moving
        return not moving.isdisjoint(replicas)

    def note(self, address: str, error: DlmError | None, now: float) -> None:
        if error is None:
            self._missed.pop(address, None)
        elif isinstance(error, (ShardDown, AuthenticationError)):
            self._missed[address] = now
            if is_moving(error):
                self._moving[address] = now
            if self.watch is not None:
                self.watch.lost(address, error)
        elif isinstance(error, (DeadlineExceeded, Overloaded)):
            self.usual[address].miss(now)

    def note_fallback(self, queries: int, error: DlmError, shard: int | None, now: float) -> None:
        """Logs bigram-fallback scores when they begin, and again if they turn out to be
        permanent."""
        kind, outage = type(error).__name__, self._outage
        if outage is None:
            self._outage = Outage(now, now, queries, kind)
            log.warning("client.bigram_fallback.started", extra={"shard": shard, "error": kind})
            return
        self._outage = outage.extended(queries, now)
        if outage.lasts(error):
            self._outage = self._outage._replace(error=kind)
            fields = {"shard": shard, "before": outage.error, "error": kind}
            log.warning("client.bigram_fallback.changed", extra=fields)

    def note_answer(self, now: float) -> None:
        outage = self._outage
        if outage is not None and outage.is_over(now):
            self._outage = None
            fields = {"seconds": round(outage.seconds, 3), "queries": outage.queries}
            log.info("client.bigram_fallback.ended", extra=fields)

    def keep_only(self, snapshots: Sequence[Snapshot]) -> None:
        """From any thread: forgets all shard sets and servers except those in `snapshots` and those
        that messages in flight use."""
        shard_sets = {each.shard_set for each in snapshots}
        replicas = (a for each in snapshots for a in each.topology.addresses.values())
        loop.leave(self._forget, shard_sets, frozenset(chain.from_iterable(replicas)))

    def _forget(self, shard_sets: Set[str], addresses: Set[str]) -> None:
        for place, lane in list(self.lanes.items()):
            if place.shard_set not in shard_sets and lane.queue.idle and not lane.messages:
                del self.lanes[place]
        asked = {address for address, queries in self.outstanding.items() if queries}
        for known in (self.usual, self._missed, self._moving, self.outstanding):
            for address in known.keys() - addresses - asked:
                del known[address]


# Objects of a parent process. A child never touches or collects them, since a fork does not copy
# the helper threads.
_INHERITED: list[dict[str, Any]] = []
