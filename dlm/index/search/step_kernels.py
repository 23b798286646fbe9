"""The steps that every search is made of: reading a weight, opening a list, finding a child.

All are inlined; nothing here checks an index or keeps a column mapped. Two kinds of addresses:
`view`, of the numbers that `search.view` names, and `level`, of those of one level of the tree.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlm.index.packed.kernels import (
    directory_bits,
    find_key,
    offset_at,
    rank_bits,
    read_head,
)
from dlm.index.packed.low import PAIR_FLAG_BITS
from dlm.index.search import view as at
from dlm.jit import inlined
from dlm.ngram.memory_kernels import (
    as_float32,
    field,
    get,
    load_float32,
    mask_of,
    of,
    prefetch,
    two_fields,
)

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
_15 = np.int64(15)
_SIGN = np.int64(1 << 31)


# ------------------------------------------------------------------------------- the numbers


class Low(NamedTuple):
    """What is read of a view in every step but those down the tree."""

    key_bits: int
    key_mask: int
    multiplier: int
    value: int  # address of the probabilities of words
    value_bits: int
    prob_table: int
    entry: int  # bit of the entries of words
    entry_bits: int
    begin_bits: int
    place_bits: int
    backoff_bits: int
    backoff_table: int
    list: int  # bit of the lists of pairs
    near_bits: int  # of a pair: flags and probability
    pair_bits: int  # and the weight
    pair_prob_table: int
    pair_backoff_bits: int
    pair_backoff_table: int


class TreeRoots(NamedTuple):
    """Which pairs are roots of a tree; zeros, where a view holds the low orders alone."""

    count: int
    key_bits: int
    key: int
    bucket_bits: int
    bucket: int


@inlined
def address_of(view):  # type: ignore[no-untyped-def]
    return np.int64(view.ctypes.data)


@inlined
def low_of(view):  # type: ignore[no-untyped-def]
    key_bits = of(view, at.KEY_BITS)
    begin_bits, place_bits = of(view, at.BEGIN_BITS), of(view, at.PLACE_BITS)
    backoff_bits = of(view, at.WORD_BACKOFF_BITS)
    near_bits = of(view, at.PAIR_PROB_BITS) + np.int64(PAIR_FLAG_BITS)
    pair_backoff_bits = of(view, at.PAIR_BACKOFF_BITS)
    return Low(
        key_bits,
        mask_of(key_bits),
        of(view, at.MULTIPLIER),
        of(view, at.WORD_VALUE),
        of(view, at.WORD_PROB_BITS) + _1,
        of(view, at.WORD_PROB_TABLE),
        of(view, at.WORD_ENTRY) << _3,
        begin_bits + place_bits + backoff_bits,
        begin_bits,
        place_bits,
        backoff_bits,
        of(view, at.WORD_BACKOFF_TABLE),
        of(view, at.LIST) << _3,
        near_bits,
        near_bits + pair_backoff_bits,
        of(view, at.PAIR_PROB_TABLE),
        pair_backoff_bits,
        of(view, at.PAIR_BACKOFF_TABLE),
    )


@inlined
def roots_of(view):  # type: ignore[no-untyped-def]
    return TreeRoots(
        of(view, at.ROOTS),
        of(view, at.ROOT_KEY_BITS),
        of(view, at.ROOT_KEY),
        of(view, at.ROOT_BUCKET_BITS),
        of(view, at.ROOT_BUCKET),
    )


@inlined
def first_level(view):  # type: ignore[no-untyped-def]
    return view + np.int64(at.LEVEL << 3)


@inlined
def below(level):  # type: ignore[no-untyped-def]
    return level + np.int64(at.LEVEL_PLACES << 3)


# --------------------------------------------------------------------------- values and lists


@inlined
def log10_prob_of(code, table):  # type: ignore[no-untyped-def]
    """Of the code of a probability; `table` as `view.table_or_base` has it."""
    if table > 0:
        return load_float32(table + (code << _2))
    return as_float32((code - table) | _SIGN)


@inlined
def log10_backoff_of(code, table):  # type: ignore[no-untyped-def]
    if table:
        return load_float32(table + (code << _2))
    return as_float32(code)


@inlined
def open_list(bit, size, key_bits):  # type: ignore[no-untyped-def]
    """Bits of a directory entry of a list (0: it has none), where its keys begin, their bits: see
    `packed.kernels.put_list`."""
    leading = directory_bits(size)
    if leading == 0:
        return _0, bit, key_bits
    step = leading + _3
    return step, bit + ((_1 << leading) + _1) * step, key_bits - leading


@inlined
def open_ranks(bit, shorter):  # type: ignore[no-untyped-def]
    """The list of a node at `bit`, whose shorter context has `shorter` words.

    Returns  (entries, bit after the head; then as `open_list`). Where all words of the shorter
             context follow, ranks are places: no directory, no bits of a key
    """
    size, head = read_head(bit, shorter)
    bit += head
    if size == shorter:
        return size, bit, _0, bit, _0
    step, keys, rest = open_list(bit, size, rank_bits(size, shorter))
    return size, bit, step, keys, rest


@inlined
def share(key, count, key_bits):  # type: ignore[no-untyped-def]
    """Where `key` should be among `count` keys of `key_bits` bits that are spread evenly."""
    # Both may have 32 bits: the product needs all 64.
    return np.int64((np.uint64(key) * np.uint64(count)) >> np.uint64(key_bits))


@inlined
def find_near(keys, width, low, high, guess, target):  # type: ignore[no-untyped-def]
    """Place of `target` among the rising keys low .. high - 1, -1 where it is not.

    Keys are spread evenly, so that `guess` is near; the search gallops away from it.
    """
    if high - low <= 6:
        return find_key(keys, width, low, high, target)
    step = np.int64(2)
    if field(keys + guess * width, width) <= target:
        low = guess
        while low + step < high:
            if field(keys + (low + step) * width, width) <= target:
                low += step
                step += step
            else:
                high = low + step
                break
    else:
        high = guess
        while high - step > low:
            if field(keys + (high - step) * width, width) > target:
                high -= step
                step += step
            else:
                low = high - step
                break
    # The key, if it is there, is in low .. high - 1.
    while high - low > 6:
        middle = (low + high) >> _1
        if field(keys + middle * width, width) <= target:
            low = middle
        else:
            high = middle
    return find_key(keys, width, low, high, target)


# ------------------------------------------------------------------------------------- words


@inlined
def key_of(low, word):  # type: ignore[no-untyped-def]
    """The key of a word: keys are spread evenly, ids are not."""
    return (word * low.multiplier) & low.key_mask


@inlined
def ask_entry(low, word):  # type: ignore[no-untyped-def]
    """Prefetches the entry of a word, and the next one, where it ends."""
    entry = low.entry + word * low.entry_bits
    prefetch(entry >> _3)
    prefetch((entry + low.entry_bits + low.begin_bits) >> _3)


@inlined
def list_after(low, word):  # type: ignore[no-untyped-def]
    """The pairs that begin with a word: the number of the first, how many, the bit of the list."""
    entry = low.entry + word * low.entry_bits
    first = field(entry, low.begin_bits)
    size = field(entry + low.entry_bits, low.begin_bits) - first
    return first, size, low.list + field(entry + low.begin_bits, low.place_bits)


@inlined
def word_code(low, word):  # type: ignore[no-untyped-def]
    """The code of the weight of a word as a context."""
    bit = low.entry + word * low.entry_bits + low.begin_bits + low.place_bits
    return field(bit, low.backoff_bits)


@inlined
def word_backoff(low, word):  # type: ignore[no-untyped-def]
    return log10_backoff_of(word_code(low, word), low.backoff_table)


@inlined
def ask_alone(low, word):  # type: ignore[no-untyped-def]
    prefetch(low.value + ((word * low.value_bits) >> _3))


@inlined
def alone(low, word):  # type: ignore[no-untyped-def]
    """Of a 1-gram: log10 P, and 1 if it matters to the right."""
    value = get(low.value, word * low.value_bits, low.value_bits)
    return log10_prob_of(value >> _1, low.prob_table), value & _1


# ------------------------------------------------------------------------------------- pairs


@inlined
def find_pair(low, size, bit, word):  # type: ignore[no-untyped-def]
    """Place of `word` in a list that `list_after` found, and the bit of its value; -1: none."""
    key = key_of(low, word)
    step, keys, rest = open_list(bit, size, low.key_bits)
    begin, end = _0, size
    if step:
        begin, end = two_fields(bit + (key >> rest) * step, step)
    bucket = keys + begin * (rest + low.pair_bits)
    place = find_key(bucket, rest, _0, end - begin, key & mask_of(rest))
    value = bucket + (end - begin) * rest + place * low.pair_bits
    return begin + place if place >= 0 else np.int64(-1), value


@inlined
def pair_code(low, value):  # type: ignore[no-untyped-def]
    return field(value + low.near_bits, low.pair_backoff_bits)


@inlined
def pair_backoff(low, value):  # type: ignore[no-untyped-def]
    return log10_backoff_of(pair_code(low, value), low.pair_backoff_table)


@inlined
def pair_prob(low, near):  # type: ignore[no-untyped-def]
    return log10_prob_of(near >> np.int64(PAIR_FLAG_BITS), low.pair_prob_table)


@inlined
def ask_root(roots, pair):  # type: ignore[no-untyped-def]
    prefetch(roots.bucket + (((pair >> roots.key_bits) * roots.bucket_bits) >> _3))


@inlined
def ask_root_keys(roots, first):  # type: ignore[no-untyped-def]
    prefetch(roots.key + ((first * roots.key_bits) >> _3))


@inlined
def root_bucket(roots, pair):  # type: ignore[no-untyped-def]
    """Among which roots that of a pair is, if it is there."""
    bit = (pair >> roots.key_bits) * roots.bucket_bits
    first = get(roots.bucket, bit, roots.bucket_bits)
    return first, get(roots.bucket, bit + roots.bucket_bits, roots.bucket_bits)


@inlined
def find_root(roots, pair):  # type: ignore[no-untyped-def]
    if roots.count == 0:
        return np.int64(-1)
    first, end = root_bucket(roots, pair)
    target = pair & mask_of(roots.key_bits)
    return find_key(roots.key << _3, roots.key_bits, first, end, target)


# ------------------------------------------------------------------------------------- nodes


@inlined
def ask_offset(address, base_bits, delta_bits, i):  # type: ignore[no-untyped-def]
    at_bit = (i >> np.int64(4)) * (base_bits + _1 + _15 * delta_bits)
    prefetch(address + (at_bit >> _3))
    prefetch(address + ((at_bit + base_bits + (i & _15) * delta_bits) >> _3))


@inlined
def ask_place(level, node):  # type: ignore[no-untyped-def]
    ask_offset(of(level, at.N_PLACE), of(level, at.N_PLACE_BASE), of(level, at.N_PLACE_DELTA), node)


@inlined
def ask_children(level, node):  # type: ignore[no-untyped-def]
    ask_offset(of(level, at.N_CHILD), of(level, at.N_CHILD_BASE), of(level, at.N_CHILD_DELTA), node)


@inlined
def node_list(level, node):  # type: ignore[no-untyped-def]
    """The bit of the list of a node; see `open_ranks`."""
    return (of(level, at.N_LIST) << _3) + offset_at(
        of(level, at.N_PLACE),
        of(level, at.N_PLACE_BASE),
        of(level, at.N_PLACE_DELTA),
        of(level, at.N_PLACE_WIDE),
        node,
    )


@inlined
def ask_node_backoff(level, node):  # type: ignore[no-untyped-def]
    prefetch(of(level, at.N_BACKOFF) + ((node * of(level, at.N_BACKOFF_BITS)) >> _3))


@inlined
def node_code(level, node):  # type: ignore[no-untyped-def]
    bits = of(level, at.N_BACKOFF_BITS)
    return get(of(level, at.N_BACKOFF), node * bits, bits)


@inlined
def node_backoff(level, node):  # type: ignore[no-untyped-def]
    return log10_backoff_of(node_code(level, node), of(level, at.N_BACKOFF_TABLE))


@inlined
def children(level, node):  # type: ignore[no-untyped-def]
    """The first child of a node, and the first one of the next node."""
    child, base = of(level, at.N_CHILD), of(level, at.N_CHILD_BASE)
    delta, wide = of(level, at.N_CHILD_DELTA), of(level, at.N_CHILD_WIDE)
    return offset_at(child, base, delta, wide, node), offset_at(child, base, delta, wide, node + _1)


@inlined
def find_child(low, level, node, word):  # type: ignore[no-untyped-def]
    """The child of a node for a word one further back, -1 where it has none."""
    first, end = children(level, node)
    if end <= first:
        return np.int64(-1)
    key = key_of(low, word)
    keys = of(below(level), at.N_KEY) << _3
    guess = first + share(key, end - first, low.key_bits)
    return find_near(keys, low.key_bits, first, end, guess, key)


@inlined
def record_bits(level):  # type: ignore[no-untyped-def]
    """Bits of flags, and of flags and probability, of an n-gram in the lists of a level."""
    flag_bits = of(level, at.N_FLAG_BITS)
    return flag_bits, of(level, at.N_PROB_BITS) + flag_bits


@inlined
def matters(record, flag_bits):  # type: ignore[no-untyped-def]
    return flag_bits and record & _1


@inlined
def has_prob(record, flag_bits):  # type: ignore[no-untyped-def]
    """Whether it is an n-gram of the model, and not a blank."""
    return flag_bits < 2 or record & _2 == 0
