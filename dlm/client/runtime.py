"""What a client owns in each process: connections, windows, counters; made anew after a fork."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from dlm.client import batcher
from dlm.client.call import Item
from dlm.client.cascade import Watch
from dlm.client.fork import inside
from dlm.client.lowgrams import LowGrams
from dlm.client.metrics import ClientMetrics
from dlm.client.partial import Spell
from dlm.client.replicas import RetryBudget
from dlm.client.topology import Connect, Topology
from dlm.client.transport import Connection
from dlm.errors import ShardDown

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # while a shard is down, the servers are looked for this often, in seconds
CLOSED = "this client is closed"


@dataclass
class Stats:
    """What a client has counted since it was made (or since the fork).

    queries        queries asked by callers
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


def closed_error() -> ShardDown:
    """What whoever uses a closed client gets."""
    error = ShardDown(CLOSED)
    error.retryable = False  # this client never comes back
    return error


class Runtime:
    """What one process owns: connections, a window for each shard, and a thread for refreshing.

    before  the watch of the parent process, whose mode goes on, until there is one here
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.windows: dict[int, batcher.Window[Item]] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.refreshing: Future[Snapshot] | None = None
        self.looked = -LOOK_AGAIN_S
        self.stats = Stats()
        self.counts = ClientMetrics()
        self.chance = random.Random()
        self.budget = RetryBudget()
        self.outstanding: Counter[str] = Counter()  # queries in flight, by address
        self.missed: dict[str, float] = {}  # address -> when a message found nobody there
        self.at: dict[tuple[int, int], tuple[str, int]] = {}  # message -> who has it, its queries
        self.spell: Spell | None = None  # of partial scores that are being given
        self.watch: Watch | None = None
        self.before: Watch | None = None
        self.looking = False  # quietly, on the helper thread

    def left(self, message: tuple[int, int]) -> str | None:
        """Nobody has it any more, answered or lost; who had it. Inside the lock, and once."""
        address, queries = self.at.pop(message, (None, 0))
        if address is not None:
            self.outstanding[address] -= queries
        return address


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# closing their channels would wait for threads that a fork does not copy.
_INHERITED: list[Runtime] = []
_ABANDONED: list[Connection] = []  # likewise, by `Links.abandon`
_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Links:
    """The runtime of whichever process asks, and the connections in it.

    Args
        connect  makes a connection to an address
    """

    def __init__(self, connect: Connect) -> None:
        self.closed = False
        self._connect = connect
        self._runtime = Runtime()

    @property
    def runtime(self) -> Runtime:
        """This process's own."""
        runtime = self._runtime
        if runtime.pid != os.getpid():
            with _making:
                if self._runtime is runtime:
                    _INHERITED.append(runtime)
                    fresh = Runtime()
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
        """Raises ShardDown where the client is closed."""
        if self.closed:
            raise closed_error()

    def connection(self, address: str) -> Connection:
        """The connection to `address`, made when first asked for."""
        runtime = self.runtime
        with runtime.lock:
            self.check_open()
            known = runtime.connections.get(address)
        if known is not None:
            return known
        # The gate comes first: a fork that holds it waits for a loop that may want the lock.
        with inside(), runtime.lock:
            self.check_open()
            found = runtime.connections.get(address)
            if found is None:
                found = runtime.connections[address] = self._connect(address)
            return found

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

    def close(self) -> None:
        """Lets go of every connection; what waits to be sent fails, as what is under way does."""
        runtime = self.runtime
        with runtime.lock:
            self.closed = True
            if runtime.watch is not None:
                runtime.watch.stop()
            connections = list(runtime.connections.values())
            runtime.connections.clear()
            waiting = [work for w in runtime.windows.values() for work in w.waiting]
            runtime.windows.clear()
        for work in waiting:
            work.item.call.fail(closed_error())
        for connection in connections:
            connection.close()
        runtime.helper.shutdown(wait=False)
