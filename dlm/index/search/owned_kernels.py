"""Checks and answers a message to one shard in one call that trusts nothing in the message.

The call reports only whether the message is valid; `server.kernels` finds the fault's place.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.search import view as at
from dlm.index.search.kernels import ANSWERS, begins_of, search_trees
from dlm.jit import kernel
from dlm.ngram.kernels import slot_of

PACKED_BYTES = 7  # per answer: a float32 and three uint8

_0 = np.int64(0)


@kernel(
    "int64[:], int64[:], int64, uint16[:], int64, uint8[:], uint32[:], uint32[:], uint32[:], "
    "uint32[:], out uint8[:], out int64[:], out int64[:]"
)
def score_owned(  # type: ignore[no-untyped-def]
    view,
    trees,
    order,
    slots,
    shard,
    context_lengths,
    context_words,
    pairs,
    word_counts,
    ranks,
    packed,
    by_order,
    by_slot,
):
    """Calls `search_trees` for untrusted queries; takes lengths, and finds where groups begin.

    Shapes   view of view.tree_view;  trees (1,) the view's address
             slots (4096,)  the shard of each slot
             context_lengths, pairs, word_counts (C,), context_words, ranks (Q,)
             packed (7 Q,) uint8 filled: log10_prob (Q,) float32, then matched_order, ngram_length
                    and state_length, (Q,) uint8 each
             by_order (16,)  added to: the answers by matched order; orders below 3 count as 0
             by_slot (4096,)  added to: the answers by slot
    Returns  whether the lengths fit each other, each context has two words or more and fits the
             order and has words to score, ids and 2-grams are in range, and all slots belong to
             `shard`; if not, nothing is filled
    Trusts   len(packed) == 7 * len(ranks); the columns, as `search_trees` does
    """
    contexts = len(context_lengths)
    queries = len(ranks)
    if len(word_counts) != contexts or len(pairs) != contexts:
        return False
    good = True
    for c in range(contexts):
        good &= (context_lengths[c] >= 2) & (context_lengths[c] < order) & (word_counts[c] > 0)
    context_begin, word_begin = begins_of(context_lengths), begins_of(word_counts)
    good &= context_begin[contexts] == len(context_words)
    if not good or word_begin[contexts] != queries:
        return False
    last = np.uint32(view[at.WORDS] - 1)
    for i in range(len(context_words)):
        good &= context_words[i] <= last
    own = np.empty(contexts, np.uint16)
    for c in range(contexts):
        good &= np.int64(pairs[c]) < view[at.PAIRS]
        end = context_begin[c + 1]
        own[c] = slot_of(context_words[end - 2], context_words[end - 1])
        good &= slots[own[c]] == shard
    if not good:
        return False
    for c in range(contexts):
        by_slot[own[c]] += np.int64(word_counts[c])
    packed[:] = 0
    matched_order = packed[4 * queries : 5 * queries]
    search_trees(
        trees,
        slots,
        np.arange(contexts),
        context_begin,
        context_words,
        pairs,
        word_begin,
        ranks,
        np.zeros(queries, np.float32),
        packed[: 4 * queries].view(np.float32),
        matched_order,
        packed[5 * queries : 6 * queries],
        packed[6 * queries :],
    )
    for i in range(queries):
        by_order[matched_order[i]] += 1
    return True


@kernel(f"int64[:], uint16[:], uint8[:], uint32[:], uint32[:], uint32[:], uint32[:], {ANSWERS}")
def search_lengths(  # type: ignore[no-untyped-def]
    trees, slots, context_lengths, context_words, pairs, word_counts, ranks,
    log10_prob, matched_order, ngram_length, state_length,
):  # fmt: skip
    """Calls `search_trees` for all contexts; takes lengths, finds where groups begin, and trusts
    that the lengths add up. Fills the answers (Q,)."""
    log10_prob[:] = 0
    matched_order[:], ngram_length[:], state_length[:] = 0, 0, 0
    search_trees(
        trees, slots, np.arange(len(context_lengths)), begins_of(context_lengths), context_words,
        pairs, begins_of(word_counts), ranks, np.zeros(len(ranks), np.float32), log10_prob,
        matched_order, ngram_length, state_length,
    )  # fmt: skip
