"""Kernels that find a message's first fault, and count queries by slot and answers by order.

A Score is checked as it is answered (`index/search/owned_kernels.py`); if the check fails,
`first_fault` finds the fault. ContextBlocks are checked only here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.jit import kernel
from dlm.ngram.kernels import slot_of

FINE = 0
BAD_CONTEXT_LENGTH = 1
BAD_CONTEXT_WORD = 2
BAD_PAIR = 3
BAD_SLOT = 4


@kernel("uint8[:], uint32[:], uint32[:], int64, int64, int64, uint16[:], int64")
def first_fault(  # type: ignore[no-untyped-def]
    context_lengths, context_words, pairs, order, vocabulary_size, most_pairs, slots, shard
):
    """Finds the first fault of a message.

    Shapes   context_lengths (C,), context_words (sum,) most recent last, pairs (C,)
             slots (4096,)  the shard of each slot
    Returns  (fault, place): FINE and 0, or one of the BAD_ numbers and the index of the context
             length, context word, pair or context at fault. Checks lengths, then ids, then slots.
    Cost     O(C + sum), no allocation
    Trusts   sum(context_lengths) == len(context_words), which `wire.codec` checks
    """
    for i in range(len(context_lengths)):
        if context_lengths[i] < 2 or context_lengths[i] > order - 1:
            return BAD_CONTEXT_LENGTH, i
    for i in range(len(context_words)):
        if context_words[i] >= vocabulary_size:
            return BAD_CONTEXT_WORD, i
    for i in range(len(pairs)):
        if pairs[i] >= most_pairs:
            return BAD_PAIR, i
    end = 0
    for i in range(len(context_lengths)):
        end += context_lengths[i]
        if slots[slot_of(context_words[end - 2], context_words[end - 1])] != shard:
            return BAD_SLOT, i
    return FINE, 0


def check(
    context_lengths: NDArray[np.uint8],
    context_words: NDArray[np.uint32],
    pairs: NDArray[np.uint32],
    order: int,
    vocabulary_size: int,
    most_pairs: int,
    slots: NDArray[np.uint16],
    shard: int,
) -> tuple[int, int]:
    fault, place = first_fault(
        context_lengths, context_words, pairs, order, vocabulary_size, most_pairs, slots, shard
    )
    return int(fault), int(place)


@kernel("uint8[:], uint32[:], uint32[:], out int64[:]")
def count_slots(context_lengths, context_words, counts, by_slot):  # type: ignore[no-untyped-def]
    """Adds the count of each context, `counts` (C,), to its slot in `by_slot` (4096,).

    Trusts   the message passed `first_fault`
    """
    end = 0
    for c in range(len(context_lengths)):
        end += context_lengths[c]
        by_slot[slot_of(context_words[end - 2], context_words[end - 1])] += np.int64(counts[c])


@kernel("uint8[:], out int64[:]")
def count_orders(orders, totals):  # type: ignore[no-untyped-def]
    """Adds to `totals` (T,) how often each order below T occurs in `orders` (Q,)."""
    for i in range(len(orders)):
        if orders[i] < len(totals):
            totals[orders[i]] += 1
