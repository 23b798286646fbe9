"""One call, from queries to answers: low orders, routing, batching, transport, and back.

Both faces of the client use this core, from any thread; what it waits for are futures that gRPC's
own threads complete. What belongs to one process (connections, queues, locks) is in `_Runtime` and
is made anew after a fork; what does not (low orders, settings) is shared with the child.

One file past 500 lines: every path here ends a call exactly once and gives its place in a window
back exactly once, and that is seen only with all of them in one place.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.client import batcher, router
from dlm.client.call import Call, Item, Pending, deliver, own_copy
from dlm.client.cascade import CascadeStatus, Watch
from dlm.client.config import ClientConfig
from dlm.client.fork import inside
from dlm.client.lowgrams import LowGrams, check_queries, fetch
from dlm.client.metrics import CANCELLED, OK, ClientMetrics, result_of
from dlm.client.modes import Mode
from dlm.client.partial import stands_in_for
from dlm.client.replicas import RetryBudget, choose
from dlm.client.security import Metadata
from dlm.client.topology import (
    Connect,
    Endpoint,
    Topology,
    check_model,
    discover,
    said_once,
)
from dlm.client.transport import Connection, GrpcConnection
from dlm.client.warm import canary_queries, warm_up
from dlm.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.ngram.query import Answers, QueryGroups
from dlm.tracing import Span, Tracer
from dlm.wire import codec

log = logging.getLogger(__name__)

Clock = Callable[[], float]
MAX_REROUTES = 2  # a table that is stale twice in one call is not going to settle within it
LOOK_AGAIN_S = 1.0  # while a shard is down, the servers are looked for this often, in seconds
# What may wait for a shard: a few messages' worth, and however small these are, some queries.
MAX_WAITING_MESSAGES = 4
MIN_WAITING = 4096
SURELY_EVERYWHERE = 8  # contexts a shard: so many in a call will hardly miss any of the shards
CLOSED = "this client is closed"
FIRST_TRY = 0.5  # part of the time left that one replica gets where another could be asked
AVOID_S = 1.0  # for so long, a server where a message found nobody is asked after all others


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


def _closed() -> ShardDown:
    error = ShardDown(CLOSED)
    error.retryable = False  # this client never comes back
    return error


@dataclass(frozen=True, slots=True)
class _Message:
    """Items that share message `number` of a window.

    tried    addresses that it was sent to; the last is the one that has it now
    """

    snapshot: Snapshot
    shard: int
    items: list[Item]
    merged: router.Grouped
    number: int
    tried: tuple[str, ...] = ()


class _Runtime:
    """What one process owns: connections, a window for each shard, and a thread for refreshing."""

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
        self.at: dict[tuple[int, int], str] = {}  # (shard, message) -> who has it
        self.watch: Watch | None = None
        self.looking = False  # quietly, on the helper thread


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# closing their channels would wait for threads that a fork does not copy.
_INHERITED: list[_Runtime] = []
_ABANDONED: list[Connection] = []  # likewise, by `Core._abandon`
_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _turn.events = None


os.register_at_fork(after_in_child=_after_fork)

_Event: TypeAlias = "batcher.Submit[Item] | batcher.Done"


class _Turn(threading.local):
    """Events that this thread has still to feed to windows; None while it feeds none."""

    events: deque[tuple[Core, int, _Event]] | None = None


_turn = _Turn()


class Core:
    """Scores batches of ids against a cluster.

    Args
        endpoints  returns the servers there are; asked again whenever the table is stale
        model      which of the models they hold; see `topology.discover`
        connect    makes a connection to an address
        clock      seconds, monotonic
    """

    def __init__(
        self,
        endpoints: Callable[[], Sequence[Endpoint]],
        config: ClientConfig,
        *,
        model: str | None = None,
        connect: Connect = GrpcConnection,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config = config
        self._endpoints = endpoints
        self._model = check_model(model)
        self._connect = connect
        self._clock = clock
        self._tracer = Tracer(__version__) if config.trace else None
        self._runtime_ = _Runtime()
        self._closed = False
        self._snapshot: Snapshot | None = None

    # -- life ---------------------------------------------------------------------------------

    @property
    def _runtime(self) -> _Runtime:
        runtime = self._runtime_
        if runtime.pid != os.getpid():
            with _making:
                if self._runtime_ is runtime:
                    _INHERITED.append(runtime)
                    fresh = _Runtime()
                    if runtime.watch is not None:
                        fresh.watch = self._new_watch(runtime.watch)
                    self._runtime_ = fresh
                runtime = self._runtime_
        return runtime

    def check_open(self) -> None:
        """Raises ShardDown where the client is closed."""
        if self._closed:
            raise _closed()

    @property
    def stats(self) -> Stats:
        """The counters of this process, as they stand now."""
        runtime = self._runtime
        with runtime.lock:
            return replace(runtime.stats)

    @property
    def counts(self) -> ClientMetrics:
        """What the metrics of this process are made of."""
        return self._runtime.counts

    def load(self) -> dict[int, tuple[int, int]]:
        """Of each shard asked so far: messages in flight, and pieces that wait for one."""
        runtime = self._runtime
        with runtime.lock:
            return {s: (w.in_flight, len(w.waiting)) for s, w in runtime.windows.items()}

    def cache_bytes(self) -> int:
        """Bytes of the files in the cache that are in use; 0 before the first snapshot."""
        snapshot = self._snapshot
        if snapshot is None:
            return 0
        manifest = snapshot.topology.manifest
        return sum(manifest.file(kind).bytes for kind in ("vocabulary", "low_orders"))

    def snapshot(self) -> Snapshot:
        """The shard set in use; found and fetched at the first call.

        Raises  UnavailableError, ProtocolError, ConfigError
        """
        snapshot = self._snapshot
        return self._refresh() if snapshot is None else snapshot

    # -- the cascade --------------------------------------------------------------------------

    def watch(self) -> Watch | None:
        """What watches the servers; begun where it is of use, see `ClientConfig.heartbeats`."""
        runtime = self._runtime
        if runtime.watch is None and not self._closed:
            wanted = self.config.heartbeats
            if wanted is None:
                snapshot = self._snapshot
                wanted = self.config.partial or (snapshot is not None and snapshot.replicated)
            if wanted:
                self._begin_watch(Mode.FULL)
        return runtime.watch

    def begin_small(self) -> None:
        """No server answers, so the first utterances go to the small model already."""
        self._begin_watch(Mode.SMALL)

    def _begin_watch(self, mode: Mode) -> None:
        runtime = self._runtime
        with runtime.lock:
            if runtime.watch is None and not self._closed:
                runtime.watch = self._new_watch(None, mode)

    def _new_watch(self, before: Watch | None, mode: Mode = Mode.FULL) -> Watch:
        config = self.config
        return Watch(
            self,
            config.beating,
            config.switching,
            may_switch=config.small is not None,
            before=before,
            mode=mode,
        ).start()

    def mode(self) -> Mode:
        """Which model new utterances are scored with."""
        watch = self.watch()
        return Mode.FULL if watch is None else watch.mode

    def cascade(self) -> CascadeStatus:
        """How the servers and the cascade stand.

        Raises  ConfigError  this client sends no heartbeats
        """
        watch = self.watch()
        if watch is None:
            self.check_open()
            raise ConfigError(
                "this client sends no heartbeats, so it knows nothing of its servers; give "
                "ClientConfig(heartbeats=True)"
            )
        return watch.status()

    def known(self) -> Topology | None:
        """See `cascade.Host`."""
        snapshot = self._snapshot
        return None if snapshot is None else snapshot.topology

    def renew(self, address: str) -> None:
        """See `cascade.Host`."""
        runtime = self._runtime
        with runtime.lock:
            found = runtime.connections.pop(address, None)
        if found is not None:
            found.close()

    def look_again(self) -> None:
        """See `cascade.Host`."""
        runtime = self._runtime
        with runtime.lock:
            if runtime.looking or self._closed:
                return
            runtime.looking = True
        try:
            runtime.helper.submit(self._look_quietly, self._snapshot)
        except RuntimeError:  # closed meanwhile
            runtime.looking = False

    def ask_canary(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        """See `cascade.Host`: an utterance's worth of queries to each shard."""
        snapshot = self.snapshot()
        groups = canary_queries(snapshot.topology.manifest)
        queries = len(groups.words)
        deadline = self._clock() + timeout_s
        place = np.arange(queries, dtype=np.int64)
        # As what was let in before: a canary is never refused for what this client has to do.
        everything = np.ones(len(groups.word_counts), np.bool_)
        call = Call(snapshot.model, Answers.empty(queries), groups, everything, place, deadline)
        call.future.add_done_callback(
            lambda ended: done(not ended.cancelled() and ended.exception() is None)
        )
        if queries == 0:
            call.succeed()
            return
        self._dispatch(snapshot, call, groups, everything, None, 0, canary=True)

    def close(self) -> None:
        """Lets go of every connection; calls under way fail with `ShardDown`."""
        runtime = self._runtime
        with runtime.lock:
            self._closed = True
            if runtime.watch is not None:
                runtime.watch.stop()
            connections = list(runtime.connections.values())
            runtime.connections.clear()
            waiting = [work for w in runtime.windows.values() for work in w.waiting]
            runtime.windows.clear()
        for work in waiting:
            work.item.call.fail(_closed())
        for connection in connections:
            connection.close()
        runtime.helper.shutdown(wait=False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "endpoints": self._endpoints,
            "config": self.config,
            "model": self._model,
            "connect": self._connect,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Core.__init__(
            self,
            state["endpoints"],
            state["config"],
            model=state["model"],
            connect=state["connect"],
        )

    def connection(self, address: str) -> Connection:
        """The connection to `address`, made when first asked for."""
        runtime = self._runtime
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

    def _abandon(self, address: str | None) -> None:
        """Forgets a connection that lost a message; the next message makes a new one.

        It is not closed: an exception from a signal handler inside gRPC leaves its locks as they
        were, and whoever touches it again may wait for ever.
        """
        runtime = self._runtime
        with runtime.lock:
            found = runtime.connections.pop(address or "", None)
        if found is not None:
            _ABANDONED.append(found)
            log.warning("client.connection.abandoned", extra={"address": address})

    # -- the table ----------------------------------------------------------------------------

    def _refresh(self) -> Snapshot:
        """The first snapshot; many callers at once share one look at the servers."""
        runtime = self._runtime
        with runtime.lock:
            self.check_open()
            if self._snapshot is not None:
                return self._snapshot
            running = runtime.refreshing
            if running is None:
                running = runtime.refreshing = runtime.helper.submit(self._look, None)
        try:
            return running.result()
        except DlmError as exc:
            raise own_copy(exc) from exc
        finally:
            with runtime.lock:
                if runtime.refreshing is running:
                    runtime.refreshing = None

    def _look(
        self,
        stale: Snapshot | None,
        timeout_s: float | None = None,
        found: Callable[[Topology], None] = lambda topology: None,
    ) -> Snapshot:
        """On the helper thread: finds the servers, and fetches what is new.

        Args
            timeout_s  for finding the servers; connect_s where not given
            found      told what was found, before anything is fetched
        """
        try:
            topology = discover(
                self._endpoints_known(stale),
                self.connection,
                self.config.connect_s if timeout_s is None else timeout_s,
                prefer=None if stale is None else stale.shard_set,
                model=self._model,
            )
        finally:
            self._runtime.looked = self._clock()
        found(topology)
        manifest = topology.manifest
        if stale is not None and stale.model == manifest.model:
            grams = stale.grams  # another sharding of the same model: words and low orders stand
        else:
            sources = [
                (shard, self.connection(address))
                for shard, addresses in sorted(topology.addresses.items())
                for address in addresses
            ]
            grams = fetch(manifest, sources, self.config.cache_dir, self.config.connect_s)
            if stale is None:
                warm_up(grams)
        runtime = self._runtime
        with runtime.lock:
            runtime.stats.refreshes += stale is not None
            snapshot = self._snapshot = Snapshot(topology, grams)
        log.info(
            "client.table.read",
            extra={"shard_set": manifest.shard_set, "shards_known": len(topology.addresses)},
        )
        return snapshot

    def _endpoints_known(self, stale: Snapshot | None) -> list[Endpoint]:
        """The endpoints, and what each held when it last said so, for those that stay silent."""
        known = {} if stale is None else stale.topology.addresses
        held = {address: shard for shard, addresses in known.items() for address in addresses}
        return [
            replace(endpoint, shard=held.get(endpoint.address))
            if endpoint.shard is None
            else endpoint
            for endpoint in self._endpoints()
        ]

    # -- a call -------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        deadline_s: float | None = None,
        held: Snapshot | None = None,
    ) -> Future[Answers]:
        """Starts a call; its future has the answers, in the order of the queries.

        Args
            model  the model that the ids belong to
            held   what the caller opened its handle on: where the servers hold another model now,
                   its low orders answer, if there is to be a partial model
        Shapes
            contexts (K, order - 1) uint32 most recent last, right-aligned; lengths (K,) uint8;
            counts (K,) uint32, words asked of each context; words (Q,) uint32, Q = sum(counts)
        Raises
            QueryError     at once, for what can have no answer
            StaleShardSet  at once, where the servers hold another model now
            in the future: UnavailableError, ProtocolError
        """
        begun = time.perf_counter()
        self.check_open()
        # A call begins outside of any turn. An exception from a signal handler may have cut off the
        # last one of this thread just where nothing could clear it.
        _turn.events = None
        snapshot = self.snapshot()
        gone: DlmError | None = None
        if snapshot.model != model:
            gone = _other_model(snapshot.model, model)
            if held is None or not self.config.partial:
                raise gone
            snapshot = held
        manifest = snapshot.topology.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        deadline = self._clock() + (self.config.deadline_s if deadline_s is None else deadline_s)
        if len(counts) >= SURELY_EVERYWHERE * manifest.shards:
            each = -(-len(words) // manifest.shards)
            refusal = self._overload(dict.fromkeys(range(manifest.shards), each), deadline)
            if refusal is not None and not self.config.partial:
                refused: Future[Answers] = Future()
                refused.set_exception(refusal)
                self._runtime.counts.call(result_of(refusal), time.perf_counter() - begun)
                return refused
        # A kernel is compiled for each kind of array; callers may bring slices and read-only ones.
        grouped = router.group(
            np.require(contexts, requirements=["C", "W"]),
            np.require(lengths, requirements=["C", "W"]),
            np.require(counts, requirements=["C", "W"]),
            np.require(words, requirements=["C", "W"]),
        )
        answers, remote = snapshot.grams.score(grouped.groups)
        call = Call(model, answers, grouped.groups, remote, grouped.place, deadline)
        if self._tracer is not None:
            call.span = self._tracer.begin("dlm.call", queries=len(words))
        unique_remote = asked_remotely = call.left
        if len(words) != len(grouped.groups.words):
            asked_remotely = int(np.repeat(remote, grouped.groups.word_counts)[grouped.place].sum())
        runtime = self._runtime
        with runtime.lock:
            stats = runtime.stats
            stats.queries += len(words)
            stats.zero_message += len(words) - asked_remotely
            stats.duplicates += asked_remotely - unique_remote
        if call.span is not None:
            share = 1.0 - asked_remotely / max(len(words), 1)
            call.future.add_done_callback(partial(_end_span, call, call.span, share))
        if unique_remote == 0:
            call.succeed()
            runtime.counts.call(OK, time.perf_counter() - begun)
            return call.future
        watch = self.watch()
        if self.config.partial:
            call.fall_back(snapshot.grams)
            if gone is None and watch is not None and watch.mode is Mode.SMALL:
                gone = ShardDown("no message is sent meanwhile")
            if gone is not None:
                # An utterance that began on the full model ends on its low orders.
                self._count_partial(call.give_up(gone))
                runtime.counts.call(OK, time.perf_counter() - begun)
                return call.future
        planned = time.perf_counter()
        call.future.add_done_callback(
            lambda done: runtime.counts.call(_result_of(done), planned - begun)
        )
        self._dispatch(snapshot, call, grouped.groups, remote, None, 0)
        return call.future

    def _overload(self, asked: Mapping[int, int], deadline: float) -> Overloaded | None:
        """What a call is told at once where a shard that it asks has too much to do already.

        Before any work, or before any of it is sent: whoever refuses many calls must have time left
        for those it answers, and what one shard answers is of no use where another refuses.

        Args
            asked  queries of each shard
        """
        runtime = self._runtime
        now = self._clock()
        with runtime.lock:
            for shard, queries in asked.items():
                window = runtime.windows.get(shard)
                if (
                    window is not None
                    and window.refuses(queries, deadline, now)
                    # What ran out meanwhile makes room; the next event of the window finds it.
                    and window.earliest > now
                    and all(lease.until > now for lease in window.leases)
                ):
                    return _too_much(shard, window, deadline - now)
        return None

    def _dispatch(
        self,
        snapshot: Snapshot,
        call: Call,
        groups: QueryGroups,
        remote: NDArray[np.bool_],
        at: NDArray[np.int64] | None,
        reroutes: int,
        canary: bool = False,
    ) -> None:
        """Queues the remote part of `groups`, whose words stand at `at` in the call (None: at
        their own places)."""
        limit, now = self._max_queries(snapshot), time.perf_counter()
        manifest = snapshot.topology.manifest
        pieces = list(router.route(groups, remote, manifest.slots, manifest.shards, limit))
        asked: Counter[int] = Counter()
        for piece in pieces:
            asked[piece.shard] += len(piece.groups.words)
        refused: dict[int, Overloaded] = {}
        if reroutes == 0 and not canary:
            for shard, queries in asked.items():
                refusal = self._overload({shard: queries}, call.deadline)
                if refusal is not None and not self.config.partial:
                    call.fail(refusal)
                    return
                if refusal is not None:
                    refused[shard] = refusal
        let_in = set()
        for piece in pieces:
            if piece.shard in refused:
                # What the other shards answer is of use all the same.
                self._count_partial(call.miss(piece, refused[piece.shard]))
                continue
            if at is not None:
                piece = router.Piece(piece.shard, piece.groups, at[piece.at])
            item = Item(call, piece, snapshot.shard_set, reroutes, now)
            more = reroutes > 0 or canary or piece.shard in let_in
            let_in.add(piece.shard)
            work = batcher.Work(item, len(piece.groups.words), call.deadline, more)
            self._step(piece.shard, batcher.Submit(work))

    def _dispatch_again(self, snapshot: Snapshot, item: Item, reroutes: int) -> None:
        """Queues an item where it belongs by the table of `snapshot`."""
        groups = item.piece.groups
        remote = np.ones(len(groups.word_counts), np.bool_)
        self._dispatch(snapshot, item.call, groups, remote, item.piece.at, reroutes)

    def _max_queries(self, snapshot: Snapshot) -> int:
        return min(self.config.max_queries, snapshot.topology.max_queries)

    def _step(self, shard: int, event: _Event) -> None:
        """Feeds an event to the shard's window and does what follows.

        Events that follow at once (a message that fails while it is sent) wait until this one is
        through: however many there are, they take no stack.
        """
        if _turn.events is not None:
            _turn.events.append((self, shard, event))
            return
        events = _turn.events = deque([(self, shard, event)])
        try:
            while events:
                core, shard, event = events.popleft()
                core._step_one(shard, event)
        finally:
            _turn.events = None

    def _step_one(self, shard: int, event: _Event) -> None:
        runtime = self._runtime
        snapshot = self.snapshot()
        with runtime.lock:
            limit = self._max_queries(snapshot)
            window = runtime.windows.get(shard) or batcher.Window(self.config.window, 0)
            if window.max_queries != limit:
                most = max(MAX_WAITING_MESSAGES * limit, MIN_WAITING)
                window = window._replace(max_queries=limit, max_waiting=most)
            if self._closed:
                actions: list[batcher.Action[Item]] = []
            else:
                runtime.windows[shard], actions = batcher.step(window, event, self._clock())
        if self._closed and isinstance(event, batcher.Submit):
            event.work.item.call.fail(_closed())
        for action in actions:
            if isinstance(action, batcher.Expire):
                if runtime.watch is not None:
                    runtime.watch.count(failed=True)
                self._miss(
                    action.work.item,
                    DeadlineExceeded(f"shard {shard}: the deadline passed before the message left"),
                )
            elif isinstance(action, batcher.Lost):
                self._abandon(runtime.at.pop((shard, action.message), None))
            elif isinstance(action, batcher.Refuse):
                self._miss(
                    action.work.item,
                    _too_much(shard, window, action.work.deadline - self._clock()),
                )
            else:
                self._send(shard, [work.item for work in action.works], action.message)

    def _send(self, shard: int, items: list[Item], number: int) -> None:
        """One message for all of `items` that still want it."""
        snapshot = self.snapshot()
        wanted = []
        for item in items:
            if item.call.future.done():
                continue  # its caller gave up, or another part of it failed
            # Ids of one model must never reach the servers of another, which would answer
            # plausibly.
            if item.call.model != snapshot.model:
                self._miss(item, _other_model(snapshot.model, item.call.model))
            elif item.shard_set != snapshot.shard_set:
                self._dispatch_again(snapshot, item, item.reroutes)  # the table changed meanwhile
            else:
                wanted.append(item)
        if not wanted:
            self._step(shard, batcher.Done(number, answered=False))
            return
        message = _Message(
            snapshot,
            shard,
            wanted,
            router.merge([item.piece.groups for item in wanted]),
            number,
        )
        self._runtime.budget.earn()
        watch = self._runtime.watch
        if watch is not None and shard in watch.gone and self.config.partial:
            # Their deadlines are better spent on what comes next.
            self._end(message, ShardDown(f"no server of shard {shard} answers heartbeats"))
            return
        try:
            self._transmit(message)
        except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
            self._settle(message, _as_dlm_error(exc, shard))

    def _transmit(self, message: _Message) -> None:
        snapshot, shard, merged = message.snapshot, message.shard, message.merged
        manifest, runtime = snapshot.topology.manifest, self._runtime
        queries = len(merged.groups.words)
        # The latest deadline among them: an earlier caller stops waiting by itself.
        deadline = max(item.call.deadline for item in message.items)
        now = self._clock()
        with runtime.lock:
            replicas = snapshot.topology.addresses.get(shard, ())
            missed = {a for a, at in runtime.missed.items() if now - at < AVOID_S}
            if runtime.watch is not None:
                missed |= runtime.watch.avoided
            avoided = frozenset(missed.union(message.tried))
            address = choose(replicas, runtime.outstanding, avoided, runtime.chance)
            others = set(replicas).difference(avoided, (address,))
        if address is None:
            known = "; ".join(said_once(snapshot.topology.faults.items()))
            raise ShardDown(
                f"no server is known to hold shard {shard} of shard set {manifest.shard_set}"
                + (f" ({known})" if known else "")
            )
        message = replace(message, tried=(*message.tried, address))
        # Where another could still be asked, it gets its share of the time.
        timeout_s = max(deadline - now, 0.0) * (FIRST_TRY if others else 1.0)
        connection = self.connection(address)
        begun = time.perf_counter()
        request, checksum = codec.encode_score_request(
            manifest.shard_set_bytes, shard, merged.groups
        )
        with runtime.lock:
            runtime.stats.messages += 1
            runtime.stats.sent_queries += queries
            runtime.stats.duplicates += len(merged.place) - queries
            runtime.stats.bytes_sent += len(request)
            runtime.outstanding[address] += queries
            runtime.at[shard, message.number] = address

        replies = count()

        def reply(data: bytes | None, error: DlmError | None) -> None:
            if next(replies):
                return  # an error that was raised after a reply was given
            came = time.perf_counter()
            try:
                if error is None:
                    answers = codec.decode_score_reply(
                        data or b"",
                        shard_set=manifest.shard_set_bytes,
                        shard=shard,
                        queries=queries,
                        request_checksum=checksum,
                    )
                    deliver(message.items, message.merged, answers)
            except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
                error = _as_dlm_error(exc, shard)
                error.add_note(f"from {address}")
            with runtime.lock:
                runtime.stats.bytes_received += len(data or b"")
                runtime.stats.failed += error is not None
                runtime.outstanding[address] -= queries
                runtime.at.pop((shard, message.number), None)
                if isinstance(error, ShardDown):
                    runtime.missed[address] = self._clock()
                elif error is None:
                    runtime.missed.pop(address, None)
            runtime.counts.message(
                result_of(error),
                queries,
                len({id(item.call) for item in message.items}),
                begun - min(item.queued for item in message.items),
                left - begun,
                came - left,
                time.perf_counter() - came if data is not None else 0.0,
            )
            watch = runtime.watch
            if watch is not None and isinstance(error, ShardDown):
                watch.lost(address)
            if error is None:
                if watch is not None:
                    watch.count(failed=False)
                self._step(shard, batcher.Done(message.number))
            else:
                self._settle(message, error)

        traced = () if self._tracer is None else (self._trace(message),)
        left = time.perf_counter()
        try:
            connection.score(request, timeout_s, reply, *traced)
        except Exception as exc:  # noqa: BLE001 - as a reply, which ends what was counted above
            reply(None, _as_dlm_error(exc, shard))

    def _trace(self, message: _Message) -> Metadata:
        """The context of the first call in the message that is sampled: a server's span has one
        parent, so of calls that share a message one shows it."""
        spans = []
        for item in message.items:
            item.call.messages += 1
            spans.append(item.call.span)
        sampled = next((span for span in spans if span is not None and span.sampled), None)
        return () if sampled is None or self._tracer is None else self._tracer.metadata(sampled)

    def _settle(self, message: _Message, error: DlmError) -> None:
        """Ends a message that failed: by a fresh table and another try where that can help."""
        runtime, now = self._runtime, self._clock()
        due = now - runtime.looked >= LOOK_AGAIN_S
        if self._ask_another(message, error, now):
            return
        try:
            self.check_open()
            if isinstance(error, StaleShardSet) or (not message.tried and due):
                runtime.helper.submit(self._reroute, message, error)
                return
            if due and isinstance(error, (ShardDown, DeadlineExceeded)):
                # It may have come back elsewhere; the next calls will know.
                runtime.looked = now
                runtime.helper.submit(self._look_quietly, message.snapshot)
        except (RuntimeError, ShardDown):
            pass  # closed meanwhile
        self._end(message, error)

    def _ask_another(self, message: _Message, error: DlmError, now: float) -> bool:
        """Sends a message that failed to another replica, once; whether it did.

        Its place in the window stays its own. A Score changes nothing, so that it does no harm
        where the first is answered after all.
        """
        replicas = message.snapshot.topology.addresses.get(message.shard, ())
        deadline = max(item.call.deadline for item in message.items)
        runtime = self._runtime
        if (
            not isinstance(error, UnavailableError)
            or isinstance(error, AuthenticationError)
            or len(message.tried) != 1
            or not set(replicas).difference(message.tried)
            or now >= deadline
            or self._closed
        ):
            return False
        with runtime.lock:
            if not runtime.budget.spend():
                return False
            runtime.stats.retries += 1
        try:
            self._transmit(message)
        except Exception as exc:  # noqa: BLE001 - a place in the window must never be lost
            self._end(message, _as_dlm_error(exc, message.shard))
        return True

    def _end(self, message: _Message, error: DlmError) -> None:
        watch = self._runtime.watch
        if watch is not None:
            watch.count(failed=stands_in_for(error))
        for item in message.items:
            self._miss(item, error)
        self._step(message.shard, batcher.Done(message.number, answered=False))

    def _look_quietly(self, snapshot: Snapshot | None) -> None:
        try:
            if self._snapshot is snapshot:
                self._look(snapshot, self.config.deadline_s)
        except DlmError as exc:
            log.info("client.table.unread", extra={"error": str(exc)})
        finally:
            self._runtime.looking = False

    def _reroute(self, message: _Message, error: DlmError) -> None:
        """On the helper thread: fetches the table and sends the items where they belong now."""

        def found(topology: Topology) -> None:
            # What is fetched of another model may take longer than these callers wait.
            for item in message.items:
                if item.call.model != topology.manifest.model:
                    self._miss(item, _other_model(topology.manifest.model, item.call.model))

        try:
            if self._snapshot is message.snapshot:
                # Half of the time that is left, so that the other half is there for asking again.
                deadline = max(item.call.deadline for item in message.items)
                allowed = max((deadline - self._clock()) / 2, 0.05)
                self._look(message.snapshot, min(allowed, self.config.connect_s), found)
            fresh = self.snapshot()
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            error.add_note(f"and no fresh table could be had: {exc}")
            self._end(message, error)
            return
        self._step(message.shard, batcher.Done(message.number, answered=False))
        for item in message.items:
            if item.call.model != fresh.model:
                self._miss(item, _other_model(fresh.model, item.call.model))
            elif item.reroutes >= MAX_REROUTES:
                self._miss(item, error)
            else:
                self._dispatch_again(fresh, item, item.reroutes + 1)

    def _miss(self, item: Item, error: DlmError) -> None:
        """An item that is not answered: by the partial model where there is one, else its error."""
        try:
            self._count_partial(item.call.miss(item.piece, error))
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error.add_note(f"and the partial model failed: {exc!r}")
            item.call.fail(error)

    def give_up(self, future: Future[Answers], error: DlmError) -> None:
        """The caller's time is over: ends its call as `_miss` does, whatever is still under way."""
        if isinstance(future, Pending) and (call := future.call) is not None:
            self._count_partial(call.give_up(error))

    def _count_partial(self, queries: int) -> None:
        if queries:
            runtime = self._runtime
            with runtime.lock:
                runtime.stats.partial += queries


def _too_much(shard: int, window: batcher.Window[Item], left_s: float) -> Overloaded:
    work_s = window.pace.seconds(window.ahead)
    error = Overloaded(
        f"shard {shard}: {window.in_flight} messages are in flight and {len(window.waiting)} wait, "
        f"with {window.ahead} queries in them, some {work_s:.3g} s of "
        f"work; a call that has {max(left_s, 0.0):.3g} s left would come too late. Ask less at "
        "once, or later"
    )
    error.retry_after_s = work_s or None
    return error


def _as_dlm_error(error: Exception, shard: int) -> DlmError:
    if isinstance(error, DlmError):
        return error
    wrapped = DlmError(f"shard {shard}: a message could not be made or read: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _end_span(call: Call, span: Span, zero_message_share: float, done: Future[Answers]) -> None:
    span.end(_result_of(done), messages=call.messages, zero_message_share=zero_message_share)


def _result_of(done: Future[Answers]) -> str:
    return CANCELLED if done.cancelled() else result_of(done.exception())


def _other_model(found: str, expected: str) -> StaleShardSet:
    return StaleShardSet(
        f"this handle was opened on model {expected}; the servers hold {found} now. "
        "Open a new utterance"
    )
