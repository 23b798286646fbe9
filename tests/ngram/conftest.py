"""Kernels as plain Python, where a read out of range is an error; their machine operations as of
arrays in place of raw memory: oracles of the compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from dlm.ngram import digit_kernels, kernels
from dlm.ngram.arpa import kernels as row_kernels


def fold(a: Any, b: Any) -> Any:
    """See `kernels.fold`."""
    product = int(a) * int(b)
    return np.uint64((product ^ (product >> 64)) & 0xFFFFFFFFFFFFFFFF)


def store64(text: Any, at: Any, value: Any) -> None:
    """See `digit_kernels.store64`."""
    text[at : at + 8] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)


OPERATIONS: dict[str, Any] = {
    "raw": lambda array: array,
    "fold": fold,
    "prefetch": lambda slots, at: None,
    "load64": lambda text, at: np.uint64(int.from_bytes(text[at : at + 8].tobytes(), "little")),
    "store64": store64,
    "trailing_zeros": lambda a: np.int64((int(a) & -int(a)).bit_length() - 1),
    "bits_of": lambda a: np.float64(a).view(np.uint64),
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The source of all kernels in place of what the compiler makes of it; numbers wrap around."""
    for module in (kernels, row_kernels, digit_kernels):
        for name, value in list(vars(module).items()):
            if name in OPERATIONS:
                monkeypatch.setattr(module, name, OPERATIONS[name])
            elif isinstance(value, Dispatcher):
                monkeypatch.setattr(module, name, value.py_func)
    with np.errstate(over="ignore"):
        yield
