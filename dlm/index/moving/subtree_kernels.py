"""Reads what lies below chosen roots of several shards as rows that `making` packs again.

The order of the rows is that of the roots given, so the rows of one shard's roots may be mixed with
those of another: each root says in which shard it lies.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.index.making.kernels import BLANK_CODE
from dlm.index.packed.kernels import get_list, offset_at, rank_bits, read_head
from dlm.index.search import view as at
from dlm.jit import kernel
from dlm.ngram.memory_kernels import field, get, load32

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


@kernel(
    "int64[:, :], int64, int64[:], int64[:], int64[:], out int64[:], out int64[:], uint32[:, :], "
    "out uint32[:, :], out int64[:], out int64[:], out int64[:], int64, int64"
)
def take_nodes(  # type: ignore[no-untyped-def]
    views,
    depth,
    shards,
    numbers,
    sizes,
    begin,
    count,
    parents,
    rows,
    lists,
    owners,
    weight,
    node_bytes,
    gram_bytes,
):
    """The nodes of one level below some roots.

    Shapes  views    (S, places)  of `search.view.tree_view`, by shard
            shards, numbers, sizes  (R,)  of each root: its shard, the number of its 2-gram, and the
                     entries of the list of the 2-gram's second word
            begin, count  (R,)  the first node below each root in its shard, and how many there are;
                     changed into those of the level below
            parents  (P, 6)  the rows of the level above, if there is one
            rows     (D, 6)  filled as by `making.kernels.route`, without the shard
            lists    (D,)  the bit at which the list of each node begins, from address 0
            owners   (D,)  the shard of each node
            weight   (R,)  added to: the bytes of each node, and of each n-gram that follows it
    Trusts   D is the sum of `count`; the columns are mapped, and passed `packed.check`
    """
    levels = views[0, at.LEVELS]
    place = at.LEVEL + depth * at.LEVEL_PLACES
    d = _0
    parent, left = np.int64(-1), _0
    for r in range(len(numbers)):
        s = shards[r]
        key_bits = views[s, at.KEY_BITS]
        key, backoff = views[s, place + at.N_KEY], views[s, place + at.N_BACKOFF]
        backoff_bits = views[s, place + at.N_BACKOFF_BITS]
        backoffs = views[s, place + at.N_BACKOFF_TABLE]
        child, base = views[s, place + at.N_CHILD], views[s, place + at.N_CHILD_BASE]
        delta, wide = views[s, place + at.N_CHILD_DELTA], views[s, place + at.N_CHILD_WIDE]
        places, place_base = views[s, place + at.N_PLACE], views[s, place + at.N_PLACE_BASE]
        place_delta = views[s, place + at.N_PLACE_DELTA]
        place_wide = views[s, place + at.N_PLACE_WIDE]
        first_list = views[s, place + at.N_LIST] << _3
        first = begin[r]
        below = _0
        if depth + 1 < levels:
            below = offset_at(child, base, delta, wide, first)
            begin[r] = below
        for i in range(first, first + count[r]):
            size = sizes[r]
            rows[d, 0] = 0
            if depth == 0:
                rows[d, 1] = numbers[r]
                rows[d, 2] = 0
            else:
                while left == 0:
                    parent += 1
                    left = np.int64(parents[parent, 3])
                left -= 1
                size = np.int64(parents[parent, 4])
                rows[d, 1] = get(key, i * key_bits, key_bits)
                code = get(backoff, i * backoff_bits, backoff_bits)
                rows[d, 2] = load32(backoffs + (code << _2)) if backoffs else code
            end = below
            if depth + 1 < levels:
                end = offset_at(child, base, delta, wide, i + _1)
            rows[d, 3] = end - below
            below = end
            bit = first_list + offset_at(places, place_base, place_delta, place_wide, i)
            following, _ = read_head(bit, size)
            rows[d, 4] = following
            rows[d, 5] = size
            lists[d], owners[d] = bit, s
            weight[r] += node_bytes + gram_bytes * following
            d += 1
        count[r] = below - begin[r] if depth + 1 < levels else _0


@kernel(
    "int64[:, :], int64, int64[:], int64[:], uint32[:, :], out uint32[:], out uint64[:], "
    "out uint64[:], out uint32[:, :]"
)
def take_entries(views, depth, lists, owners, nodes, ranks, values, none, rows):  # type: ignore[no-untyped-def]
    """The n-grams that follow some nodes of `take_nodes`; returns how many of them are blanks.

    Shapes  lists, owners (D,), nodes (D, 6)  as filled there, or some of them in their order
            ranks, values, none  (G,)  for the work
            rows    (G, 3)  filled as by `making.kernels.route`, without the shard
    Trusts  G is the sum of the n-grams that follow the nodes
    """
    place = at.LEVEL + depth * at.LEVEL_PLACES
    first = _0
    blanks = _0
    for d in range(len(nodes)):
        s = owners[d]
        flag_bits, prob_bits = views[s, place + at.N_FLAG_BITS], views[s, place + at.N_PROB_BITS]
        table = views[s, place + at.N_PROB_TABLE]
        value_bits = flag_bits + prob_bits
        size = np.int64(nodes[d, 5])
        n, head = read_head(lists[d], size)
        bit = lists[d] + head
        if n == size:
            for j in range(n):
                ranks[first + j] = j
                values[first + j] = field(bit, value_bits)
                bit += value_bits
        else:
            width = rank_bits(n, size)
            get_list(bit, width, value_bits, value_bits, ranks, values, none, first, n)
        for j in range(first, first + n):
            value = np.int64(values[j])
            code = value >> flag_bits
            if table > 0:
                code = load32(table + (code << _2)) & np.int64(0x7FFFFFFF)
            else:
                code -= table
            if flag_bits == _2 and value & _2:
                code = np.int64(BLANK_CODE)
                blanks += 1
            rows[j, 0] = 0
            rows[j, 1] = ranks[j]
            rows[j, 2] = (code << _1) | (value & _1 if flag_bits else _0)
        first += n
    return blanks
