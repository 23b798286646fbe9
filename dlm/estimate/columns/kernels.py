"""Kernels that sort n-grams and find their prefixes and suffixes. They run without the GIL.

Rows of an order are in *prefix order*: by the oldest word, then the next, and so on. The n-grams of
one context are then adjacent, and contexts are sorted just as in the order below, so links to that
order are found by walking two sorted arrays side by side.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import kernel

# DO NOT CHANGE: the row of a suffix that the model lacks. Columns may be stored in files.
NO_ROW = np.uint32(0xFFFFFFFF)


@kernel("uint32[:, :]")
def first_unsorted(ids):  # type: ignore[no-untyped-def]
    """Returns the first row not above the previous row, or n, and whether both rows are equal."""
    n, k = ids.shape
    for i in range(1, n):
        j = 0
        while j < k and ids[i, j] == ids[i - 1, j]:
            j += 1
        if j == k:
            return i, True
        if ids[i, j] < ids[i - 1, j]:
            return i, False
    return n, False


@kernel("uint32[:, :], int64, out int64[:]")
def count_words(ids, column, begin):  # type: ignore[no-untyped-def]
    """Counts the rows of each word in one column; returns whether rows are sorted by that column.

    Shapes
        ids      (n, k)    uint32
        begin    (V + 1,)  int64   filled: where the rows of each word begin once they are sorted
    Trusts       ids < V, as ModelColumns.of checks
    """
    begin[:] = 0
    rising = True
    before = np.uint32(0)
    for i in range(len(ids)):
        word = ids[i, column]
        rising &= word >= before
        before = word
        begin[np.int64(word) + 1] += 1
    for w in range(1, len(begin)):
        begin[w] += begin[w - 1]
    return rising


@kernel("uint32[:, :], int64, out int64[:], uint32[:], out uint32[:]")
def scatter(ids, column, begin, place, out):  # type: ignore[no-untyped-def]
    """Sorts the rows `place` by one column, in a stable pass of a counting sort.

    Shapes
        begin       (V + 1,) int64   from `count_words`; advanced
        place, out  (n,)     uint32  row numbers, before and after the sort
    """
    for i in range(len(place)):
        row = place[i]
        word = ids[row, column]
        out[begin[word]] = row
        begin[word] += 1


@kernel(
    "uint32[:], uint32[:, :], float32[:], float32[:], out uint32[:, :], out float32[:], "
    "out float32[:]"
)
def permute(place, ids, log10_prob, log10_backoff, new_ids, new_prob, new_backoff):  # type: ignore[no-untyped-def]
    order = ids.shape[1]
    for i in range(len(place)):
        row = place[i]
        for j in range(order):
            new_ids[i, j] = ids[row, j]
        new_prob[i] = log10_prob[row]
        new_backoff[i] = log10_backoff[row]


@kernel("uint32[:, :], uint32[:, :], out uint32[:], out uint32[:]")
def link_prefixes(shorter, ids, prefix, first_child):  # type: ignore[no-untyped-def]
    """Finds the row of each n-gram's prefix, and the first n-gram that has each prefix.

    Shapes
        shorter      (m, k - 1) uint32  in prefix order
        ids          (n, k)     uint32  in prefix order
        prefix       (n,)       uint32  filled
        first_child  (m + 1,)   uint32  filled: first_child[i] is where the rows of prefix i begin
    Returns          n, or the first row whose prefix is missing
    """
    n, m, length = len(ids), len(shorter), ids.shape[1] - 1
    at = 0
    row = 0
    while row < n:
        while at < m:
            j = 0
            while j < length and shorter[at, j] == ids[row, j]:
                j += 1
            if j == length:
                break
            if shorter[at, j] > ids[row, j]:
                return row
            first_child[at] = row
            at += 1
        if at == m:
            return row
        first_child[at] = row
        same = True
        while same:
            prefix[row] = at
            row += 1
            same = row < n
            j = 0
            while same and j < length:
                same = ids[row, j] == ids[row - 1, j]
                j += 1
        at += 1
    while at <= m:
        first_child[at] = n
        at += 1
    return n


@kernel
def search_word(ids, low, high, word):  # type: ignore[no-untyped-def]
    """Finds the first row of low..high whose last word is not below `word`, by galloping; trusts
    that last words rise from low to high, as they do after one prefix."""
    last = ids.shape[1] - 1
    step = 1
    while low + step < high and ids[low + step - 1, last] < word:
        low += step
        step *= 2
    top = min(low + step, high)
    while low < top:
        middle = (low + top) >> 1
        if ids[middle, last] < word:
            low = middle + 1
        else:
            top = middle
    return low


@kernel("uint32[:, :], uint32[:], uint32[:], uint32[:, :], uint32[:], out uint32[:], int64, int64")
def link_suffixes(  # type: ignore[no-untyped-def]
    ids, first_child, context_suffix, shorter, shorter_child, suffix, begin, end
):
    """Finds the row of each n-gram's suffix, for order 3 or above and the contexts begin..end.

    Shapes, k the order
        ids             (n, k)      uint32
        first_child     (m + 1,)    uint32  where the n-grams of each context begin
        context_suffix  (m,)        uint32  the suffix of each context
        shorter         (m, k - 1)  uint32  the ids of the contexts, the n-grams of order k - 1
        shorter_child   (l + 1,)    uint32  first_child of the n-grams of order k - 2
        suffix          (n,)        uint32  filled; NO_ROW where it is missing
        begin, end      int64       rows of order k - 1
    Guarantees  only the n-grams that extend the suffix of an n-gram's context are searched
    """
    last = ids.shape[1] - 1
    for context in range(begin, end):
        here, stop = np.int64(first_child[context]), np.int64(first_child[context + 1])
        if here == stop:
            continue
        shared = context_suffix[context]
        if shared == NO_ROW:
            suffix[here:stop] = NO_ROW
            continue
        low = np.int64(shorter_child[shared])
        high = np.int64(shorter_child[np.int64(shared) + 1])
        for row in range(here, stop):
            word = ids[row, last]
            low = search_word(shorter, low, high, word)
            if low < high and shorter[low, last - 1] == word:
                suffix[row] = low
            else:
                suffix[row] = NO_ROW


@kernel("uint32[:], uint32[:], uint32[:], uint32[:, :], out uint32[:]")
def find_children(rows, words, first_child, ids, found):  # type: ignore[no-untyped-def]
    """Finds the row of each n-gram from the row of its prefix and its last word.

    Shapes
        rows         (n,)      uint32  NO_ROW where the prefix is missing
        words        (n,)      uint32
        first_child  (m + 1,)  uint32  of the order of the prefixes
        ids          (l, k)    uint32  of the order of the n-grams
        found        (n,)      uint32  filled; NO_ROW where the n-gram is missing
    Trusts           rows that are not NO_ROW are < m
    """
    last = ids.shape[1] - 1
    for i in range(len(rows)):
        found[i] = NO_ROW
        if rows[i] != NO_ROW:
            low = np.int64(first_child[rows[i]])
            high = np.int64(first_child[np.int64(rows[i]) + 1])
            low = search_word(ids, low, high, words[i])
            if low < high and ids[low, last] == words[i]:
                found[i] = low


@kernel("bool[:], out uint32[:]")
def places_of(keep, before):  # type: ignore[no-untyped-def]
    count = np.uint32(0)
    for row in range(len(keep)):
        before[row] = count
        count += np.uint32(keep[row])
    before[len(keep)] = count


@kernel("uint32[:, :], bool[:], out uint32[:, :]")
def take_rows(ids, keep, out):  # type: ignore[no-untyped-def]
    at = 0
    for row in range(len(ids)):
        if keep[row]:
            for i in range(ids.shape[1]):
                out[at, i] = ids[row, i]
            at += 1


@kernel("float32[:], bool[:], out float32[:]")
def take_values(values, keep, out):  # type: ignore[no-untyped-def]
    at = 0
    for row in range(len(values)):
        if keep[row]:
            out[at] = values[row]
            at += 1


@kernel("uint32[:], bool[:], uint32[:], out uint32[:]")
def take_links(links, keep, before, out):  # type: ignore[no-untyped-def]
    """Copies the links of the kept rows, renumbered to the new rows of their targets.

    Shapes
        links   (n,)      uint32  rows of the order below, or NO_ROW
        keep    (n,)      bool
        before  (m + 1,)  uint32  `places_of` the order below
        out     (kept,)   uint32  filled; NO_ROW where the target is not kept
    """
    at = 0
    for row in range(len(links)):
        if keep[row]:
            to = links[row]
            out[at] = NO_ROW
            if to != NO_ROW and before[np.int64(to) + 1] != before[to]:
                out[at] = before[to]
            at += 1


@kernel("uint32[:], out uint32[:]")
def count_children(prefix, first_child):  # type: ignore[no-untyped-def]
    """Fills first_child (m + 1,) of an order from the prefixes (n,) of the order above it."""
    first_child[:] = 0
    for row in range(len(prefix)):
        first_child[np.int64(prefix[row]) + 1] += np.uint32(1)
    for row in range(1, len(first_child)):
        first_child[row] += first_child[row - 1]
