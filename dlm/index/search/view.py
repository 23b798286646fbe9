"""Makes the views of packed columns that kernels take: addresses and widths in one array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed.low import LOW_SHAPE, Arrays, extended_from, key_bits_of
from dlm.index.packed.tree import level_numbers, tree_shape

# Indices into a view; the first two are the same in every view.
WORDS, KEY_BITS = range(2)
# Indices into the view of the low orders.
(
    WORD_VALUE,
    WORD_PROB_TABLE,
    WORD_ENTRY,
    ENTRIES,
    BEGIN_BITS,
    PLACE_BITS,
    WORD_BACKOFF_BITS,
    WORD_BACKOFF_TABLE,
    LIST,
    PAIR_FLAG_BITS,
    PAIR_PROB_BITS,
    PAIR_PROB_TABLE,
    EXTENDED_FROM,
    LOW_PLACES,
) = range(2, 16)
# Indices into the view of a shard's tree.
(
    PAIRS,
    ROOTS,
    ROOT_KEY_BITS,
    TREE,
    LEVEL,  # the levels begin here, each a row of `packed.tree.level_numbers`
) = range(2, 7)


def low_view(a: Arrays) -> NDArray[np.int64]:
    """The view of the low orders; the caller keeps `a` as long as the view is used."""
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    at = {name: column.ctypes.data for name, column in a.items()}
    return np.array(
        [
            s["words"],
            key_bits_of(s["words"]),
            at["word_value"],
            at["word_prob_table"],
            at["word_entry"],
            s["entries"],
            s["begin_bits"],
            s["place_bits"],
            s["word_backoff_bits"],
            table_or_base(a["word_backoff_table"]),
            at["list"],
            s["pair_flag_bits"],
            s["pair_prob_bits"],
            table_or_base(a["pair_prob_table"], s["pair_prob_base"]),
            extended_from(a),
        ],
        np.int64,
    )


def table_or_base(table: NDArray[np.float32], base: int = 0) -> int:
    """The address of a table of values or, if it is empty, minus the base of the codes."""
    return table.ctypes.data if len(table) else -base


def tree_view(a: Arrays, words: int) -> NDArray[np.int64]:
    """The view of a tree, for a model of `words` words."""
    s = tree_shape(a["shape"])
    own = [words, s.key_bits, s.pairs, s.roots, key_bits_of(s.pairs), a["tree"].ctypes.data]
    return np.concatenate([np.array(own, np.int64), level_numbers(a, s).reshape(-1)])
