"""Plans each call in its caller's thread, and posts it to the loop, which sends and ends it.

Both kinds of clients use this core, from any thread, and wait for their call to end. A model in
this process answers at once. Over 600 lines, since `Core` and `LocalScorer` share an interface.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.client import loop, router
from dlm.client.call import BlockCall, Call, EndedCall, Part, Place, as_dlm_error, send
from dlm.client.cascade import BeatReply, CascadeMonitor, CascadeStatus
from dlm.client.cluster_file import Servers
from dlm.client.config import ClientConfig
from dlm.client.health import Mode, Topology
from dlm.client.lane import Lane
from dlm.client.metrics import OK, ClientMetrics, Stats
from dlm.client.router import LowGrams, Snapshot, WordsAlone, check_queries, probe_queries
from dlm.client.runtime import Runtime
from dlm.client.server import (
    SCORES,
    Asks,
    BlockPart,
    Connect,
    Connection,
    client_closed,
)
from dlm.client.table import Table, other_model
from dlm.errors import ConfigError, DlmError, ShardDown
from dlm.index.layout import Manifest
from dlm.index.search.local import LocalModel
from dlm.kenlm.layout import is_kenlm_file
from dlm.kenlm.model import KenlmFile
from dlm.ngram.query import FULL, LOCAL_FALLBACK, QueryGroups
from dlm.tracing import Tracer
from dlm.wire._pb import shard_pb2 as pb

Asked: TypeAlias = Call | EndedCall


class Lanes(Runtime):
    """Has the lanes of a client's shards, and is its cascade's host; the arguments are `Core`'s."""

    table: Table

    def __init__(
        self,
        endpoints: Servers,
        config: ClientConfig,
        *,
        model: str | None,
        connect: Connect,
        clock: Callable[[], float],
        tracer: Tracer | None,
        home: Any = loop,
    ) -> None:
        super().__init__(config, connect, clock, home)
        self.tracer = tracer
        self.table = Table(endpoints, model, self)
        self.refresh_later, self.follow = self.table.refresh_later, self.table.follow_later

    def begin_in_child(self) -> None:
        super().begin_in_child()
        self.table.begin()

    # -- in any thread ------------------------------------------------------------------------

    def post(self, call: Call) -> None:
        """Sends a call."""
        try:
            self._home.post(self._take, self.take, (call,))
        except Exception as exc:  # noqa: BLE001 - no loop can be started
            call.cut_off(exc)

    def overload(
        self, snapshot: Snapshot, queries: int, deadline: float, asks: Asks = SCORES
    ) -> DlmError | None:
        """Returns an error if a shard is too busy for a call with `queries` queries per shard.
        Called before any work on the call, to save time for other calls."""
        now = self.clock()
        for number in range(snapshot.topology.manifest.shards):
            lane = self.lanes.get(Place(snapshot.shard_set, number, asks.name))
            error: DlmError | None = lane and lane.overload(queries, deadline, now)
            if error is not None:
                return error
        return None

    def max_queries(self, snapshot: Snapshot) -> int:
        return min(self.config.max_queries, snapshot.topology.max_queries)

    def count_bigram_fallback(
        self, call: Call, queries: int, error: DlmError, shard: int | None
    ) -> None:
        self.counts.fell_back(queries)
        self.tell(self._note_fallback, call.model, queries, error, shard)

    # -- calls, on the loop -------------------------------------------------------------------

    def _note_fallback(self, model: str, queries: int, error: DlmError, shard: int | None) -> None:
        known = self.table.known
        if known is not None and self.table.of(model) is None:
            # No server holds this model any longer, so sending the message again would not help.
            error = other_model(known.model, model)
            self.table.note_gone(model, error)
        self.note_fallback(queries, error, shard, self.clock())

    def take(self, call: Call) -> None:
        """Queues all parts of a call, or none."""
        if self.closed:
            call.fail(client_closed())
            return
        parts = call.parts  # read once, as a caller whose time is up drops its parts
        if not parts or call.done():
            return
        now = self.clock()
        lanes = [self._lane_of(part.place) for part in parts]
        refused: dict[int, DlmError] = {}
        if not call.let_in:
            asked = Counter[int]()
            for part in parts:
                asked[part.shard] += part.queries
            for part, lane in zip(parts, lanes, strict=True):
                if lane.queue.earliest <= now:
                    lane.make_room(now)  # drops late parts before more are let in
                queries = asked.pop(part.shard, 0)
                error = lane.overload(queries, part.deadline, now) if queries else None
                if error is not None:
                    refused[part.shard] = error
            if refused and not self.config.bigram_fallback:
                # The answers of one shard are useless if another shard refuses.
                call.fail(next(iter(refused.values())))
                return
        lanes[0].queue.round.asked(now)
        for part, lane in zip(parts, lanes, strict=True):
            if part.shard in refused:
                call.miss(part, refused[part.shard])
            else:
                lane.submit(part, now)
        lanes[0].go_on()  # calls that waited for this caller may go out now

    def route(self, snapshot: Snapshot, part: Part) -> None:
        """Queues a part again, at the shards that own its queries by `snapshot`'s slot table."""
        now, manifest = self.clock(), snapshot.topology.manifest
        limit = self.max_queries(snapshot)
        pieces = router.route(part.groups, manifest.slots, manifest.shards, limit)
        for one in part.call.replace(part, pieces, snapshot.shard_set):
            try:
                self._lane_of(one.place).submit(one, now)
            except Exception as exc:  # noqa: BLE001 - this part ends, the others are still sent
                one.call.miss(one, as_dlm_error(exc, one.shard))

    def _lane_of(self, place: Place) -> Lane:
        found: Lane | None = self.lanes.get(place)
        if found is None:
            snapshot = self.table.of_set(place.shard_set) or self.table.snapshot()
            found = self.lanes[place] = Lane(self, place, self.max_queries(snapshot))
        return found

    # -- for the cascade, on the loop -----------------------------------------------------------

    def known(self) -> Topology | None:
        snapshot = self.table.known
        return None if snapshot is None else snapshot.topology

    def beat(
        self, address: str, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        def send(made: Connection | Exception) -> None:
            if not isinstance(made, Exception):  # otherwise the beat counts as missed later
                made.heartbeat_later(request, timeout_s, reply)

        self.reach(address, send)

    def ask_probe(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        snapshot = self.table.known
        assert snapshot is not None  # otherwise no shard would be reachable
        manifest, limit = snapshot.topology.manifest, self.max_queries(snapshot)
        # However busy this client is, it must not refuse a probe; hence `let_in` below.
        pieces = router.route(probe_queries(manifest), manifest.slots, manifest.shards, limit)
        call = Call.of_pieces(snapshot.model, pieces, self.clock() + timeout_s, snapshot.shard_set)
        call.let_in = True
        call.when_ended(lambda: done(call.outcome == OK))
        if call.parts:
            self.post(call)
        else:
            call.end()


Clock = Callable[[], float]
SURELY_EVERYWHERE = 8  # with this many contexts per shard, a call almost surely needs every shard


class Core:
    """Scores batches of word ids on a cluster; a forked child has its own connections.

    Args
        endpoints  returns the servers; called again whenever the table of servers is stale
        model      which of the servers' models to use; see `census.Census.choose`
        connect    makes a connection to an address
        clock      returns monotonic seconds
        home       the loop that sends the messages and takes the replies
    """

    local_model, keeps_deadlines = None, True

    def __init__(
        self,
        endpoints: Servers,
        config: ClientConfig,
        *,
        model: str | None = None,
        connect: Connect = Connection,
        clock: Clock = time.monotonic,
        home: Any = loop,
    ) -> None:
        self.config = config
        self._tracer = Tracer(__version__) if config.trace else None
        given = {"connect": connect, "clock": clock, "tracer": self._tracer, "home": home}
        self._lanes = Lanes(endpoints, config, model=model, **given)
        lanes, table = self._lanes, self._lanes.table
        self.table, self.connection, self.close = table, lanes.connection, lanes.close
        self.check_open, self.known = lanes.check_open, lanes.known
        self.snapshot, self.current, self.named = table.snapshot, table.current, table.named
        self.begin_in_child = lanes.begin_in_child
        # The client's other objects may outlive this one for a while, but once this one is freed,
        # nobody uses the client.
        self._end = weakref.finalize(self, self._lanes.let_go)
        self._end.atexit = False
        _open.add(self)

    # -- life ---------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """The current counters of this process."""
        return self.counts.now()

    @property
    def counts(self) -> ClientMetrics:
        """The counters behind this process's metrics."""
        return self._lanes.counts

    def load(self) -> dict[int, tuple[int, int]]:
        """Returns how many messages are in flight and how many parts wait, by queried shard."""
        found: dict[int, tuple[int, int]] = {}
        for place, lane in list(self._lanes.lanes.items()):  # lanes of all models in use
            in_flight, waiting = found.get(place.shard, (0, 0))
            queue = lane.queue
            found[place.shard] = in_flight + len(queue.in_flight), waiting + len(queue.waiting)
        return found

    def cache_bytes(self) -> int:
        """How many bytes the vocabulary and low orders of the model in use take."""
        snapshot = self.table.known
        return 0 if snapshot is None else snapshot.low_bytes

    # -- the cascade --------------------------------------------------------------------------

    def watch(self) -> CascadeMonitor | None:
        """Returns the servers' monitor; starts it if it is useful (`ClientConfig.heartbeats`)."""
        lanes = self._lanes
        if lanes.watch is None and not lanes.closed:
            wanted = self.config.heartbeats
            if wanted is None:
                snapshot = self.table.known
                wanted = self.config.bigram_fallback or (
                    snapshot is not None and snapshot.replicated
                )
            if wanted or lanes.before is not None:
                self._begin_watch(Mode.FULL)
        return lanes.watch

    @property
    def begun(self) -> bool:
        """Whether servers were found, or the client is watching for them."""
        return self.table.known is not None or self._lanes.watch is not None

    def begin_local_fallback(self) -> None:
        """Starts on the local fallback, since no server answers."""
        self._begin_watch(Mode.LOCAL_FALLBACK)

    def _begin_watch(self, mode: Mode) -> None:
        lanes, config = self._lanes, self.config
        with lanes.lock:
            if lanes.watch is None and not lanes.closed:
                lanes.watch = CascadeMonitor(
                    lanes,
                    config.heartbeat_config,
                    config.failover_config,
                    may_switch=config.local_fallback is not None,
                    before=lanes.before,
                    mode=mode,
                    clock=lanes.clock,
                )
                lanes.tell(lanes.watch.begin)

    def mode(self) -> Mode:
        """Returns which model new utterances use: the servers' or the local fallback."""
        watch = self.watch()
        return Mode.FULL if watch is None else watch.mode

    def cascade(self) -> CascadeStatus:
        """The state of the servers and of the cascade.

        Raises  ConfigError  the client sends no heartbeats
        """
        watch = self.watch()
        if watch is None:
            self.check_open()
            raise ConfigError(
                "this client sends no heartbeats, so it does not know the state of its servers; "
                "pass ClientConfig(heartbeats=True)"
            )
        return watch.status()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "endpoints": self.table.endpoints,
            "config": self.config,
            "model": self.table.model,
            "connect": self._lanes.connect,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

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
        *,
        moves_on: bool = False,
        more: bool = False,
        ahead: int = 0,
        asks: Asks = SCORES,
    ) -> Asked:
        """Starts a call; its result has the answers, in the order of the queries.

        Args
            model  the model that the ids belong to
            held   the snapshot of the caller's utterance: if no server holds its model any longer,
                   the snapshot's low orders answer, provided the bigram fallback is on
            moves_on  whether the utterance can switch to the next model instead
            more   whether earlier parts of the call were let in, so these queries are not refused
            ahead  how many queries of the same call follow later
            asks   with BLOCKS, `words` counts the words already fetched for each context, and the
                   result is that of `BlockCall`
        Shapes
            contexts (K, order - 1) uint32 most recent last, right-aligned; lengths (K,) uint8;
            counts (K,) uint32, number of words for each context; words (Q,) uint32, Q = sum(counts)
        Raises
            QueryError     at once, if the queries cannot have an answer
            StaleShardSet  at once, if no server holds the model any longer
            UnavailableError, ProtocolError  when the result is read
        """
        begun = time.perf_counter()
        self.check_open()
        current = self.table.snapshot()
        found = self.table.of(model)
        gone: DlmError | None = None
        if found is None:
            gone = other_model(current.model, model)
            if held is None or moves_on or not self.config.bigram_fallback:
                raise gone
            found = held
        snapshot, lanes = found, self._lanes
        manifest = snapshot.topology.manifest
        deadline = lanes.clock() + (self.config.deadline_s if deadline_s is None else deadline_s)
        if len(counts) >= SURELY_EVERYWHERE * manifest.shards and not more and lanes.lanes:
            each = -(-(len(words) + ahead) // manifest.shards)
            refusal = lanes.overload(snapshot, each, deadline, asks)
            if refusal is not None and not self.config.bigram_fallback:
                return EndedCall(error=refusal, planned_s=time.perf_counter() - begun)
        plan = router.plan(
            snapshot.grams,
            manifest,
            contexts,
            lengths,
            counts,
            words,
            lanes.max_queries(snapshot),
            blocks=asks is not SCORES,
        )
        kind = Call if asks is SCORES else BlockCall
        call = kind(model, plan, deadline, snapshot.shard_set)
        call.moves_on, call.let_in = moves_on, more
        remote = plan.shard_asked
        if self._tracer is not None:
            call.span = self._tracer.begin("dlm.call", queries=len(words))
            call.local_hits_share = 1.0 - remote / max(len(words), 1)
        lanes.counts.planned(len(words), len(words) - remote, remote - len(plan.at))
        call.planned_s = time.perf_counter() - begun
        if not call.parts:
            call.end()
            return call
        watch = self.watch()
        if watch is None:  # a monitor calls `follow` in its ticks
            self.table.follow()
        if self.config.bigram_fallback:
            call.fall_back(snapshot.grams, lanes.count_bigram_fallback)
            if gone is None and watch is not None and watch.mode is Mode.LOCAL_FALLBACK:
                gone = ShardDown(
                    "the servers are failing, so this client sends no messages; open a new "
                    "utterance, which uses the local fallback"
                )
            if gone is not None:
                # An utterance that began on the full model ends on its low orders.
                call.give_up(gone)
                return call
        send(lanes.post, call)
        return call


# -------------------------------------------------------------------------------------------------
# A model in this process.


class LocalScorer:
    """Answers each call at once from mapped shards or a mapped KenLM file, without servers.

    Args
        directory  the folder of the shard set, or the path of the KenLM file
        source     the answers' source; with `LOCAL_FALLBACK`, deadlines are kept as with servers
    """

    def __init__(self, model: LocalModel | KenlmFile, directory: Path, source: int = FULL) -> None:
        self.config = ClientConfig()
        self.local_model: LocalModel | KenlmFile = model
        self.source = source
        self.keeps_deadlines = source == LOCAL_FALLBACK
        self.begin_in_child()
        self._closed = False
        grams: LowGrams
        if isinstance(model, KenlmFile):
            grams = WordsAlone(directory, _manifest_of(model), None, model.vocabulary)
        else:
            grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self._snapshot = Snapshot(Topology(grams.manifest, {}, {}), grams)
        _open.add(self)

    def begin_in_child(self) -> None:
        self._counts = ClientMetrics()

    @property
    def begun(self) -> bool:
        return True

    def begin_local_fallback(self) -> None:
        raise NotImplementedError  # not called, since `snapshot` never fails here

    def check_open(self) -> None:
        if self._closed:
            raise client_closed()

    def close(self) -> None:
        self._closed = True

    def known(self) -> Topology:
        return self._snapshot.topology

    def cascade(self) -> CascadeStatus:
        raise ConfigError(
            "this client uses a shard set in its own process; only a client that is connected to "
            "servers can report on them"
        )

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def current(
        self, timeout_s: float, unlike: str | None = None, key: str | bytes | None = None
    ) -> Snapshot:
        return self._snapshot

    def named(self, model: str) -> Snapshot | None:
        return self._snapshot if self._snapshot.model.startswith(model) else None

    def mode(self) -> Mode:
        return Mode.FULL

    def watch(self) -> None:
        return None

    def load(self) -> dict[int, tuple[int, int]]:
        return {}

    def cache_bytes(self) -> int:
        model = self.local_model
        return len(model.data) if isinstance(model, KenlmFile) else self._snapshot.low_bytes

    @property
    def counts(self) -> ClientMetrics:
        return self._counts

    @property
    def stats(self) -> Stats:
        return self._counts.now()

    def __getstate__(self) -> dict[str, Any]:
        file = self.local_model if isinstance(self.local_model, KenlmFile) else None
        directory = self._snapshot.grams.directory.absolute()
        return {"directory": directory, "source": self.source, "file": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        directory = state["directory"]
        model = state["file"] or LocalModel.open(directory)
        self.__init__(model, directory, state["source"])  # type: ignore[misc]

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        *_: Any,
        asks: Asks = SCORES,
        **__: Any,
    ) -> EndedCall:
        self.check_open()
        manifest = self._snapshot.topology.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        self._counts.planned(len(words))
        if asks is not SCORES:
            return EndedCall(self._stored(contexts, lengths))
        width = contexts.shape[1]
        reached = np.arange(width) >= width - lengths[:, None].astype(np.int64)
        # Callers may pass slices, and each further kind of array would compile a kernel anew.
        given = (
            np.require(array, requirements=["C", "W"])
            for array in (lengths, contexts[reached], counts, words)
        )
        try:
            answers = self.local_model.score_groups(QueryGroups(*given))
        except DlmError as exc:
            return EndedCall(error=exc)
        if self.source != FULL:
            answers = replace(answers, source=np.full(len(answers), self.source, np.uint8))
        return EndedCall(answers)

    def _stored(
        self, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8]
    ) -> tuple[list[BlockPart | None], NDArray[np.uint8]]:
        assert isinstance(self.local_model, LocalModel)  # a KenLM file is never asked for blocks
        parts: list[BlockPart | None] = []
        width = contexts.shape[1]
        for row, length in enumerate(lengths.tolist()):
            if length < 2:
                parts.append(None)
                continue
            context = np.ascontiguousarray(contexts[row, width - length :])
            found = self.local_model.stored_words(context)
            total = int(found.totals[0])
            parts.append(BlockPart(total, found.log10_backoffs, found.ranks, found.answers))
        return parts, np.full(len(parts), self.source, np.uint8)


def _manifest_of(file: KenlmFile) -> Manifest:
    layout = file.layout
    return Manifest(
        text=b"",
        shard_set=file.model_id,
        model=file.model_id,
        order=layout.order,
        counts=(layout.words, *layout.counts[1:]),
        blanks=(0,) * layout.order,
        unk_in_model=True,
        encoding="kenlm",
        slots=np.zeros(0, np.uint16),
        files=(),
        provenance={},
    )


def open_local(
    directory: Path,
    source: int = FULL,
    *,
    verify: bool = True,
    vocab: str | os.PathLike[str] | None = None,
    what: str = "the shard set",
) -> LocalScorer:
    """Opens the shard set in `directory`, or the KenLM file at this path.

    Args  vocab  see `KenlmFile.open`
    Raises
        ConfigError       `directory` is no folder or (if FULL) KenLM file; errors call it `what`
        ShardFormatError, KenlmFormatError  the shard set or file is damaged
    """
    if source == FULL and is_kenlm_file(directory):
        return LocalScorer(KenlmFile.open(directory, vocab=vocab), directory)
    if vocab is not None:
        raise ConfigError(
            f"vocab={os.fspath(vocab)} was given, but {directory} is not a KenLM binary file; only "
            "KenLM files can come without their words. Omit the `vocab` argument"
        )
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{what} {directory} {found}; expected a shard set's folder, as written by `dlm shard`"
        )
    return LocalScorer(LocalModel.open(directory, verify=verify), directory, source)


_open: weakref.WeakSet[Core | LocalScorer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for each in list(_open):
        each.begin_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)

Scorer: TypeAlias = Core | LocalScorer
