"""Grouping queries: the client's share of numeric work, without Python objects."""

from __future__ import annotations

import numpy as np
from numba import njit

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def group_queries(contexts, lengths, words):  # type: ignore[no-untyped-def]
    """Groups queries by context and drops repeats, in the order of first appearance.

    Shapes
        contexts  (Q, W)  uint32  most recent word in the last column; unused columns come first
        lengths   (Q,)    uint8   words of each context, at most W
        words     (Q,)    uint32
    Returns
        row       (C,)    int64   a query that has the context of group c
        counts    (C,)    uint32  distinct words asked of group c
        asked     (U,)    uint32  the words, group after group
        place     (Q,)    int64   where in `asked` each query's word stands
    Cost      two hash tables, O(Q * W)
    Trusts    lengths <= W: checked in lowgrams.check_queries
    """
    queries = len(words)
    width = contexts.shape[1]
    size = 16
    while size < 2 * queries:
        size *= 2
    mask = np.uint64(size - 1)
    context_table = np.full(size, -1, np.int64)
    query_table = np.full(size, -1, np.int64)
    row = np.empty(queries, np.int64)
    group_hash = np.empty(queries, np.uint64)
    counts = np.zeros(queries, np.uint32)
    unique_group = np.empty(queries, np.int64)
    unique_word = np.empty(queries, np.uint32)
    unique_of = np.empty(queries, np.int64)
    groups = np.int64(0)
    uniques = 0
    group = np.int64(-1)
    for q in range(queries):
        length = np.int64(lengths[q])
        same = group >= 0 and np.int64(lengths[row[group]]) == length
        if same:
            for j in range(width - length, width):
                if contexts[q, j] != contexts[row[group], j]:
                    same = False
                    break
        if not same:
            h = np.uint64(length)
            for j in range(width - length, width):
                h = (h ^ np.uint64(contexts[q, j])) * _MULTIPLIER
                h ^= h >> np.uint64(29)
            at = h & mask
            while True:
                group = context_table[at]
                if group < 0:
                    group = groups
                    context_table[at] = group
                    row[group] = q
                    group_hash[group] = h
                    groups += 1
                    break
                if group_hash[group] == h and np.int64(lengths[row[group]]) == length:
                    equal = True
                    for j in range(width - length, width):
                        if contexts[q, j] != contexts[row[group], j]:
                            equal = False
                            break
                    if equal:
                        break
                at = (at + np.uint64(1)) & mask
        word = words[q]
        h = (np.uint64(group) * _MULTIPLIER ^ np.uint64(word)) * _MULTIPLIER
        at = (h ^ (h >> np.uint64(29))) & mask
        while True:
            u = query_table[at]
            if u < 0:
                u = uniques
                query_table[at] = u
                unique_group[u] = group
                unique_word[u] = word
                counts[group] += np.uint32(1)
                uniques += 1
                break
            if unique_group[u] == group and unique_word[u] == word:
                break
            at = (at + np.uint64(1)) & mask
        unique_of[q] = u
    cursor = np.zeros(groups + 1, np.int64)
    for g in range(groups):
        cursor[g + 1] = cursor[g] + np.int64(counts[g])
    asked = np.empty(uniques, np.uint32)
    place_of = np.empty(uniques, np.int64)
    for u in range(uniques):
        at_group = cursor[unique_group[u]]
        place_of[u] = at_group
        asked[at_group] = unique_word[u]
        cursor[unique_group[u]] = at_group + 1
    place = np.empty(queries, np.int64)
    for q in range(queries):
        place[q] = place_of[unique_of[q]]
    return row[:groups].copy(), counts[:groups].copy(), asked, place
