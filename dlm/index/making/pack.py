"""Packs the columns that `packed.columns` and `packed.tree` read, a piece at a time.

Each function gives bit for bit what packing whole arrays gives (tests/index/oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import DistinctValues, ValueCode
from dlm.index.making.kernels import BLANK_CODE
from dlm.index.making.work import Work
from dlm.index.packed import kernels
from dlm.index.packed.columns import BACKOFF_BITS, bits_of, probs_of, room
from dlm.index.packed.kernels import OFFSET_BLOCK
from dlm.index.packed.tree import LEVEL_COLUMNS, LEVEL_SHAPE, TABLES, TREE_SHAPE, root_key_bits_of
from dlm.spill.column import Column

U64 = np.uint64
I64 = np.int64
Rows = NDArray[np.uint32]


class BitStream:
    def __init__(self, column: Column) -> None:
        self.column = column
        self._bits = 0
        self._last = U64(0)

    def room(self, bits: int) -> tuple[NDArray[np.uint64], int]:
        """Words for the next `bits` bits, 0 there, and the bit at which they begin."""
        begin = self._bits % 64
        words = room(begin + bits)
        words[0] = self._last
        return words, begin

    def put(self, words: NDArray[np.uint64], bits: int) -> None:
        whole = (self._bits % 64 + bits) // 64
        self.column.append(words[:whole])
        self._last = words[whole]
        self._bits += bits

    def fields(self, values: NDArray[Any], width: int) -> None:
        bits = len(values) * width
        words, begin = self.room(bits)
        kernels.put_all(words, begin, width, width, np.ascontiguousarray(values, np.uint64))
        self.put(words, bits)

    def close(self) -> Column:
        end = [self._last, 0] if self._bits % 64 else [0]
        self.column.append(np.array(end, np.uint64))
        return self.column.finish(sync=False)


def rechunk(chunks: Iterator[NDArray[Any]], multiple: int) -> Iterator[NDArray[Any]]:
    """The same values in chunks whose lengths, but the last, are multiples."""
    left: NDArray[Any] | None = None
    for chunk in chunks:
        whole = chunk if left is None or not len(left) else np.concatenate([left, chunk])
        cut = len(whole) // multiple * multiple
        if cut:
            yield whole[:cut]
        left = whole[cut:].copy()
    if left is not None and len(left):
        yield left


def stream_offsets(
    make: Callable[[], Iterator[NDArray[np.int64]]],
    count: int,
    last: int,
    words: BitStream,
    wide_words: BitStream,
) -> tuple[int, int]:
    """Packs `count` offsets up to `last`, which `make` gives twice: `columns.Offsets`.

    Takes the fewest bits (the narrower distances of a tie), returned as base_bits, delta_bits.
    """
    blocks = -(-count // OFFSET_BLOCK)
    base_bits = max(bits_of(last), bits_of(blocks))

    def rows() -> Iterator[NDArray[np.uint64]]:
        for chunk in rechunk(make(), OFFSET_BLOCK):
            size = -(-len(chunk) // OFFSET_BLOCK) * OFFSET_BLOCK
            whole = np.full(size, last, np.uint64)
            whole[: len(chunk)] = chunk
            yield whole.reshape(-1, OFFSET_BLOCK)

    powers = U64(1) << np.arange(0, 64, dtype=np.uint64)
    widths = np.zeros(base_bits + 1, I64)
    for block in rows():
        spans = block[:, -1] - block[:, 0]
        widths += np.bincount(
            np.searchsorted(powers, spans, side="right"), minlength=base_bits + 1
        )[: base_bits + 1]
    above = np.cumsum(widths[::-1])[::-1]
    costs = [
        blocks * (OFFSET_BLOCK - 1) * width
        + (int(above[width + 1]) if width < base_bits else 0) * OFFSET_BLOCK * base_bits
        for width in range(base_bits + 1)
    ]
    delta_bits = int(np.argmin(costs))
    stride = base_bits + 1 + (OFFSET_BLOCK - 1) * delta_bits
    exceptions = 0
    for block in rows():
        wide = block[:, -1] - block[:, 0] >= U64(1) << U64(delta_bits)
        bits = len(block) * stride
        out, begin = words.room(bits)
        head = block[:, 0] << U64(1)
        found = int(wide.sum())
        if found:
            number = np.arange(exceptions, exceptions + found, dtype=np.uint64)
            head[wide] = (number << U64(1)) | U64(1)
        kernels.put_all(out, begin, stride, base_bits + 1, head)
        if delta_bits:
            delta = block - block[:, :1]
            if found:
                delta[wide] = 0
            for j in range(1, OFFSET_BLOCK):
                first = begin + base_bits + 1 + (j - 1) * delta_bits
                kernels.put_all(out, first, stride, delta_bits, np.ascontiguousarray(delta[:, j]))
        words.put(out, bits)
        if found:
            wide_words.fields(block[wide].reshape(-1), base_bits)
            exceptions += found
    return base_bits, delta_bits


@dataclass
class LevelParts:
    """A packed level: its numbers but where its parts begin, and its parts by column."""

    numbers: dict[str, int]
    parts: dict[str, NDArray[Any] | Column]
    root_bucket: Column | None = None
    root_key: Column | None = None
    root_bits: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class LevelShape:
    root: bool
    deepest: bool
    any_blank: bool
    pairs: int
    key_bits: int
    prob_table: int
    backoff_table: int


class LevelPacker:
    """Packs one level of one shard: nodes (D, 6) and entries (G, 3) of `kernels.route`."""

    def __init__(
        self, nodes: Column, entries: Column, shape: LevelShape, work: Work, name: str, rows: int,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._entries = entries
        self._shape = shape
        self._work = work
        self._name = name
        self._rows = rows

    def _stream(self, part: str) -> BitStream:
        return BitStream(Column(np.uint64, path=self._work.file(f"{self._name}-{part}.part")))

    def _cumulated(self, column: int) -> Iterator[NDArray[np.int64]]:
        total = 0
        yield np.zeros(1, I64)
        for chunk in self._nodes.chunks(self._rows):
            sums = np.cumsum(chunk[:, column], dtype=I64) + total
            total = int(sums[-1])
            yield sums

    def _places(self, value_bits: int) -> Iterator[NDArray[np.int64]]:
        total = 0
        yield np.zeros(1, I64)
        for chunk in self._nodes.chunks(self._rows):
            place = _list_places(chunk, value_bits)[1]
            place += total
            total = int(place[-1])
            yield place[1:]

    def pack(self) -> LevelParts:
        s = self._shape
        probs = DistinctValues(s.prob_table)
        for chunk in self._entries.chunks(self._rows):
            magnitude = chunk[:, 2] >> np.uint32(1)  # as `kernels.join` makes them
            probs.add(magnitude[magnitude != BLANK_CODE])
        prob = probs.code()
        weights = DistinctValues(s.backoff_table, BACKOFF_BITS)
        if not s.root:
            for chunk in self._nodes.chunks(self._rows):
                weights.add(chunk[:, 2])
        weight = weights.code()
        flag_bits = int(not s.deepest) + int(s.any_blank)
        value_bits = prob.bits + flag_bits

        lists = self._stream("list")
        key, backoff = self._stream("node_key"), self._stream("node_backoff")
        at = 0
        for nodes in self._nodes.chunks(self._rows):
            at = self._put_lists(lists, nodes, at, prob, flag_bits, value_bits)
            if not s.root:
                key.fields(nodes[:, 1], s.key_bits)
                backoff.fields(weight.codes(nodes[:, 2]), weight.bits)
        list_bits = lists._bits
        place, place_wide = self._stream("place"), self._stream("place_wide")
        place_widths = stream_offsets(
            lambda: self._places(value_bits), len(self._nodes) + 1, list_bits, place, place_wide
        )
        child, child_wide = self._stream("child"), self._stream("child_wide")
        child_widths = (0, 0)
        if not s.deepest:
            last = sum(int(c[:, 3].sum(dtype=I64)) for c in self._nodes.chunks(self._rows))
            child_widths = stream_offsets(
                lambda: self._cumulated(3), len(self._nodes) + 1, last, child, child_wide
            )
        numbers = {
            "nodes": len(self._nodes),
            "grams": len(self._entries),
            "flag_bits": flag_bits,
            "prob_bits": prob.bits,
            "prob_base": prob.base,
            "backoff_bits": weight.bits,
            "child_base_bits": child_widths[0],
            "child_delta_bits": child_widths[1],
            "place_base_bits": place_widths[0],
            "place_delta_bits": place_widths[1],
        }
        parts: dict[str, NDArray[Any] | Column] = {
            "node_key": key.close(),
            "node_backoff": backoff.close(),
            "child": child.close(),
            "child_wide": child_wide.close(),
            "place": place.close(),
            "place_wide": place_wide.close(),
            "list": lists.close(),
            "prob_table": probs_of(prob.table),
            "backoff_table": weight.table.view(np.float32),
        }
        out = LevelParts(numbers, parts)
        if s.root:
            self._roots(out)
        return out

    def _put_lists(
        self, lists: BitStream, nodes: Rows, at: int, prob: ValueCode, flag_bits: int,
        value_bits: int,
    ) -> int:  # fmt: skip
        """Packs the lists of some nodes, whose entries begin at `at`; returns where they end."""
        ends = np.cumsum(nodes[:, 4], dtype=I64)
        first = 0
        while first < len(nodes):
            # One list at least; it has no more entries than there are words.
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + self._rows, side="right")), first + 1)
            some = nodes[first:last]
            begin, place = _list_places(some, value_bits)
            count = int(begin[-1])
            entries = self._entries.read(at, at + count)
            magnitude = entries[:, 2] >> np.uint32(1)
            blank = magnitude == BLANK_CODE
            values = prob.codes(magnitude)
            values[blank] = 0
            if flag_bits:
                values <<= U64(flag_bits)
                if not self._shape.deepest:
                    values |= entries[:, 2] & np.uint32(1)
                if self._shape.any_blank:
                    values |= blank.astype(U64) << U64(flag_bits - 1)
            bits = int(place[-1])
            words, offset = lists.room(bits)
            kernels.put_rank_lists(
                words, place + offset, begin, some[:, 5].astype(I64), value_bits,
                value_bits, np.ascontiguousarray(entries[:, 1]), values, np.zeros(count, U64),
            )  # fmt: skip
            lists.put(words, bits)
            at += count
            first = last
        return at

    def _roots(self, out: LevelParts) -> None:
        pairs, roots = self._shape.pairs, len(self._nodes)
        key_bits, bucket_bits = root_key_bits_of(pairs, roots), bits_of(roots)
        buckets = (pairs >> key_bits) + 1
        bucket, key = self._stream("root_bucket"), self._stream("root_key")
        done = before = 0
        mask = np.uint32((1 << key_bits) - 1)
        for nodes in self._nodes.chunks(self._rows):
            number = nodes[:, 1]
            key.fields(number & mask, key_bits)
            # Buckets that begin at or below the last root of the chunk are known now.
            until = min(int(number[-1] >> np.uint32(key_bits)) + 1, buckets + 1)
            begins = np.arange(done, until, dtype=U64) << U64(key_bits)
            bucket.fields(np.searchsorted(number, begins) + before, bucket_bits)
            done = until
            before += len(number)
        for first in range(done, buckets + 1, self._rows):
            rest = min(self._rows, buckets + 1 - first)
            bucket.fields(np.full(rest, roots, I64), bucket_bits)
        out.root_bucket, out.root_key = bucket.close(), key.close()
        out.root_bits = (key_bits, bucket_bits)


def _list_places(nodes: Rows, value_bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the entries and the lists of some nodes begin, and end, from 0."""
    begin = np.zeros(len(nodes) + 1, I64)
    np.cumsum(nodes[:, 4], out=begin[1:])
    place = np.empty(len(nodes) + 1, I64)
    kernels.rank_list_bits(begin, nodes[:, 5].astype(I64), value_bits, place)
    return begin, place


def tree_columns(
    levels: list[LevelParts], pairs: int, key_bits: int
) -> dict[str, tuple[Any, list[NDArray[Any] | Column]]]:
    at = dict.fromkeys(LEVEL_COLUMNS, 0)
    shapes: list[int] = []
    for level in levels:
        numbers = {**level.numbers, **at}
        shapes += [numbers[name] for name in LEVEL_SHAPE]
        for name in LEVEL_COLUMNS:
            part = level.parts[name]
            at[name] += len(part)
    roots = levels[0].numbers["nodes"] if levels else 0
    if levels:
        root_key_bits, bucket_bits = levels[0].root_bits
        root_bucket, root_key = levels[0].root_bucket, levels[0].root_key
        assert root_bucket is not None and root_key is not None
        bucket_parts: list[Any] = [root_bucket]
        key_parts: list[Any] = [root_key]
    else:
        root_key_bits, bucket_bits = root_key_bits_of(pairs, 0), bits_of(0)
        buckets = (pairs >> root_key_bits) + 1
        bucket_parts, key_parts = [room((buckets + 1) * bucket_bits)], [room(0)]
    shape = dict(
        zip(
            TREE_SHAPE,
            (len(levels), pairs, roots, key_bits, root_key_bits, bucket_bits),
            strict=True,
        )
    )
    columns: dict[str, tuple[Any, list[Any]]] = {
        "shape": (np.uint64, [np.array([*shape.values(), *shapes], np.uint64)]),
        "root_bucket": (np.uint64, bucket_parts),
        "root_key": (np.uint64, key_parts),
    }
    for name in LEVEL_COLUMNS:
        dtype = np.float32 if name in TABLES else np.uint64
        columns[name] = (dtype, [level.parts[name] for level in levels])
    return columns
