"""Turns sorted n-grams into adjusted counts. The kernels need neither Python objects nor the GIL.

N-grams of all orders form a *suffix trie*: the children of an n-gram are one word longer, to the
left. The nodes of an order are sorted by their reversed words, so the children of a node are
adjacent, and an n-gram is identified by its index in the order, its *rank*.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel

BOS, EOS = 1, 2

# The highest bit of a count marks an n-gram that is left out of the model.
PRUNED = 1 << 31
COUNT_BITS = PRUNED - 1
_PRUNED_BIT = np.uint32(PRUNED)

# Statistics of an order: n-grams with adjusted counts 1 to 4, all n-grams, those that are kept, and
# those whose count overflows.
ALL, KEPT, TOO_LARGE, STATISTICS = 4, 5, 6, 7


@inlined
def _close(down_to, depth, words, counts, used, actual, outside, thresholds, statistics, at_end):  # type: ignore[no-untyped-def]
    """Finishes the open nodes of orders depth, ..., down_to + 1: marks and counts them."""
    order = words.shape[0]
    for n in range(depth - 1, down_to - 1, -1):
        i = used[n] - 1
        often = actual[n]
        word = words[n, i]
        if n == order - 1 or (word == BOS and n > 0):
            count = often  # no n-gram extends it to the left
            if count > COUNT_BITS:
                statistics[n, TOO_LARGE] += 1
        else:
            count = np.int64(counts[n, i])
        # lmplz counts the suffixes of the text's last n-gram by how often they occur.
        seen = often if at_end and n < order - 1 else count
        if 1 <= seen <= 4:
            statistics[n, seen - 1] += 1
        statistics[n, ALL] += 1
        value = np.uint32(count)
        if (often <= thresholds[n] or outside[n] != 0) and not (n == 0 and word <= EOS):
            value |= _PRUNED_BIT
        else:
            statistics[n, KEPT] += 1
        counts[n, i] = value


@kernel(
    "int64, uint32[:, :], out uint32[:, :], int64[:], int64[:], uint8[:], int64[:], "
    "out int64[:, :], bool"
)
def close(depth, words, counts, used, actual, outside, thresholds, statistics, at_end):  # type: ignore[no-untyped-def]
    _close(0, depth, words, counts, used, actual, outside, thresholds, statistics, at_end)


@kernel(
    "uint32[:, :], int64, int64, out uint32[:], out uint32[:, :], out uint32[:, :], "
    "out uint32[:, :], out int64[:], int64[:], out int64[:], out uint8[:], uint8[:], int64[:], "
    "out int64[:, :]"
)
def grow(  # type: ignore[no-untyped-def]
    rows, begin, depth, path, words, counts, children, used, base, actual, outside, known,
    thresholds, statistics,
):  # fmt: skip
    """Adds sorted keys to the trie, as far as there is room.

    Shapes
        rows        (m, N + 1)     uint32  keys with their counts, sorted, and none below an
                                           earlier key; a key may repeat the previous one
        begin       int            the first row to add
        depth       int            how many nodes are open: the nodes of the last key
        path        (N,)           uint32  the words of the open nodes
        words       (N, room)      uint32  the leftmost word of each node, by order
        counts      (N, room)      uint32  adjusted counts, and PRUNED
        children    (N, room)      uint32  rank of each node's first child, for orders below N
        used        (N,)           int64   nodes in the arrays, the last of which may be open
        base        (N,)           int64   rank of the first node in the arrays
        actual      (N,)           int64   how often the open nodes occur
        outside     (N,)           uint8   whether the open nodes have a word outside `known`
        known       (words,)       uint8   whether a word is known; empty if all words are
        thresholds  (N,)           int64   n-grams that occur at most this often are left out
        statistics  (N, STATISTICS) int64  added to
    Returns  (the first key that was not added, how many nodes are open)
    Paper    Heafield et al. 2013, section 3.2; Chen and Goodman 1998
    """
    order = np.int64(words.shape[0])
    room = np.int64(words.shape[1])
    most = room
    for n in range(order):
        most = min(most, room - used[n])  # a key adds at most one node of each order
    row = np.int64(begin)
    end = min(np.int64(len(rows)), row + most)
    all_known = len(known) == 0
    while row < end:
        same = np.int64(0)
        while same < depth and rows[row, same] == path[same]:
            same += 1
        if same < depth or depth == 0:
            _close(same, depth, words, counts, used, actual, outside, thresholds, statistics, False)
            if same > 0:
                counts[same - 1, used[same - 1] - 1] += np.uint32(1)
            depth = same
            while depth < order:
                word = rows[row, depth]
                i = used[depth]
                words[depth, i] = word
                counts[depth, i] = np.uint32(1)  # one child so far; a leaf gets its count later
                if depth < order - 1:
                    children[depth, i] = np.uint32(base[depth + 1] + used[depth + 1])
                actual[depth] = 0
                beyond = not all_known and known[word] == 0
                if depth > 0:
                    beyond |= outside[depth - 1] != 0
                outside[depth] = beyond
                path[depth] = word
                used[depth] = i + 1
                depth += 1
                if word == BOS:
                    break
        count = np.int64(rows[row, order])
        for n in range(depth):
            actual[n] += count
        row += 1
    return row, depth


@kernel("out uint32[:, :], out uint32[:, :], out uint32[:, :], out int64[:], out int64[:], int64")
def keep_open(words, counts, children, used, base, depth):  # type: ignore[no-untyped-def]
    for n in range(len(used)):
        keep = np.int64(n < depth)
        gone = used[n] - keep
        if keep:
            words[n, 0] = words[n, gone]
            counts[n, 0] = counts[n, gone]
            children[n, 0] = children[n, gone]
        used[n] = keep
        base[n] += gone
