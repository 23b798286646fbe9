"""What a client owns in each process: connections, lanes, counters; made anew after a fork."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlm.client.api.metrics import ClientMetrics, Stats
from dlm.client.deliver import loop
from dlm.client.deliver.call import Part, Place
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.pace import Usual
from dlm.client.deliver.replicas import TokenBucket
from dlm.client.deliver.transport import Connection
from dlm.client.health.cascade import CascadeMonitor
from dlm.client.plan.lowgrams import LowGrams
from dlm.client.plan.partial import Outage
from dlm.client.plan.topology import Connect, Topology
from dlm.errors import ClientClosed
from dlm.logs import EventLog

log = EventLog(__name__)

LOOK_AGAIN_S = 1.0  # while a shard is down, the servers are looked for this often, in seconds


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A shard set, where its shards are, and its low orders."""

    topology: Topology
    grams: LowGrams

    @property
    def model(self) -> str:
        """Id of the model; the same in every sharding of it."""
        return self.topology.manifest.model

    @property
    def shard_set(self) -> str:
        """Id of the shard set."""
        return self.topology.manifest.shard_set

    @property
    def low_bytes(self) -> int:
        """Bytes of the files of its vocabulary and low orders."""
        manifest = self.topology.manifest
        return sum(manifest.file(kind).bytes for kind in ("vocabulary", "low_orders"))

    @cached_property
    def replicated(self) -> bool:
        """Whether a shard has several servers."""
        return any(len(addresses) > 1 for addresses in self.topology.addresses.values())


# What is called with a connection, or with what kept it from being made.
Connected = Callable[[Connection | Exception], None]
Tell = Callable[..., None]  # has the loop carry out a step, with its arguments; from any thread


def closed_error() -> ClientClosed:
    """What whoever uses a closed client gets."""
    return ClientClosed("this client is closed; open another")


# Share of messages that may be sent again when they fail, and as many more at once.
RETRIED, RETRY_BURST = 0.1, 20.0
# Share of messages that may be sent to a second server when they are late, likewise.
HEDGED, HEDGE_BURST = 0.02, 100.0


class Runtime:
    """What one process owns: connections, a lane for each shard, and a thread for refreshing.

    What is below "of the loop" is touched there alone; `lock` holds the rest, and neither calls nor
    messages take it. It is reentrant, since a signal handler may ask while its own thread has it.

    before  the watch of the parent process, whose mode goes on, until there is one here
    """

    def __init__(self) -> None:
        self.process = _process
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.refreshing: Future[Snapshot] | None = None
        self.queued: Future[Snapshot] | None = None  # the last look that many may share
        self.looked = -LOOK_AGAIN_S
        self.fetcher = ThreadPoolExecutor(1, thread_name_prefix="dlm-fetch")
        self.fetching: Future[None] | None = None  # low orders of the model that comes next
        self.fetched: dict[str, LowGrams] = {}  # these, until they are in use
        self.counts = ClientMetrics()
        # What others have for the loop; somebody has woken it, until then at the latest.
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.woken_until = 0.0
        # of the loop:
        self.lanes: dict[Place, Lane[Part]] = {}
        self.ready: dict[Place, Lane[Part]] = {}  # that may have something to send
        self.connecting: dict[str, list[Connected]] = {}  # who waits for a connection, by address
        self.busy = False  # a step is carried out, which looks at these at its end
        self.under_way: set[Any] = set()  # messages that have not ended, or that a server has still
        self.alarms: list[float] = []  # when lanes and messages are looked at; the next is last
        self.chance = random.Random()
        self.retrying = TokenBucket(RETRIED, RETRY_BURST)
        self.hedging = TokenBucket(HEDGED, HEDGE_BURST)
        self.outstanding: Counter[str] = Counter()  # queries in flight, by address
        self.usual: defaultdict[str, Usual] = defaultdict(Usual)  # by address
        self.missed: dict[str, float] = {}  # address -> when a message found nobody there
        self.moving: dict[str, float] = {}  # address -> when it last refused to drain or warm up
        self.outage: Outage | None = None  # of partial scores that are being given
        # of any thread, as single values:
        self.watch: CascadeMonitor | None = None
        self.before: CascadeMonitor | None = None
        self.looking = False  # quietly, on the helper thread
        self.ended = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to let go of: it never began, or has ended."""
        return not self.connections and (self.watch is None or self.ended)

    def end(self) -> None:
        """Lets go of everything; may wait for gRPC."""
        with self.lock:
            self.ended = True
            if self.watch is not None:
                self.watch.stop()
            connections = list(self.connections.values())
            self.connections.clear()
        if not loop.post(self.end_waiting):
            self.end_waiting()
        for connection in connections:
            connection.close()
        self.helper.shutdown(wait=False)
        self.fetcher.shutdown(wait=False)

    def end_waiting(self) -> None:
        """On the loop: what waits to be sent fails."""
        for lane in list(self.lanes.values()):
            for part in list(lane.waiting):
                part.call.fail(closed_error())
        self.lanes.clear()
        self.ready.clear()

    def forget(self, shard_sets: Set[str]) -> None:
        """On the loop: forgets the idle lanes of all other shard sets."""
        for place, lane in list(self.lanes.items()):
            if place.shard_set not in shard_sets and lane.idle:
                del self.lanes[place]


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# closing their channels would wait for threads that a fork does not copy.
_INHERITED: list[Runtime] = []
_DROPPED: list[Runtime] = []  # of clients that nobody closed, while no loop ran
_making = threading.Lock()


_process = object()  # another in each process


def _after_fork() -> None:
    global _making, _process
    _making, _process = threading.Lock(), object()
    _INHERITED.extend(_DROPPED)
    _DROPPED.clear()


os.register_at_fork(after_in_child=_after_fork)


def _let_go(runtime: Runtime) -> None:
    """Nobody can use it any more. A collector may come here in any thread, with any lock held, so
    nothing is waited for, and the thread that ends it is started by the loop."""
    if runtime.process is not _process:
        _INHERITED.append(runtime)
    elif not runtime.is_idle and not loop.post(lambda: _end_later(runtime)):
        _DROPPED.append(runtime)


def _end_later(runtime: Runtime) -> None:
    try:
        threading.Thread(target=runtime.end, name="dlm-close", daemon=True).start()
    except RuntimeError:  # no thread can be started now
        _DROPPED.append(runtime)


class Links:
    """The runtime of whichever process asks, and the connections in it.

    Args
        connect  makes a connection to an address
    """

    def __init__(self, connect: Connect) -> None:
        self.closed = False
        self._connect = connect
        self._runtime = self._begin()
        dropped, _DROPPED[:] = list(_DROPPED), []
        for old in dropped:
            _let_go(old)

    def _begin(self) -> Runtime:
        """One that ends when these links are gone, though nobody closed them."""
        runtime = Runtime()
        weakref.finalize(self, _let_go, runtime).atexit = False
        return runtime

    @property
    def runtime(self) -> Runtime:
        """This process's own."""
        runtime = self._runtime
        if runtime.process is not _process:
            with _making:
                if self._runtime is runtime:
                    _INHERITED.append(runtime)
                    fresh = self._begin()
                    fresh.before = runtime.watch or runtime.before
                    self._runtime = fresh
                runtime = self._runtime
        return runtime

    def stats(self) -> Stats:
        """The counters of this process, as they stand now."""
        return self.runtime.counts.now()

    def check_open(self) -> None:
        """Raises ClientClosed where the client is closed."""
        if self.closed:
            raise closed_error()

    def connection(self, address: str) -> Connection:
        """The connection to `address`, made when first asked for."""
        runtime = self.runtime
        with runtime.lock:
            self.check_open()
            found = runtime.connections.get(address)
        if found is not None:
            return found
        # Outside the lock: it may resolve a name, for seconds, and whoever closes the client would
        # wait. Where another thread was faster, its own is used: this one has opened nothing yet.
        made = self._connect(address)
        with runtime.lock:
            self.check_open()
            return runtime.connections.setdefault(address, made)

    def reach(self, address: str, tell: Tell, then: Connected) -> None:
        """On the loop: calls `then` there with the connection to `address`, once there is one. It
        is made in a thread: to resolve a name may take seconds.

        Args
            tell  has the loop carry out a step; from any thread. Each who waits is told by one of
                  its own: what one raises harms no other
        """
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
            except Exception as exc:  # noqa: BLE001 - whoever waits must hear of it
                made = exc
            tell(reached, made)

        try:
            threading.Thread(target=connect, name="dlm-connect", daemon=True).start()
        except RuntimeError as exc:  # no thread can be started
            reached(exc)

    def renew(self, address: str) -> None:
        """On the loop: gives up the connection to `address`; what follows goes over another."""
        found = self.runtime.connections.pop(address, None)
        if found is None:
            return
        try:  # what closes a channel may wait for whoever opens it
            threading.Thread(target=found.close, name="dlm-close", daemon=True).start()
        except RuntimeError:  # no thread can be started
            found.close()

    def forget_lanes(self, shard_sets: Set[str]) -> None:
        """Has the idle lanes of all other shard sets forgotten."""
        runtime = self.runtime
        loop.post(lambda: runtime.forget(shard_sets))

    def close(self) -> None:
        """Closes every connection; what waits to be sent fails, and so does what is in flight."""
        runtime = self.runtime
        with runtime.lock:
            self.closed = True
        runtime.end()
