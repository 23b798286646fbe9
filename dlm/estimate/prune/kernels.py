"""The passes of relative-entropy pruning. The kernels use no Python objects, and release the GIL.

Values in files are log10 and float32; these kernels compute in natural logarithms and
float64. A *context* is a row of order k - 1, and its n-grams are the rows of order k that extend
it. `criterion.py` has the formulas in words; the rows are linked by `estimate.columns`, which the
kernels trust.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import kernel
from dlm.units import LN_10

NO_ROW = np.uint32(0xFFFFFFFF)
# A context that leaves no mass gets this log10 weight, since ARPA files cannot hold log10 of 0.
LEAST_LOG10 = np.float32(-99.0)


@kernel
def chain(log10_prob, prefix, ln_shorter, ln_history):  # type: ignore[no-untyped-def]
    """Computes ln P of each n-gram as a history: ln P of the prefix plus that of the last word.

    Shapes
        log10_prob  (n,)  float64 or float32
        prefix      (n,)  uint32
        ln_shorter  (m,)  float64  of order k - 1
        ln_history  (n,)  float64  filled
    """
    for row in range(len(prefix)):
        ln_history[row] = ln_shorter[prefix[row]] + LN_10 * log10_prob[row]


@kernel(
    "int64, int64, uint32[:], float64[:], uint32[:, :], float32[:], uint32[:], float32[:], "
    "int64[:], float64[:], int64, out float32[:]"
)
def score_contexts(  # type: ignore[no-untyped-def]
    begin,
    end,
    first_child,
    ln_history,
    ids,
    log10_prob,
    suffix,
    log10_shorter,
    orphan,
    orphan_log10,
    never,
    score,
):
    """Scores n-grams of some contexts by the relative entropy that pruning each one alone adds.

    Shapes, rows n of order k and m of order k - 1
        begin, end     int64            contexts
        first_child    (m + 1,) uint32
        ln_history     (m,)     float64 ln P of each context
        ids            (n, k)   uint32
        log10_prob     (n,)     float32
        suffix         (n,)     uint32
        log10_shorter  (m,)     float32 probabilities of order k - 1
        orphan         (o,)     int64   rows without a suffix, ascending
        orphan_log10   (o,)     float64 log10 P(w | h') of these rows
        never          int64            the id of the word that is never predicted, `<s>`, or -1
        score          (n,)     float32 filled for the n-grams of the contexts; >= 0, never -0.0
    Guarantees         0 where ln P of the context is -inf, inf where an n-gram has a probability
                       and backing off gives it none
    Paper              Stolcke 1998, equations 3 and 4, and alpha of section 3
    """
    last = ids.shape[1] - 1
    most = np.int64(0)
    for context in range(begin, end):
        most = max(most, np.int64(first_child[context + 1]) - np.int64(first_child[context]))
    prob = np.empty(most, np.float64)
    shorter = np.empty(most, np.float64)
    ln_shorter = np.empty(most, np.float64)
    at = np.int64(np.searchsorted(orphan, np.int64(first_child[begin]))) if end > begin else 0
    for context in range(begin, end):
        here, stop = np.int64(first_child[context]), np.int64(first_child[context + 1])
        if here == stop:
            continue
        # The probability left for backing off, at this order and at the order below.
        left, left_shorter = np.float64(1.0), np.float64(1.0)
        for row in range(here, stop):
            i = row - here
            if suffix[row] != NO_ROW:
                ln_shorter[i] = LN_10 * np.float64(log10_shorter[suffix[row]])
            else:
                ln_shorter[i] = LN_10 * orphan_log10[at]
                at += 1
            if np.int64(ids[row, last]) == never:
                prob[i] = 0.0
                shorter[i] = 0.0
                continue
            prob[i] = math.exp(LN_10 * np.float64(log10_prob[row]))
            shorter[i] = math.exp(ln_shorter[i])
            left -= prob[i]
            left_shorter -= shorter[i]
        p_history = math.exp(ln_history[context])
        some = left > 0.0 and left_shorter > 0.0
        ln_weight = math.log(left / left_shorter) if some else 0.0
        left, left_shorter = max(left, 0.0), max(left_shorter, 0.0)
        for row in range(here, stop):
            i = row - here
            if p_history == 0.0 or (prob[i] == 0.0 and shorter[i] == 0.0):
                score[row] = np.float32(0.0)
                continue
            if shorter[i] == 0.0:
                score[row] = np.float32(np.inf)
                continue
            if some:
                # ln alpha' - ln alpha; log1p loses no digits where its argument is small.
                change = math.log1p(prob[i] / left) - math.log1p(shorter[i] / left_shorter)
                rest = left * change
                ln_new = ln_weight + change
            elif left + prob[i] > 0.0:
                # Before pruning, nothing backs off, so only this n-gram's probability changes.
                ln_new = math.log((left + prob[i]) / (left_shorter + shorter[i]))
                rest = 0.0
            else:
                ln_new = -np.inf
                rest = 0.0
            moved = 0.0
            if prob[i] > 0.0:
                moved = prob[i] * (ln_shorter[i] + ln_new - LN_10 * np.float64(log10_prob[row]))
            grown = -p_history * (moved + rest)
            # max() could give -0.0, whose bits lie above the bits of every other score.
            score[row] = np.float32(grown if grown > 0.0 else 0.0)


@kernel("float32[:], uint32[:], out float32[:]")
def raise_to(score, link, shorter):  # type: ignore[no-untyped-def]
    """Raises scores so that no n-gram scores less than one of which it is the prefix or suffix.

    Shapes
        score    (n,)  float32
        link     (n,)  uint32   rows of order k - 1, or NO_ROW
        shorter  (m,)  float32  scores of order k - 1, raised
    """
    for row in range(len(score)):
        to = link[row]
        if to != NO_ROW and score[row] > shorter[to]:
            shorter[to] = score[row]


@kernel("uint32[:], int64, int64, out int64[:]")
def count_leading(score, leading, bits, count):  # type: ignore[no-untyped-def]
    """Counts, by their lowest 16 bits, the scores whose upper bits are `leading`.

    Shapes
        score    (n,)      uint32  the bits of float32 values >= 0, which sort like the values
        leading  int64     the upper bits, or -1 to count all scores by their upper 16 bits
        bits     int64     how many bits lie below `leading`
        count    (2**16,)  int64   added to
    """
    for i in range(len(score)):
        value = np.int64(score[i])
        if leading < 0:
            count[value >> 16] += 1
        elif value >> bits == leading:
            count[value & 0xFFFF] += 1


@kernel("float32[:], float32, int64, out bool[:]")
def keep_above(score, least, ties, keep):  # type: ignore[no-untyped-def]
    """Marks scores above `least`, and the first `ties` at `least`; returns (marked, ties left)."""
    kept = 0
    for i in range(len(score)):
        keep[i] = score[i] > least
        if score[i] == least and ties > 0:
            keep[i] = True
            ties -= 1
        kept += keep[i]
    return kept, ties


@kernel(
    "int64, int64, uint32[:], uint32[:, :], float32[:], float32[:], uint32[:], bool[:], "
    "bool[:], float64[:], int64[:], float64[:], bool[:], int64, float64[:], out float32[:], "
    "out float64[:]"
)
def weigh_contexts(  # type: ignore[no-untyped-def]
    begin,
    end,
    first_child,
    ids,
    log10_prob,
    log10_backoff,
    suffix,
    keep,
    keep_shorter,
    log10_shorter,
    orphan,
    orphan_log10,
    orphan_moved,
    never,
    total_shorter,
    weight,
    total,
):
    """Computes new back-off weights of some contexts, so that each context sums to 1 over words.

    The mass that a context leaves is divided by what its listed words leave of the distribution
    below. That distribution sums to 1 only as far as float32 allows, which matters for a context
    that lists nearly every word, so the exact sums are kept.

    Shapes, as in `score_contexts`, and
        log10_backoff  (m,)  float32  weights before
        keep           (n,)  bool     which n-grams are kept
        keep_shorter   (m,)  bool     which n-grams of order k - 1 are kept
        log10_shorter  (m,)  float64  probabilities of order k - 1 in the pruned model, of all of
                                      its rows, kept or not
        orphan_moved   (o,)  bool     whether P(w | h') differs from before
        total_shorter  (m,)  float64  the sum over all words after the h' of each context
        weight         (m,)  float32  filled: log10; 0 if no n-gram of the context is kept, or
                                      the context is not kept
        total          (m,)  float64  filled: the sum over all words after each context
    Returns     the number of contexts that leave no mass to back off with, though words are left
    Guarantees  a context in which nothing changed keeps its weight to the bit
    """
    last = ids.shape[1] - 1
    without = 0
    at = np.int64(np.searchsorted(orphan, np.int64(first_child[begin]))) if end > begin else 0
    for context in range(begin, end):
        here, stop = np.int64(first_child[context]), np.int64(first_child[context + 1])
        left, left_shorter = np.float64(1.0), np.float64(total_shorter[context])
        kept, changed = 0, False
        for row in range(here, stop):
            if suffix[row] != NO_ROW:
                shorter = log10_shorter[suffix[row]]
                moved = not keep_shorter[suffix[row]]
            else:
                shorter = orphan_log10[at]
                moved = orphan_moved[at]
                at += 1
            if not keep[row]:
                changed = True
                continue
            kept += 1
            changed |= moved
            if np.int64(ids[row, last]) != never:
                left -= math.exp(LN_10 * np.float64(log10_prob[row]))
                left_shorter -= math.exp(LN_10 * shorter)
        if not keep_shorter[context]:
            weight[context] = np.float32(0.0)
        elif not changed:
            weight[context] = log10_backoff[context]
        elif kept == 0:
            weight[context] = np.float32(0.0)
        elif left_shorter <= 0.0:
            # Every word is listed, so the weight is never used.
            weight[context] = log10_backoff[context]
        elif left <= 0.0:
            weight[context] = LEAST_LOG10
            without += 1
        else:
            weight[context] = np.float32(
                max(math.log(left / left_shorter) / LN_10, np.float64(LEAST_LOG10))
            )
        backed_off = math.exp(LN_10 * np.float64(weight[context])) * max(left_shorter, 0.0)
        total[context] = 1.0 - left + backed_off
    return without


@kernel(
    "float32[:], uint32[:], uint32[:], bool[:], float32[:], float64[:], int64[:], float64[:], "
    "out float64[:]"
)
def new_probs(  # type: ignore[no-untyped-def]
    log10_prob, prefix, suffix, keep, weight, log10_shorter, orphan, orphan_log10, out
):
    """Computes log10 P of each n-gram in the pruned model, from its own value or by backing off.

    Shapes, as in `weigh_contexts`, and
        out  (n,)  float64  filled
    """
    at = np.int64(0)
    for row in range(len(log10_prob)):
        if suffix[row] != NO_ROW:
            shorter = log10_shorter[suffix[row]]
        else:
            shorter = orphan_log10[at]
            at += 1
        if keep[row]:
            out[row] = log10_prob[row]
        else:
            out[row] = np.float64(weight[prefix[row]]) + shorter


@kernel("float64[:], uint32[:], out float64[:]")
def gather(values, rows, out):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        out[i] = values[rows[i]] if rows[i] != NO_ROW else 0.0


@kernel("float32[:], bool[:]")
def sum_dropped(score, keep):  # type: ignore[no-untyped-def]
    total = np.float64(0.0)
    for row in range(len(score)):
        if not keep[row]:
            total += np.float64(score[row])
    return total
