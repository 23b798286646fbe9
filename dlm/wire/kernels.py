"""Kernels that pass once over the arrays of an unchecked message."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel
from dlm.ngram.kernels import NO_RANK


@kernel("uint8[:], uint32[:]", nogil=False)
def totals(context_lengths, word_counts):  # type: ignore[no-untyped-def]
    """Returns the sum of each array, and whether any word count is 0.

    Fewer than 2^31 counts sum to less than 2^63, so hostile counts cannot wrap to the right total.
    """
    contexts = np.int64(0)
    words = np.int64(0)
    silent = False
    for i in range(len(context_lengths)):
        contexts += np.int64(context_lengths[i])
        words += np.int64(word_counts[i])
        silent |= word_counts[i] == 0
    return contexts, words, silent


# The faults that `block_fault` finds; 0 for none.
(TOTAL, COUNT, NO_PROGRESS, WORD, RISE, WEIGHT, NGRAM) = range(1, 8)


@kernel("uint32[:], uint32[:], uint32[:], uint32[:], float32[:], uint8[:], int64")
def block_fault(totals, counts, skips, words, log10_backoffs, ngram, size):  # type: ignore[no-untyped-def]
    """Returns the first fault of a ContextBlockReply, TOTAL to NGRAM or 0 for none, and its index.

    Shapes  totals, counts, skips (C,); words, ngram (Q,); log10_backoffs (B,)
            size  of the vocabulary, in words
    Trusts  Q = sum(counts): the caller has checked the lengths of the reply
    """
    left = np.int64(0)
    at = np.int64(0)
    for c in range(len(counts)):
        if np.int64(totals[c]) > size:
            return TOTAL, np.int64(c)
        more = max(np.int64(totals[c]) - np.int64(skips[c]), np.int64(0))
        if np.int64(counts[c]) > more:
            return COUNT, np.int64(c)
        left += more
        before = np.int64(-1)
        for _ in range(counts[c]):
            word = np.int64(words[at])
            if word >= size:
                return WORD, at
            if word <= before:
                return RISE, at
            if ngram[at] < 3:
                return NGRAM, at
            before = word
            at += 1
    if left > 0 and at == 0:
        return NO_PROGRESS, np.int64(0)
    for i in range(len(log10_backoffs)):
        if not np.isfinite(log10_backoffs[i]):
            return WEIGHT, np.int64(i)
    return 0, np.int64(0)


@kernel(
    "float32[:], uint8[:], uint8[:], uint8[:], uint8[:], uint32[:], uint32[:], int64, float32",
    nogil=False,
)
def out_of_range(  # type: ignore[no-untyped-def]
    log10_prob, matched, ngram, state, context_lengths, word_counts, ranks, order, most_log10
):
    """Returns the index of the first answer outside the ranges of proto/README.md, "Score", or -1.

    Shapes  log10_prob, matched, ngram, state, ranks (Q,); context_lengths, word_counts (C,)
    Trusts  Q = sum(word_counts): the caller has checked the lengths of the reply
    """
    at = 0
    for i in range(len(word_counts)):
        words = np.int64(context_lengths[i]) + 1
        for _ in range(word_counts[i]):
            m, n, s = np.int64(matched[at]), np.int64(ngram[at]), np.int64(state[at])
            most = np.float32(0.0) if m == words else most_log10
            # The comparison with `most` is false for NaN.
            small = (m == 1) | (m == 2) | (n == 1) | (n == 2) | (s == 1) | (s == 2)
            if not (m <= n <= words and s <= n and s < order and log10_prob[at] <= most):
                return at
            if small or (n and ranks[at] == NO_RANK):
                return at
            at += 1
    return -1
