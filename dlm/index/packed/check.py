"""Checks everything that the kernels trust, when a file is opened.

Every offset, key and code that could lead a kernel out of its columns, or that no model can have,
must be found by this module. Each function raises ValueError with the rule that is broken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import BY_TABLE, MOST_WEIGHTS
from dlm.index.packed import check_kernels as checks, kernels
from dlm.index.packed.columns import BACKOFF_BITS, PROB_BITS
from dlm.index.packed.low import (
    ALL_FLAGS,
    BLOCK_WORDS,
    LOW_SHAPE,
    ONE_FLAG,
    Arrays,
    entry_bits_of,
    key_bits_of,
    unpack_words,
    word_lists,
)
from dlm.index.packed.record_kernels import LONGEST, N_PROB_LIMIT
from dlm.index.packed.tree import (
    TABLES,
    TreeShape,
    level_numbers,
    part_of,
    tree_shape,
)

_INFINITY = 0x7F800000  # bits of the probability 0; larger magnitudes are not numbers


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _words(bits: int) -> int:
    return (bits + 63) // 64 + 1


def _prob_limit(bits: int, base: int, table: NDArray[np.float32], name: str) -> int:
    """The limit that codes must stay below."""
    _require(bits <= PROB_BITS, f"{name}: the codes have too many bits")
    if not len(table):
        _require(base <= _INFINITY, f"{name}: the base is too large")
        return _INFINITY + 1 - base
    _require(base == BY_TABLE, f"{name}: there must be a table or a base, not both")
    _check_probs(table, name)
    return _table_size(bits, table, name)


def _check_probs(table: NDArray[np.float32], name: str) -> None:
    _require(bool((table <= 0).all()), f"{name}: log10 probabilities must be 0 or less")
    _require(not _has_signed_zero(table), f"{name}: no value may be negative zero")


def _backoff_limit(bits: int, table: NDArray[np.float32], name: str) -> int:
    if bits == BACKOFF_BITS and not len(table):
        return 0
    _require(bool(np.isfinite(table).all()), f"{name}: back-off weights must be finite")
    _require(not _has_signed_zero(table), f"{name}: no value may be negative zero")
    return _table_size(bits, table, name)


def _table_size(bits: int, table: NDArray[np.float32], name: str) -> int:
    _require(0 < len(table) <= 1 << bits < 1 << BACKOFF_BITS, f"{name} must fit the bits of a code")
    return len(table)


def _has_signed_zero(table: NDArray[np.float32]) -> bool:
    return bool((np.signbit(table) & (table == 0)).any())


def check_low(a: Arrays, words: int, order: int) -> int:
    """Checks the low orders; returns the number of pairs."""
    _require(len(a["shape"]) == len(LOW_SHAPE), f"shape must have {len(LOW_SHAPE)} values")
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    pairs, entries = s["pairs"], s["entries"]
    _require(s["words"] == words, f"there must be {words} words")
    _require(entries <= words, "entries must be at most the number of words")
    _require(
        pairs < 1 << 32 and (order > 1 or not pairs),
        "there must be fewer than 2**32 2-grams, and none at order 1",
    )
    _require(s["pair_flag_bits"] in (ONE_FLAG, ALL_FLAGS), "pair_flag_bits must be 1 or 3")
    _require(s["word_backoff_bits"] <= BACKOFF_BITS, "word_backoff_bits must be at most 32")
    _require(s["begin_bits"] <= 32 and s["place_bits"] <= 48, "begin_bits or place_bits is too big")
    stride = entry_bits_of(s)
    _require(len(a["word_entry"]) == _words((entries + 2) * stride), "word_entry: wrong length")
    _require(len(a["word_value"]) == -(-words // BLOCK_WORDS), "word_value: wrong length")
    _check_probs(a["word_prob_table"], "word_prob_table")
    runs = len(a["word_prob_table"])
    at = checks.check_words_value(a["word_value"].ctypes.data, words, runs)
    _require(at < 0, f"word_value: block {at} is invalid for {runs} probabilities")
    _require(
        s["pair_flag_bits"] != ONE_FLAG
        or np.array_equal(
            unpack_words(a["word_value"], words)[1][1:], np.arange(1, words) < entries
        ),
        "word_value: with one 2-gram flag, words 1 to entries - 1 must be EXTENDED, later ones not",
    )
    limit = _backoff_limit(s["word_backoff_bits"], a["word_backoff_table"], "word_backoff_table")
    shift = stride - s["word_backoff_bits"]
    address = a["word_entry"].ctypes.data
    at = checks.check_backoffs(address, entries + 1, shift, stride, s["word_backoff_bits"], limit)
    _require(at < 0, f"word_entry: the backoff of word {at} is invalid")
    limit = _prob_limit(
        s["pair_prob_bits"], s["pair_prob_base"], a["pair_prob_table"], "pair_prob_table"
    )
    begin, place, widths = word_lists(a, s)
    for name, offsets in (("begin", begin), ("place", place)):
        _require(
            int(offsets[0]) == 0 and bool((offsets[1:] >= offsets[:-1]).all()),
            f"word_entry: {name} must start at 0 and never decrease",
        )
    last = np.empty(1, np.uint64)
    kernels.get_all(address, (entries + 1) * stride, stride, s["begin_bits"], last)
    _require(
        begin[-1] == int(last[0]) == pairs,
        f"word_entry: the last value of begin must be {pairs}, the number of 2-grams",
    )
    sizes = np.diff(begin)
    most = int(sizes.max(initial=0))
    _require(most < LONGEST, f"a list must have fewer than {LONGEST} entries")
    _require(most <= words, "begin: a word begins more 2-grams than there are words")
    _require(
        bool(((sizes <= 1 << widths) & (widths <= key_bits_of(words))).all()),
        "word_entry: the widths of the keys do not fit their lists",
    )
    _require(len(a["list"]) == _words(int(place[-1])), "list: wrong length")
    at, fault = checks.check_key_lists(
        a["list"].ctypes.data, place, begin, widths, words,
        s["pair_flag_bits"] + s["pair_prob_bits"], s["pair_flag_bits"], limit,
    )  # fmt: skip
    _require(not fault, f"list: bad {checks.FAULTS[fault]} of 2-grams that begin with word {at}")
    return int(pairs)


def check_tree(a: Arrays, levels: int, words: int, pairs: int, nodes: int) -> int:
    """Checks a shard's tree, for a model of `words` words and, with blanks, `pairs` 2-grams;
    returns how many n-grams, including blanks, the tree has.

    Args  nodes  the number of nodes that the shard should have
    """
    shape = tree_shape(a["shape"])
    _require(shape.levels == levels, f"there must be {levels} levels")
    _require(shape.key_bits == key_bits_of(words), "key_bits must fit word ids")
    _require(
        sum(level["nodes"] for level in shape.level) == nodes, f"there must be {nodes} nodes in all"
    )
    _require(shape.pairs == pairs, f"there must be {pairs} 2-grams")
    _require(shape.roots <= pairs, "each root must be a 2-gram")
    _require(
        shape.tree_bits < 64 * len(a["tree"]) and len(a["tree"]) == _words(shape.tree_bits),
        "tree: wrong length",
    )
    limits = _limits(a, shape)
    numbers = level_numbers(a, shape)
    numbers[:, N_PROB_LIMIT] = limits
    counts = np.zeros((levels, 2), np.int64)
    most = np.array([level["grams"] for level in shape.level], np.int64)
    root, fault = checks.check_records(
        numbers.ctypes.data, a["tree"].ctypes.data, shape.tree_bits, shape.roots,
        key_bits_of(pairs), pairs, words, shape.key_bits, most, counts,
    )  # fmt: skip
    _require(not fault, f"tree: bad {checks.FAULTS[fault]} below root {root}")
    for depth, level in enumerate(shape.level):
        found = tuple(counts[depth].tolist())
        _require(
            found == (level["nodes"], level["grams"]),
            f"level {depth}: found {found[0]} nodes and {found[1]} n-grams; the shape disagrees",
        )
    return int(counts[:, 1].sum())


def _limits(a: Arrays, shape: TreeShape) -> list[int]:
    for name in TABLES:
        _require(sum(level[name] for level in shape.level) == len(a[name]), f"{name}: wrong length")
    limits = []
    for depth, s in enumerate(shape.level):
        where = f"level {depth}"
        _require(s["flag_bits"] <= 2 and s["grams"] < 1 << 32, f"{where}: bad flag_bits or grams")
        _require((s["flag_bits"] == 0) == (depth + 1 == shape.levels), f"{where}: bad flag_bits")
        table = part_of(a, shape, depth, "prob_table")
        name = f"{where}: prob_table"
        limits.append(_prob_limit(s["prob_bits"], s["prob_base"], table, name))
        weights = part_of(a, shape, depth, "weight_table")
        _require(len(weights) <= MOST_WEIGHTS + 1, f"{where}: weight_table is too long")
        # The table maps the escape code to infinity: after this code, the bits of a weight follow.
        _require(s["escape"] <= len(weights), f"{where}: escape is beyond weight_table")
        odd = np.flatnonzero(~np.isfinite(weights) | (np.signbit(weights) & (weights == 0)))
        escaped = weights[s["escape"] : s["escape"] + 1]
        _require(
            odd.tolist() == [s["escape"]] * len(escaped) and bool((escaped == np.inf).all()),
            f"{where}: weights must be finite, except the escape",
        )
    return limits
