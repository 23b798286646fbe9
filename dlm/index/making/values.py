"""Statistics of a model's values without storing them: how often each occurs, and which occur."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import codebook
from dlm.index.packed.columns import bits_of

Bits = NDArray[np.uint32]


class ValueHistogram:
    """How often each float32 occurs. Memory: 12 bytes per distinct value, several times."""

    def __init__(self) -> None:
        self.values = np.zeros(0, np.float32)
        self.counts = np.zeros(0, np.int64)
        self._pending: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, values: NDArray[np.float32]) -> None:
        distinct, counts = np.unique(values, return_counts=True)
        self._pending.append((distinct, counts.astype(np.int64)))
        self._waiting += len(distinct)
        if self._waiting > len(self.values) + (1 << 16):
            self.merge()

    def merge(self) -> None:
        """Brings `values` (rising) and `counts` up to date."""
        if not self._pending:
            return
        values = np.concatenate([self.values, *(v for v, _ in self._pending)])
        counts = np.concatenate([self.counts, *(c for _, c in self._pending)])
        self._pending, self._waiting = [], 0
        place = np.argsort(values, kind="stable")
        values, counts = values[place], counts[place]
        first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        self.values = values[first]
        self.counts = np.add.reduceat(counts, first) if len(first) else counts


class Quantiser:
    """The replacement of each value: `coding.quantise` from a histogram."""

    def __init__(self, values: NDArray[np.float32], counts: NDArray[np.int64], bits: int) -> None:
        own = ~((values == 0) | ~np.isfinite(values))
        distinct = values[own]
        room = (1 << bits) - int((~own).sum())
        # A code stands for adjacent values: knowing where each code's begin is enough.
        self._begin = np.zeros(0, np.float32)
        self._book = np.zeros(0, np.float32)
        if len(distinct) > room:
            self._book, code = codebook(distinct.astype(np.float64), counts[own], room)
            self._begin = distinct[np.searchsorted(code, np.arange(room))]

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        out = values.copy()
        if len(self._begin):
            own = ~((values == 0) | ~np.isfinite(values))
            out[own] = self._book[np.searchsorted(self._begin, values[own], side="right") - 1]
        return out


class DistinctValues:
    """Which bit patterns occur, until they are more than the `most` that a table may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found = np.zeros(0, np.uint32)
        self._pending: list[Bits] = []
        self._waiting = 0
        self._count = 0
        self._too_many = most == 0

    def add(self, bits: Bits) -> None:
        self._count += len(bits)
        if self._too_many or not len(bits):
            return
        new = np.unique(bits)
        self._pending.append(new)
        self._waiting += len(new)
        if self._waiting > len(self._found) + (1 << 16):
            self._merge()

    def _merge(self) -> None:
        self._found = np.unique(np.concatenate([self._found, *self._pending]))
        self._pending, self._waiting = [], 0
        if len(self._found) > self._most:
            self._too_many, self._found = True, np.zeros(0, np.uint32)

    def table(self, raw_bits: int) -> Bits | None:
        """The values in rising order, or None where they stay as they are: `code_values`."""
        if not self._too_many:
            self._merge()
        if self._too_many:
            return None
        width = bits_of(max(len(self._found) - 1, 0))
        if self._count * width + len(self._found) * 32 < self._count * raw_bits:
            return self._found
        return None
