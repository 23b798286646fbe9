"""A served model, and one gateway to it for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, ModelFiles, build
from dlm.client import AsyncClient, ClientConfig
from gateway.gateways import DOORS, Caller, ThreadGateway
from models import random_model


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model of order 4, suffixes missing, in two shards."""
    model = random_model(7, order=4, words=60, per_order=400)
    return build(model, tmp_path_factory.mktemp("gateway"), 2)


@pytest.fixture(scope="session")
def opening(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Opens the client of a gateway: of a server for each shard."""
    cache = tmp_path_factory.mktemp("low-orders")
    with Cluster(files) as cluster:
        config = ClientConfig(deadline_s=20.0, cache_dir=cache, heartbeats=True)
        yield lambda: AsyncClient.connect(cluster.addresses, config)


@pytest.fixture(scope="module")
def gateway(opening: Any) -> Iterator[ThreadGateway]:
    """A gateway to these servers."""
    with ThreadGateway(opening, deadline_s=20.0) as running:
        yield running


@pytest.fixture(scope="module")
def callers(gateway: ThreadGateway) -> dict[str, Caller]:
    """A caller by each door."""
    return {door: gateway.caller(door) for door in DOORS}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """The tokens of alice and bob."""
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"alice:{'a' * 32}\nbob:{'b' * 32}\n")
    return path
