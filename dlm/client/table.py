"""Which shard set a client uses, where its shards are, and its low orders: found, and found anew.

All looks at the servers are taken on one thread, so that many calls which find the table stale at
once have it read once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlm.client.call import own_copy
from dlm.client.config import ClientConfig
from dlm.client.lowgrams import fetch
from dlm.client.runtime import Links, Snapshot
from dlm.client.topology import Endpoint, Topology, check_model, discover
from dlm.client.warm import warm_up
from dlm.errors import DlmError

log = logging.getLogger(__name__)


class Table:
    """The snapshot in use.

    Args
        endpoints  returns the servers there are; asked again whenever the table is stale
        model      which of the models they hold; see `topology.discover`
        clock      seconds, monotonic
    Attributes
        known      None before any was found
    """

    def __init__(
        self,
        endpoints: Callable[[], Sequence[Endpoint]],
        model: str | None,
        config: ClientConfig,
        links: Links,
        clock: Callable[[], float],
    ) -> None:
        self.endpoints = endpoints
        self.model = check_model(model)
        self.known: Snapshot | None = None
        self._config = config
        self._links = links
        self._clock = clock

    def snapshot(self) -> Snapshot:
        """The shard set in use; found and fetched at the first call.

        Raises  UnavailableError, ProtocolError, ConfigError
        """
        known = self.known
        return self._refresh() if known is None else known

    def look_again(self) -> None:
        """Has the servers asked what they hold, in the background, where nobody does so already."""
        runtime = self._links.runtime
        with runtime.lock:
            if runtime.looking or self._links.closed:
                return
            runtime.looking = True
        try:
            runtime.helper.submit(self.look_quietly, self.known)
        except RuntimeError:  # closed meanwhile
            runtime.looking = False

    def _refresh(self) -> Snapshot:
        """The first snapshot; many callers at once share one look at the servers."""
        runtime = self._links.runtime
        with runtime.lock:
            self._links.check_open()
            if self.known is not None:
                return self.known
            running = runtime.refreshing
            if running is None:
                running = runtime.refreshing = runtime.helper.submit(self.look, None)
        try:
            return running.result()
        except DlmError as exc:
            raise own_copy(exc) from exc
        finally:
            with runtime.lock:
                if runtime.refreshing is running:
                    runtime.refreshing = None

    def look(
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
                self._links.connection,
                self._config.connect_s if timeout_s is None else timeout_s,
                prefer=None if stale is None else stale.shard_set,
                model=self.model,
            )
        finally:
            self._links.runtime.looked = self._clock()
        found(topology)
        manifest = topology.manifest
        if stale is not None and stale.model == manifest.model:
            grams = stale.grams  # another sharding of the same model: words and low orders stand
        else:
            sources = [
                (shard, self._links.connection(address))
                for shard, addresses in sorted(topology.addresses.items())
                for address in addresses
            ]
            grams = fetch(manifest, sources, self._config.cache_dir, self._config.connect_s)
            if stale is None:
                warm_up(grams)
        runtime = self._links.runtime
        with runtime.lock:
            runtime.stats.refreshes += stale is not None
            snapshot = self.known = Snapshot(topology, grams)
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
            for endpoint in self.endpoints()
        ]

    def look_quietly(self, snapshot: Snapshot | None) -> None:
        """As `look`, where `snapshot` is in use still; what goes wrong is logged."""
        try:
            if self.known is snapshot:
                self.look(snapshot, self._config.deadline_s)
        except DlmError as exc:
            log.info("client.table.unread", extra={"error": str(exc)})
        finally:
            self._links.runtime.looking = False
