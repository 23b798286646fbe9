"""Packs the columns that `packed.columns` and `packed.tree` read, a piece at a time.

Results equal those of packing whole arrays, bit for bit (tests/index/oracle.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import (
    COUNTED_WEIGHTS,
    ValueHistogram,
    weight_code,
)
from dlm.index.making.kernels import BLANK_CODE
from dlm.index.making.work import Work
from dlm.index.packed import record_kernels
from dlm.index.packed.columns import probs_of, room
from dlm.index.packed.low import key_bits_of
from dlm.index.packed.tree import TABLES, LevelCode
from dlm.spill.column import Column

U64 = np.uint64
I64 = np.int64
Rows = NDArray[np.uint32]
Bits = NDArray[np.uint32]


class BitStream:
    def __init__(self, column: Column) -> None:
        self.column = column
        self._bits = 0
        self._last = U64(0)

    def room(self, bits: int) -> tuple[NDArray[np.uint64], int]:
        """Returns 64-bit words with room for `bits` bits, which are 0, and where the bits begin."""
        begin = self._bits % 64
        words = room(begin + bits)
        words[0] = self._last
        return words, begin

    def put(self, words: NDArray[np.uint64], bits: int) -> None:
        whole = (self._bits % 64 + bits) // 64
        self.column.append(words[:whole])
        self._last = words[whole]
        self._bits += bits

    def close(self) -> Column:
        end = [self._last, 0] if self._bits % 64 else [0]
        self.column.append(np.array(end, np.uint64))
        return self.column.finish(sync=False)


def zero_words(path: Path | None, bits: int) -> NDArray[np.uint64]:
    """Makes words as `columns.room` does, in memory or in a preallocated, unlinked file."""
    if path is None:
        return room(bits)
    count = len(room(0)) + (bits + 63) // 64
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, count * 8)
        return np.memmap(file, U64, "r+", shape=(count,))


def put_roots(
    path: Path | None, numbers: Bits, sizes: NDArray[np.int64], pairs: int
) -> tuple[int, NDArray[np.uint64], NDArray[np.int64]]:
    """Starts a tree; returns its size in bits, its words, and where each root's record begins.

    Shapes  numbers, sizes (R,)  of each root: number of its 2-gram, ascending; bits of its record
    """
    key_bits = key_bits_of(pairs)
    bits = int(record_kernels.root_bits(numbers, sizes, key_bits))
    words, begins = zero_words(path, bits), np.empty(len(numbers), I64)
    record_kernels.put_roots(words, numbers, sizes, key_bits, begins)
    return bits, words, begins


class LevelValues:
    """One level's values in all trees, from the rows of `kernels.join`."""

    def __init__(self, prob_table: int) -> None:
        self.probs = ValueHistogram(prob_table, np.uint32)
        self.weights = ValueHistogram(COUNTED_WEIGHTS)

    def add_nodes(self, weights: Bits) -> None:
        self.weights.add(np.ascontiguousarray(weights).view(np.float32))

    def add_entries(self, values: Bits) -> None:
        magnitude = values >> np.uint32(1)
        self.probs.add(magnitude[magnitude != BLANK_CODE])

    def join(self, other: LevelValues) -> None:
        """Adds the values of `other`, which is for the same level and must not be used again."""
        self.probs.join(other.probs)
        self.weights.join(other.weights)

    def code(self, deepest: bool, blanks: int) -> LevelCode:
        flag_bits = 0 if deepest else 1 + int(blanks > 0)
        return LevelCode(flag_bits, self.probs.code(), weight_code(self.weights))


TreeColumns = dict[str, tuple[Any, list[NDArray[Any] | Column]]]


def tree_columns(
    pairs: int,
    key_bits: int,
    codes: Sequence[LevelCode],
    counts: Sequence[tuple[int, int]],
    tree_bits: int,
    tree: NDArray[np.uint64],
) -> TreeColumns:
    """The columns of a shard, in the order of the format.

    Args    pairs, key_bits  2-grams of the model, and bits of a word's key
            codes, counts    for each level: its code; its numbers of nodes and n-grams
            tree_bits, tree  the length of the records in bits, and the records
    """
    shape = [len(codes), pairs, key_bits, tree_bits]
    tables: list[list[NDArray[Any] | Column]] = [[], []]
    for (nodes, grams), (flag_bits, prob, weight) in zip(counts, codes, strict=True):
        shape += [nodes, grams, flag_bits, prob.bits, prob.base, weight.escape]
        shape += [len(prob.table), len(weight.table)]
        tables[0].append(probs_of(prob.table))
        tables[1].append(weight.table.view(np.float32))
    columns: dict[str, NDArray[np.uint64]] = {"shape": np.array(shape, U64), "tree": tree}
    return {
        **{name: (U64, [column]) for name, column in columns.items()},
        **{name: (np.float32, own) for name, own in zip(TABLES, tables, strict=True)},
    }


class _Piece(NamedTuple):
    """The rows of some nodes of a level; and three ranges: of these nodes, of the n-grams that
    follow them, and of the nodes below them."""

    rows: Rows
    nodes: tuple[int, int]
    entries: tuple[int, int]
    below: tuple[int, int]


class TreePacker:
    """Packs the tree of one shard, from the rows of nodes (D, 6) and entries (G, 3) of
    `kernels.route` for each level. It finds the sizes of all records, from the longest contexts
    to the roots, then writes the records, from the roots down: the rows are never all in memory.

    Args  name  how the names of its intermediate files in `work` begin
    """

    def __init__(
        self, levels: Sequence[tuple[Column, Column]], codes: Sequence[LevelCode], pairs: int,
        key_bits: int, work: Work, rows: int, name: str,
    ) -> None:  # fmt: skip
        self._levels, self._codes = levels, codes
        self._value_bits = [code.prob.bits + code.flag_bits for code in codes]
        self._pairs, self._key_bits = pairs, key_bits
        self._work, self._rows, self._name = work, rows, name
        # For each level, with the roots last: the bits of each record, and the codes of weights.
        self._sizes: list[Column] = []

    def pack(self) -> TreeColumns:
        """The columns of the shard, in the order of the format."""
        for depth in reversed(range(len(self._levels))):
            self._sizes.append(self._size(depth))
        # The roots of a shard are in memory; their records and rows need not be.
        chunks = self._levels[0][0].chunks(self._rows) if self._levels else []
        keys = (nodes[:, 1].copy() for nodes in chunks)
        numbers = np.concatenate([np.empty(0, np.uint32), *keys])
        sizes = self._sizes[-1].read(0, len(numbers))[:, 0] if self._sizes else np.empty(0, I64)
        counts = [(len(nodes), len(entries)) for nodes, entries in self._levels]
        bits, tree = self._put(numbers, np.ascontiguousarray(sizes))
        for column in self._sizes:
            column.remove()
        return tree_columns(self._pairs, self._key_bits, self._codes, counts, bits, tree)

    def _file(self, part: str) -> Path | None:
        return self._work.file(f"{self._name}-{part}.part")

    def _pieces(self, depth: int) -> Iterator[_Piece]:
        nodes, entries = self._levels[depth]
        deepest = depth + 1 == len(self._levels)
        end = (0, 0, 0)
        for chunk in nodes.chunks(self._rows):
            below, after = (np.cumsum(chunk[:, i], dtype=I64) for i in (3, 4))
            ends, (x, y, z), first = below + after, end, 0
            while first < len(chunk):
                # A piece has at least one node. A node has at most one node below it, and at most
                # one n-gram after it, for each word.
                before = int(ends[first - 1]) if first else 0
                last = max(int(np.searchsorted(ends, before + self._rows, "right")), first + 1)
                begin, end = end, (x + last, y + int(after[last - 1]), z + int(below[last - 1]))
                yield _Piece(chunk[first:last], *zip(begin, end, strict=True))
                first = last
        assert end[1:] == (len(entries), 0 if deepest else len(self._levels[depth + 1][0]))

    def _below(self, depth: int, piece: _Piece) -> tuple[Bits, NDArray[np.int64], int]:
        """The keys of the nodes below a piece of a level, the sizes of their records, and the bits
        of a key. The deepest level has no nodes below it."""
        if depth + 1 == len(self._levels):
            return np.empty(0, np.uint32), np.empty(0, I64), 0
        sizes = self._sizes[len(self._levels) - 2 - depth].read(*piece.below)
        below = self._levels[depth + 1][0].read(*piece.below)
        return below[:, 1].copy(), sizes[:, 0].copy(), self._key_bits

    def _widths(self, depth: int, piece: _Piece) -> NDArray[np.int64]:
        if depth:
            return np.empty(0, I64)
        ranks = self._levels[0][1].read(*piece.entries)[:, 1]
        ends = np.cumsum(piece.rows[:, 4], dtype=I64)
        # Ranks ascend within a list, so the last one is the largest.
        largest = np.append(ranks, U64(0))[ends - 1] * (piece.rows[:, 4] > 0)
        return np.maximum(np.frexp(largest.astype(np.float64))[1], 1).astype(I64)

    def _size(self, depth: int) -> Column:
        found = Column(I64, 2, path=self._file(f"size-{depth}"))
        for piece in self._pieces(depth):
            rows, weight = np.empty((2, len(piece.rows)), I64), self._codes[depth].weight
            rows[1] = weight.codes(piece.rows[:, 2])
            below, below_sizes, key_bits = self._below(depth, piece)
            record_kernels.size_records(
                piece.rows, rows[1], weight.escape,
                self._value_bits[depth], self._widths(depth, piece), below, below_sizes, key_bits,
                rows[0],
            )  # fmt: skip
            found.append(rows.T.copy())
        return found.finish(sync=False)

    def _put(self, numbers: Bits, sizes: NDArray[np.int64]) -> tuple[int, NDArray[np.uint64]]:
        bits, words, begins = put_roots(self._file("tree"), numbers, sizes, self._pairs)
        places = Column(I64, path=self._file("place-0"))
        places.append(begins)
        for depth in range(len(self._levels)):
            lower = Column(I64, path=self._file(f"place-{depth + 1}"))
            for piece in self._pieces(depth):
                below, sizes, key_bits = self._below(depth, piece)
                entries = self._levels[depth][1].read(*piece.entries)
                coded, found = self._sizes[-1 - depth].read(*piece.nodes), np.empty(len(below), I64)
                record_kernels.put_records(
                    words, places.read(*piece.nodes), piece.rows,
                    coded[:, 1].copy(), self._codes[depth].weight.escape,
                    self._value_bits[depth], self._widths(depth, piece),
                    np.ascontiguousarray(entries[:, 1]), self._values(depth, entries[:, 2]), below,
                    sizes, key_bits, found,
                )  # fmt: skip
                lower.append(found)
            places.remove()
            places = lower.finish(sync=False)
        places.remove()
        return bits, words

    def _values(self, depth: int, values: Bits) -> NDArray[np.uint64]:
        flag_bits, prob, _ = self._codes[depth]
        magnitude = values >> np.uint32(1)
        blank = magnitude == BLANK_CODE
        codes = prob.codes(magnitude)
        codes[blank] = 0
        if flag_bits:
            codes <<= U64(flag_bits)
            codes |= values & np.uint32(1)
        if flag_bits == 2:
            codes |= blank.astype(U64) << U64(1)
        return codes
