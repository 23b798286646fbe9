"""Kernels that split the mass of uncased words over cased spellings. They run without the GIL."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel


@kernel("uint32[:], uint32[:], uint32[:], float64[:], float64[:], out float64[:, :]")
def back_off_to(rows, first_child, words, prob, weight, given):  # type: ignore[no-untyped-def]
    """Lengthens the context of each history's distribution by one word.

    Shapes, b histories, v words, m contexts of the new length with n n-grams
        rows         (b,)      uint32   context of the new length that ends each history, or NO_ROW
        first_child  (m + 1,)  uint32   where each context's n-grams begin
        words        (n,)      uint32   last words of the n-grams
        prob         (n,)      float64  P of the n-grams
        weight       (m,)      float64  backoff weights
        given        (b, v)    float64  changed
    """
    for b in range(len(rows)):
        row = np.int64(rows[b])
        if row < len(weight):
            for w in range(given.shape[1]):
                given[b, w] *= weight[row]
            for e in range(first_child[row], first_child[row + 1]):
                given[b, words[e]] = prob[e]


@kernel("float32[:, :], float64[:, :], int64[:], uint32[:], out float32[:, :], out float32[:]")
def split_over(uncased, cased, begin, spellings, given, entropy):  # type: ignore[no-untyped-def]
    """Splits the mass of uncased words over their spellings by a cased model.

    Shapes, b histories, u uncased and v cased words
        uncased    (b, u)    float32  a distribution after each history
        cased      (b, v)    float64  distribution of the cased model
        begin      (u + 1,)  int64    spellings of word i are spellings[begin[i]:begin[i + 1]]
        spellings  (v,)      uint32   at least one for each uncased word
        given      (b, v)    float32  filled
        entropy    (b,)      float32  increased by the entropy of spellings, in nats
    """
    for b in range(len(uncased)):
        more = 0.0
        for word in range(uncased.shape[1]):
            first, last = begin[word], begin[word + 1]
            # The share of a single spelling is exactly 1.
            if last - first == 1:
                given[b, spellings[first]] = uncased[b, word]
                continue
            total = 0.0
            for i in range(first, last):
                total += cased[b, spellings[i]]
            for i in range(first, last):
                share = cased[b, spellings[i]] / total if total > 0.0 else 1.0 / (last - first)
                given[b, spellings[i]] = uncased[b, word] * share
                if share > 0.0:
                    more -= uncased[b, word] * share * np.log(share)
        entropy[b] += more
