"""Turns adjusted counts into probabilities. The kernels need neither Python objects nor the GIL.

An n-gram is identified by its rank in its order: see adjust/kernels.py. Its *parent* is the n-gram
without its leftmost word; its *context* is the n-gram without its rightmost word. Both are one
order below. The context of a child is a child of its parent's context, with the same leftmost word,
so each context is found by one search in a sorted list.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import kernel
from dlm.ngram.kernels import prefetch, raw

_PRUNED = np.uint32(1 << 31)
_COUNT_BITS = np.uint32((1 << 31) - 1)
_AHEAD = 16

# The logarithm of 0 in ARPA files.
LOG10_ZERO = -99.0


@kernel(
    "uint32[:], uint32[:], int64, uint32[:], uint32[:], int64, int64, uint32[:], int64, int64, "
    "uint32[:], float64[:], out float64[:, :], out uint32[:]"
)
def add_up(  # type: ignore[no-untyped-def]
    contexts, children, first_child, words, counts, low, high, searched, first_searched,
    first_context, searched_words, discounts, sums, links,
):  # fmt: skip
    """Finds the contexts of some n-grams, and adds up what follows each context.

    Shapes
        contexts        (m,)      uint32   ranks of the contexts of some n-grams of order n - 1
        children        (m + 1,)  uint32   ranks of the first children, of order n, of these n-grams
        first_child     int       rank of the first child in `words` and `counts`
        words, counts   (c,)      uint32   of the children: leftmost word; count, with bit PRUNED
        low, high       int       only children of n-grams with a context low <= q < high are used
        searched        (h,)      uint32   rank of the first child of each context
        first_searched  int       rank of the first context in `searched`
        first_context   int       rank of the first n-gram of order n - 1 in searched_words, sums
        searched_words  (k,)      uint32   leftmost words
        discounts       (4,)      float64
        sums            (k, 2)    float64  added to: each context's discounted mass, and its counts
        links           (c,)      uint32   filled: the context of each child that is used
    Cost  a cache line or two for each n-gram of order n - 1
    """
    children_, searched_, first = raw(children), raw(searched), np.int64(first_searched)
    searched_words_, words_, counts_, links_ = (
        raw(searched_words), raw(words), raw(counts), raw(links)
    )  # fmt: skip
    sums_ = raw(sums.reshape(2 * len(sums)))
    for j in range(len(contexts)):
        context = np.int64(contexts[j])
        if context < low or context >= high:
            continue
        if j + _AHEAD < len(contexts):
            later = np.int64(contexts[j + _AHEAD])
            if low <= later < high:
                place = np.int64(searched_[later - first]) - first_context
                prefetch(searched_words_, np.uint64(place))
                prefetch(sums_, np.uint64(2 * place))
        at = np.int64(searched_[context - first]) - first_context
        end = np.int64(searched_[context - first + 1]) - first_context
        for i in range(
            np.int64(children_[j]) - first_child, np.int64(children_[j + 1]) - first_child
        ):
            word = words_[i]
            # The word is listed at or after the previous word: gallop ahead, then halve the range.
            stride = np.int64(1)
            while at + stride < end and searched_words_[at + stride] <= word:
                at += stride
                stride += stride
            stop = min(at + stride, end)
            while stop - at > 1:
                middle = (at + stop) >> 1
                if searched_words_[middle] <= word:
                    at = middle
                else:
                    stop = middle
            links_[i] = np.uint32(at + first_context)
            count = counts_[i]
            number = np.float64(count & _COUNT_BITS)
            sums_[2 * at] += number if count & _PRUNED else discounts[min(np.int64(count), 3)]
            sums_[2 * at + 1] += number


@kernel("uint32[:], uint32[:], int64, int64, float64[:], out float64[:, :]")
def add_up_bigrams(links, counts, low, high, discounts, sums):  # type: ignore[no-untyped-def]
    """Does what `add_up` does, but for order 2: sums (k, 2) has the words low <= w < high."""
    for i in range(len(links)):
        word = np.int64(links[i])
        if low <= word < high:
            count = counts[i]
            number = np.float64(count & _COUNT_BITS)
            spared = number if count & _PRUNED else discounts[min(np.int64(count), 3)]
            sums[word - low, 0] += spared
            sums[word - low, 1] += number


@kernel("out float64[:, :], out float32[:]")
def weights(sums, backoffs):  # type: ignore[no-untyped-def]
    """Computes the backoff weight of each context from its sums.

    Shapes
        sums      (k, 2)  float64  changed: column 0 becomes the weight, 1 if nothing follows
        backoffs  (k,)    float32  filled with the weights
    """
    for i in range(len(sums)):
        if sums[i, 1] > 0:
            sums[i, 0] /= sums[i, 1]
        else:
            sums[i, 0] = 1.0
        backoffs[i] = np.float32(sums[i, 0])


@kernel(
    "uint32[:], int64, uint32[:], uint32[:], float32[:], int64, int64, float64[:, :], "
    "float64[:], out float32[:]"
)
def probabilities(children, first_child, counts, links, lower, low, high, sums, discounts, out):  # type: ignore[no-untyped-def]
    """Computes the interpolated probabilities of the n-grams whose contexts are low <= c < high.

    Shapes
        children       (m + 1,)  uint32   ranks of the first children of n-grams of order n - 1
        first_child    int       rank of the first child in the following arrays
        counts, links  (c,)      uint32   of the children
        lower          (m,)      float32  probabilities of the n-grams of order n - 1
        sums           (k, 2)    float64  from rank `low` on, as `weights` leaves them
        discounts      (4,)      float64
        out            (c,)      float32  filled, except where an n-gram is left out of the model
    Paper  Chen and Goodman 1998, interpolated modified Kneser-Ney
    """
    children_, counts_, links_, out_ = raw(children), raw(counts), raw(links), raw(out)
    sums_ = raw(sums.reshape(2 * len(sums)))
    total = np.int64(len(links))
    for j in range(len(lower)):
        below = np.float64(lower[j])
        for i in range(
            np.int64(children_[j]) - first_child, np.int64(children_[j + 1]) - first_child
        ):
            if i + _AHEAD < total:
                later = np.int64(links_[i + _AHEAD])
                if low <= later < high:
                    prefetch(sums_, np.uint64(2 * (later - low)))
            link = np.int64(links_[i])
            count = counts_[i]
            if count & _PRUNED or link < low or link >= high:
                continue
            at = 2 * (link - low)
            own = (np.float64(count) - discounts[min(np.int64(count), 3)]) / sums_[at + 1]
            out_[i] = np.float32(own + sums_[at] * below)


@kernel("float32[:], out float32[:]")
def as_log10(values, out):  # type: ignore[no-untyped-def]
    """Computes the log10 of values (n,) in ARPA's form: at most 0, and LOG10_ZERO for 0."""
    for i in range(len(values)):
        value = np.float64(values[i])
        if value >= 1.0:
            out[i] = np.float32(0.0)
        elif value > 0.0:
            out[i] = np.float32(math.log10(value))
        else:
            out[i] = np.float32(LOG10_ZERO)


@kernel("uint32[:, :], uint32[:], int64, uint32[:], out uint32[:, :]")
def lengthen(parents, children, begin, words, out):  # type: ignore[no-untyped-def]
    """Derives the words of n-grams from the words of their parents.

    Shapes
        parents   (m, n - 1)  uint32  oldest word first
        children  (m + 1,)    uint32  ranks of the parents' first children
        begin     int         rank of the first n-gram that is asked for
        words     (c,)        uint32  leftmost word of each n-gram that is asked for
        out       (c, n)      uint32  filled
    """
    shorter = parents.shape[1]
    total = np.int64(len(words))
    for j in range(len(parents)):
        low = max(np.int64(children[j]) - begin, 0)
        for i in range(low, min(np.int64(children[j + 1]) - begin, total)):
            out[i, 0] = words[i]
            for k in range(shorter):
                out[i, k + 1] = parents[j, k]
