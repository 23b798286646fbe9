"""What tests of federated learning share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_compiling() -> Iterator[None]:
    """XLA with few of its optimisations: the same functions, compiled in half the time.

    For modules whose tests compile much and compute little.
    """
    jax = pytest.importorskip("jax", reason="pip install dlm[train]")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
