"""The two faces of the client: synchronous and asyncio.

    client = Client.connect("cluster.toml")
    utterance = client.utterance()
    extension = utterance.extend([utterance.begin()], ["the", "a", "there"])

Clients pickle (a copy connects by itself), survive fork, and may be used from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from dlm.client.cascade import CascadeStatus
from dlm.client.config import ClientConfig
from dlm.client.core import Core
from dlm.client.local import open_small
from dlm.client.metrics import ClientCollector
from dlm.client.modes import Mode
from dlm.client.runtime import Snapshot, Stats
from dlm.client.security import read_cluster_security
from dlm.client.topology import ClusterFile, Endpoint, FixedEndpoints, read_cluster_small
from dlm.client.transport import GrpcConnection
from dlm.client.utterance import FINISH, FULL_KIND, SMALL_KIND, AsyncUtterance, Utterance
from dlm.errors import ConfigError, UnavailableError
from dlm.index.layout import Manifest
from dlm.ngram.vocab import Vocabulary

log = logging.getLogger(__name__)

Cluster: TypeAlias = str | os.PathLike[str] | Sequence[str]
_Opened: TypeAlias = tuple[Core, Snapshot, float | None, str, str]


def _core(cluster: Cluster, config: ClientConfig | None, model: str | None) -> Core:
    config = config or ClientConfig()
    security = config.security
    endpoints: ClusterFile | FixedEndpoints
    if isinstance(cluster, (str, os.PathLike)):
        endpoints = ClusterFile(cluster)
        endpoints()  # says what to do where there is no such file
        security = security.over(read_cluster_security(cluster))
        if config.partial and config.small is None and config.heartbeats is not False:
            config = replace(config, small=_small_of(cluster))
    else:
        for address in cluster:
            if not isinstance(address, str) or ":" not in address:
                raise ConfigError(
                    f'{address!r} is no address of a server; "host:port" is expected, or the path '
                    "of a cluster.toml in place of the list"
                )
        endpoints = FixedEndpoints([Endpoint(address) for address in cluster])
    connect = partial(GrpcConnection, streams=config.connections, security=security)
    return Core(endpoints, config, connect=connect, model=model)


def _small_of(cluster: str | os.PathLike[str]) -> Path | None:
    small = read_cluster_small(cluster)
    if small is not None and not small.is_dir():
        if small.exists():
            raise ConfigError(
                f"{os.fspath(cluster)} names the small model {small}, which is a file; the folder "
                "of a shard set is expected, as `dlm shard` makes them"
            )
        raise ConfigError(
            f"{os.fspath(cluster)} names the small model {small}, and there is no such folder on "
            "this machine; copy it there, write where it is into the file, or give "
            "ClientConfig(small=...)"
        )
    return small


class _Face:
    """What both faces share."""

    def __init__(self, core: Core) -> None:
        self._core = core
        small = core.config.small
        self._small = None if small is None else open_small(small)

    def _connect(self) -> None:
        """Finds the servers; without any, begins on the small model where there is one."""
        try:
            self._core.snapshot()
        except UnavailableError:
            if self._small is None:
                raise
            log.warning("client.small.begun", extra={"small": str(self._core.config.small)})
            self._core.begin_small()
        self._core.watch()

    def _connect_copy(self) -> None:
        """A copy of a client connects when it is first used; as `connect`, where servers fail."""
        if not self._core.begun:
            self._connect()

    def _open(self, deadline_s: float | None, on_switch: str) -> _Opened:
        """What a new handle is made of."""
        core, small = self._core, self._small
        core.check_open()
        self._connect_copy()
        if small is not None and core.mode() is Mode.SMALL:
            return small, small.snapshot(), deadline_s, SMALL_KIND, on_switch
        return core, core.snapshot(), deadline_s, FULL_KIND, on_switch

    @property
    def cascade(self) -> CascadeStatus:
        """How the servers are, and which model new utterances are scored with.

        Raises  ConfigError  this client sends no heartbeats, see `ClientConfig.heartbeats`
        """
        self._connect_copy()
        return self._core.cascade()

    @property
    def manifest(self) -> Manifest:
        """The shard set in use."""
        return self._core.snapshot().topology.manifest

    @property
    def vocabulary(self) -> Vocabulary:
        """Words and ids of the model in use."""
        return self._core.snapshot().grams.vocabulary

    @property
    def stats(self) -> Stats:
        """What this client has counted."""
        return self._core.stats

    @property
    def metrics(self) -> ClientCollector:
        """The same and more for Prometheus: ``registry.register(client.metrics)``."""
        return ClientCollector(self._core, self._small)

    def __repr__(self) -> str:
        snapshot = self._core.table.known
        if snapshot is None:
            return f"{type(self).__name__}(not connected)"
        return (
            f"{type(self).__name__}(shard_set={snapshot.shard_set}, "
            f"shards={snapshot.topology.manifest.shards}, {self._core.stats})"
        )


class Client(_Face):
    """The synchronous face."""

    @classmethod
    def connect(
        cls, cluster: Cluster, config: ClientConfig | None = None, *, model: str | None = None
    ) -> Client:
        """Finds the servers, and fetches the low orders unless they are in the cache.

        Args
            cluster  path of a cluster.toml, or a list of addresses "host:port"
            model    of the models that they hold, the one whose id, or the id of whose shard set,
                     begins so: 6 hex digits or more, as `dlm info` prints them. Without it, the
                     shard set of which they hold most shards
        Raises
            ConfigError       no such file, a cache that cannot be written, certificates or a token
                              that cannot be read; or the servers hold no such model, or several
            AuthenticationError  the servers do not let this client in
            UnavailableError  no server answers, and there is no small model
            ProtocolError     servers answer, but not as proto/README.md says
            ShardFormatError  the small model is damaged
        """
        client = cls(_core(cluster, config, model))
        client._connect()
        return client

    def utterance(self, *, deadline_s: float | None = None, on_switch: str = FINISH) -> Utterance:
        """A new handle, pinned to the model in use: the full one, or the small one while the
        servers fail (`Utterance.family`).

        Args
            deadline_s  for each of its calls
            on_switch   where the client goes over to the small model before the utterance ends:
                        "finish" ends it on the low orders of the full one, without messages;
                        "rescore" has its next call raise `ModelSwitched`
        Raises
            ShardDown  the client is closed
        """
        return Utterance(*self._open(deadline_s, on_switch))

    def close(self) -> None:
        """Lets go of every connection."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_Face):
    """The asyncio face: the same methods, awaited."""

    @classmethod
    async def connect(
        cls, cluster: Cluster, config: ClientConfig | None = None, *, model: str | None = None
    ) -> AsyncClient:
        """See `Client.connect`."""
        core = _core(cluster, config, model)
        client = await asyncio.to_thread(cls, core)
        await asyncio.to_thread(client._connect)
        return client

    def utterance(
        self, *, deadline_s: float | None = None, on_switch: str = FINISH
    ) -> AsyncUtterance:
        """See `Client.utterance`."""
        return AsyncUtterance(*self._open(deadline_s, on_switch))

    async def close(self) -> None:
        """Lets go of every connection."""
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
