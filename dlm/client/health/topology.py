"""The servers of a model: a shard set, and where its shards are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlm.index.layout import Manifest

NO_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class Topology:
    """A shard set and the addresses of its shards.

    addresses    shard -> addresses of its replicas; a shard without a known server is missing
    faults       address -> what is wrong with a server that is not in it
    max_queries  queries that each of its servers accepts in one message
    """

    manifest: Manifest
    addresses: Mapping[int, tuple[str, ...]]
    faults: Mapping[str, str]
    max_queries: int = NO_LIMIT
