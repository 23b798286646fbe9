"""One call, from queries to answers: planned here, in its caller's thread, and posted to the loop.

Both clients use this core, from any thread, and wait until the loop ends their call. The state of
one process (connections, lanes, counters) is in `runtime`; the rest (low orders, settings) is
shared with a forked child.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.client.api.scorer import Asked, Scorer
from dlm.client.config.cluster_file import Servers
from dlm.client.config.settings import ClientConfig
from dlm.client.deliver import loop
from dlm.client.deliver.asks import SCORES, Asks
from dlm.client.deliver.call import BlockCall, Call, EndedCall
from dlm.client.deliver.counts import CANCELLED, OK, ClientMetrics, Stats, result_of
from dlm.client.deliver.delivery import Delivery
from dlm.client.deliver.ending import Ending, send
from dlm.client.deliver.runtime import Links, Runtime, Snapshot
from dlm.client.deliver.table import Table, other_model
from dlm.client.deliver.transport import Connect, Connection, GrpcConnection
from dlm.client.health.cascade import BeatReply, CascadeMonitor, CascadeStatus, Host, Steps
from dlm.client.health.membership import Topology
from dlm.client.health.modes import Mode
from dlm.client.plan import router
from dlm.client.plan.router import probe_queries
from dlm.errors import ConfigError, DlmError, ShardDown
from dlm.logs import EventLog
from dlm.tracing import Span, Tracer
from dlm.wire._pb import shard_pb2 as pb

log = EventLog(__name__)

Clock = Callable[[], float]
SURELY_EVERYWHERE = 8  # contexts per shard: with this many, a call almost surely needs all shards


class Core(Scorer, Host):
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
        home: loop.Home = loop,
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
        self._links.check_open()

    @property
    def stats(self) -> Stats:
        return self._links.stats()

    @property
    def counts(self) -> ClientMetrics:
        return self._runtime.counts

    def load(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for (_, shard, _), lane in list(self._runtime.lanes.items()):  # of all models in use
            in_flight, waiting = found.get(shard, (0, 0))
            found[shard] = in_flight + len(lane.in_flight), waiting + len(lane.waiting)
        return found

    def cache_bytes(self) -> int:
        snapshot = self.table.known
        return 0 if snapshot is None else snapshot.low_bytes

    def snapshot(self) -> Snapshot:
        return self.table.snapshot()

    def current(
        self, timeout_s: float, unlike: str | None = None, key: str | bytes | None = None
    ) -> Snapshot:
        return self.table.current(timeout_s, unlike, key)

    def named(self, model: str) -> Snapshot | None:
        return self.table.named(model)

    def connection(self, address: str) -> Connection:
        return self._links.connection(address)

    # -- the cascade --------------------------------------------------------------------------

    def watch(self) -> CascadeMonitor | None:
        """See `Counted`; started if it is useful, see `ClientConfig.heartbeats`."""
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
        return self.table.known is not None or self._runtime.watch is not None

    def begin_local_fallback(self) -> None:
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
        watch = self.watch()
        return Mode.FULL if watch is None else watch.mode

    def cascade(self) -> CascadeStatus:
        watch = self.watch()
        if watch is None:
            self._links.check_open()
            raise ConfigError(
                "this client sends no heartbeats, so it does not know the state of its servers; "
                "pass ClientConfig(heartbeats=True)"
            )
        return watch.status()

    def known(self) -> Topology | None:
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
