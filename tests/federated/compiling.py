"""Compiling quicker, for tests that compile much and compute little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """XLA with few of its optimisations: the same functions, compiled in half the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
