"""What tests of federated learning share."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest

from federated.compiling import kept_in, quickly


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No function is compiled twice, where there is a compiler."""
    there = importlib.util.find_spec("jax") is not None
    with kept_in(tmp_path_factory.mktemp("compiled")) if there else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def quick_compiling() -> Iterator[None]:
    """For modules whose tests compile much and compute little."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    with quickly():
        yield
