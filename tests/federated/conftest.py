"""What tests of federated learning share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from federated.compiling import quickly


@pytest.fixture(scope="module")
def quick_compiling() -> Iterator[None]:
    """For modules whose tests compile much and compute little."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    with quickly():
        yield
