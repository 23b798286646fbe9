"""One call, from queries to answers: low orders, routing, batching, transport, and back.

Both faces of the client use this core, from any thread; what it waits for are futures that gRPC's
own threads complete. What belongs to one process (connections, queues, locks) is in `_Runtime` and is
made anew after a fork; what does not (low orders, settings) is shared with the child.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client import batcher, router
from dlm.client.cascade import Fallback, NoFallback
from dlm.client.config import ClientConfig
from dlm.client.lowgrams import LowGrams, check_queries, fetch
from dlm.client.topology import Connect, Endpoint, Topology, discover, read_cluster_file
from dlm.client.transport import Connection, GrpcConnection
from dlm.errors import DeadlineExceeded, DlmError, ShardDown, StaleShardSet
from dlm.ngram.query import Answers, QueryGroups
from dlm.wire import codec
from dlm.wire.status import STALE_REASONS

log = logging.getLogger(__name__)

Clock = Callable[[], float]
MAX_REROUTES = 2  # a table that is stale twice in one call is not going to settle within it
LOOK_AGAIN_S = 1.0  # while a shard is down, the servers are looked for this often, in seconds


@dataclass
class Stats:
    """What a client has counted since it was made (or since the fork).

    queries        queries asked by callers
    zero_message   of these, answered from the low orders, without any message
    duplicates     of these, asked more than once within a call or a message, and sent once
    sent_queries   distinct queries sent to servers
    messages       messages sent
    failed         messages that failed
    bytes_sent, bytes_received  bytes of these messages, without gRPC's own framing
    refreshes      times the table was found stale and fetched anew
    """

    queries: int = 0
    zero_message: int = 0
    duplicates: int = 0
    sent_queries: int = 0
    messages: int = 0
    failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
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


class _Call:
    """One caller's batch: distinct queries, and how many of them still wait for a server."""

    __slots__ = ("answers", "deadline", "future", "left", "lock", "model", "place")

    def __init__(
        self, model: str, answers: Answers, place: NDArray[np.int64], deadline: float
    ) -> None:
        self.model = model
        self.answers = answers
        self.place = place
        self.deadline = deadline
        self.future: Future[Answers] = Future()
        self.left = 0
        self.lock = threading.Lock()

    def fill(self, at: NDArray[np.int64], part: Answers) -> None:
        """Writes the answers to the distinct queries `at`; the last part completes the call."""
        with self.lock:
            for name in _ANSWER_FIELDS:
                getattr(self.answers, name)[at] = getattr(part, name)
            self.left -= len(at)
            done = self.left == 0
        if done:
            self.succeed()

    def succeed(self) -> None:
        result = Answers(*(getattr(self.answers, name)[self.place] for name in _ANSWER_FIELDS))
        try:
            self.future.set_result(result)
        except InvalidStateError:
            pass  # given up by its caller, or failed already

    def fail(self, error: DlmError) -> None:
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            pass


_ANSWER_FIELDS = tuple(f.name for f in fields(Answers))


@dataclass(frozen=True, slots=True)
class _Item:
    """A piece of a call, waiting for or on its way to a shard; `reroutes` fresh tables so far."""

    call: _Call
    piece: router.Piece
    reroutes: int


class _Runtime:
    """What one process owns: connections, a window for each shard, and a thread for refreshing."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.connections: dict[str, Connection] = {}
        self.windows: dict[int, batcher.Window[_Item]] = {}
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="dlm-refresh")
        self.refreshing: Future[Snapshot] | None = None
        self.looked = -LOOK_AGAIN_S
        self.stats = Stats()
        self.closed = False


# Runtimes of a parent process: never touched in a child, and never collected there either, since
# closing their channels would wait for threads that a fork does not copy.
_INHERITED: list[_Runtime] = []
_making = threading.Lock()


def _renew_lock() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Core:
    """Scores batches of ids against a cluster.

    Args
        endpoints  returns the servers there are; asked again whenever the table is stale
        connect    makes a connection to an address
        clock      seconds, monotonic
    """

    def __init__(
        self,
        endpoints: Callable[[], Sequence[Endpoint]],
        config: ClientConfig,
        *,
        connect: Connect = GrpcConnection,
        clock: Clock = time.monotonic,
        fallback: Fallback | None = None,
    ) -> None:
        self.config = config
        self._endpoints = endpoints
        self._connect = connect
        self._clock = clock
        self._fallback = fallback or NoFallback()
        self._runtime_ = _Runtime()
        self._snapshot: Snapshot | None = None

    # -- life ---------------------------------------------------------------------------------

    @property
    def _runtime(self) -> _Runtime:
        runtime = self._runtime_
        if runtime.pid != os.getpid():
            with _making:
                if self._runtime_ is runtime:
                    _INHERITED.append(runtime)
                    self._runtime_ = _Runtime()
                runtime = self._runtime_
        if runtime.closed:
            raise ShardDown("this client is closed")
        return runtime

    @property
    def stats(self) -> Stats:
        """The counters of this process."""
        return self._runtime.stats

    def snapshot(self) -> Snapshot:
        """The shard set in use; found and fetched at the first call.

        Raises  UnavailableError, ProtocolError, ConfigError
        """
        snapshot = self._snapshot
        return self._refresh(None) if snapshot is None else snapshot

    def close(self) -> None:
        """Lets go of every connection; calls under way fail."""
        runtime = self._runtime_
        if runtime.pid != os.getpid() or runtime.closed:
            return
        with runtime.lock:
            runtime.closed = True
            connections = list(runtime.connections.values())
            runtime.connections.clear()
        for connection in connections:
            connection.close()
        runtime.helper.shutdown(wait=False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "endpoints": self._endpoints,
            "config": self.config,
            "connect": self._connect,
            "fallback": self._fallback,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Core.__init__(
            self,
            state["endpoints"],
            state["config"],
            connect=state["connect"],
            fallback=state["fallback"],
        )

    def connection(self, address: str) -> Connection:
        """The connection to `address`, made when first asked for."""
        runtime = self._runtime
        with runtime.lock:
            found = runtime.connections.get(address)
            if found is None:
                found = runtime.connections[address] = self._connect(address)
            return found

    # -- the table ----------------------------------------------------------------------------

    def _refresh(self, stale: Snapshot | None) -> Snapshot:
        """A snapshot newer than `stale`; many callers at once share one look at the servers."""
        runtime = self._runtime
        with runtime.lock:
            if self._snapshot is not None and self._snapshot is not stale:
                return self._snapshot
            running = runtime.refreshing
            if running is None:
                running = runtime.refreshing = runtime.helper.submit(self._look, stale)
        try:
            return running.result()
        finally:
            with runtime.lock:
                if runtime.refreshing is running:
                    runtime.refreshing = None

    def _look(self, stale: Snapshot | None, timeout_s: float | None = None) -> Snapshot:
        """On the helper thread: finds the servers, and fetches what is new."""
        timeout_s = self.config.connect_s if timeout_s is None else timeout_s
        endpoints = list(self._endpoints())
        topology = discover(
            endpoints,
            self.connection,
            timeout_s,
            prefer=None if stale is None else stale.shard_set,
        )
        manifest = topology.manifest
        if stale is not None and stale.model == manifest.model:
            grams = stale.grams  # another sharding of the same model: words and low orders stand
        else:
            sources = [self.connection(a) for _, a in sorted(topology.addresses.items())]
            grams = fetch(manifest, sources, self.config.cache_dir, timeout_s)
        runtime = self._runtime
        with runtime.lock:
            runtime.stats.refreshes += stale is not None
            snapshot = self._snapshot = Snapshot(topology, grams)
        log.info(
            "client.table.read",
            extra={"shard_set": manifest.shard_set, "shards_known": len(topology.addresses)},
        )
        return snapshot

    # -- a call -------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        words: NDArray[np.uint32],
        deadline_s: float | None = None,
    ) -> Future[Answers]:
        """Starts a call; its future has the answers, in the order of the queries.

        Args
            model  the model that the ids belong to
        Shapes
            contexts (Q, order - 1) uint32 most recent last, right-aligned; lengths (Q,) uint8;
            words (Q,) uint32
        Raises
            QueryError     at once, for what can have no answer
            StaleShardSet  at once, where the servers hold another model now
            in the future: UnavailableError, ProtocolError
        """
        snapshot = self.snapshot()
        if snapshot.model != model:
            raise _other_model(snapshot, model)
        manifest = snapshot.topology.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, words)
        grouped = router.group(contexts, lengths, words)
        answers, remote = snapshot.grams.score(grouped.groups)
        deadline = self._clock() + (self.config.deadline_s if deadline_s is None else deadline_s)
        call = _Call(model, answers, grouped.place, deadline)
        counts = grouped.groups.word_counts
        unique_remote = int(counts[remote].sum())
        runtime = self._runtime
        with runtime.lock:
            stats = runtime.stats
            stats.queries += len(words)
            asked_remotely = int(np.repeat(remote, counts)[grouped.place].sum())
            stats.zero_message += len(words) - asked_remotely
            stats.duplicates += asked_remotely - unique_remote
        if unique_remote == 0:
            call.succeed()
            return call.future
        call.left = unique_remote
        everything = np.arange(len(grouped.groups.words), dtype=np.int64)
        self._dispatch(snapshot, call, grouped.groups, remote, everything, 0)
        return call.future

    def _dispatch(
        self,
        snapshot: Snapshot,
        call: _Call,
        groups: QueryGroups,
        remote: NDArray[np.bool_],
        at: NDArray[np.int64],
        reroutes: int,
    ) -> None:
        """Queues the remote part of `groups`, whose words stand at `at` in the call."""
        pieces = router.route(
            groups, remote, snapshot.topology.manifest.slots, self.config.max_queries
        )
        for piece in pieces:
            moved = router.Piece(piece.shard, piece.groups, at[piece.at])
            work = batcher.Work(_Item(call, moved, reroutes), len(moved.groups.words), call.deadline)
            self._step(piece.shard, batcher.Submit(work))

    def _step(self, shard: int, event: batcher.Submit[_Item] | batcher.Done) -> None:
        runtime = self._runtime
        with runtime.lock:
            window = runtime.windows.get(shard) or batcher.Window(
                self.config.window, self.config.max_queries
            )
            runtime.windows[shard], actions = batcher.step(window, event, self._clock())
        for action in actions:
            if isinstance(action, batcher.Expire):
                action.work.item.call.fail(
                    DeadlineExceeded(
                        f"shard {shard}: the deadline passed while {self.config.window} messages "
                        "were in flight and none came back"
                    )
                )
            else:
                self._send(shard, [work.item for work in action.works])

    def _send(self, shard: int, items: list[_Item]) -> None:
        """One message for all of `items`."""
        snapshot = self.snapshot()
        # Ids of one model must never reach the servers of another, which would answer plausibly.
        for item in items:
            if item.call.model != snapshot.model:
                item.call.fail(_other_model(snapshot, item.call.model))
        items = [item for item in items if item.call.model == snapshot.model]
        if not items:
            self._step_if_open(shard)
            return
        now = self._clock()
        merged = router.merge([item.piece.groups for item in items])
        address = snapshot.topology.addresses.get(shard)
        manifest = snapshot.topology.manifest
        if address is None:
            known = "; ".join(f"{a}: {f}" for a, f in snapshot.topology.faults.items())
            error = ShardDown(
                f"no server is known to hold shard {shard} of shard set {manifest.shard_set}"
                + (f" ({known})" if known else "")
            )
            self._settle(snapshot, shard, items, merged, error, look=True)
            return
        request, checksum = codec.encode_score_request(
            manifest.shard_set_bytes, shard, merged.groups
        )
        runtime = self._runtime
        queries = len(merged.groups.words)
        with runtime.lock:
            runtime.stats.messages += 1
            runtime.stats.sent_queries += queries
            runtime.stats.duplicates += len(merged.place) - queries
            runtime.stats.bytes_sent += len(request)

        def reply(data: bytes | None, error: DlmError | None) -> None:
            answers = None
            if data is not None:
                try:
                    answers = codec.decode_score_reply(
                        data,
                        shard_set=manifest.shard_set_bytes,
                        shard=shard,
                        queries=queries,
                        request_checksum=checksum,
                    )
                except DlmError as exc:
                    exc.add_note(f"from {address}")
                    error = exc
            with runtime.lock:
                runtime.stats.bytes_received += len(data or b"")
                runtime.stats.failed += error is not None
            if answers is not None:
                self._deliver(items, merged, answers)
                self._step_if_open(shard)
            else:
                assert error is not None
                look = getattr(error, "reason", None) in STALE_REASONS
                self._settle(snapshot, shard, items, merged, error, look=look)

        # The latest deadline among them: an earlier caller stops waiting by itself.
        timeout_s = max(max(item.call.deadline for item in items) - now, 0.0)
        try:
            self.connection(address).score(request, timeout_s, reply)
        except (DlmError, ValueError) as exc:  # closed meanwhile
            error = exc if isinstance(exc, DlmError) else ShardDown(f"{address}: {exc}")
            self._fail(items, merged, error)
            self._step_if_open(shard)

    def _settle(
        self,
        snapshot: Snapshot,
        shard: int,
        items: list[_Item],
        merged: router.Grouped,
        error: DlmError,
        *,
        look: bool,
    ) -> None:
        """Ends a message that failed: with `look`, by a fresh table and another try; else as failed."""
        try:
            runtime = self._runtime
            if look:
                runtime.helper.submit(self._reroute, snapshot, shard, items, merged, error)
                return
            if isinstance(error, ShardDown) and self._clock() - runtime.looked >= LOOK_AGAIN_S:
                # It may have come back elsewhere; the next calls will know.
                runtime.looked = self._clock()
                runtime.helper.submit(self._look_quietly, snapshot)
        except (RuntimeError, ShardDown):
            pass  # closed meanwhile
        self._fail(items, merged, error)
        self._step_if_open(shard)

    def _look_quietly(self, snapshot: Snapshot) -> None:
        try:
            if self._snapshot is snapshot:
                self._look(snapshot, self.config.deadline_s)
        except DlmError as exc:
            log.info("client.table.unread", extra={"error": str(exc)})

    def _reroute(
        self,
        snapshot: Snapshot,
        shard: int,
        items: list[_Item],
        merged: router.Grouped,
        error: DlmError,
    ) -> None:
        """On the helper thread: fetches the table and sends the items where they belong now."""
        try:
            fresh = self._look(snapshot) if self._snapshot is snapshot else self.snapshot()
        except Exception as exc:  # noqa: BLE001 - a helper thread must never leave a caller waiting
            error.add_note(f"and no fresh table could be had: {exc}")
            self._fail(items, merged, error)
            self._step_if_open(shard)
            return
        self._step_if_open(shard)
        tired = [item for item in items if item.reroutes >= MAX_REROUTES]
        if tired:
            self._fail(tired, router.merge([item.piece.groups for item in tired]), error)
        for item in items:
            if item.reroutes < MAX_REROUTES:
                if item.call.model != fresh.model:
                    item.call.fail(_other_model(fresh, item.call.model))
                    continue
                remote = np.ones(len(item.piece.groups.word_counts), np.bool_)
                self._dispatch(
                    fresh,
                    item.call,
                    item.piece.groups,
                    remote,
                    item.piece.at,
                    item.reroutes + 1,
                )

    def _deliver(self, items: list[_Item], merged: router.Grouped, answers: Answers) -> None:
        """Hands each call its part of one message's answers."""
        begin = 0
        for item in items:
            end = begin + len(item.piece.at)
            place = merged.place[begin:end]
            item.call.fill(
                item.piece.at, Answers(*(getattr(answers, n)[place] for n in _ANSWER_FIELDS))
            )
            begin = end

    def _fail(self, items: list[_Item], merged: router.Grouped, error: DlmError) -> None:
        answers = self._fallback.answer(merged.groups, error)
        if answers is not None:
            self._deliver(items, merged, answers)
            return
        for item in items:
            item.call.fail(error)

    def _step_if_open(self, shard: int) -> None:
        try:
            self._step(shard, batcher.Done())
        except ShardDown:
            pass  # closed meanwhile: nothing waits any more


def _other_model(snapshot: Snapshot, model: str) -> StaleShardSet:
    return StaleShardSet(
        f"this handle was opened on model {model}; the servers hold {snapshot.model} now. "
        "Open a new utterance"
    )


class ClusterFile:
    """Reads the servers from a cluster.toml, anew each time; picklable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __call__(self) -> list[Endpoint]:
        return read_cluster_file(self.path)


class FixedEndpoints:
    """The same servers each time; picklable."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    def __call__(self) -> list[Endpoint]:
        return self.endpoints
