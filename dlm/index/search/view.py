"""Where the kernels find the packed columns: addresses and widths in one array of numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.index.packed.low import LOW_SHAPE, Arrays, key_bits_of
from dlm.index.packed.record_kernels import LEVEL_PLACES
from dlm.index.packed.tree import level_numbers, tree_shape

# Places in a view.
WORDS, KEY_BITS = range(2)
# Of the low orders:
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
    LOW_PLACES,
) = range(2, 15)
# Of the tree of a shard:
(
    PAIRS,
    ROOTS,
    ROOT_KEY_BITS,
    TREE,
    LEVEL,  # here begin the levels, each as `packed.tree.level_numbers` has it
) = range(2, 7)


def low_view(a: Arrays) -> NDArray[np.int64]:
    """The view of the low orders; the caller keeps `a` as long as it is used."""
    s = dict(zip(LOW_SHAPE, a["shape"].tolist(), strict=True))
    at = {name: column.ctypes.data for name, column in a.items()}
    view = np.zeros(LOW_PLACES, np.int64)
    view[WORDS], view[KEY_BITS] = s["words"], key_bits_of(s["words"])
    view[WORD_VALUE], view[WORD_PROB_TABLE] = at["word_value"], at["word_prob_table"]
    view[WORD_ENTRY], view[ENTRIES] = at["word_entry"], s["entries"]
    view[BEGIN_BITS], view[PLACE_BITS] = s["begin_bits"], s["place_bits"]
    view[WORD_BACKOFF_BITS] = s["word_backoff_bits"]
    view[LIST] = at["list"]
    view[PAIR_FLAG_BITS], view[PAIR_PROB_BITS] = s["pair_flag_bits"], s["pair_prob_bits"]
    view[WORD_BACKOFF_TABLE] = table_or_base(a["word_backoff_table"])
    view[PAIR_PROB_TABLE] = table_or_base(a["pair_prob_table"], s["pair_prob_base"])
    return view


def table_or_base(table: NDArray[np.float32], base: int = 0) -> int:
    """The address of a table of values; where it is empty, minus the base of the codes."""
    return table.ctypes.data if len(table) else -base


def tree_view(a: Arrays, words: int) -> NDArray[np.int64]:
    """The view of a tree, of a model with so many words."""
    s = tree_shape(a["shape"])
    view = np.zeros(LEVEL + s.levels * LEVEL_PLACES, np.int64)
    view[WORDS], view[KEY_BITS], view[PAIRS] = words, s.key_bits, s.pairs
    view[ROOTS], view[ROOT_KEY_BITS] = s.roots, key_bits_of(s.pairs)
    view[TREE] = a["tree"].ctypes.data
    view[LEVEL:] = level_numbers(a, s).reshape(-1)
    return view
