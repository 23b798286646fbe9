"""A served model for the tests of faults, and clients that end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.conftest import cache_dir, connect  # noqa: F401 - fixtures
from cluster import Cluster, ModelFiles, build
from models import random_model


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model of order 4 in two shards."""
    model = random_model(17, order=4, words=40, per_order=300)
    return build(model, tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="module")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """A server for each shard, in this process."""
    with Cluster(files) as running:
        yield running
