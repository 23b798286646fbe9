"""A message for one shard, checked and searched in one call, which trusts nothing that it is sent.

It says only whether a message is valid; `server.kernels` finds what is wrong and where.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.search import view as at
from dlm.index.search.kernels import score_groups
from dlm.jit import kernel
from dlm.ngram.kernels import slot_of

PACKED_BYTES = 7  # of an answer: a float32 and three uint8

_0 = np.int64(0)


@kernel(
    "int64[:], int64, uint16[:], int64, uint8[:], uint32[:], uint32[:], uint32[:], "
    "out uint8[:], out int64[:], out int64[:]"
)
def score_owned(  # type: ignore[no-untyped-def]
    view,
    order,
    slots,
    shard,
    context_lengths,
    context_words,
    word_counts,
    words,
    packed,
    by_order,
    by_slot,
):
    """`score_groups` of untrusted queries, by lengths in place of begins.

    Shapes   slots (4096,)  the shard of each slot;  context_lengths, word_counts (C,)
             packed (7 Q,) uint8 filled: log10_prob (Q,) float32, then matched_order, ngram_length
                    and state_length, (Q,) uint8 each
             by_order (16,)  added to: the answers by matched order
             by_slot (4096,)  added to: the answers by slot
    Returns  whether the lengths fit each other, each context has two words or more and fits the
             order, each asks a word, ids are in range, and all slots belong to `shard`; where not,
             nothing is filled
    Trusts   len(packed) == 7 * len(words); the columns, as `score_groups`
    """
    contexts = len(context_lengths)
    queries = len(words)
    if len(word_counts) != contexts:
        return False
    context_begin = np.empty(contexts + 1, np.int64)
    word_begin = np.empty(contexts + 1, np.int64)
    context_total = _0
    word_total = _0
    good = True
    for c in range(contexts):
        context_begin[c] = context_total
        word_begin[c] = word_total
        length, count = np.int64(context_lengths[c]), np.int64(word_counts[c])
        good &= (length >= 2) & (length < order) & (count > 0)
        # Fewer than 2^31 contexts cannot reach 2^63: hostile counts never wrap to the right total.
        context_total += length
        word_total += count
    context_begin[contexts] = context_total
    word_begin[contexts] = word_total
    if not good or context_total != len(context_words) or word_total != queries:
        return False
    last = np.uint32(view[at.WORDS] - 1)
    for i in range(len(context_words)):
        good &= context_words[i] <= last
    for i in range(queries):
        good &= words[i] <= last
    own = np.empty(contexts, np.uint16)
    for c in range(contexts):
        end = context_begin[c + 1]
        own[c] = slot_of(context_words[end - 2], context_words[end - 1])
        good &= slots[own[c]] == shard
    if not good:
        return False
    for c in range(contexts):
        by_slot[own[c]] += np.int64(word_counts[c])
    needs_shard = np.empty(contexts, np.uint8)
    matched_order = packed[4 * queries : 5 * queries]
    score_groups(
        view,
        order,
        context_begin,
        context_words,
        word_begin,
        words,
        packed[: 4 * queries].view(np.float32),
        matched_order,
        packed[5 * queries : 6 * queries],
        packed[6 * queries :],
        needs_shard,
    )
    for i in range(queries):
        by_order[matched_order[i]] += 1
    return True
