"""dlm.server.kernels: the checks, compiled and plain."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from dlm.ngram.kernels import slot_of
from dlm.ngram.partition import slots_of
from dlm.server import kernels

EDGES = [0, 1, 2, 255, 65_535, 2**31, 2**32 - 1]


@njit
def compiled_slot(u, v):
    """`slot_of` of a pair."""
    return slot_of(u, v)


def test_slot_is_that_of_the_partition():
    """XXH64 as in `ngram.partition`, on random ids and at the edges of uint32."""
    rng = np.random.default_rng(3)
    u = np.concatenate([np.repeat(EDGES, len(EDGES)), rng.integers(0, 2**32, 3000)])
    v = np.concatenate([np.tile(EDGES, len(EDGES)), rng.integers(0, 2**32, 3000)])
    u, v = u.astype(np.uint32), v.astype(np.uint32)
    expected = slots_of(u, v).tolist()
    assert [int(compiled_slot(a, b)) for a, b in zip(u, v, strict=True)] == expected
    with np.errstate(over="ignore"):
        plain = [int(slot_of.py_func(a, b)) for a, b in zip(u, v, strict=True)]
    assert plain == expected


@pytest.mark.parametrize(
    ("lengths", "context_words", "pairs", "expected"),
    [
        ([], [], [], (kernels.FINE, 0)),
        ([2, 3], [1, 2, 9, 1, 2], [0, 9], (kernels.FINE, 0)),
        ([2, 1], [1, 2, 1], [0, 0], (kernels.BAD_CONTEXT_LENGTH, 1)),
        ([0], [], [0], (kernels.BAD_CONTEXT_LENGTH, 0)),
        ([4], [1, 1, 1, 2], [0], (kernels.BAD_CONTEXT_LENGTH, 0)),
        ([255], [1] * 255, [0], (kernels.BAD_CONTEXT_LENGTH, 0)),
        ([2, 2], [1, 2, 1, 10], [0, 0], (kernels.BAD_CONTEXT_WORD, 3)),
        ([2], [2**32 - 1, 2], [0], (kernels.BAD_CONTEXT_WORD, 0)),
        ([2], [1, 2], [0, 5, 10], (kernels.BAD_PAIR, 2)),
        ([2, 3], [1, 2, 1, 3, 4], [0, 0], (kernels.BAD_SLOT, 1)),
        # Lengths before ids before slots.
        ([2, 1], [3, 4, 99], [99, 0], (kernels.BAD_CONTEXT_LENGTH, 1)),
        ([2], [3, 99], [99], (kernels.BAD_CONTEXT_WORD, 1)),
        ([2], [3, 4], [99], (kernels.BAD_PAIR, 0)),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_first_fault_is_found(lengths, context_words, pairs, expected, compiled):
    """Order 4, ids and 2-grams below 10, and the one slot of (1, 2) owned."""
    slots = np.ones(4096, np.uint16)
    slots[slots_of(np.array([1], np.uint32), np.array([2], np.uint32))] = 0
    function = kernels.first_fault if compiled else kernels.first_fault.py_func
    arrays = (np.array(lengths, np.uint8), np.array(context_words, np.uint32))
    with np.errstate(over="ignore"):
        found = function(*arrays, np.array(pairs, np.uint32), 4, 10, 10, slots, 0)
    assert tuple(int(x) for x in found) == expected


@pytest.mark.parametrize("counting", [kernels.count_orders, kernels.count_orders.py_func])
def test_orders_are_counted(counting) -> None:
    """As NumPy counts them; what is beyond the totals is left out."""
    orders = np.random.default_rng(1).integers(0, 20, 1000).astype(np.uint8)
    totals = np.zeros(16, np.int64)
    counting(orders, totals)
    counting(orders[:0], totals)
    counting(orders, totals)
    assert totals.tolist() == (2 * np.bincount(orders, minlength=20)[:16]).tolist()
