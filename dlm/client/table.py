"""Keeps a client's shard sets, their servers' addresses, and low orders; refreshes them when stale.

One helper thread refreshes the table, so many calls that find it stale at once cause one refresh. A
second thread fetches the next model's low orders, while calls continue with the current model.
Models to which open utterances are pinned stay in the table as long as servers hold them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import (
    CancelledError,
    Future,
    ThreadPoolExecutor,
    TimeoutError as FutureTimeout,
)
from dataclasses import replace

from dlm.client import kernels
from dlm.client.call import own_copy
from dlm.client.census import Census, fetch
from dlm.client.cluster_file import Endpoint, Rollout, Servers, check_model
from dlm.client.health import Topology
from dlm.client.router import LowGrams, Snapshot
from dlm.client.runtime import Runtime
from dlm.client.server import Connect
from dlm.errors import ConfigError, DeadlineExceeded, DlmError, ProtocolError, StaleShardSet
from dlm.index.layout import Manifest
from dlm.index.search import blocks, shard
from dlm.jit import load
from dlm.logs import EventLog
from dlm.ngram import kernels as text
from dlm.wire import kernels as checks
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.ids import MAX_SHARD_SETS

# The kernels for calls to servers, compiled and loaded before any call has a deadline: on a
# new machine, numba compiles for tens of seconds, while a call has only two.
_OF_CALLS = (
    kernels.plan,
    kernels.repeats,
    kernels.regroup,
    kernels.regroup_large,
    kernels.route_groups,
    kernels.finish,
    kernels.are_word,
    kernels.next_states,
    *blocks.KERNELS,
    checks.out_of_range,
    checks.block_fault,
    checks.totals,
)
# All kernels of a client, with or without servers; see jit.compile_ahead.
KERNELS = (
    *shard.KERNELS,
    *_OF_CALLS,
    kernels.group_queries,
    kernels.fold_new,
    kernels.advance,
    kernels.walk,
    text.enter_words,
    text.find_words,
)


log = EventLog(__name__)

MAX_ASKED = 256  # number of servers asked at once, since silent ones take their whole timeout
STAMP_S = 1.0  # seconds between checks for changes of cluster.toml
LOOK_AGAIN_S = 1.0  # seconds between searches for servers while a shard is down
FOLLOW_S = 10.0  # seconds between checks of servers, if heartbeats do not go to all of them


class Table:
    """The snapshots in use. `known` is the snapshot for new utterances, or None until one is found.
    The endpoints, with the default model, are read again whenever the table is stale; `model`
    overrides the default."""

    def __init__(self, endpoints: Servers, model: str | None, runtime: Runtime) -> None:
        self.endpoints = endpoints
        self.model = check_model(model)
        self.known: Snapshot | None = None
        self._others: Mapping[str, Snapshot] = {}  # snapshots by model; replaced as a whole
        self._gone = False  # no server holds `known`
        self._missed: frozenset[str] = frozenset()  # utterances' models that no server holds
        self._kept: frozenset[str] = frozenset()  # settings that changed without effect
        self._unread = ""  # why the last refresh failed
        self._rollout: Rollout | None = None  # names a model of `_others` by its complete id
        self._unserved: str | None = None  # the default model, while servers lack shards of it
        self._stamp = endpoints.stamp()
        self._runtime, self._config, self._clock = runtime, runtime.config, runtime.clock
        self._stamp_seen = self._read_at = self._follows = self._clock()
        self.begin()

    def begin(self) -> None:
        """Begins with no refresh in progress: at creation, and in a forked child."""
        self._refreshing: Future[Snapshot] | None = None
        self._queued: Future[Snapshot] | None = None  # the last refresh, which callers may share
        self._looking = False  # whether a quiet refresh is queued or running
        self._looked = -LOOK_AGAIN_S
        self._fetching: Future[None] | None = None  # low orders of the next model
        self._fetched: dict[str, LowGrams] = {}  # fetched low orders, until they are in use

    def snapshot(self) -> Snapshot:
        """Returns the current shard set, which the first call finds and fetches. Raises
        UnavailableError, ProtocolError, ConfigError."""
        known = self.known
        return self._refresh_shared() if known is None else known

    def of(self, model: str) -> Snapshot | None:
        """The snapshot of an open utterance's model; None if no server holds it any longer."""
        known = self.known
        if known is None or known.model != model:
            return self._others.get(model)
        return None if self._gone else known

    def of_set(self, shard_set: str) -> Snapshot | None:
        every = (self.known, *self._others.values())
        return next((s for s in every if s is not None and s.shard_set == shard_set), None)

    def named(self, model: str) -> Snapshot | None:
        """The snapshot of the model whose id begins with `model`, if servers hold it."""
        every = (None if self._gone else self.known, *self._others.values())
        return next((s for s in every if s is not None and s.model.startswith(model)), None)

    def current(
        self, timeout_s: float, unlike: str | None = None, key: str | bytes | None = None
    ) -> Snapshot:
        """Returns the snapshot for a new utterance: the current one; in a roll-out, the next
        model's if `key` falls into its share; the replacement's, once fetched, if servers no longer
        hold the current model (or refused model `unlike`). Raises StaleShardSet if the replacement
        is not ready in time, and what `snapshot` raises."""
        self.follow()
        known, rollout = self.snapshot(), self._rollout
        if rollout is not None and unlike is None and rollout.takes(key):
            following = self._others.get(rollout.model)
            if following is not None:
                return following
        if (not self._gone and known.model != unlike) or timeout_s <= 0.0:
            return known
        end = self._clock() + timeout_s
        try:
            self._refresh_soon(known).result(timeout_s)
            fetching = self._fetching
            if fetching is not None:
                fetching.result(max(end - self._clock(), 0.0))
        except (FutureTimeout, CancelledError, RuntimeError) as exc:
            raise StaleShardSet(
                f"no server holds model {known.model} any longer, and its replacement was "
                f"not ready within {timeout_s:.3g} s; retry"
            ) from exc
        except DlmError as exc:
            raise own_copy(exc) from exc
        except Exception as exc:
            raise _unread(exc) from exc
        return self.snapshot()

    def _refresh_soon(self, known: Snapshot) -> Future[Snapshot]:
        """Queues a refresh, or returns the queued one, so that callers share it until it begins."""
        runtime = self._runtime
        with runtime.lock:
            queued = self._queued
            if queued is None or queued.running() or queued.done():
                queued = self._queued = runtime.helper.submit(self.refresh, known)
            return queued

    def follow(self) -> None:
        """Refreshes in the background if the default model may have changed. New utterances call
        this method. So do heartbeats (or calls, if there are no heartbeats), for clients that keep
        an utterance for days."""
        known = self.known
        if known is None:
            return
        now, runtime = self._clock(), self._runtime
        if now - self._stamp_seen >= STAMP_S:
            self._stamp_seen = now
            if self.endpoints.stamp() != self._stamp:  # true until a refresh has read the file
                self.refresh_later()
                return
        # Heartbeats go only to the servers in use, not to every server listed.
        watched = runtime.watch is not None and not known.topology.faults
        if not watched and now - self._read_at >= FOLLOW_S:
            self._read_at = now
            self.refresh_later()

    def follow_later(self) -> None:
        """On the loop: runs `follow` on the helper thread, since reading a file may be slow."""
        now = self._clock()
        if self.known is None or now - self._follows < STAMP_S:
            return
        self._follows = now
        self._runtime.help(self.follow)

    def refresh_later(self) -> None:
        """Refreshes in the background, unless a refresh is in progress."""
        with self._runtime.lock:
            if self._looking or self._runtime.closed:
                return
            self._looking = True
        if not self._runtime.help(self._refresh_once, self.known):
            self._looking = False

    def _refresh_once(self, known: Snapshot | None) -> None:
        try:
            self.refresh_quietly(known)
        finally:
            self._looking = False

    def may_look(self) -> bool:
        """Whether the servers were last asked at least `LOOK_AGAIN_S` ago."""
        return self._clock() - self._looked >= LOOK_AGAIN_S

    def look_quietly(self, snapshot: Snapshot) -> None:
        """Refreshes in the background, for the next messages."""
        self._looked = self._clock()
        self._runtime.help(self.refresh_quietly, snapshot)

    def look(self, snapshot: Snapshot, timeout_s: float, stale: bool) -> None:
        """On the helper thread: refreshes, unless another call has replaced `snapshot`, or the last
        refresh was recent and the table is not `stale`."""
        if self.of(snapshot.model) is snapshot and (stale or self.may_look()):
            self.refresh(snapshot, timeout_s)

    def _refresh_shared(self) -> Snapshot:
        runtime = self._runtime
        with runtime.lock:
            self._runtime.check_open()
            if self.known is not None:
                return self.known
            running = self._refreshing
            try:
                if running is None:
                    running = self._refreshing = runtime.helper.submit(self.refresh, None)
            except RuntimeError as exc:
                self._runtime.check_open()  # raises if closed; if not, no thread could be started
                raise _unread(exc) from exc
        try:
            return running.result()
        except DlmError as exc:
            raise own_copy(exc) from exc
        except Exception as exc:
            raise _unread(exc) from exc
        finally:
            with runtime.lock:
                if self._refreshing is running:
                    self._refreshing = None

    def refresh(self, before: Snapshot | None, timeout_s: float | None = None) -> Snapshot:
        """On the helper thread: finds the servers and what they hold, in connect_s by default. The
        first refresh also fetches the low orders. Later, the low orders of another model are
        fetched in the background, and that model is used once they have arrived."""
        runtime, known = self._runtime, self.known
        stamp = self.endpoints.stamp()  # taken before the servers are read
        try:
            if stamp != self._stamp:
                self._note_settings(self.endpoints.kept())
            census = take_census(
                self._endpoints_known(known),
                self._runtime.connection,
                self._config.connect_s if timeout_s is None else timeout_s,
            )
            named = self.endpoints.model()
            topology = census.choose(None if known is None else known.shard_set, self.model, named)
            rollout = None if self.model else self.endpoints.rollout()
        finally:
            self._looked = self._read_at = self._clock()
        was_edited, self._stamp = stamp != self._stamp, stamp
        manifest = topology.manifest
        self._note_kept(None if self.model else named, manifest)
        grams = self._grams(manifest.model)
        if known is None:
            grams = grams or self._fetch(topology)
            load(_OF_CALLS)
        if grams is not None:
            snapshot = _with(topology, grams)
            self._gone = False
        else:
            assert known is not None
            self._fetch_behind(topology)
            found = census.of(known.model, known.shard_set)
            self._gone = found is None
            snapshot = known if found is None else _with(found, known.grams)
        following = self._next(census, snapshot, rollout)
        with runtime.lock:
            runtime.counts.stats.refreshes += before is not None
            self._others = self._still_held(census, snapshot)
            self._follow_rollout(following, rollout)
            self.known = snapshot
            self._missed -= {snapshot.model, *self._others}
            self._runtime.keep_only([snapshot, *self._others.values()])
        if known is not None and known.model != snapshot.model:
            fields = {"before": known.model, "after": snapshot.model}
            log.warning("client.model.changed", extra=fields)
        self._unread = ""
        known_shards = len(snapshot.topology.addresses)
        read = {"shard_set": snapshot.shard_set, "shards_known": known_shards}
        if known is None or was_edited or known.topology != snapshot.topology:
            log.info("client.cluster_file.read", extra=read)
        return snapshot

    def _next(self, census: Census, now: Snapshot, rollout: Rollout | None) -> Snapshot | None:
        """Returns the next model's snapshot once servers hold all its shards and its low orders are
        fetched; None until then, and if the next model is a resharding of the model in use."""
        found = None if rollout is None else census.whole(rollout.model)
        if found is None or found.manifest.model == now.model:
            return None
        grams = self._grams(found.manifest.model)
        if grams is None:
            self._fetch_behind(found)
        return None if grams is None else _with(found, grams)

    def _follow_rollout(self, following: Snapshot | None, rollout: Rollout | None) -> None:
        found = None
        if following is not None and rollout is not None:
            self._others = {**self._others, following.model: following}
            found = replace(rollout, model=following.model)
        if found != self._rollout:
            fields = {"model": found and found.model, "share": found.share if found else 0.0}
            log.info("client.rollout.changed", extra=fields)
        self._rollout = found

    def _note_settings(self, kept: list[str]) -> None:
        for name in kept:
            if name not in self._kept:
                advice = "restart the client to apply the setting"
                log.warning(
                    "client.setting.needs_restart", extra={"setting": name, "advice": advice}
                )
        self._kept = frozenset(kept)

    def _note_kept(self, named: str | None, manifest: Manifest) -> None:
        """Logs, once, that servers do not hold all shards of the operator's default model."""
        if any(one.startswith(named or "") for one in (manifest.model, manifest.shard_set)):
            named = None
        if named is not None and named != self._unserved:
            log.warning("client.model.kept", extra={"named": named, "model": manifest.model})
        self._unserved = named

    def note_gone(self, model: str, error: DlmError) -> None:
        """Logs, once per model, that an utterance is open on a model that no server holds. If the
        low orders answer its queries, nothing else shows this."""
        with self._runtime.lock:
            if model in self._missed:
                return
            self._missed |= {model}
        log.warning("client.model.gone", extra={"model": model, "error": str(error)})

    def _still_held(self, census: Census, now: Snapshot) -> dict[str, Snapshot]:
        found = {}
        for before in (*self._others.values(), self.known):
            if before is not None and before.model != now.model:
                topology = census.of(before.model, before.shard_set)
                if topology is not None:
                    found[before.model] = _with(topology, before.grams)
        return found

    def _grams(self, model: str) -> LowGrams | None:
        snapshot = self.of(model)
        return self._fetched.get(model) if snapshot is None else snapshot.grams

    def _fetch(self, topology: Topology) -> LowGrams:
        sources = [
            (shard, self._runtime.connection(address))
            for shard, addresses in sorted(topology.addresses.items())
            for address in addresses
        ]

        def rest(seconds: float) -> None:
            self._runtime.check_open()  # raises for a closed client, to end the retries
            time.sleep(seconds)

        config = self._config
        return fetch(topology.manifest, sources, config.cache_dir, config.connect_s, sleep=rest)

    def _fetch_behind(self, topology: Topology) -> None:
        runtime, model = self._runtime, topology.manifest.model

        def get() -> None:
            try:
                grams = self._fetch(topology)
                _ = grams.vocabulary.ids  # builds the ids now, not while a caller waits
                self._fetched = {model: grams}
                runtime.helper.submit(self.refresh, self.known).result()
            except Exception as exc:
                fields = {"model": model, "error": str(exc) or repr(exc)}
                log.warning("client.model.not_loaded", extra=fields)
                raise
            finally:
                self._fetched = {}
                self._fetching = None

        with runtime.lock:
            if self._fetching is None:
                self._fetching = runtime.fetcher.submit(get)

    def _endpoints_known(self, stale: Snapshot | None) -> list[Endpoint]:
        known = {} if stale is None else stale.topology.addresses
        held = {address: shard for shard, addresses in known.items() for address in addresses}
        return [
            e if e.shard is not None else replace(e, shard=held.get(e.address))
            for e in self.endpoints()
        ]

    def refresh_quietly(self, snapshot: Snapshot | None) -> None:
        try:
            # A model that no server holds stays in use until the next one is fetched.
            if snapshot is self.known or snapshot is None or self.of(snapshot.model) is snapshot:
                self.refresh(snapshot, self._config.deadline_s)
        except Exception as exc:  # noqa: BLE001 - nobody waits for the result
            error = " ".join([str(exc) or repr(exc), *getattr(exc, "__notes__", [])])
            # Each error is logged once, and none is logged if the client was closed meanwhile.
            if error != self._unread and not self._runtime.closed:
                self._unread = error
                log.warning("client.cluster_file.rejected", extra={"error": error})


def _describe(
    endpoint: Endpoint,
    connect: Connect,
    timeout_s: float,
    census: Census,
    clock: Callable[[], float],
) -> list[pb.DescribeReply | DlmError]:
    """Gets a server's descriptions of its default shard set and then of its other sets. `timeout_s`
    covers all of them, and the time to read the manifests."""
    until = clock() + timeout_s
    replies: list[pb.DescribeReply | DlmError] = []
    wanted = [b""]
    for shard_set in wanted:
        left_s = until - clock() if replies else timeout_s
        if left_s <= 0:
            what = (
                f"described only {len(replies)} of its {len(wanted)} shard sets in "
                f"{timeout_s:g} s; retry"
            )
            return [*replies, DeadlineExceeded(f"{endpoint.address} {what}")]
        try:
            reply = connect(endpoint.address).describe(left_s, shard_set)
            if not replies:
                others = [one for one in dict.fromkeys(reply.shard_sets) if one != reply.shard_set]
                wanted += others[:MAX_SHARD_SETS]
            census.read(endpoint.address, reply, shard_set)
        except ConfigError:
            raise  # a fault of this client, the same for every server
        except DlmError as exc:
            replies.append(exc)
        else:
            replies.append(reply)
    return replies


def take_census(
    endpoints: Sequence[Endpoint],
    connect: Connect,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Census:
    """Asks every server what it holds; each server has `timeout_s` for all its descriptions. Raises
    ConfigError if the client's own credentials cannot be read."""
    census = Census()
    with ThreadPoolExecutor(max_workers=min(len(endpoints), MAX_ASKED) or 1) as pool:
        replies = list(
            pool.map(lambda e: _describe(e, connect, timeout_s, census, clock), endpoints)
        )
    for endpoint, said in zip(endpoints, replies, strict=True):
        for place, reply in enumerate(said):
            census.add(endpoint, reply, place)
    return census


def _with(topology: Topology, grams: LowGrams) -> Snapshot:
    """Joins a shard set with low orders, perhaps from another sharding of its model; raises
    `ProtocolError` if the manifests contradict each other."""
    known, found = grams.manifest, topology.manifest
    for name in ("order", "counts", "blanks", "unk_in_model"):
        if getattr(known, name) != getattr(found, name):
            raise ProtocolError(
                f"shard set {found.shard_set} claims to be of model {found.model}, like shard set "
                f"{known.shard_set}, but its {name} is {getattr(found, name)}; expected "
                f"{getattr(known, name)}"
            )
    return Snapshot(topology, grams)


def _unread(cause: Exception) -> DlmError:
    return DlmError(
        f"this process could not ask the servers for their models: {cause!r}; retry, and report "
        "the error if it persists"
    )


def other_model(found: str, expected: str) -> StaleShardSet:
    now = "no server holds that model" if found == expected else f"the servers now hold {found}"
    return StaleShardSet(
        f"this utterance was opened on model {expected}; {now}. Open a new utterance"
    )
