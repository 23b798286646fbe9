"""Kernels for counts along suffixes, and for the KL step of a context. They run without the GIL.

A context's n-grams are contiguous (`OrderColumns`), and so are those of each of its children, the
contexts one word longer that back off to it. The suffixes of a child's n-grams are n-grams of the
context. So one context's problem reads and writes only a few ranges of the arrays.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel

# Leftover mass below this is computed as a sum, not as a difference from 1.
_LITTLE = 1e-9
# Rounding errors of sums of visits, as a share of the sums. Smaller differences are not
# significant.
ROUNDING = 1e-11
# After this many steps, only words with almost no counts still change.
_SLOW = 256
_LEAST = 1e-99  # the lowest probability in an ARPA file
_LN_LEAST = -227.955924206411  # natural logarithm of _LEAST


@kernel("float64[:], uint32[:], out float64[:]")
def add_at(values, place, total):  # type: ignore[no-untyped-def]
    """Adds values[i] to total[place[i]]; trusts that places are below the size of `total`."""
    for i in range(len(values)):
        total[place[i]] += values[i]


@kernel("float64[:], uint32[:], uint32[:], out float64[:]")
def subtract_from_prefix(values, prefix, suffix, total):  # type: ignore[no-untyped-def]
    """Subtracts values[prefix[i]] from total[suffix[i]], since listed words do not back off."""
    for i in range(len(prefix)):
        total[suffix[i]] -= values[prefix[i]]


@kernel(
    "float32[:, :], float64[:], uint32[:], uint32[:], uint32[:], out float64[:], out float64[:]"
)
def add_given(  # type: ignore[no-untyped-def]
    given, total, rows, first_child, words, ngrams, contexts
):
    """Adds a source's distribution after each history to the counts of the history's last context.

    A distribution is divided by its sum, or a rounding error would count as mass of unlisted words.

    Shapes, b histories, contexts of length k
        given        (b, v)    float32  distribution after each history
        total        (b,)      float64  sum of each distribution
        rows         (b,)      uint32   context of length k that ends each history, or NO_ROW
        first_child  (m + 1,)  uint32   where each context's n-grams of order k + 1 begin
        words        (n,)      uint32   last words of the n-grams of order k + 1
        ngrams       (n,)      float64  counts of these n-grams; added to
        contexts     (m,)      float64  counts of the contexts; added to
    Trusts           words < v
    """
    for b in range(len(rows)):
        row = np.int64(rows[b])
        if row < len(contexts):
            contexts[row] += 1.0
            for e in range(first_child[row], first_child[row + 1]):
                ngrams[e] += given[b, words[e]] / total[b]


@kernel("float32[:, :], float64[:], out uint32[:]")
def draw(given, at, drawn):  # type: ignore[no-untyped-def]
    """Draws a word from each distribution: the first whose cumulative probability exceeds `at`.

    Shapes
        given  (b, v)  float32  rows sum to 1, or nearly
        at     (b,)    float64  0 <= at < 1
        drawn  (b,)    uint32   filled with words whose probability is above 0
    """
    for b in range(len(at)):
        left = at[b]
        word = 0
        for w in range(given.shape[1]):
            if given[b, w] > 0.0:
                word = w
                left -= given[b, w]
                if left < 0.0:
                    break
        drawn[b] = word


@kernel("uint32[:], out int64[:], out uint32[:]")
def group_by(place, begin, rows):  # type: ignore[no-untyped-def]
    """Groups rows by place: those of place p are rows[begin[p]:begin[p + 1]].

    Shapes
        place  (n,)      uint32
        begin  (m + 1,)  int64   filled
        rows   (n,)      uint32  filled, increasing within a place
    """
    begin[:] = 0
    for i in range(len(place)):
        begin[np.int64(place[i]) + 1] += 1
    for p in range(1, len(begin)):
        begin[p] += begin[p - 1]
    for i in range(len(place)):
        p = place[i]
        rows[begin[p]] = i
        begin[p] += 1
    for p in range(len(begin) - 1, 0, -1):
        begin[p] = begin[p - 1]
    begin[0] = 0


@kernel("float64[:], float64, uint32[:], int64, int64, int64")
def sum_unlisted(values, back, suffix, begin, end, first):  # type: ignore[no-untyped-def]
    """Returns `back` plus the values of words that a child does not list; see `left_over`."""
    i = begin
    for word in range(len(values)):
        if i < end and np.int64(suffix[i]) - first == word:
            i += 1
        else:
            back += values[word]
    return back


@kernel("float64[:], float64, uint32[:], int64, int64, int64")
def left_over(prob, prob_back, suffix, begin, end, first):  # type: ignore[no-untyped-def]
    """Returns the probability of all words that a child does not list.

    Shapes
        prob        (n,)  float64  probabilities of the words that a context lists
        prob_back   probability of all other words: 1 minus the sum of prob
        suffix      entries begin..end, minus `first`: places in `prob` of the child's words, rising
    """
    listed = 0.0
    for i in range(begin, end):
        listed += prob[np.int64(suffix[i]) - first]
    left = 1.0 - listed
    if left > _LITTLE:
        return left
    return sum_unlisted(prob, prob_back, suffix, begin, end, first)


@kernel(
    "uint32[:], uint32[:], uint32[:], uint32[:], float64[:], float64[:], float64[:], float64[:], "
    "out float64[:]"
)
def cap_backed(  # type: ignore[no-untyped-def]
    parent, parent_first, first_child, suffix, found, parent_backed, parent_visited, visited, backed
):
    """Caps counts of backed-off visits that are so small that they may be rounding errors.

    A context that lists almost all mass backs off a difference of two large sums. If that is within
    rounding, the cap is the context's share, by visits, of its parent's mass on unlisted words.

    Shapes, contexts of length k >= 1
        parent          (m,)      uint32   the context that each backs off to
        parent_first    (p + 1,)  uint32   where each parent's n-grams of order k begin
        first_child     (m + 1,)  uint32   where each context's n-grams of order k + 1 begin
        suffix          (n,)      uint32   suffixes of the n-grams of order k + 1
        found           (l,)      float64  C(w, h) of the n-grams of order k
        parent_backed, parent_visited  (p,)  float64  C(phi, h), all visits
        visited         (m,)      float64  all visits
        backed          (m,)      float64  C(phi, h), lowered
    Returns             how many visits were taken from `backed` in all
    """
    removed = 0.0
    for q in range(len(backed)):
        if backed[q] <= 0.0 or backed[q] > ROUNDING * visited[q]:
            continue
        p = np.int64(parent[q])
        first = np.int64(parent_first[p])
        there = found[first : np.int64(parent_first[p + 1])]
        begin, end = np.int64(first_child[q]), np.int64(first_child[q + 1])
        unlisted = sum_unlisted(there, parent_backed[p], suffix, begin, end, first)
        most = unlisted * (visited[q] / parent_visited[p])
        if backed[q] > most:
            removed += backed[q] - most
            backed[q] = most
    return removed


@kernel(
    "float64[:], float64, float64[:], float64, float64[:], float64[:], float64, float64, float64"
)
def excess_bound(  # type: ignore[no-untyped-def]
    y, y_back, counts, back, taken, sharp, weight, sharp_weight, full
):
    """Upper bound, in nats, on the best distribution's gain over y; arguments as in `fit_contexts`.

    The likelihood of choices from offered sets A with counts n(A) is concave in ln y. Its dual is
    the entropy of flows: n(A) p(w | A) flows from set A to word w, and C(w) in total to w. Flows of
    y match the counts except for a residue, which the set of all words takes up; if negative,
    it costs ln(y / lowest probability) per visit. The gap is sum over A of n(A) KL(flow || y on A).
    """
    total, lost = 0.0, 0.0
    for i in range(len(y) + 1):
        if i < len(y):
            value, offered = y[i], max(weight - taken[i], full) + sharp[i]
            flow = counts[i] - value * (offered - full)
        else:
            value, offered = y_back, weight + sharp_weight
            flow = back - value * (offered - full)
        if flow > 0.0:
            total += flow
            lost += flow * np.log(flow / max(value, _LEAST))
        elif value > 0.0:
            lost -= flow * (np.log(max(value, _LEAST)) - _LN_LEAST)
    if total > 0.0:
        lost -= total * np.log(total)
    return max(lost, 0.0)


@kernel(
    "int64, int64, uint32[:], int64[:], uint32[:], uint32[:], uint32[:], float64[:], float64[:], "
    "float64[:], float64[:], float64[:], float64[:], float64[:], float64[:], float64, float64, "
    "int64, out float64[:], out float64[:], out int64[:], out float64[:], out float64[:]"
)
def fit_contexts(  # type: ignore[no-untyped-def]
    begin,
    end,
    first_child,
    child_begin,
    children,
    grandchild,
    suffix,
    found,
    backed,
    direct,
    child_backed,
    visited,
    prior,
    prior_prob,
    prior_back,
    tolerance,
    enough,
    most,
    prob,
    prob_back,
    iterations,
    residual,
    excess,
):
    """Fits the distributions of contexts begin..end by least relative entropy.

    A distribution maximises, by minorisation and maximisation (Hunter 2004), the likelihood that a
    word is chosen among the words on offer: all words, or the words that a child does not list.

    Shapes, contexts of length k, n-grams of order k + 1 and children of length k + 1
        first_child     (m + 1,)  uint32   where each context's n-grams begin
        child_begin     (m + 1,)  int64    where each context's entries in `children` begin
        children        (n,)      uint32   children, grouped by the context that they back off to
        grandchild      (n + 1,)  uint32   where each child's n-grams begin
        suffix          (l,)      uint32   suffix, of order k + 1, of each child's n-gram
        found           (n,)      float64  C(w, h)
        backed, direct, visited  (m,) float64  C(phi, h), visits that begin here, all visits
        child_backed    (n,)      float64  C(phi, h) of the children
        prior           (m,)      float64  visits to add to a visited context
        prior_prob      (n,)      float64  share of an added visit for each n-gram
        prior_back      (m,)      float64  share of an added visit for words not listed
        tolerance       float64   error of moment matching, as a share of the context's counts
        enough          float64   excess in nats at which a slow context stops
        most            int64     most steps
        prob            (n,)      float64  filled; nan in contexts that were never visited
        prob_back       (m,)      float64  filled: probability of words not listed
        iterations      (m,)      int64    filled
        residual        (m,)      float64  filled: error of moment matching, at the end
        excess          (m,)      float64  filled: upper bound on the nats below the best
                                     likelihood; 0 if all counts are rounding errors
    """
    for q in range(begin, end):
        first, last = np.int64(first_child[q]), np.int64(first_child[q + 1])
        size = last - first
        iterations[q] = 0
        residual[q] = 0.0
        excess[q] = 0.0
        if visited[q] <= 0.0:
            prob[first:last] = np.nan
            prob_back[q] = np.nan
            continue
        y = prob[first:last]
        counts = np.empty(size)
        total = 0.0
        for i in range(size):
            counts[i] = found[first + i] + prior[q] * prior_prob[first + i]
            total += counts[i]
        back = backed[q] + prior[q] * prior_back[q]
        total += back
        if total <= 0.0:
            prob[first:last] = np.nan
            prob_back[q] = np.nan
            continue
        for i in range(size):
            y[i] = counts[i] / total
        y_back = back / total
        taken, sharp = np.empty(size), np.empty(size)
        has_children = False
        full = direct[q] + prior[q]  # visits that offer every word
        for c in range(child_begin[q], child_begin[q + 1]):
            child = np.int64(children[c])
            if grandchild[child] == grandchild[child + 1]:
                full += child_backed[child]
            else:
                has_children |= child_backed[child] > 0.0
        steps = 0
        while has_children:
            taken[:] = 0.0
            sharp[:] = 0.0
            weight, sharp_weight = full, 0.0
            for c in range(child_begin[q], child_begin[q + 1]):
                child = np.int64(children[c])
                i, j = np.int64(grandchild[child]), np.int64(grandchild[child + 1])
                if child_backed[child] > 0.0 and i < j:
                    left = left_over(y, y_back, suffix, i, j, first)
                    if left <= _LEAST:
                        continue  # the child lists every word: what it backs off is rounding
                    rate = child_backed[child] / left
                    if left > _LITTLE:
                        weight += rate
                        for e in range(i, j):
                            taken[np.int64(suffix[e]) - first] += rate
                        continue
                    # This rate is so high that weight - taken would lose other rates to rounding.
                    sharp_weight += rate
                    for word in range(size):
                        if i < j and np.int64(suffix[i]) - first == word:
                            i += 1
                        else:
                            sharp[word] += rate
            if weight + sharp_weight <= 0.0:
                break
            off = 0.0
            for i in range(size):
                offered = max(weight - taken[i], full) + sharp[i]
                if offered > 0.0:  # else, the word is never offered: its count is a rounding error
                    off = max(off, abs(y[i] * offered - counts[i]))
            off = max(off, abs(y_back * (weight + sharp_weight) - back)) / total
            residual[q] = off
            ends = off <= tolerance or steps == most
            if ends or steps % _SLOW == _SLOW - 1:
                excess[q] = excess_bound(
                    y, y_back, counts, back, taken, sharp, weight, sharp_weight, full
                )
                if ends or excess[q] <= enough:
                    break
            steps += 1
            sum_now = 0.0
            for i in range(size):
                offered = max(weight - taken[i], full) + sharp[i]
                y[i] = counts[i] / offered if counts[i] > 0.0 and offered > 0.0 else 0.0
                sum_now += y[i]
            y_back = back / (weight + sharp_weight)
            sum_now += y_back
            if sum_now <= 0.0:  # all counts are due to rounding
                for i in range(size):
                    y[i] = counts[i] / total
                y_back = back / total
                break
            for i in range(size):
                y[i] /= sum_now
            y_back /= sum_now
        iterations[q] = steps
        prob_back[q] = y_back


@kernel(
    "uint32[:], uint32[:], uint32[:], uint32[:], float64[:], float64[:], out float64[:], "
    "out float64[:], out float64[:]"
)
def weigh(  # type: ignore[no-untyped-def]
    parent, parent_first, first_child, suffix, below, below_back, prob, prob_back, weight
):
    """Computes backoff weights: leftover mass of a context / its parent's mass on the same words.

    A context that was never visited copies its parent's probabilities.

    Shapes as in `cap_backed`, and
        below       (l,)  float64  P of the n-grams of order k
        below_back  (p,)  float64  leftover mass of the parents
        prob        (n,)  float64  P of the n-grams of order k + 1; nan is filled in
        prob_back   (m,)  float64  leftover mass of the contexts; nan is filled in
        weight      (m,)  float64  filled; 0 where nothing is left
    """
    for q in range(len(weight)):
        p = np.int64(parent[q])
        begin, end = np.int64(first_child[q]), np.int64(first_child[q + 1])
        first = np.int64(parent_first[p])
        listed = below[first : np.int64(parent_first[p + 1])]
        left = left_over(listed, below_back[p], suffix, begin, end, first)
        if np.isnan(prob_back[q]):
            for e in range(begin, end):
                prob[e] = below[suffix[e]]
            prob_back[q] = left
            weight[q] = 1.0
        else:
            weight[q] = prob_back[q] / left if left > 0.0 else 0.0


@kernel(
    "uint32[:], uint32[:], uint32[:], uint32[:], float64[:], float64[:], out float64[:], "
    "out float64[:], out float64[:]"
)
def normalise(  # type: ignore[no-untyped-def]
    parent, parent_first, first_child, suffix, below, below_back, prob, weight, prob_back
):
    """Divides each context's distribution by its sum, which a file's rounding has moved off 1.

    Shapes as in `weigh`, but for
        weight     (m,)  float64  backoff weights; divided as well
        prob_back  (m,)  float64  filled: leftover mass of the contexts
    """
    for q in range(len(weight)):
        p = np.int64(parent[q])
        begin, end = np.int64(first_child[q]), np.int64(first_child[q + 1])
        first = np.int64(parent_first[p])
        listed = below[first : np.int64(parent_first[p + 1])]
        left = left_over(listed, below_back[p], suffix, begin, end, first)
        total = weight[q] * left
        for e in range(begin, end):
            total += prob[e]
        if total > 0.0:
            for e in range(begin, end):
                prob[e] /= total
            weight[q] /= total
        prob_back[q] = weight[q] * left
