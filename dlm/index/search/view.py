"""Where the kernels find the packed columns: addresses and widths in one array of numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed.low import LOW_SHAPE, Arrays, multiplier_of
from dlm.index.packed.tree import part_of, tree_shape

# Places in a view. The low orders:
(
    WORDS,
    PAIRS,
    KEY_BITS,
    MULTIPLIER,
    WORD_VALUE,
    WORD_PROB_BITS,
    WORD_PROB_TABLE,
    WORD_ENTRY,
    BEGIN_BITS,
    PLACE_BITS,
    WORD_BACKOFF_BITS,
    WORD_BACKOFF_TABLE,
    LIST,
    PAIR_PROB_BITS,
    PAIR_PROB_TABLE,
    PAIR_BACKOFF_BITS,
    PAIR_BACKOFF_TABLE,
    # the tree of a shard:
    LEVELS,
    ROOTS,
    ROOT_KEY_BITS,
    ROOT_BUCKET_BITS,
    ROOT_BUCKET,
    ROOT_KEY,
    LEVEL,  # here begin the levels, each with the places below
) = range(24)
(
    N_KEY,
    N_BACKOFF,
    N_BACKOFF_BITS,
    N_BACKOFF_TABLE,
    N_CHILD,
    N_CHILD_BASE,
    N_CHILD_DELTA,
    N_CHILD_WIDE,
    N_PLACE,
    N_PLACE_BASE,
    N_PLACE_DELTA,
    N_PLACE_WIDE,
    N_LIST,
    N_FLAG_BITS,
    N_PROB_BITS,
    N_PROB_TABLE,
    N_NODES,
    LEVEL_PLACES,
) = range(18)


def low_view(a: Arrays) -> NDArray[np.int64]:
    """The view of the low orders, without a tree; the caller keeps `a` as long as it is used."""
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    at = {name: column.ctypes.data for name, column in a.items()}
    view = np.zeros(LEVEL, np.int64)
    view[WORDS], view[PAIRS], view[KEY_BITS] = s["words"], s["pairs"], s["key_bits"]
    view[MULTIPLIER] = multiplier_of(s["key_bits"])
    view[WORD_VALUE] = at["word_value"]
    view[WORD_PROB_BITS] = s["word_prob_bits"]
    view[WORD_ENTRY] = at["word_entry"]
    view[BEGIN_BITS], view[PLACE_BITS] = s["begin_bits"], s["place_bits"]
    view[WORD_BACKOFF_BITS] = s["word_backoff_bits"]
    view[LIST] = at["list"]
    view[PAIR_PROB_BITS], view[PAIR_BACKOFF_BITS] = s["pair_prob_bits"], s["pair_backoff_bits"]
    view[WORD_PROB_TABLE] = table_or_base(a["word_prob_table"], s["word_prob_base"])
    view[WORD_BACKOFF_TABLE] = table_or_base(a["word_backoff_table"])
    view[PAIR_PROB_TABLE] = table_or_base(a["pair_prob_table"], s["pair_prob_base"])
    view[PAIR_BACKOFF_TABLE] = table_or_base(a["pair_backoff_table"])
    return view


def table_or_base(table: NDArray[np.float32], base: int = 0) -> int:
    """The address of a table of values; where it is empty, minus the base of the codes."""
    return table.ctypes.data if len(table) else -base


def tree_view(low: NDArray[np.int64], a: Arrays) -> NDArray[np.int64]:
    s = tree_shape(a["shape"])
    at = {name: column.ctypes.data for name, column in a.items()}
    view = np.zeros(LEVEL + s.levels * LEVEL_PLACES, np.int64)
    view[:LEVEL] = low[:LEVEL]
    view[LEVELS], view[ROOTS] = s.levels, s.roots
    view[ROOT_KEY_BITS], view[ROOT_BUCKET_BITS] = s.root_key_bits, s.root_bucket_bits
    view[ROOT_BUCKET], view[ROOT_KEY] = at["root_bucket"], at["root_key"]
    for k, level in enumerate(s.level):

        def part(name: str, level: dict[str, int] = level) -> int:
            return at[name] + level[name] * a[name].itemsize

        begin = LEVEL + k * LEVEL_PLACES
        view[begin : begin + LEVEL_PLACES] = (
            part("node_key"),
            part("node_backoff"),
            level["backoff_bits"],
            table_or_base(part_of(a, s, k, "backoff_table")),
            part("child"),
            level["child_base_bits"],
            level["child_delta_bits"],
            part("child_wide"),
            part("place"),
            level["place_base_bits"],
            level["place_delta_bits"],
            part("place_wide"),
            part("list"),
            level["flag_bits"],
            level["prob_bits"],
            table_or_base(part_of(a, s, k, "prob_table"), level["prob_base"]),
            level["nodes"],
        )
    return view
