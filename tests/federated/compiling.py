"""Compiling less and quicker, for tests that compile much and compute little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """What XLA compiles is kept there: the same function of another run or test is read again."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir is not None:  # the user's own
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    compilation_cache.reset_cache()  # JAX looks at the folder's name once
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """XLA with few of its optimisations: the same functions, compiled in half the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
