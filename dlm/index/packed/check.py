"""What the kernels trust, checked when a file is opened.

Every offset, key and code that could lead a kernel out of its columns, or that no model can have,
must be found here. Each function raises ValueError with the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import BY_TABLE
from dlm.index.packed import kernels
from dlm.index.packed.columns import (
    BACKOFF_BITS,
    PROB_BITS,
    Offsets,
    unpack_fields,
    unpack_offsets,
)
from dlm.index.packed.kernels import OFFSET_BLOCK
from dlm.index.packed.low import (
    LOW_SHAPE,
    PAIR_FLAG_BITS,
    Arrays,
    key_bits_of,
    multiplier_of,
    word_lists,
)
from dlm.index.packed.tree import (
    LEVEL_COLUMNS,
    TABLES,
    TreeShape,
    part_of,
    root_key_bits_of,
    tree_shape,
)

_INFINITY = 0x7F800000  # bits of the probability 0; above it, magnitudes are no numbers
LONGEST_LIST = 1 << 28  # entries; DO NOT CHANGE: the format's limit
_FAULTS = ("", "directory", "keys", "values", "place")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _words(bits: int) -> int:
    return (bits + 63) // 64 + 1


def _prob_limit(bits: int, base: int, table: NDArray[np.float32], name: str) -> int:
    """What codes must stay below; see `kernels.good_prob`."""
    _require(bits <= PROB_BITS, f"{name}: bits")
    if not len(table):
        _require(base <= _INFINITY, f"{name}: the base")
        return _INFINITY + 1 - base
    _require(base == BY_TABLE, f"{name}: a base beside a table")
    _require(bool((table <= 0).all()), f"{name}: log10 probabilities are 0 or less")
    return _table_size(bits, table, name)


def _backoff_limit(bits: int, table: NDArray[np.float32], name: str) -> int:
    """The same of `kernels.good_backoff`."""
    if bits == BACKOFF_BITS and not len(table):
        return 0
    _require(bool(np.isfinite(table).all()), f"{name}: back-off weights are finite")
    return _table_size(bits, table, name)


def _table_size(bits: int, table: NDArray[np.float32], name: str) -> int:
    _require(0 < len(table) <= 1 << bits < 1 << BACKOFF_BITS, f"{name}: a table that its codes fit")
    signed = np.signbit(table) & (table == 0)
    _require(not bool(signed.any()), f"{name}: a value of 0 has no sign")
    return len(table)


def _offsets(
    words: NDArray[np.uint64],
    wide: NDArray[np.uint64],
    base_bits: int,
    delta_bits: int,
    count: int,
    last: int | None,
    name: str,
) -> NDArray[np.int64]:
    """`count` offsets from 0 to `last`, never falling."""
    _require(1 <= base_bits <= 48 and delta_bits <= base_bits, f"{name}: widths")
    blocks = -(-count // OFFSET_BLOCK)
    stride = base_bits + 1 + (OFFSET_BLOCK - 1) * delta_bits
    _require(len(words) == _words(blocks * stride), f"{name}: length")
    head = np.empty(blocks, np.uint64)
    kernels.get_all(words.ctypes.data, 0, stride, base_bits + 1, head)
    flagged = (head & np.uint64(1)) != 0
    wide_blocks = int(flagged.sum())
    _require(
        len(wide) == _words(wide_blocks * OFFSET_BLOCK * base_bits)
        and bool((head[flagged] >> np.uint64(1) == np.arange(wide_blocks)).all()),
        f"{name}: blocks whose distances do not fit",
    )
    offsets = unpack_offsets(Offsets(words, wide, base_bits, delta_bits), count)
    _require(int(offsets[0]) == 0, f"{name} must begin with 0")
    _require(bool((offsets[1:] >= offsets[:-1]).all()), f"{name} must never fall")
    _require(last is None or int(offsets[-1]) == last, f"{name} must end with {last}")
    return offsets


def check_low(a: Arrays, words: int, order: int) -> tuple[NDArray[np.int64], int]:
    """Checks the low orders; (words + 1,) where the pairs of each word begin, and their number."""
    _require(len(a["shape"]) == len(LOW_SHAPE), f"shape must have {len(LOW_SHAPE)} values")
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    pairs, key_bits = s["pairs"], s["key_bits"]
    _require(s["words"] == words, f"there must be {words} words")
    _require(key_bits == key_bits_of(words), "key_bits must be those of the words")
    _require(
        pairs < 1 << 32 and (order > 1 or not pairs),
        "there are fewer than 2**32 2-grams, and none at order 1",
    )
    _require(s["word_prob_bits"] <= PROB_BITS, "word_prob_bits")
    _require(s["word_backoff_bits"] <= BACKOFF_BITS, "word_backoff_bits")
    _require(s["begin_bits"] <= 32 and s["place_bits"] <= 48, "begin_bits, place_bits")
    stride = s["begin_bits"] + s["place_bits"] + s["word_backoff_bits"]
    _require(len(a["word_entry"]) == _words((words + 1) * stride), "word_entry: length")
    _require(
        len(a["word_value"]) == _words(words * (s["word_prob_bits"] + 1)), "word_value: length"
    )
    prob_limit = _prob_limit(
        s["word_prob_bits"], s["word_prob_base"], a["word_prob_table"], "word_prob_table"
    )
    backoff_limit = _backoff_limit(
        s["word_backoff_bits"], a["word_backoff_table"], "word_backoff_table"
    )
    for name, column, shift, width, limit in (
        ("prob", "word_value", 1, s["word_prob_bits"] + 1, prob_limit),
        ("backoff", "word_entry", s["begin_bits"] + s["place_bits"], stride, backoff_limit),
    ):
        bits = s[f"word_{name}_bits"]
        is_prob = name == "prob"
        at = kernels.check_values(a[column].ctypes.data, words, shift, width, bits, limit, is_prob)
        _require(at < 0, f"{column}: the {name} of word {at}")
    _require(s["pair_backoff_bits"] <= BACKOFF_BITS, "pair_backoff_bits")
    prob_limit = backoff_limit = 1
    if pairs:
        prob_limit = _prob_limit(
            s["pair_prob_bits"], s["pair_prob_base"], a["pair_prob_table"], "pair_prob_table"
        )
        backoff_limit = _backoff_limit(
            s["pair_backoff_bits"], a["pair_backoff_table"], "pair_backoff_table"
        )
    begin, place = word_lists(a, s)
    for name, offsets in (("begin", begin), ("place", place)):
        _require(
            int(offsets[0]) == 0 and bool((offsets[1:] >= offsets[:-1]).all()),
            f"word_entry: {name} must rise from 0",
        )
    _require(int(begin[-1]) == pairs, f"word_entry: begin must end with {pairs}")
    _require(
        int((begin[1:] - begin[:-1]).max()) < LONGEST_LIST, f"fewer than {LONGEST_LIST} in a list"
    )
    _require(len(a["list"]) == _words(int(place[-1])), "list: length")
    _require(int(np.diff(begin).max()) <= words, "begin: a word begins no more pairs than words")
    value_bits = PAIR_FLAG_BITS + s["pair_prob_bits"] + s["pair_backoff_bits"]
    at, fault = kernels.check_key_lists(
        a["list"].ctypes.data, place, begin, key_bits, value_bits, PAIR_FLAG_BITS,
        s["pair_prob_bits"],
        prob_limit, backoff_limit,
    )  # fmt: skip
    _require(not fault, f"list: {_FAULTS[fault]} of the 2-grams that begin with word {at}")
    inverse = pow(multiplier_of(key_bits), -1, 1 << key_bits)
    at = kernels.check_list_ids(
        a["list"].ctypes.data, place, begin, key_bits, value_bits, inverse, words
    )
    _require(at < 0, f"list: word ids or state lengths after word {at}")
    return begin, pairs


def check_tree(
    a: Arrays,
    levels: int,
    words: int,
    pairs: int,
    sizes_of: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    nodes: int,
) -> int:
    """Checks the tree of a shard beside low orders that passed; returns its n-grams, with blanks.

    Args  sizes_of  entries of the list of the second word of each 2-gram, as `low.sizes_after`
          nodes     how many there should be
    """
    shape = tree_shape(a["shape"])
    _require(shape.levels == levels, f"there must be {levels} levels")
    _require(shape.pairs == pairs, f"there must be {pairs} 2-grams")
    _require(shape.key_bits == key_bits_of(words), "key_bits must be those of the words")
    _require(
        sum(level["nodes"] for level in shape.level) == nodes, f"the manifest says {nodes} nodes"
    )
    _parts(a, shape)
    roots = _roots(a, shape)
    parent_size = sizes_of(roots)
    total = 0
    child = np.zeros(1, np.int64)
    for depth, s in enumerate(shape.level):
        where = f"level {depth}"
        _require(len(parent_size) == s["nodes"], f"{where}: the children of the level above")
        _require(s["flag_bits"] <= 2, f"{where}: widths")
        _require((s["flag_bits"] == 0) == (depth + 1 == levels), f"{where}: flag_bits")
        _require(s["backoff_bits"] <= BACKOFF_BITS, f"{where}: backoff_bits")
        limit = _prob_limit(
            s["prob_bits"], s["prob_base"], part_of(a, shape, depth, "prob_table"),
            f"{where}: prob_table",
        )  # fmt: skip
        place = _offsets(
            part_of(a, shape, depth, "place"), part_of(a, shape, depth, "place_wide"),
            s["place_base_bits"], s["place_delta_bits"], s["nodes"] + 1, None, f"{where}: place",
        )  # fmt: skip
        lists = part_of(a, shape, depth, "list")
        _require(len(lists) == _words(int(place[-1])), f"{where}: list: length")
        sizes = np.zeros(s["nodes"], np.int64)
        at, fault = kernels.check_rank_lists(
            lists.ctypes.data, place, parent_size, s["prob_bits"] + s["flag_bits"], s["flag_bits"],
            limit, sizes,
        )  # fmt: skip
        _require(not fault, f"{where}: list: {_FAULTS[fault]} of node {at}")
        _require(int(sizes.sum()) == s["grams"], f"{where}: there must be {s['grams']} n-grams")
        total += s["grams"]
        if depth:
            _keys_and_weights(a, shape, depth, words, child)
        if depth + 1 < levels:
            child = _offsets(
                part_of(a, shape, depth, "child"), part_of(a, shape, depth, "child_wide"),
                s["child_base_bits"], s["child_delta_bits"], s["nodes"] + 1,
                shape.level[depth + 1]["nodes"], f"{where}: child",
            )  # fmt: skip
            below = shape.level[depth + 1]["nodes"]
            keys = part_of(a, shape, depth + 1, "node_key")
            _require(  # before so many are counted out: the number may be anything
                len(keys) == _words(below * shape.key_bits), f"level {depth + 1}: node_key: length"
            )
            parent_size = np.repeat(sizes, np.diff(child))
        else:
            widths = (s["child_base_bits"], s["child_delta_bits"])
            _require(widths == (0, 0), f"{where}: child: widths where nothing is below")
    return total


def _parts(a: Arrays, shape: TreeShape) -> None:
    """The parts of the levels follow each other and are the whole column."""
    for name in LEVEL_COLUMNS:
        begins = [level[name] for level in shape.level] + [len(a[name])]
        _require(
            begins[0] == 0 and all(x <= y for x, y in pairwise(begins)),
            f"{name}: where the parts of the levels begin",
        )
        if not shape.levels:
            _require(len(a[name]) == 0, f"{name} must be empty")
    for depth in range(shape.levels):
        empty = [] if depth else ["node_key", "node_backoff"]
        if depth + 1 == shape.levels:
            empty += ["child", "child_wide"]
        for name in LEVEL_COLUMNS:
            if name not in TABLES:
                words = len(part_of(a, shape, depth, name))
                _require(words == _words(0) if name in empty else words > 0, f"{name}: length")


def _roots(a: Arrays, shape: TreeShape) -> NDArray[np.int64]:
    roots = shape.level[0]["nodes"] if shape.levels else 0
    _require(shape.roots == roots <= shape.pairs, f"there must be {roots} roots, each a pair")
    _require(
        shape.root_key_bits == root_key_bits_of(shape.pairs, roots)
        and shape.root_bucket_bits == roots.bit_length(),
        "the widths of roots",
    )
    buckets = (shape.pairs >> shape.root_key_bits) + 1
    _require(
        len(a["root_bucket"]) == _words((buckets + 1) * shape.root_bucket_bits)
        and len(a["root_key"]) == _words(roots * shape.root_key_bits),
        "root_bucket, root_key: length",
    )
    ends = unpack_fields(a["root_bucket"], shape.root_bucket_bits, buckets + 1).astype(np.int64)
    _require(
        int(ends[0]) == 0 and int(ends[-1]) == roots and bool((ends[1:] >= ends[:-1]).all()),
        f"root_bucket must rise from 0 to {roots}",
    )
    low = unpack_fields(a["root_key"], shape.root_key_bits, roots).astype(np.int64)
    pair = (np.repeat(np.arange(buckets), np.diff(ends)) << shape.root_key_bits) | low
    _require(bool((pair[1:] > pair[:-1]).all()), "root_key must rise strictly in a bucket")
    _require(roots == 0 or int(pair[-1]) < shape.pairs, "root_key: 2-grams")
    return pair


def _keys_and_weights(
    a: Arrays, shape: TreeShape, depth: int, words: int, child: NDArray[np.int64]
) -> None:
    s, where = shape.level[depth], f"level {depth}"
    key = part_of(a, shape, depth, "node_key")
    _require(len(key) == _words(s["nodes"] * shape.key_bits), f"{where}: node_key: length")
    inverse = pow(multiplier_of(shape.key_bits), -1, 1 << shape.key_bits)
    at = kernels.check_ids(
        key.ctypes.data, s["nodes"], shape.key_bits, shape.key_bits, child, inverse, words
    )
    _require(at < 0, f"{where}: node_key: the children of node {at} of the level above")
    bits = s["backoff_bits"]
    weight = part_of(a, shape, depth, "node_backoff")
    _require(len(weight) == _words(s["nodes"] * bits), f"{where}: node_backoff: length")
    if s["nodes"]:
        limit = _backoff_limit(
            bits, part_of(a, shape, depth, "backoff_table"), f"{where}: backoff_table"
        )
        at = kernels.check_values(weight.ctypes.data, s["nodes"], 0, bits, bits, limit, False)
        _require(at < 0, f"{where}: node_backoff: the weight of node {at}")
