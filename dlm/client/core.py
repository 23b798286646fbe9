"""One call, from queries to answers: planned here, in its caller's thread, and posted to the loop.

Both clients use this core, from any thread, and wait until the loop ends their call. The state of
one process (connections, lanes, counters) is in `runtime`; the rest (low orders, settings) is
shared with a forked child.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.client import loop, router
from dlm.client.call import SCORES, Asks, BlockCall, BlockPart, Call, EndedCall, Ending, send
from dlm.client.cascade import BeatReply, CascadeMonitor, CascadeStatus, Host, Steps
from dlm.client.cluster_file import Servers
from dlm.client.config import ClientConfig
from dlm.client.delivery import Delivery
from dlm.client.membership import Topology
from dlm.client.metrics import CANCELLED, OK, ClientMetrics, Stats, result_of
from dlm.client.modes import Mode
from dlm.client.router import LowGrams, WordsAlone, check_queries, probe_queries
from dlm.client.runtime import Links, Runtime, Snapshot, closed_error
from dlm.client.server import Connect, Connection, GrpcConnection
from dlm.client.table import Table, other_model
from dlm.errors import ConfigError, DlmError, ShardDown
from dlm.index.layout import Manifest
from dlm.index.search.local import LocalModel
from dlm.kenlm.layout import is_kenlm_file
from dlm.kenlm.model import KenlmFile
from dlm.logs import EventLog
from dlm.ngram.query import FULL, LOCAL_FALLBACK, QueryGroups
from dlm.tracing import Span, Tracer
from dlm.wire._pb import shard_pb2 as pb

# -------------------------------------------------------------------------------------------------
# Scorers of batches of ids: servers (`api.core.Core`), or a shard set in this process.
#
# Handles and clients use either through `Scorer`, so a decoder can be written and tested offline
# with `Client.local(DIR)`; a client's local fallback is opened the same way.


Asked: TypeAlias = Call | EndedCall


class LocalScorer:
    """Answers each call at once, from mapped shards or a mapped KenLM file, without servers.

    Args
        directory  of the shard set; the path of the file
        source     of the answers; with `LOCAL_FALLBACK`, deadlines are kept as with servers
    """

    def __init__(self, model: LocalModel | KenlmFile, directory: Path, source: int = FULL) -> None:
        self.config = ClientConfig()
        self.local_model: LocalModel | KenlmFile = model
        self.source = source
        self.keeps_deadlines = source == LOCAL_FALLBACK
        self._counts = ClientMetrics()
        self._closed = False
        grams: LowGrams
        if isinstance(model, KenlmFile):
            grams = WordsAlone(directory, _manifest_of(model), None, model.vocabulary)
        else:
            grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self._snapshot = Snapshot(Topology(grams.manifest, {}, {}), grams)
        _open.add(self)

    @property
    def begun(self) -> bool:
        return True

    def begin_local_fallback(self) -> None:
        raise NotImplementedError  # `snapshot` never fails here

    def check_open(self) -> None:
        if self._closed:
            raise closed_error()

    def close(self) -> None:
        self._closed = True

    def known(self) -> Topology:
        return self._snapshot.topology

    def cascade(self) -> CascadeStatus:
        raise ConfigError(
            "this client uses a shard set in its own process, so it has no servers to report on; "
            "connect to servers for that"
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
        # A kernel is compiled for each kind of array, and callers may pass slices.
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
        assert isinstance(self.local_model, LocalModel)  # a KenLM file is not asked for this
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


_open: weakref.WeakSet[LocalScorer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for scorer in list(_open):
        scorer._counts = ClientMetrics()


os.register_at_fork(after_in_child=_after_fork_in_child)


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
        ConfigError       there is no such folder, or it is another file; `what` names it
        ShardFormatError, KenlmFormatError  it is damaged
    """
    if source == FULL and is_kenlm_file(directory):
        return LocalScorer(KenlmFile.open(directory, vocab=vocab), directory)
    if vocab is not None:
        raise ConfigError(
            f"vocab={os.fspath(vocab)} was given, but {directory} is not a KenLM binary file; only "
            "those may lack their words. Leave it out"
        )
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{what} {directory} {found}; expected the folder of a shard set, "
            "as `dlm shard` writes it"
        )
    return LocalScorer(LocalModel.open(directory, verify=verify), directory, source)


log = EventLog(__name__)

Clock = Callable[[], float]
SURELY_EVERYWHERE = 8  # contexts per shard: with this many, a call almost surely needs all shards


class Core(Host):
    """Scores batches of ids against a cluster; its base classes describe their methods.

    Args
        endpoints  returns the servers; called again whenever the table is stale
        model      which of their models to use; see `census.Census.choose`
        connect    makes a connection to an address
        clock      seconds, monotonic
        home       where its messages are sent and end
    """

    local_model, keeps_deadlines = None, True

    def __init__(
        self,
        endpoints: Servers,
        config: ClientConfig,
        *,
        model: str | None = None,
        connect: Connect = GrpcConnection,
        clock: Clock = time.monotonic,
        home: Any = loop,
    ) -> None:
        self.config = config
        self._connect = connect
        self._clock = clock
        self._tracer = Tracer(__version__) if config.trace else None
        self._links = Links(connect)
        self.table = Table(endpoints, model, config, self._links, clock)
        self._delivery = Delivery(config, self._links, self.table, clock, self._tracer, home)

    # -- life ---------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        return self._delivery.inbox

    @property
    def _runtime(self) -> Runtime:
        return self._links.runtime

    def check_open(self) -> None:
        """Raises ClientClosed if it is closed."""
        self._links.check_open()

    @property
    def stats(self) -> Stats:
        """The current counters of this process."""
        return self._links.stats()

    @property
    def counts(self) -> ClientMetrics:
        """The counters behind this process's metrics."""
        return self._runtime.counts

    def load(self) -> dict[int, tuple[int, int]]:
        """For each shard asked so far: messages in flight, and parts that wait."""
        found: dict[int, tuple[int, int]] = {}
        for (_, shard, _), lane in list(self._runtime.lanes.items()):  # of all models in use
            in_flight, waiting = found.get(shard, (0, 0))
            found[shard] = in_flight + len(lane.in_flight), waiting + len(lane.waiting)
        return found

    def cache_bytes(self) -> int:
        """Bytes of the model's vocabulary and low orders in use."""
        snapshot = self.table.known
        return 0 if snapshot is None else snapshot.low_bytes

    def snapshot(self) -> Snapshot:
        """The shard set in use; finds it first if it is not known yet.

        Raises  UnavailableError, ProtocolError, ConfigError
        """
        return self.table.snapshot()

    def current(
        self, timeout_s: float, unlike: str | None = None, key: str | bytes | None = None
    ) -> Snapshot:
        """The snapshot for a new utterance; see `Table.current`."""
        return self.table.current(timeout_s, unlike, key)

    def named(self, model: str) -> Snapshot | None:
        """That of the model whose id begins so, if it can be asked."""
        return self.table.named(model)

    def connection(self, address: str) -> Connection:
        return self._links.connection(address)

    # -- the cascade --------------------------------------------------------------------------

    def watch(self) -> CascadeMonitor | None:
        """The monitor of the servers; started if it is useful, see `ClientConfig.heartbeats`."""
        runtime = self._runtime
        if runtime.watch is None and not self._links.closed:
            wanted = self.config.heartbeats
            if wanted is None:
                snapshot = self.table.known
                wanted = self.config.bigram_fallback or (
                    snapshot is not None and snapshot.replicated
                )
            if wanted or runtime.before is not None:
                self._begin_watch(Mode.FULL)
        return runtime.watch

    @property
    def begun(self) -> bool:
        """Whether servers were found, or are being watched for."""
        return self.table.known is not None or self._runtime.watch is not None

    def begin_local_fallback(self) -> None:
        """Starts on the local fallback, since no server answers."""
        self._begin_watch(Mode.LOCAL_FALLBACK)

    def _begin_watch(self, mode: Mode) -> None:
        runtime, config = self._runtime, self.config
        with runtime.lock:
            if runtime.watch is None and not self._links.closed:
                watch = CascadeMonitor(
                    self,
                    config.heartbeat_config,
                    config.failover_config,
                    may_switch=config.local_fallback is not None,
                    before=runtime.before,
                    mode=mode,
                    clock=self._clock,
                )
                runtime.watch = watch
                self._delivery.tell(watch.begin)

    def mode(self) -> Mode:
        """The model that new utterances use."""
        watch = self.watch()
        return Mode.FULL if watch is None else watch.mode

    def cascade(self) -> CascadeStatus:
        """The state of the servers and of the cascade.

        Raises  ConfigError  nothing watches them
        """
        watch = self.watch()
        if watch is None:
            self._links.check_open()
            raise ConfigError(
                "this client sends no heartbeats, so it does not know the state of its servers; "
                "pass ClientConfig(heartbeats=True)"
            )
        return watch.status()

    def known(self) -> Topology | None:
        """The shard set in use, and the places of its shards; None before one is found."""
        snapshot = self.table.known
        return None if snapshot is None else snapshot.topology

    def beat(
        self, address: str, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        def send(made: Connection | Exception) -> None:
            if not isinstance(made, Exception):  # otherwise the beat counts as missed later
                made.heartbeat_later(request, timeout_s, reply)

        self._links.reach(address, self._delivery.tell, send)

    def renew(self, address: str) -> None:
        self._links.renew(address)

    def refresh_later(self) -> None:
        self.table.refresh_later()

    def follow(self) -> None:
        self.table.follow_later()

    def ask_probe(self, timeout_s: float, done: Callable[[bool], None]) -> None:
        snapshot = self.table.known
        assert snapshot is not None  # otherwise no shard would be reachable
        manifest = snapshot.topology.manifest
        groups = probe_queries(manifest)
        # Like a call that was let in: a probe is never refused because this client is busy.
        pieces = router.route(
            groups, manifest.slots, manifest.shards, self._delivery.max_queries(snapshot)
        )
        deadline = self._clock() + timeout_s
        call = Call.of_pieces(snapshot.model, pieces, deadline, snapshot.shard_set)
        call.let_in = True
        call.add_done_callback(
            lambda ended: done(not ended.cancelled() and ended.exception() is None)
        )
        if call.parts:
            self._delivery.post(call)
        else:
            call.end()

    def close(self) -> None:
        """Closes it: calls in progress and all later calls fail with `ClientClosed`."""
        self._links.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "endpoints": self.table.endpoints,
            "config": self.config,
            "model": self.table.model,
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
            held   the snapshot on which the caller's handle was opened: if no server holds its
                   model any longer, its low orders answer, provided the bigram fallback is on
            moves_on  whether the utterance can switch to the next model instead
            more   these belong to a call that was partly let in, so they are not refused
            ahead  queries of this call that follow these
            asks   with BLOCKS, `words` counts the words already fetched for each context, and the
                   result is that of `BlockCall`
        Shapes
            contexts (K, order - 1) uint32 most recent last, right-aligned; lengths (K,) uint8;
            counts (K,) uint32, words asked of each context; words (Q,) uint32, Q = sum(counts)
        Raises
            QueryError     at once, if the queries cannot have an answer
            StaleShardSet  at once, if no server holds the model any longer
            with the result: UnavailableError, ProtocolError
        """
        begun = time.perf_counter()
        self._links.check_open()
        current = self.table.snapshot()
        found = self.table.of(model)
        gone: DlmError | None = None
        if found is None:
            gone = other_model(current.model, model)
            if held is None or moves_on or not self.config.bigram_fallback:
                raise gone
            found = held
        snapshot, runtime = found, self._runtime
        manifest, counts_of = snapshot.topology.manifest, runtime.counts
        deadline = self._clock() + (self.config.deadline_s if deadline_s is None else deadline_s)
        if len(counts) >= SURELY_EVERYWHERE * manifest.shards and not more and runtime.lanes:
            each = -(-(len(words) + ahead) // manifest.shards)
            refusal = self._delivery.overload(snapshot, each, deadline, asks)
            if refusal is not None and not self.config.bigram_fallback:
                counts_of.call(result_of(refusal), time.perf_counter() - begun)
                return EndedCall(error=refusal)
        plan = router.plan(
            snapshot.grams,
            manifest,
            contexts,
            lengths,
            counts,
            words,
            self._delivery.max_queries(snapshot),
            blocks=asks is not SCORES,
        )
        kind = Call if asks is SCORES else BlockCall
        call = kind(model, plan, deadline, snapshot.shard_set)
        call.moves_on, call.let_in = moves_on, more
        if self._tracer is not None:
            span = call.span = self._tracer.begin("dlm.call", queries=len(words))
            if span is not None:
                share = 1.0 - plan.shard_asked / max(len(words), 1)
                call.add_done_callback(partial(_end_span, call, span, share))
        remote = plan.shard_asked
        counts_of.planned(len(words), len(words) - remote, remote - len(plan.at))
        if not call.parts:
            call.end()
            counts_of.call(OK, time.perf_counter() - begun)
            return call
        watch = self.watch()
        if watch is None:  # otherwise its ticks do
            self.table.follow()
        planned_s = time.perf_counter() - begun
        call.add_done_callback(lambda done: counts_of.call(_result_of(done), planned_s))
        if self.config.bigram_fallback:
            call.fall_back(snapshot.grams, self._delivery.count_bigram_fallback)
            if gone is None and watch is not None and watch.mode is Mode.LOCAL_FALLBACK:
                gone = ShardDown(
                    "the servers fail, so this client sends no messages; open a new utterance, "
                    "which uses the local fallback"
                )
            if gone is not None:
                # An utterance that began on the full model ends on its low orders.
                call.give_up(gone)
                return call
        send(self._delivery.post, call)
        return call


def _end_span(call: Call, span: Span, local_hits_share: float, done: Ending) -> None:
    span.end(_result_of(done), messages=call.messages, local_hits_share=local_hits_share)


def _result_of(done: Ending) -> str:
    return CANCELLED if done.cancelled() else result_of(done.exception())


Scorer: TypeAlias = Core | LocalScorer
