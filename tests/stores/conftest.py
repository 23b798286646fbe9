"""Stores, and a cache folder, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlm.stores import remote
from stores.servers import CREDENTIALS, Files, s3_server

pytest.importorskip("obstore", reason="obstore is not installed (the extra stores)")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    pytest.importorskip("moto.server", reason="moto is not installed (the extra dev)")
    with s3_server() as address:
        yield address


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_S", 1)
    remote.opened.cache_clear()
    yield tmp_path / "cache"
    remote.opened.cache_clear()


@pytest.fixture
def bucket(
    s3_address: str, cache: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """A new bucket, as s3://NAME."""
    import boto3

    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_address}.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture
def files(cache: Path) -> Iterator[Files]:
    found = Files()
    yield found
    found.close()
