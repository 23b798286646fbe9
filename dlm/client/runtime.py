"""What a client owns in each process: connections, windows, counters; made anew after a fork."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dlm.client import batcher, loop
from dlm.client.asks import SCORES
from dlm.client.call import Item
from dlm.client.cascade import CascadeMonitor
from dlm.client.lowgrams import LowGrams
from dlm.client.metrics import ClientMetrics
from dlm.client.partial import Outage
from dlm.client.replicas import RetryBudget
from dlm.client.topology import Connect, Topology
from dlm.client.transport import Connection
from dlm.errors import ClientClosed
from dlm.logs import EventLog

log = EventLog(__name__)

LOOK_AGAIN_S = 1.0  # while a shard is down, the servers are looked for this often, in seconds


class Place(NamedTuple):
    """A shard set, one of its shards, and what is asked of it: each has a window."""

    shard_set: str
    shard: int
    asks: str = SCORES.name


@dataclass
class Stats:
    """What a client has counted since it was made (or since the fork).

    queries        queries asked by callers; a context whose stored words are asked is one
    zero_message   of these, answered from the low orders, without any message
    duplicates     of these, asked more than once within a call or a message, and sent once
    sent_queries   distinct queries sent to servers
    messages       messages sent
    failed         messages that failed
    retries        messages that were sent to another replica after that
    bytes_sent, bytes_received  bytes of these messages, without gRPC's own framing
    partial        distinct queries that the partial model answered
    refreshes      times the table was found stale and fetched anew
    """

    queries: int = 0
    zero_message: int = 0
    duplicates: int = 0
    sent_queries: int = 0
    messages: int = 0
    failed: int = 0
    retries: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    partial: int = 0
    refreshes: int = 0


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

    @cached_property
    def replicated(self) -> bool:
        """Whether a shard has several servers."""
        return any(len(addresses) > 1 for addresses in self.topology.addresses.values())


def closed_error() -> ClientClosed:
    """What whoever uses a closed client gets."""
    return ClientClosed("this client is closed; open another")


class Runtime:
    """What one process owns: connections, a window for each shard, and a thread for refreshing.

    before  the watch of the parent process, whose mode goes on, until there is one here
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.windows: dict[Place, batcher.Window[Item]] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.refreshing: Future[Snapshot] | None = None
        self.queued: Future[Snapshot] | None = None  # the last look that many may share
        self.looked = -LOOK_AGAIN_S
        self.fetcher = ThreadPoolExecutor(1, thread_name_prefix="dlm-fetch")
        self.fetching: Future[None] | None = None  # low orders of the model that comes next
        self.fetched: dict[str, LowGrams] = {}  # these, until they are in use
        self.stats = Stats()
        self.counts = ClientMetrics()
        self.chance = random.Random()
        self.budget = RetryBudget()
        self.outstanding: Counter[str] = Counter()  # queries in flight, by address
        self.missed: dict[str, float] = {}  # address -> when a message found nobody there
        self.moving: dict[str, float] = {}  # address -> when it last refused to drain or warm up
        self.at: dict[tuple[Place, int], tuple[str, int]] = {}  # message -> who has it, its queries
        self.outage: Outage | None = None  # of partial scores that are being given
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
            waiting = [work for w in self.windows.values() for work in w.waiting]
            self.windows.clear()
        for work in waiting:
            work.item.call.fail(closed_error())
        for connection in connections:
            connection.close()
        self.helper.shutdown(wait=False)
        self.fetcher.shutdown(wait=False)

    def release(self, message: tuple[Place, int]) -> str | None:
        """Nobody has it any more, answered or lost; who had it. Inside the lock, and once."""
        address, queries = self.at.pop(message, (None, 0))
        if address is not None:
            self.outstanding[address] -= queries
        return address


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# closing their channels would wait for threads that a fork does not copy.
_INHERITED: list[Runtime] = []
_ABANDONED: list[Connection] = []  # likewise, by `Links.abandon`
_DROPPED: list[Runtime] = []  # of clients that nobody closed, while no loop ran
_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _INHERITED.extend(_DROPPED)
    _DROPPED.clear()


os.register_at_fork(after_in_child=_after_fork)


def _let_go(runtime: Runtime) -> None:
    """Nobody can use it any more. A collector may come here in any thread, with any lock held, so
    nothing is waited for, and the thread that ends it is started by the loop."""
    if runtime.pid != os.getpid():
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
        if runtime.pid != os.getpid():
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
        runtime = self.runtime
        with runtime.lock:
            return replace(runtime.stats)

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
        # Outside the lock, which every message takes: it may resolve a name, for seconds. Where
        # another thread was faster, its own is used: this one has opened nothing yet.
        made = self._connect(address)
        with runtime.lock:
            self.check_open()
            return runtime.connections.setdefault(address, made)

    def abandon(self, address: str | None) -> None:
        """Forgets a connection that lost a message; the next message makes a new one.

        It is not closed: an exception from a signal handler inside gRPC leaves its locks as they
        were, and whoever touches it again may wait for ever.
        """
        runtime = self.runtime
        with runtime.lock:
            found = runtime.connections.pop(address or "", None)
        if found is not None:
            _ABANDONED.append(found)
            log.warning("client.connection.abandoned", extra={"address": address})

    def renew(self, address: str) -> None:
        """Gives up the connection to `address`; what follows goes over another."""
        runtime = self.runtime
        with runtime.lock:
            found = runtime.connections.pop(address, None)
        if found is not None:
            found.close()

    def forget_windows(self, shard_sets: Set[str]) -> None:
        """Forgets the idle windows of all other shard sets. Inside the lock."""
        runtime = self.runtime
        runtime.windows = {
            place: window
            for place, window in runtime.windows.items()
            if place.shard_set in shard_sets or window.in_flight or window.waiting
        }

    def close(self) -> None:
        """Lets go of every connection; what waits to be sent fails, as what is under way does."""
        runtime = self.runtime
        with runtime.lock:
            self.closed = True
        runtime.end()
