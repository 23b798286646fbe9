"""What tests of federated learning share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What XLA compiles is kept in a folder of this session: the same function of another run or
    test is read from there, which takes a tenth of the time."""
    if importlib.util.find_spec("jax") is None:
        yield
        return
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # the user's own
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def quick_compiling() -> Iterator[None]:
    """XLA with few of its optimisations: the same functions, compiled in half the time.

    For modules whose tests compile much and compute little.
    """
    jax = pytest.importorskip("jax", reason="pip install dlm[train]")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
