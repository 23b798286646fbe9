"""The tree of one shard, packed level by level."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed import kernels
from dlm.index.packed.columns import (
    Offsets,
    decode_backoffs,
    decode_probs,
    unpack_fields,
    unpack_offsets,
)
from dlm.index.packed.low import Arrays

# The values of the column `shape`: these, then those of each level.
TREE_SHAPE = ("levels", "pairs", "roots", "key_bits", "root_key_bits", "root_bucket_bits")
LEVEL_SHAPE = (
    "nodes",
    "grams",
    "flag_bits",
    "prob_bits",
    "prob_base",
    "backoff_bits",
    "child_base_bits",
    "child_delta_bits",
    "place_base_bits",
    "place_delta_bits",
    "node_key",  # here begin its parts of the columns with these names
    "node_backoff",
    "child",
    "child_wide",
    "place",
    "place_wide",
    "list",
    "prob_table",
    "backoff_table",
)
LEVEL_COLUMNS = LEVEL_SHAPE[LEVEL_SHAPE.index("node_key") :]
TABLES = ("prob_table", "backoff_table")
ROOTS_A_BUCKET = 8


@dataclass(frozen=True, eq=False)
class LevelPlain:
    """The contexts of k words that are nodes, and the n-grams that follow them, in plain arrays.

    Shapes, D nodes and G n-grams, blanks included
        key            (D,)      a root's pair number; else its oldest word's key
        log10_backoff  (D,)      unused for roots, whose weight is with the pair
        child          (D + 1,)  children of each node, counted in the next level
        begin          (D + 1,)  n-grams that follow each node
        parent_size    (D,)      entries of the list of the context without its oldest word
        rank           (G,)      place of the word in that list, rising in each node
        log10_prob, extended, blank  (G,)
    """

    key: NDArray[np.uint32]
    log10_backoff: NDArray[np.float32]
    child: NDArray[np.int64]
    begin: NDArray[np.int64]
    parent_size: NDArray[np.int64]
    rank: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    extended: NDArray[np.bool_]
    blank: NDArray[np.bool_]


def root_key_bits_of(pairs: int, roots: int) -> int:
    """Low bits of a pair's number that its root keeps; the others choose its bucket."""
    if not roots:
        return 0
    # 32 at most: wider fields are no keys, and the numbers of pairs have no more.
    return min(max((ROOTS_A_BUCKET * pairs // roots).bit_length() - 1, 0), 32)


@dataclass(frozen=True, eq=False)
class TreeShape:
    levels: int
    pairs: int
    roots: int
    key_bits: int
    root_key_bits: int
    root_bucket_bits: int
    level: list[dict[str, int]]


def tree_shape(column: NDArray[np.uint64]) -> TreeShape:
    numbers = column.tolist()
    width = len(LEVEL_SHAPE)
    if len(numbers) < len(TREE_SHAPE) or len(numbers) != len(TREE_SHAPE) + numbers[0] * width:
        raise ValueError(f"shape has {len(numbers)} values")
    rest = numbers[len(TREE_SHAPE) :]
    rows = [rest[i : i + width] for i in range(0, len(rest), width)]
    levels, pairs, roots, key_bits, root_key_bits, root_bucket_bits = numbers[: len(TREE_SHAPE)]
    named = [dict(zip(LEVEL_SHAPE, row, strict=True)) for row in rows]
    return TreeShape(levels, pairs, roots, key_bits, root_key_bits, root_bucket_bits, named)


def part_of(a: Arrays, shape: TreeShape, depth: int, name: str) -> NDArray[Any]:
    """What a column has of one level."""
    begin = shape.level[depth][name]
    end = shape.level[depth + 1][name] if depth + 1 < shape.levels else len(a[name])
    return a[name][begin:end]


def root_numbers(a: Arrays, shape: TreeShape) -> NDArray[np.int64]:
    """The numbers of the 2-grams that are roots, rising."""
    low = unpack_fields(a["root_key"], shape.root_key_bits, shape.roots)
    buckets = (shape.pairs >> shape.root_key_bits) + 1
    ends = unpack_fields(a["root_bucket"], shape.root_bucket_bits, buckets + 1)
    filled = (ends[1:] - ends[:-1]).astype(np.int64)
    high = np.repeat(np.arange(buckets, dtype=np.uint64), filled)
    return ((high << np.uint64(shape.root_key_bits)) | low).astype(np.int64)


def unpack_tree(
    a: Arrays, sizes_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> list[LevelPlain]:
    """The levels as plain arrays, roots first; `sizes_of` as `low.sizes_after`."""
    shape = tree_shape(a["shape"])
    out: list[LevelPlain] = []
    sizes = np.zeros(0, np.int64)
    parent = np.zeros(0, np.int64)
    for depth, s in enumerate(shape.level):
        nodes = s["nodes"]

        part = functools.partial(part_of, a, shape, depth)

        if depth:
            key = unpack_fields(part("node_key"), shape.key_bits, nodes).astype(np.uint32)
            codes = unpack_fields(part("node_backoff"), s["backoff_bits"], nodes)
            backoff = decode_backoffs(codes, part("backoff_table"))
            parent_size = sizes[parent]
        else:
            numbers = root_numbers(a, shape)
            key = numbers.astype(np.uint32)
            backoff = np.zeros(nodes, np.float32)
            parent_size = sizes_of(numbers)
        place = unpack_offsets(
            Offsets(part("place"), part("place_wide"), s["place_base_bits"], s["place_delta_bits"]),
            nodes + 1,
        )
        value_bits = s["prob_bits"] + s["flag_bits"]
        sizes = np.empty(nodes, np.int64)
        kernels.read_heads(part("list").ctypes.data, place, parent_size, sizes)
        begin = np.zeros(nodes + 1, np.int64)
        np.cumsum(sizes, out=begin[1:])
        rank = np.empty(s["grams"], np.uint32)
        values, none = np.empty(s["grams"], np.uint64), np.empty(s["grams"], np.uint64)
        kernels.get_rank_lists(
            part("list").ctypes.data, place, begin, parent_size, value_bits, value_bits, rank,
            values, none,
        )  # fmt: skip
        if depth + 1 < shape.levels:
            child = unpack_offsets(
                Offsets(
                    part("child"), part("child_wide"), s["child_base_bits"], s["child_delta_bits"]
                ),
                nodes + 1,
            )
            extended = (values & np.uint64(1)).astype(np.bool_)
            parent = np.repeat(np.arange(nodes), np.diff(child))
        else:
            child = np.zeros(nodes + 1, np.int64)
            extended = np.zeros(len(rank), np.bool_)
        blank = np.zeros(len(rank), np.bool_)
        if s["flag_bits"] == 2:
            blank = (values & np.uint64(2)).astype(np.bool_)
        codes = values >> np.uint64(s["flag_bits"])
        prob = decode_probs(codes, s["prob_base"], part("prob_table"))
        prob[blank & (codes == 0)] = 0
        out.append(LevelPlain(key, backoff, child, begin, parent_size, rank, prob, extended, blank))
    return out
