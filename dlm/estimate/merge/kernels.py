"""Kernels for several models' n-grams side by side, and their mixture. They run without the GIL.

All models number words in the same way (`union.unite`) and are stored one after the other: `first`
has the first_child of an order of every model, `words` the last words of the order above, and the
two bases say where each model's entries begin. A *node* is an n-gram of the union, or a *blank*: a
suffix that the union lacks. The nodes of an order are in prefix order, like the rows of `columns`.

The row of a node in a model is found with unknown words replaced by <unk>, as in a query of that
model; `own` says that none was replaced.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import kernel

NO_ROW = np.uint32(0xFFFFFFFF)
LN_10 = math.log(10.0)

# Probability mass. If a context's sum differs from 1 by less than TOLERANCE, the cause is taken to
# be rounding in files; words whose sum is below LITTLE are not scaled up to fill a gap.
TOLERANCE = 2e-7
LITTLE = 1e-7
# What files store as the log10 of 0.
LOG10_ZERO = np.float32(-99.0)

_0, _1 = np.int64(0), np.int64(1)
_NO_WORD = np.int64(1 << 40)


@kernel
def _open_lists(models, context, row, first, first_base, word_base, at, stop):  # type: ignore[no-untyped-def]
    for i in range(models):
        at[i] = 0
        stop[i] = 0
        if row[i, context] != NO_ROW:
            place = first_base[i] + np.int64(row[i, context])
            at[i] = word_base[i] + np.int64(first[place])
            stop[i] = word_base[i] + np.int64(first[place + 1])


@kernel(
    "uint32[:, :], uint8[:, :], uint32[:], int64[:], int64[:], uint32[:], out int64[:], int64, "
    "int64"
)
def count_children(row, own, first, first_base, word_base, words, count, begin, end):  # type: ignore[no-untyped-def]
    """Counts the words that follow each context in any model that has the context.

    Shapes, m models (the last may be the blanks), c contexts
        row, own     (m, c)  uint32, uint8   of the contexts
        first        (.,)    uint32          of the order of the contexts, model after model
        first_base   (m,)    int64
        word_base    (m,)    int64
        words        (.,)    uint32          last words of the order above, model after model
        count        (c,)    int64           filled for contexts begin..end
    """
    models = row.shape[0]
    at, stop = np.zeros(models, np.int64), np.zeros(models, np.int64)
    for c in range(begin, end):
        _open_lists(models, c, row, first, first_base, word_base, at, stop)
        found = _0
        while True:
            least = _NO_WORD
            for i in range(models):
                if own[i, c] and at[i] < stop[i]:
                    least = min(least, np.int64(words[at[i]]))
            if least == _NO_WORD:
                break
            for i in range(models):
                if own[i, c] and at[i] < stop[i] and np.int64(words[at[i]]) == least:
                    at[i] += 1
            found += 1
        count[c] = found


@kernel(
    "uint32[:, :], uint8[:, :], uint32[:], int64[:], int64[:], uint32[:], uint8[:, :], "
    "uint32[:], uint32[:, :], out uint32[:, :], out uint32[:], out uint32[:, :], "
    "out uint8[:, :], int64, int64"
)
def place_children(  # type: ignore[no-untyped-def]
    row, own, first, first_base, word_base, words, known, first_child, ids_above,
    ids, prefix, child_row, child_own, begin, end,
):  # fmt: skip
    """Lays out the nodes of an order, with their rows in each model.

    Shapes as in `count_children`, and v words, n nodes of the order above
        known                 (m, v)      uint8   whether a model has the word
        first_child           (c + 1,)    uint32  where the children of each context go
        ids_above             (c, k - 1)  uint32  the contexts
        ids                   (n, k)      uint32  filled for children of begin..end, like the rest
        prefix                (n,)        uint32
        child_row, child_own  (m, n)      uint32, uint8
    """
    models = row.shape[0]
    k = ids.shape[1]
    at, stop = np.zeros(models, np.int64), np.zeros(models, np.int64)
    unknown = np.zeros(models, np.uint32)  # the row of (context, <unk>)
    for c in range(begin, end):
        node = np.int64(first_child[c])
        if np.int64(first_child[c + 1]) == node:
            continue
        _open_lists(models, c, row, first, first_base, word_base, at, stop)
        for i in range(models):
            unknown[i] = NO_ROW
            if at[i] < stop[i] and words[at[i]] == 0:
                unknown[i] = np.uint32(at[i] - word_base[i])
        while node < np.int64(first_child[c + 1]):
            least = _NO_WORD
            for i in range(models):
                if own[i, c] and at[i] < stop[i]:
                    least = min(least, np.int64(words[at[i]]))
            for i in range(models):
                child_row[i, node] = NO_ROW
                child_own[i, node] = 0
                if not known[i, least]:
                    child_row[i, node] = unknown[i]
                    continue
                while at[i] < stop[i] and np.int64(words[at[i]]) < least:
                    at[i] += 1
                if at[i] < stop[i] and np.int64(words[at[i]]) == least:
                    child_row[i, node] = np.uint32(at[i] - word_base[i])
                    child_own[i, node] = own[i, c]
                    at[i] += 1
            for j in range(k - 1):
                ids[node, j] = ids_above[c, j]
            ids[node, k - 1] = np.uint32(least)
            prefix[node] = np.uint32(c)
            node += 1


@kernel
def _power(log10_value):  # type: ignore[no-untyped-def]
    return math.exp(np.float64(log10_value) * LN_10)


@kernel(
    "float64[:], uint32[:, :], uint8[:, :], float32[:], int64[:], int64, out float64[:, :], "
    "out float64[:]"
)
def mix_words(weights, row, known, log10_prob, prob_base, begin_id, prob, mixed):  # type: ignore[no-untyped-def]
    """Computes the probability of each word, for order 1, in each model and in the mixture.

    Shapes, m models
        row, known  (m, v)    uint32, uint8
        log10_prob  (.,)      float32  of order 1, model after model, from prob_base (m,) on
        prob        (m, v)    float64  filled
        mixed       (v,)      float64  filled
    Returns         the sum of `mixed`, <s> left out
    """
    total = 0.0
    for w in range(prob.shape[1]):
        mixed[w] = 0.0
        for i in range(len(weights)):
            prob[i, w] = 0.0
            if known[i, w]:
                prob[i, w] = _power(log10_prob[prob_base[i] + np.int64(row[i, w])])
            mixed[w] += weights[i] * prob[i, w]
        if w != begin_id:
            total += mixed[w]
    return total


@kernel(
    "float64[:], int64, int64, uint8[:, :], uint32[:], uint32[:, :], uint8[:], float32[:], "
    "int64[:], float64[:, :], float64[:], uint32[:, :], uint32[:], uint32[:, :], uint8[:], "
    "float32[:], int64[:], out float64[:, :], out float64[:], out float64[:], int64, int64"
)
def mix_order(  # type: ignore[no-untyped-def]
    weights, begin_id, vocabulary_size, known,
    first_child, context_row, context_real, log10_backoff, backoff_base, prob_below, mixed_below,
    ids, suffix, row, real, log10_prob, prob_base, prob, mixed, backoff, begin, end,
):  # fmt: skip
    """Computes the probabilities of an order, and the backoff weights of its contexts.

    Shapes, m models, c contexts of order k - 1, n nodes of order k
        weights         (m,)      float64
        known           (m, v)    uint8    whether a model has the word
        first_child     (c + 1,)  uint32
        context_row     (m, c)    uint32   of the contexts in each model
        context_real    (c,)      uint8    0: a blank
        log10_backoff   (.,)      float32  of order k - 1, model after model, from backoff_base on
        prob_below      (m, c)    float64  of order k - 1, in each model
        mixed_below     (c,)      float64  of order k - 1, in the mixture
        ids             (n, k)    uint32
        suffix          (n,)      uint32   nodes of order k - 1
        row, real       (m, n), (n,)       as for the contexts
        log10_prob      (.,)      float32  of order k, model after model, from prob_base on
        prob            (m, n)    float64  filled for the children of begin..end
        mixed           (n,)      float64  filled
        backoff         (c,)      float64  filled for begin..end
    Returns
        how many contexts have a weight computed from 1 minus their sum, and how many were scaled
    Guarantees
        the mixture of a context sums to 1, within TOLERANCE and the error of shorter contexts
    """
    models = len(weights)
    last = ids.shape[1] - 1
    gamma = np.zeros(models, np.float64)
    below = np.zeros(models, np.float64)  # mass of the same words one order below
    lacking, scaled = _0, _0
    for c in range(begin, end):
        here, stop = np.int64(first_child[c]), np.int64(first_child[c + 1])
        backoff[c] = 1.0
        if here == stop:
            continue
        for i in range(models):
            gamma[i] = 1.0
            if context_row[i, c] != NO_ROW:
                gamma[i] = _power(log10_backoff[backoff_base[i] + np.int64(context_row[i, c])])
            below[i] = 0.0
        total, mixed_total = 0.0, 0.0
        children = 0
        for node in range(here, stop):
            word = np.int64(ids[node, last])
            shorter = np.int64(suffix[node])
            mixed[node] = 0.0
            for i in range(models):
                if not known[i, word]:
                    prob[i, node] = 0.0
                elif row[i, node] != NO_ROW:
                    prob[i, node] = _power(log10_prob[prob_base[i] + np.int64(row[i, node])])
                else:
                    prob[i, node] = gamma[i] * prob_below[i, shorter]
                mixed[node] += weights[i] * prob[i, node]
            if real[node] and word != begin_id:
                children += 1
                total += mixed[node]
                mixed_total += mixed_below[shorter]
                for i in range(models):
                    below[i] += prob_below[i, shorter]
        if context_real[c] and children:
            # The mass left for unlisted words is computed in two ways: from the models' own
            # weights, which keeps more digits, and as the difference from 1, which is always
            # right.
            own = 0.0
            for i in range(models):
                own += weights[i] * gamma[i] * (1.0 - below[i])
            left = own
            if not (abs(own - (1.0 - total)) <= TOLERANCE and own > 0.0):
                left = 1.0 - total
                lacking += 1
            room = 1.0 - mixed_total
            scale = 1.0
            if children == vocabulary_size:
                backoff[c] = 1.0  # no word is left to back off
                if abs(1.0 - total) > TOLERANCE:
                    scale = 1.0 / total
            elif room < LITTLE:
                room = max(room, 0.0)
                if abs(1.0 - total - room) > TOLERANCE:
                    scale = (1.0 - room) / total
            elif left > 0.0:
                backoff[c] = left / room
            else:
                backoff[c] = 0.0
                if total > 1.0 + TOLERANCE:
                    scale = 1.0 / total
            if scale != 1.0:
                scaled += 1
                for node in range(here, stop):
                    if real[node]:
                        mixed[node] *= scale
        for node in range(here, stop):
            if not real[node]:
                mixed[node] = backoff[c] * mixed_below[np.int64(suffix[node])]
    return lacking, scaled


@kernel("float64[:], out float32[:]")
def store(values, out):  # type: ignore[no-untyped-def]
    """Stores log10 of values (n,) in out (n,), and LOG10_ZERO for 0."""
    for j in range(len(values)):
        out[j] = LOG10_ZERO
        if values[j] > 0.0:
            out[j] = max(np.float32(math.log(values[j]) / LN_10), LOG10_ZERO)


@kernel("float64[:, :], float64[:], out float64[:]")
def expect(prob, weights, share):  # type: ignore[no-untyped-def]
    """Does a step of EM: computes the share of the tokens that each model accounts for.

    Shapes
        prob     (m, t)  float64  of each token in each model; no token has 0 in all models
        weights  (m,)    float64
        share    (m,)    float64  filled: mean of prob[i] / mixture, 1 or less at the maximum
    Returns      the mean ln of the mixture's probability
    """
    models, tokens = prob.shape
    share[:] = 0.0
    total = 0.0
    for t in range(tokens):
        mixture = 0.0
        for i in range(models):
            mixture += weights[i] * prob[i, t]
        total += math.log(mixture)
        for i in range(models):
            share[i] += prob[i, t] / mixture
    for i in range(models):
        share[i] /= tokens
    return total / tokens
