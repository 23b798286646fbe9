"""The synchronous and the asyncio client: connect, open an utterance, close.

    client = Client.connect("cluster.toml")
    utterance = client.utterance()
    extension = utterance.extend([utterance.begin()], ["the", "a", "there"])

Clients can be pickled (a copy connects by itself), survive a fork, and work in any thread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, cast

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dlm import __version__
from dlm.client.base_utterance import FINISH, check_deadline
from dlm.client.cascade import CascadeMonitor, CascadeStatus
from dlm.client.cluster_file import ClusterFile, Endpoint, FixedEndpoints
from dlm.client.config import ClientConfig, check_address
from dlm.client.core import Core, LocalScorer, Scorer, open_local
from dlm.client.health import Liveness, Mode
from dlm.client.metrics import FAILED, FAMILIES, OK, Stats
from dlm.client.phrases import Phrases, Weights, prepared
from dlm.client.server import Connection
from dlm.client.states import FULL_MODEL, LOCAL_MODEL
from dlm.client.utterance import AsyncUtterance, Opened, Utterance
from dlm.errors import ConfigError, QueryError, StaleShardSet, UnavailableError
from dlm.families import family
from dlm.index.layout import Manifest
from dlm.index.placed import local_set
from dlm.logs import EventLog
from dlm.ngram.query import LOCAL_FALLBACK
from dlm.ngram.vocab import Vocabulary
from dlm.resources import Closeable
from dlm.stores.remote import RemotePath, located
from dlm.wire.ids import check_beginning

log = EventLog(__name__)

Cluster: TypeAlias = str | os.PathLike[str] | Sequence[str]
_ADDRESS = re.compile(r"[^\s/]+:\d+")


def _core(cluster: Cluster, config: ClientConfig | None, model: str | None) -> Core:
    config = config or ClientConfig()
    security = config.security
    endpoints: ClusterFile | FixedEndpoints
    if isinstance(cluster, (str, os.PathLike)):
        _check_path(cluster)
        endpoints = ClusterFile(cluster, config)
        security = endpoints.started.security
        config = replace(config, local_fallback=endpoints.started.local_fallback)
    else:
        _check_addresses(cluster)
        endpoints = FixedEndpoints([Endpoint(address) for address in cluster])
    connect = partial(Connection, streams=config.connections, security=security)
    return Core(endpoints, config, connect=connect, model=model)


def _check_path(cluster: str | os.PathLike[str]) -> None:
    path = located(cluster)
    if isinstance(path, RemotePath):
        return
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; expected the path of a cluster.toml. To open a shard set on this "
            "machine, use Client.local(DIR)"
        )
    if isinstance(cluster, str) and _ADDRESS.fullmatch(cluster) and not path.exists():
        raise ConfigError(
            f"{cluster!r} is a single address; expected the path of a cluster.toml or a list of "
            f"addresses. Write connect([{cluster!r}])"
        )


def _check_addresses(cluster: Any) -> None:
    if isinstance(cluster, bytes) or not isinstance(cluster, Sequence):
        raise ConfigError(
            f'{cluster!r} does not name servers; expected a list of "host:port", or the path of a '
            "cluster.toml"
        )
    for address in cluster:
        try:
            check_address(address)
        except ConfigError as exc:
            raise ConfigError(
                f"{exc}. To use a cluster.toml, pass its path instead of a list"
            ) from exc


def _open_local(directory: str | os.PathLike[str], **options: Any) -> LocalScorer:
    return open_local(local_set(located(directory)), **options)


def open_local_fallback(directory: Path) -> LocalScorer:
    """Opens a client's local fallback and compiles its kernels; raises what `open_local` raises."""
    scorer = open_local(directory, LOCAL_FALLBACK, what="the local fallback")
    Utterance(scorer, scorer.snapshot(), None).score_sentences([b"", b"<unk> <unk>"])
    return scorer


# -------------------------------------------------------------------------------------------------
# The counters of a client as Prometheus metrics; families are built when they are collected.
#
# The library registers nothing itself; the application chooses the registry::
#
#     prometheus_client.REGISTRY.register(client.metrics)
#
# Labels are shard numbers and closed sets of results and stages; never words, ids or addresses.


class ClientCollector(Collector):
    """The metric families of one client.

    A registry accepts one client, since all clients' families have the same names. Give each client
    its own registry, or let threads share a client.
    """

    def __init__(self, core: Scorer, fallback: Scorer | None = None) -> None:
        self._core = core
        self._fallback = fallback

    def describe(self) -> Iterable[Metric]:
        """Yields what `collect` does; the names let a registry refuse a second client."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yields the current families, without asking a server."""
        core = self._core
        counts, stats = core.counts, core.stats
        local = self._fallback if core.local_model is None else core
        yield _queries(stats, 0 if local is None else local.stats.queries)
        yield _labelled("calls_total", counts.calls)
        yield _labelled("messages_total", counts.messages)
        hedges = {"won": stats.hedges_won, "lost": stats.hedges - stats.hedges_won}
        yield _labelled("hedges_total", hedges)
        for name, sizes in (
            ("message_queries", counts.message_queries),
            ("coalesced_calls", counts.gathered_calls),
        ):
            histogram = _family(name)
            histogram.add_metric((), sizes.cumulative(), sizes.total)
            yield histogram
        stages = _family("stage_seconds")
        for stage, seconds in counts.stages.items():
            stages.add_metric((stage,), seconds.cumulative(), seconds.total)
        yield stages
        load = sorted(core.load().items())
        yield _labelled("in_flight", {str(shard): sent for shard, (sent, _) in load})
        yield _labelled("queue_depth", {str(shard): queued for shard, (_, queued) in load})
        if watch := core.watch():  # without heartbeats, nothing is known about servers
            yield from _cascade(watch)
        for name, value in (
            ("local_fallback", int(self._fallback is not None)),
            ("cache_bytes", core.cache_bytes()),
        ):
            gauge = _family(name)
            gauge.add_metric((), value)
            yield gauge
        yield _labelled("info", {__version__: 1})


def _family(name: str) -> Any:
    return family(FAMILIES, f"dlm_client_{name}")


def _labelled(name: str, values: Mapping[str, float]) -> Metric:
    out = _family(name)
    for value, number in dict(values).items():
        out.add_metric((value,), number)
    return cast("Metric", out)


def _cascade(watch: CascadeMonitor) -> Iterator[Metric]:
    status = watch.status()
    servers = Counter(one.health for one in status.servers)
    yield _labelled("servers", {health: servers[health] for health in Liveness})
    yield _labelled("mode", {mode: int(status.mode is mode) for mode in Mode})
    switches = _family("mode_switches_total")
    for (to, reason), times in sorted(status.switches.items()):
        switches.add_metric((to, reason), times)
    yield switches
    probes = {OK: watch.probes[True], FAILED: watch.probes[False]}
    yield _labelled("probes_total", probes)


def _queries(stats: Stats, fallback: int) -> Metric:
    """Counts queries by how they were answered. When no query is in progress, `local`, `shard` and
    `duplicate` add up to the queries to the full model, plus queries sent again, minus queries
    refused before they were sent. Most `bigram_fallback` queries also count as `shard`."""
    return _labelled(
        "queries_total",
        {
            "local": stats.local_hits,
            "shard": stats.sent_queries,
            "duplicate": stats.duplicates,
            "bigram_fallback": stats.bigram_fallback,
            "local_fallback": fallback,
        },
    )


class _Face:
    def __init__(self, core: Core | LocalScorer) -> None:
        if not isinstance(core, (Core, LocalScorer)):
            name = type(self).__name__
            raise TypeError(
                f"{name}({core!r}) does not open a client; use {name}.connect({core!r}) for "
                f"servers, or {name}.local(DIR) for a shard set on this machine"
            )
        self._core: Scorer = core
        fallback = core.config.local_fallback
        self._fallback = None if fallback is None else open_local_fallback(fallback)

    def _connect(self) -> None:
        try:
            self._core.snapshot()
        except UnavailableError as exc:
            if self._fallback is None:
                raise
            path = str(self._core.config.local_fallback)
            why = " ".join([str(exc), *getattr(exc, "__notes__", ())])
            fields = {"local_fallback": path, "error": why}
            log.warning("client.local_fallback.started", extra=fields)
            self._core.begin_local_fallback()
        self._core.watch()

    def _open(
        self,
        deadline_s: float | None,
        on_switch: str,
        key: str | bytes | None,
        model: str | None,
        wait_s: float,
        phrases: Phrases | None,
    ) -> Opened:
        """Returns the arguments of a new utterance; if servers no longer hold the current model,
        waits `wait_s` seconds for the next model."""
        if key is not None and not isinstance(key, (str, bytes)):
            raise QueryError(f"the key is {key!r}; expected a string or bytes")
        core, fallback = self._core, self._fallback
        if deadline_s is not None:
            check_deadline(deadline_s)
        core.check_open()
        if not core.begun:
            self._connect()
        if model is not None:
            found = core.named(check_beginning(model))
            if found is None:
                raise StaleShardSet(
                    f"no server that this client knows holds model {model}; serve it, or omit the "
                    "`model` argument"
                )
            return core, found, deadline_s, FULL_MODEL, on_switch, phrases, True
        if fallback is not None and core.mode() is Mode.LOCAL_FALLBACK:
            limit_s = core.config.deadline_s if deadline_s is None else deadline_s
            return fallback, fallback.snapshot(), limit_s, LOCAL_MODEL, on_switch, phrases, False
        found = core.current(wait_s, key=key)
        return core, found, deadline_s, FULL_MODEL, on_switch, phrases, False

    def _connect_now(self) -> None:
        """Connects before a property is read, as a copied client connects only when first used."""
        if not self._core.begun:
            self._connect()

    @property
    def cascade(self) -> CascadeStatus:
        """The state of the servers, and which model new utterances are scored with.

        Without a local fallback the mode stays `full`, even while every server is down: `servers`
        shows the state of each.

        Raises  ConfigError  this client sends no heartbeats, see `ClientConfig.heartbeats`
        """
        self._connect_now()
        return self._core.cascade()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the shard set in use."""
        self._connect_now()
        return self._core.snapshot().topology.manifest

    @property
    def vocabulary(self) -> Vocabulary:
        """Words and ids of the model in use."""
        self._connect_now()
        return self._core.snapshot().grams.vocabulary

    @property
    def stats(self) -> Stats:
        """The counters of this client."""
        return self._core.stats

    @property
    def sent_to(self) -> dict[int, int]:
        """How many distinct queries this client has sent to the servers of each shard."""
        self._core.counts.now()  # counts messages that were only noted so far
        return dict(self._core.counts.sent_to)

    @property
    def metrics(self) -> ClientCollector:
        """The client's metrics for Prometheus; use ``registry.register(client.metrics)``."""
        return ClientCollector(self._core, self._fallback)

    def __repr__(self) -> str:
        known = self._core.known()
        if known is None:
            return f"{type(self).__name__}(not connected)"
        return (
            f"{type(self).__name__}(shard_set={known.manifest.shard_set}, "
            f"shards={known.manifest.shards}, queues={self._core.load()}, "
            f"{self._core.stats})"
        )


class Client(_Face, Closeable):
    """A client of servers, or of a shard set in this process; any thread may use it.

    Create a client with `connect` or `local`, and call `utterance` to score words. A `with` block
    closes the client. `AsyncClient` has the same methods, for asyncio.
    """

    @classmethod
    def connect(
        cls, cluster: Cluster, config: ClientConfig | None = None, *, model: str | None = None
    ) -> Client:
        """Finds the servers, and fetches the low orders unless they are in the cache.

        Args
            cluster  path of a cluster.toml, or a list of addresses "host:port"
            model    the first 6 hex digits or more of the id of a model, or of its shard set, as
                     `dlm info` prints them. By default, new utterances get the model that
                     cluster.toml names at the time, or else the servers' default
        Raises
            ConfigError          no such file; a cache that cannot be written; certificates or a
                                 token that cannot be read; no such model, or several
            AuthenticationError  the servers rejected the client's credentials
            UnavailableError     no server answers, and there is no local fallback
            ProtocolError        servers answer, but not as proto/README.md says
            ShardFormatError     the local fallback is damaged
        """
        client = cls(_core(cluster, config, model))
        client._connect()
        return client

    @classmethod
    def local(
        cls,
        directory: str | os.PathLike[str],
        *,
        verify: bool = True,
        vocab: str | os.PathLike[str] | None = None,
    ) -> Client:
        """Opens the shard set in `directory` in this process, which then needs no servers.

        `directory` may also be the path of a KenLM binary file; the scores are then KenLM's, see
        `dlm.kenlm.model.KenlmFile`.

        Utterances, states, scores and errors are like those of `connect`. Calls return their answer
        even after their deadline.

        Args
            verify  whether to check every checksum first
            vocab   a file that lists the words, for a KenLM file that stores none
        Raises
            ConfigError       there is no such folder or file
            ShardFormatError, KenlmFormatError  the folder or file is damaged
        """
        return cls(_open_local(directory, verify=verify, vocab=vocab))

    def utterance(
        self,
        *,
        key: str | bytes | None = None,
        model: str | None = None,
        deadline_s: float | None = None,
        on_switch: str = FINISH,
        wait_s: float | None = None,
        phrases: Phrases | Weights | None = None,
    ) -> Utterance:
        """A new utterance, pinned to the model in use: the full one, or the local fallback while
        the servers fail (`Utterance.model_info`).

        Args
            key         the name of e.g. a user or a session: during a roll-out, utterances with
                        equal keys get the same model. Without a key, the model is drawn at random
            model       the first 6 hex digits or more of a model's id, e.g. of another process's
                        states: the utterance keeps that model, even if it is replaced
            deadline_s  the deadline of each call of the utterance, in seconds
            on_switch   what happens if the client switches to the local fallback midway: with
                        "finish", the full model's low orders score the rest, without messages;
                        with "rescore", the next call raises `ModelSwitched`
            wait_s      seconds to wait for the next model if servers no longer hold the model in
                        use; by default `connect_s`. With 0, the utterance gets the model in use
            phrases     the log10 bonus of each phrase that a speaker may say; or `Phrases`, which
                        many utterances can share
        Raises
            ClientClosed  the client is closed
            ConfigError   no id can begin with `model`
            StaleShardSet  no server holds `model`
            QueryError    the deadline is not a number of seconds above 0; see also `Phrases`
        """
        wait_s = self._core.config.connect_s if wait_s is None else wait_s
        return Utterance(*self._open(deadline_s, on_switch, key, model, wait_s, prepared(phrases)))

    def close(self) -> None:
        """Closes every connection."""
        self._core.close()


class Opening(Coroutine[Any, Any, "AsyncClient"]):
    """A client being opened: use `client = await ...`, or `async with ...`, which also closes it.

    This object is a coroutine, so tasks and asyncio.run accept it.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncClient]) -> None:
        self._opening = opening
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, Any, AsyncClient]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._opening
        return self._client

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        await self._client.close()


class AsyncClient(_Face):
    """A client for asyncio with the methods of `Client`; `await` the methods that wait."""

    @classmethod
    def connect(
        cls, cluster: Cluster, config: ClientConfig | None = None, *, model: str | None = None
    ) -> Opening:
        """See `Client.connect`; use the result with `await` or `async with`."""

        async def connect() -> AsyncClient:
            client = await asyncio.to_thread(lambda: cls(_core(cluster, config, model)))
            await asyncio.to_thread(client._connect)
            return client

        return Opening(connect())

    @classmethod
    def local(
        cls,
        directory: str | os.PathLike[str],
        *,
        verify: bool = True,
        vocab: str | os.PathLike[str] | None = None,
    ) -> Opening:
        """See `Client.local`; await the result or use `async with`. Calls run on the event loop."""
        opening = partial(_open_local, directory, verify=verify, vocab=vocab)

        async def local() -> AsyncClient:
            return cls(await asyncio.to_thread(opening))

        return Opening(local())

    def utterance(
        self,
        *,
        key: str | bytes | None = None,
        model: str | None = None,
        deadline_s: float | None = None,
        on_switch: str = FINISH,
        phrases: Phrases | Weights | None = None,
    ) -> AsyncUtterance:
        """See `Client.utterance`.

        An unpickled copy of a client has not connected yet, and must not block the event loop to
        connect. Either ``await client.utterance()``, or let the utterance's first call connect,
        within the call's deadline; until then, the utterance has no states and no words.
        """
        self._core.check_open()
        ready = prepared(phrases)
        if self._core.begun:
            return AsyncUtterance(*self._open(deadline_s, on_switch, key, model, 0.0, ready))
        wait_s = self._core.config.connect_s
        opened = partial(self._open, deadline_s, on_switch, key, model, wait_s, ready)
        return AsyncUtterance.later(opened, self._core, deadline_s)

    def _connect_now(self) -> None:
        if not self._core.begun:
            self._core.check_open()
            raise ConfigError(
                "this copy of a client has not connected yet, and a property cannot connect it; "
                "use `await client.utterance()` first"
            )

    async def close(self) -> None:
        """Closes every connection."""
        await asyncio.to_thread(self._core.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
