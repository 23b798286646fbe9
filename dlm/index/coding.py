"""Determines how values are stored: exactly or quantised.

If quantised, each order has a codebook for its probabilities and one for its weights. Lloyd's
iteration (Lloyd 1982) starts from the quantiles, where KenLM stops, and reduces the sum of squared
errors in log10. 0 and -inf have separate codes, so that no weight appears or disappears, and
states and the tree stay as they are in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.index.settings import LOSSLESS_BITS, ShardSettings

ANY = 1 << 31  # no limit on a table's entries: the smaller encoding wins
BY_TABLE = 1 << 31  # the base of a code that has a table; no other base is as large
DEFAULT_BITS = 6
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Coding:
    """The encoding of values as bits.

    bits           bits of a quantised probability, see also `weight_bits`; None: not quantised
    prob_table     maximum entries of a table of probabilities. The exact encoding has no table,
                   since a table costs each query a cache line
    """

    name: str
    bits: int | None
    prob_table: int


def coding_of(encoding: str, bits: int | None) -> Coding:
    """Returns the coding for `--encoding` and `--bits`; raises `ConfigError` if one is invalid."""
    ShardSettings(encoding=encoding, bits=bits)
    if encoding == "exact":
        return Coding("exact", None, 0)
    bits = DEFAULT_BITS if bits is None else bits
    return Coding("compact", None if bits == LOSSLESS_BITS else bits, ANY)


def coding_of_set(encoding: str) -> Coding:
    """The coding of an existing shard set, whose values are already quantised."""
    return coding_of(encoding, None if encoding == "exact" else LOSSLESS_BITS)


def weight_bits(bits: int) -> int:
    """Returns the bits of a quantised weight: three fewer than a probability's, but at least 2.

    Few weights are enough, since all words after a context share its weight: perplexities with 8
    and with 32 weights per order agreed to 0.01 %, for an unpruned and for a pruned model.
    """
    return max(bits - 3, 2)


def codebook(
    distinct: NDArray[np.float64], counts: NDArray[np.int64], size: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns a codebook for ascending values that occur `counts` times, and each value's code.

    Guarantees  every code is used; the same values give the same codebook on every machine
    """
    weight = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    moment = np.concatenate([[0.0], np.cumsum(counts * distinct)])
    # Code c stands for distinct[edges[c] : edges[c + 1]], which is never empty.
    wanted = np.arange(1, size) * weight[-1] / size
    edges = _spread(np.searchsorted(weight[1:], wanted), len(distinct))
    for _ in range(ROUNDS):
        centre = np.diff(moment[edges]) / np.diff(weight[edges])
        moved = _nearest(distinct, centre)
        if np.array_equal(moved, edges):
            break
        edges = moved
    centre = np.diff(moment[edges]) / np.diff(weight[edges])
    book = np.clip(centre, distinct[edges[:-1]], distinct[edges[1:] - 1]).astype(np.float32)
    # The centre of values on both sides of 0 may be 0, but a weight of 0 would mean no weight.
    for c in np.flatnonzero(book == 0).tolist():
        mine = distinct[edges[c] : edges[c + 1]]
        book[c] = mine[np.argmin(np.abs(mine))]
    # A value may now be nearer to another entry, so each value is assigned once more.
    return book, np.repeat(np.arange(size), np.diff(_nearest(distinct, book.astype(np.float64))))


def _nearest(distinct: NDArray[np.float64], book: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the edges that assign each value to the nearest entry of the codebook."""
    return _spread(np.searchsorted(distinct, (book[1:] + book[:-1]) / 2), len(distinct))


def _spread(inner: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    edges = np.r_[0, inner, count]
    places = np.arange(len(edges))
    risen = np.maximum.accumulate(edges - places) + places
    out: NDArray[np.int64] = np.minimum(risen, count - places[::-1])
    return out


# ---------------------------------------------------------- how often values occur, and their codes

Bits = NDArray[np.uint32]


class ValueHistogram:
    """Counts how often each value occurs; its memory is several times 12 bytes per distinct value.

    Args  most  the most distinct values that are counted; if there are more, `values` is empty
    """

    def __init__(self, most: int | None = None, kind: type[np.generic] = np.float32) -> None:
        self.values: NDArray[Any] = np.zeros(0, kind)
        self.counts = np.zeros(0, np.int64)
        self.total, self.least, self.largest = 0, 1 << 32, 0  # the last two only for integers
        self._most, self._too_many = most, most == 0
        self._pending: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, values: NDArray[Any]) -> None:
        self.total += len(values)
        if len(values) and values.dtype.kind == "u":
            self.least = min(self.least, int(values.min()))
            self.largest = max(self.largest, int(values.max()))
        if not self._too_many:
            self._add(*np.unique(values, return_counts=True))

    def _add(self, values: NDArray[Any], counts: NDArray[np.int64]) -> None:
        self._pending.append((values, counts))
        self._waiting += len(values)
        if self._waiting > len(self.values) + (1 << 16):
            self.merge()

    def join(self, other: ValueHistogram) -> None:
        """Adds the counts of another histogram."""
        other.merge()
        self.total += other.total
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)
        self._too_many |= other._too_many
        self._add(other.values, other.counts)

    def merge(self) -> None:
        """Updates `values` (ascending) and `counts`."""
        values = np.concatenate([self.values, *(v for v, _ in self._pending)])
        counts = np.concatenate([self.counts, *(c for _, c in self._pending)])
        self._pending, self._waiting = [], 0
        place = np.argsort(values, kind="stable")
        values, counts = values[place], counts[place]
        first = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        self.values = values[first]
        self.counts = np.add.reduceat(counts, first) if len(first) else counts
        if self._too_many or (self._most is not None and len(first) > self._most):
            self._too_many, self.values, self.counts = True, values[:0], counts[:0]

    def code(self, raw_bits: int | None = None) -> ValueCode:
        """Returns a code for integers: by a table if that takes fewer bits and is not too large.

        Args  raw_bits  bits of a code without a table; None: as many as the values' range needs
        """
        self.merge()
        base, bits = 0, raw_bits
        if bits is None:
            base = self.least if self.total else 0
            bits = (self.largest - base).bit_length()
        width = max(len(self.values) - 1, 0).bit_length()
        tabled = self.total * width + len(self.values) * 32
        if self._too_many or tabled >= self.total * bits:
            return ValueCode(bits, base, np.zeros(0, np.uint32))
        return ValueCode(width, BY_TABLE, self.values)


class Quantiser:
    """Replaces each value by the nearest one of a codebook, which is made from a histogram."""

    def __init__(self, values: NDArray[np.float32], counts: NDArray[np.int64], bits: int) -> None:
        own = ~((values == 0) | ~np.isfinite(values))
        distinct = values[own]
        room = (1 << bits) - int((~own).sum())
        # A code stands for adjacent values, so only the first value of each code is kept.
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


class ValueCode(NamedTuple):
    """Turns values, given as their bits, into codes: each value's index in a table or, if the table
    is empty, its distance above the base."""

    bits: int
    base: int
    table: Bits

    def codes(self, values: Bits) -> NDArray[np.uint64]:
        if len(self.table):
            return np.searchsorted(self.table, values).astype(np.uint64)
        return values - np.uint64(self.base)


# The weights of a level of the trees. DO NOT CHANGE: on disk.
COUNTED_WEIGHTS = 1 << 20  # a level with more different weights has no table of them
LEAST_COUNT = 16  # a weight in a table occurs at least this often
MOST_WEIGHTS = (1 << 16) - 1  # maximum entries of a table of weights
_INFINITY = 0x7F800000  # the bits of infinity, which is never a weight


@dataclass(frozen=True, eq=False)
class WeightCode:
    """Codes a weight by its index in a table, the most frequent first. Any other weight gets the
    code `escape`, for which the table holds infinity, and the weight's 32 bits follow."""

    escape: int
    table: Bits

    @cached_property
    def _rising(self) -> tuple[Bits, NDArray[np.int64]]:
        """Returns the table's values, ascending, and their codes; the escape comes last in both."""
        order = np.argsort(self.table)
        return np.append(self.table[order], np.uint32(_INFINITY)), np.append(order, self.escape)

    def codes(self, weights: Bits) -> NDArray[np.int64]:
        values, codes = self._rising
        place = np.searchsorted(values[:-1], weights)
        return np.where(values[place] == weights, codes[place], self.escape)


def weight_code(found: ValueHistogram) -> WeightCode:
    """Makes a level's code for weights."""
    found.merge()
    bits = np.ascontiguousarray(found.values).view(np.uint32)
    order = np.lexsort((bits, -found.counts))
    order = order[found.counts[order] >= LEAST_COUNT][:MOST_WEIGHTS]
    table, counts = bits[order], found.counts[order]
    rare = found.total - int(counts.sum())
    if not rare:
        return WeightCode(len(table), table)
    escape = int(np.searchsorted(-counts, -rare, side="right"))
    return WeightCode(escape, np.insert(table, escape, _INFINITY))
