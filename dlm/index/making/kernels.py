"""The kernels of the streaming builder, which turn blocks of rows into blocks of rows.

A kernel returns when it needs another block, or room for output, and says which; it is then called
again. `at` and other arrays keep its progress.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.kernels import slot_of
from dlm.ngram.memory_kernels import mirrored

# What `join` and `route` return.
DONE, FULL, ROWS, SUFFIXES, ENTRIES, PAIRS = -1, 0, 1, 2, 3, 4
PARENTS, PARENT_KEYS, NODES, LIST = 1, 2, 3, 4

# Indices into the array `at` of `join`.
(
    A, Q, X, P, E, D, R, PHASE, BLANK, CHILDREN, FOLLOWING, PROB, BACKOFF, HELD, HELD_CHILDREN,
    HELD_RANK, GROUP, GROUP_COUNT, NUMBER, BLANKS, TWICE, MISSING, SLOT_U, SLOT_V, SLOT, TWICE_KEPT,
    MISSING_KEPT,
) = range(27)  # fmt: skip
JOIN_STATE = 27

BLANK_CODE = 0x7FFFFFFF  # no probability has these bits, which are a NaN's


@kernel("uint32[:, :], uint32[:], uint32[:], int64, out uint32[:, :]")
def suffix_rows(ids, prob, backoff, key_bits, out):  # type: ignore[no-untyped-def]
    """Fills rows (n, k + 2) from n-grams (n, k), k >= 2: words in suffix order, then value bits."""
    k = ids.shape[1]
    for i in range(len(ids)):
        out[i, 0] = ids[i, k - 2]
        out[i, 1] = np.uint32(mirrored(np.int64(ids[i, k - 1]), key_bits))
        for j in range(2, k):
            out[i, j] = np.uint32(mirrored(np.int64(ids[i, k - 1 - j]), key_bits))
        out[i, k] = prob[i]
        out[i, k + 1] = backoff[i]


@inlined
def _compare(x, i, y, j, width):  # type: ignore[no-untyped-def]
    """Returns -1, 0 or 1: row i of x is below, equal to or above row j of y in `width` columns."""
    for c in range(width):
        if x[i, c] != y[j, c]:
            return -1 if x[i, c] < y[j, c] else 1
    return 0


@kernel(
    "int64, bool, uint32[:, :], uint32[:, :], uint32[:, :], uint32[:, :], bool[:], out "
    "int64[:], out uint32[:], out uint32[:], out uint32[:, :], out uint32[:, :], out uint32[:, "
    ":], out int64[:], out uint32[:, :], out uint32[:, :], int64, int64, int64"
)
def join(  # type: ignore[no-untyped-def]
    k,
    top,
    rows,
    suffixes,
    entries,
    pairs,
    ended,
    at,
    current,
    held,
    out_entries,
    out_nodes,
    out_suffixes,
    load,
    twice,
    missing,
    key_bits,
    node_bytes,
    gram_bytes,
):
    """Makes order k, with blanks and flags, from three sorted streams (`suffixes` in suffix order).

    Args    k, top   the order, and whether it is the highest
            ended    (5,) by the stream's number: whether its current block is the last
            node_bytes, gram_bytes  what a node and an n-gram add to the load of their slot
    Shapes
        rows      (n, k + 2)  k-grams of the file in suffix order, bits of probability and weight
        suffixes  (n, k + 1)  distinct k-grams that order k + 1 requires; nodes below each
        entries   (n, > k + 1) order k + 1 in list order; its last column the value, see below
        pairs     (n, 4)      the 2-grams of the file in suffix order, where k is 3
        at        (JOIN_STATE,);  current, held (k,): the current n-gram, and the current suffix
        out_entries    k > 3: (n, k + 1) list order, value;  k = 3: (n, 5), with the place in the
                       list of 2-grams before the value;  k = 2: (n, 4) suffix order, bits of the
                       probability, and 1 extended | 2 node | 4 blank
        out_nodes      (n, 5) key of the oldest word (k = 2: number of the pair), bits of the
                       weight, nodes below, n-grams following, slot
        out_suffixes   (n, k) like `suffixes`, one order down;  load (4096,)
        twice, missing (m, k) repeated n-grams; contexts that are not n-grams of the file
    Returns      FULL, or the number of the stream whose block is used up, or DONE

    A value holds the probability's bits without the sign and, as its lowest bit, whether the n-gram
    is extended; a blank has BLANK_CODE in place of a probability.
    """
    while True:
        if at[PHASE] == 0:
            if at[E] >= len(out_entries) or at[D] >= len(out_nodes) or at[R] >= len(out_suffixes):
                return FULL
            if at[A] >= len(rows) and not ended[ROWS]:
                return ROWS
            if at[Q] >= len(suffixes) and not ended[SUFFIXES]:
                return SUFFIXES
            has_row = at[A] < len(rows)
            has_suffix = at[Q] < len(suffixes)
            if not has_row and not has_suffix:
                while at[X] < len(entries):  # contexts after the last n-gram
                    _note_missing(at, entries, missing, k)
                    at[X] += 1
                if not ended[ENTRIES]:
                    return ENTRIES
                if at[HELD]:
                    _put_suffix(at, held, out_suffixes, k)
                    at[HELD] = 0
                return DONE
            order = 0
            if has_row and has_suffix:
                order = _compare(rows, at[A], suffixes, at[Q], k)
            elif has_row:
                order = -1
            else:
                order = 1
            at[CHILDREN] = 0
            at[FOLLOWING] = 0
            if order <= 0:
                for c in range(k):
                    current[c] = rows[at[A], c]
                at[PROB] = rows[at[A], k]
                at[BACKOFF] = rows[at[A], k + 1]
                at[BLANK] = 0
                at[A] += 1
            else:
                for c in range(k):
                    current[c] = suffixes[at[Q], c]
                at[PROB] = 0
                at[BACKOFF] = 0
                at[BLANK] = 1
                at[BLANKS] += 1
            if order >= 0:
                at[CHILDREN] = suffixes[at[Q], k]
                at[Q] += 1
            at[PHASE] = 1
        if at[PHASE] == 1:  # skip repetitions of the n-gram
            while True:
                if at[A] >= len(rows):
                    if not ended[ROWS]:
                        return ROWS
                    break
                same = True
                for c in range(k):
                    if rows[at[A], c] != current[c]:
                        same = False
                        break
                if not same:
                    break
                at[TWICE] += 1
                if at[TWICE_KEPT] < len(twice):
                    for c in range(k):
                        twice[at[TWICE_KEPT], c] = current[c]
                    at[TWICE_KEPT] += 1
                at[A] += 1
            at[PHASE] = 2
        if at[PHASE] == 2:  # count the n-gram's entries
            while True:
                if at[X] >= len(entries):
                    if not ended[ENTRIES]:
                        return ENTRIES
                    break
                order = 0
                for c in range(k):
                    if entries[at[X], c] != current[c]:
                        order = -1 if entries[at[X], c] < current[c] else 1
                        break
                if order > 0:
                    break
                if order < 0 or at[BLANK]:
                    _note_missing(at, entries, missing, k)
                if order == 0:
                    at[FOLLOWING] += 1
                at[X] += 1
            at[PHASE] = 3
        if at[PHASE] == 3:  # keep the n-gram's suffix, and write the n-gram
            new = not at[HELD]
            if k > 2 and not new:
                for c in range(k - 1):
                    if current[c] != held[c]:
                        new = True
                        break
            if k > 2 and new:
                if k == 3:
                    # Count the earlier pairs with the same first word, in the file or required.
                    while True:
                        if at[P] >= len(pairs):
                            if not ended[PAIRS]:
                                return PAIRS
                            break
                        u = np.int64(pairs[at[P], 0])
                        key = pairs[at[P], 1]
                        if u > current[0] or (u == current[0] and key > current[1]):
                            break
                        if u == current[0] and key < current[1]:
                            if at[GROUP] != u:
                                at[GROUP] = u
                                at[GROUP_COUNT] = 0
                            at[GROUP_COUNT] += 1
                        at[P] += 1
                    if at[GROUP] != current[0]:
                        at[GROUP] = current[0]
                        at[GROUP_COUNT] = 0
                    at[HELD_RANK] = at[GROUP_COUNT]
                    at[GROUP_COUNT] += 1
                if at[HELD]:
                    _put_suffix(at, held, out_suffixes, k)
                for c in range(k - 1):
                    held[c] = current[c]
                at[HELD] = 1
                at[HELD_CHILDREN] = 0
            following = at[FOLLOWING] > 0
            weight = at[BACKOFF] != 0
            node = (following or at[CHILDREN] > 0 or weight) and not top
            extended = (following or weight) and not top
            e = at[E]
            if k == 2:
                out_entries[e, 0] = current[0]
                out_entries[e, 1] = current[1]
                out_entries[e, 2] = at[PROB]
                out_entries[e, 3] = (
                    (1 if extended else 0) | (2 if node else 0) | (4 if at[BLANK] else 0)
                )
            else:
                second = current[2]
                out_entries[e, 0] = np.uint32(mirrored(np.int64(second), key_bits))
                out_entries[e, 1] = np.uint32(mirrored(np.int64(current[0]), key_bits))
                for c in range(3, k):
                    out_entries[e, c - 1] = current[c]
                out_entries[e, k - 1] = current[1]
                code = np.int64(BLANK_CODE) if at[BLANK] else at[PROB] & np.int64(0x7FFFFFFF)
                value = (code << np.int64(1)) | (np.int64(1) if extended else np.int64(0))
                if k == 3:
                    out_entries[e, 3] = at[HELD_RANK]
                    out_entries[e, 4] = value
                else:
                    out_entries[e, k] = value
            at[E] += 1
            if node:
                if at[SLOT_U] != current[0] or at[SLOT_V] != current[1]:
                    at[SLOT_U] = current[0]
                    at[SLOT_V] = current[1]
                    at[SLOT] = slot_of(current[0], mirrored(np.int64(current[1]), key_bits))
                d = at[D]
                out_nodes[d, 0] = at[NUMBER] if k == 2 else current[k - 1]
                out_nodes[d, 1] = at[BACKOFF]
                out_nodes[d, 2] = at[CHILDREN]
                out_nodes[d, 3] = at[FOLLOWING]
                out_nodes[d, 4] = at[SLOT]
                at[D] += 1
                at[HELD_CHILDREN] += 1
                load[at[SLOT]] += node_bytes + gram_bytes * at[FOLLOWING]
            at[NUMBER] += 1
            at[PHASE] = 0


@inlined
def _put_suffix(at, held, out_suffixes, k):  # type: ignore[no-untyped-def]
    r = at[R]
    for c in range(k - 1):
        out_suffixes[r, c] = held[c]
    out_suffixes[r, k - 1] = at[HELD_CHILDREN]
    at[R] += 1


@inlined
def _note_missing(at, entries, missing, k):  # type: ignore[no-untyped-def]
    """Records the missing context of an entry; a blank may lack its context, so it is skipped."""
    x = at[X]
    if np.int64(entries[x, entries.shape[1] - 1]) >> np.int64(1) == BLANK_CODE:
        return
    at[MISSING] += 1
    kept = at[MISSING_KEPT]
    if kept and _compare(entries, x, missing, kept - 1, k) == 0:
        return
    if kept < len(missing):
        for c in range(k):
            missing[kept, c] = entries[x, c]
        at[MISSING_KEPT] += 1


# Indices into the array `at` of `route`.
LISTED, FILLED, LEFT_NODES, LEFT_ENTRIES, FROM, R_PARENT, R_KEY, R_NODE, R_ENTRY = range(9)
ROUTE_STATE = 9


@kernel(
    "bool, uint32[:, :], uint32[:, :], uint32[:, :], uint32[:, :], bool[:], out int64[:], out "
    "uint32[:], uint32[:], out uint32[:, :], out uint32[:, :], out int64[:, :]"
)
def route(  # type: ignore[no-untyped-def]
    direct,
    parents,
    parent_keys,
    nodes,
    entries,
    ended,
    at,
    listed,
    shard_of_slot,
    out_nodes,
    out_entries,
    counts,
):
    """Finds the shard of each node and entry of a level, and entries' places in the parents' lists.

    Args    direct   whether the nodes are roots, which have no parents; entries then have places
            ended    (5,) as in `join`
    Shapes
        parents, nodes   (n, 5) as `join` makes them, of two consecutive orders
        parent_keys, entries  (n, 2) key, value; where `direct`, entries are (n, 3), with the place
                         in the middle
        at               (ROUTE_STATE,);  listed (V,) the keys of the parent's list
        shard_of_slot    (4096,)
        out_nodes        (len(nodes), 6) shard, key, weight, nodes below, n-grams following,
                         number of entries of the parent's list (0 for roots)
        out_entries      (len(entries), 3) shard, place in the parent's list, value
        counts           (B, 3)  nodes, n-grams, blanks of each shard
    Returns      the number of the stream whose block is used up, or DONE
    """
    while True:
        if at[LEFT_ENTRIES] > 0:
            d = at[R_NODE] - 1
            shard = out_nodes[d, 0]
            following = np.int64(out_nodes[d, 4])
            whole = not direct and following == at[LISTED]
            while at[LEFT_ENTRIES] > 0:
                e = at[R_ENTRY]
                if e >= len(entries):
                    return DONE if ended[LIST] else LIST
                if direct:
                    out_entries[e, 1] = entries[e, 1]
                    value = entries[e, 2]
                else:
                    value = entries[e, 1]
                    low = at[FROM]
                    if not whole:
                        key = entries[e, 0]
                        # Gallop on from the last place, then bisect: places rise within a list.
                        step = np.int64(1)
                        high = low
                        while high < at[LISTED] and listed[high] < key:
                            low = high + 1
                            high += step
                            step += step
                        high = min(high, at[LISTED])
                        while low < high:
                            middle = (low + high) >> np.int64(1)
                            if listed[middle] < key:
                                low = middle + 1
                            else:
                                high = middle
                    out_entries[e, 1] = low
                    at[FROM] = low + 1
                out_entries[e, 0] = shard
                out_entries[e, 2] = value
                counts[shard, 1] += 1
                if np.int64(value) >> np.int64(1) == BLANK_CODE:
                    counts[shard, 2] += 1
                at[R_ENTRY] += 1
                at[LEFT_ENTRIES] -= 1
        elif at[LEFT_NODES] > 0 or direct:
            d = at[R_NODE]
            if d >= len(nodes):
                return DONE if ended[NODES] else NODES
            shard = shard_of_slot[nodes[d, 4]]
            out_nodes[d, 0] = shard
            out_nodes[d, 1] = nodes[d, 0]
            out_nodes[d, 3] = nodes[d, 2]
            out_nodes[d, 4] = nodes[d, 3]
            out_nodes[d, 2] = nodes[d, 1]
            out_nodes[d, 5] = 0 if direct else at[LISTED]
            counts[shard, 0] += 1
            at[LEFT_ENTRIES] = nodes[d, 3]
            at[LEFT_NODES] -= 1
            at[FROM] = 0
            at[R_NODE] += 1
        elif at[FILLED] < at[LISTED]:
            p = at[R_KEY]
            if p >= len(parent_keys):
                return DONE if ended[PARENT_KEYS] else PARENT_KEYS
            count = min(at[LISTED] - at[FILLED], len(parent_keys) - p)
            for i in range(count):
                listed[at[FILLED] + i] = parent_keys[p + i, 0]
            at[FILLED] += count
            at[R_KEY] += count
            if at[FILLED] == at[LISTED]:
                at[LEFT_NODES] = parents[at[R_PARENT] - 1, 2]
        else:
            p = at[R_PARENT]
            if p >= len(parents):
                return DONE if ended[PARENTS] else PARENTS
            at[R_PARENT] += 1
            at[LISTED] = parents[p, 3]
            at[FILLED] = 0
            if at[LISTED] == 0:
                at[LEFT_NODES] = parents[p, 2]
