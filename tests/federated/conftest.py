"""What tests of federated learning share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from federated.compiling import quickly


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone."""
    monkeypatch.delenv("DLM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def quick_compiling() -> Iterator[None]:
    """For modules whose tests compile much and compute little."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    with quickly():
        yield
