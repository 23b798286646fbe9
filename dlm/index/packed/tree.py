"""The tree of one shard: its roots, and for each a record of everything stored below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import ValueCode, WeightCode
from dlm.index.packed import record_kernels
from dlm.index.packed.columns import decode_probs, magnitudes_of
from dlm.index.packed.low import Arrays, key_bits_of
from dlm.index.packed.record_kernels import (
    LEVEL_PLACES,
    N_ESCAPE,
    N_FLAG_BITS,
    N_PROB_TABLE,
    N_VALUE_BITS,
    N_WEIGHT_TABLE,
    N_WEIGHTS,
)

# The values of the column `shape`: TREE_SHAPE, then LEVEL_SHAPE for each level.
TREE_SHAPE = (
    "levels",
    "pairs",  # 2-grams of the model, blanks included
    "key_bits",
    "tree_bits",
)
LEVEL_SHAPE = (
    "nodes",
    "grams",
    "flag_bits",
    "prob_bits",
    "prob_base",
    "escape",
    "prob_table",  # here and next: how many entries the level has in the column of this name
    "weight_table",
)
TABLES = ("prob_table", "weight_table")


@dataclass(frozen=True, eq=False)
class LevelPlain:
    """The contexts of k words that are nodes, and the n-grams that follow them, in plain arrays.

    Shapes, D nodes and G n-grams, blanks included
        key            (D,)      the number of a root's 2-gram; else the key of its oldest word
        log10_backoff  (D,)
        child          (D + 1,)  where each node's children begin in the next level, and the end
        begin          (D + 1,)  where the n-grams that follow each node begin, and the end
        parent_size    (D,)      size of the list of the context without its oldest word; 0 for
                                 roots, where it is not known
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


class LevelCode(NamedTuple):
    """How all trees of a model store a level: flag bits, codes of probabilities and weights."""

    flag_bits: int
    prob: ValueCode
    weight: WeightCode


@dataclass(frozen=True, eq=False)
class TreeShape:
    levels: int
    pairs: int
    key_bits: int
    tree_bits: int
    level: list[dict[str, int]]

    @property
    def roots(self) -> int:
        return self.level[0]["nodes"] if self.level else 0


def tree_shape(column: NDArray[np.uint64]) -> TreeShape:
    numbers = column.tolist()
    width = len(LEVEL_SHAPE)
    if len(numbers) < len(TREE_SHAPE) or len(numbers) != len(TREE_SHAPE) + numbers[0] * width:
        raise ValueError(f"shape has {len(numbers)} values, too many or too few for its levels")
    rest = numbers[len(TREE_SHAPE) :]
    rows = [rest[i : i + width] for i in range(0, len(rest), width)]
    named = [dict(zip(LEVEL_SHAPE, row, strict=True)) for row in rows]
    return TreeShape(**dict(zip(TREE_SHAPE, numbers, strict=False)), level=named)


def part_of(a: Arrays, shape: TreeShape, depth: int, name: str) -> NDArray[Any]:
    """The values of column `name` for one level of the tree."""
    begin = sum(level[name] for level in shape.level[:depth])
    return a[name][begin : begin + shape.level[depth][name]]


def level_numbers(a: Arrays, shape: TreeShape) -> NDArray[np.int64]:
    """Returns what record kernels read about levels, (levels, LEVEL_PLACES), with addresses in `a`.

    N_PROB_TABLE is the address of the table or, if the table is empty, minus the codes' base.
    N_PROB_LIMIT is 0; `check.check_tree` fills it in.
    """
    numbers = np.zeros((shape.levels, LEVEL_PLACES), np.int64)
    for depth, level in enumerate(shape.level):
        probs, weights = (part_of(a, shape, depth, name) for name in TABLES)
        numbers[depth, N_FLAG_BITS] = level["flag_bits"]
        numbers[depth, N_VALUE_BITS] = level["flag_bits"] + level["prob_bits"]
        numbers[depth, N_PROB_TABLE] = probs.ctypes.data if len(probs) else -level["prob_base"]
        numbers[depth, N_ESCAPE] = level["escape"]
        numbers[depth, N_WEIGHT_TABLE] = weights.ctypes.data
        numbers[depth, N_WEIGHTS] = len(weights)
    return numbers


def codes_of(a: Arrays) -> list[LevelCode]:
    """Returns how all trees of a model store the values of each level."""
    shape = tree_shape(a["shape"])
    found = []
    for depth, level in enumerate(shape.level):
        probs, weights = (part_of(a, shape, depth, name) for name in TABLES)
        prob = ValueCode(level["prob_bits"], level["prob_base"], magnitudes_of(probs))
        weight = WeightCode(level["escape"], weights.view(np.uint32))
        found.append(LevelCode(level["flag_bits"], prob, weight))
    return found


def code_bytes(a: Arrays) -> bytes:
    """The result of `codes_of` as bytes, for comparison."""
    rows = a["shape"][len(TREE_SHAPE) :].reshape(-1, len(LEVEL_SHAPE))
    of_model = np.ascontiguousarray(rows[:, LEVEL_SHAPE.index("flag_bits") :])
    return b"".join(x.tobytes() for x in (of_model, *(a[name] for name in TABLES)))


def unpack_tree(a: Arrays) -> list[LevelPlain]:
    """Unpacks the levels into plain arrays; the level of the roots comes first."""
    shape = tree_shape(a["shape"])
    if not shape.levels:
        return []
    numbers = level_numbers(a, shape)
    nodes, grams = (
        np.cumsum([0, *(level[name] for level in shape.level)]) for name in ("nodes", "grams")
    )
    key, weight = (np.empty(nodes[-1], np.uint32) for _ in range(2))
    children, following, parent = (np.empty(nodes[-1], np.int64) for _ in range(3))
    rank = np.empty(grams[-1], np.uint32)
    values = np.empty(grams[-1], np.uint64)
    record_kernels.unpack_records(
        numbers.ctypes.data, a["tree"].ctypes.data, key_bits_of(shape.pairs), shape.key_bits,
        nodes, grams, key, weight, children, following, parent, rank, values,
    )  # fmt: skip
    out: list[LevelPlain] = []
    for depth, s in enumerate(shape.level):
        some, few = (slice(x[depth], x[depth + 1]) for x in (nodes, grams))
        extended, blank = np.zeros((2, s["grams"]), np.bool_)
        if s["flag_bits"]:
            extended = (values[few] & np.uint64(1)).astype(np.bool_)
        if s["flag_bits"] == 2:
            blank = (values[few] & np.uint64(2)).astype(np.bool_)
        codes = values[few] >> np.uint64(s["flag_bits"])
        prob = decode_probs(codes, s["prob_base"], part_of(a, shape, depth, "prob_table"))
        prob[blank & (codes == 0)] = 0
        child, begin = (np.concatenate([[0], np.cumsum(x[some])]) for x in (children, following))
        weights = weight[some].view(np.float32)
        out.append(
            LevelPlain(
                key[some], weights, child, begin, parent[some], rank[few], prob, extended, blank
            )
        )
    return out
