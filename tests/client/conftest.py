"""A served model for all tests of the client, and clients that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from client.scripted import Clients, Network
from cluster import Cluster, ModelFiles, build
from dlm.client import Client
from models import random_model


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Low orders of all models, shared by all tests."""
    return tmp_path_factory.mktemp("low-orders")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model of order 4, suffixes missing, in three shards."""
    model = random_model(7, order=4, words=60, per_order=400)
    return build(model, tmp_path_factory.mktemp("served"), 3)


@pytest.fixture(scope="session")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Another model, of the same size, in two shards."""
    model = random_model(8, order=4, words=60, per_order=400)
    return build(model, tmp_path_factory.mktemp("other"), 2)


@pytest.fixture(scope="session")
def cluster(files: ModelFiles) -> Iterator[Cluster]:
    """A server for each of its shards."""
    with Cluster(files) as running:
        yield running


@pytest.fixture
def connect(cache_dir: Path) -> Iterator[Clients]:
    """Opens clients; closes them with the test."""
    with Clients(cache_dir) as clients:
        yield clients


@pytest.fixture(scope="session")
def local(files: ModelFiles) -> Iterator[Client]:
    """The model of `files`, in this process."""
    with Client.local(files.directory) as client:
        yield client


@pytest.fixture
def network() -> Network:
    """That the messages of a client pass through which is connected with it."""
    return Network()


@pytest.fixture
def client(cluster: Cluster, connect: Clients) -> Client:
    """A client of `cluster`."""
    return connect(cluster)
