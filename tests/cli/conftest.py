"""A small model, its shards, and a cluster that serves them, for the tests of the command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forked
from cluster import WAIT_S, CommandServer, command
from models import HAND_MADE

MODEL = HAND_MADE["missing_suffixes"]
OTHER = HAND_MADE["weight_without_continuation"]

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a cache folder of its own."""
    return {**os.environ, "DLM_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def run(environ: dict[str, str]) -> Run:
    """Runs `dlm` with arguments, and returns what it printed; checks its exit status if given."""

    def call(
        *arguments: object, cwd: Path | None = None, text: bytes = b"", status: int | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        done = forked.run(
            command(*arguments),
            cwd=cwd,
            env=environ,
            input=text,
            capture_output=True,
            timeout=WAIT_S,
        )
        assert status in (None, done.returncode), done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """A folder with model.arpa and its shards, made by the command."""
    home = tmp_path_factory.mktemp("cli")
    MODEL.write(home / "model.arpa")
    done = run("shard", "model.arpa", "--shards", 2, "--output", "shards", cwd=home)
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="session")
def other(folder: Path, run: Run) -> Path:
    """The shards of another model, in the same folder: three of them."""
    OTHER.write(folder / "other.arpa")
    done = run("shard", "other.arpa", "--shards", 3, "--output", "others", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "others"


@pytest.fixture(scope="session")
def cluster(folder: Path, environ: dict[str, str]) -> Iterator[Path]:
    """cluster.toml of a running `dlm cluster`."""
    with CommandServer("cluster", "shards", cwd=folder, env=environ).ready():
        yield folder / "cluster.toml"
    assert not (folder / "cluster.toml").exists()
