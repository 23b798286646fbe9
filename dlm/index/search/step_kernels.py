"""The steps of every search: reading a weight, opening a list, finding a child.

These kernels are inlined; none checks an index or keeps a column mapped. They take two kinds of
addresses: a `view` points to the numbers that `search.view` names (of the low orders, or of a
tree), a `level` to the numbers of one level of a tree. `Low` and `Keys` hold fields of a view.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlm.index.packed.kernels import directory_bits, find_key
from dlm.index.packed.low import BLOCK_WORDS, EXTENDED, FIRST, NOT_EXTENDED
from dlm.index.packed.record_kernels import (
    LEVEL_PLACES,
    N_FLAG_BITS,
    N_VALUE_BITS,
    N_WEIGHT_TABLE,
    WIDTH_BITS,
    find_child,
)
from dlm.index.search import view as at
from dlm.jit import inlined
from dlm.ngram.memory_kernels import (
    as_float32,
    field,
    load64,
    load_float32,
    mask_of,
    mirrored,
    of,
    ones_in,
    prefetch,
    two_fields,
)

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
_SIGN = np.int64(1 << 31)
_BLOCK = np.int64(BLOCK_WORDS.bit_length() - 1)  # a shift: dividing signed numbers takes longer


# ------------------------------------------------------------------------------- the numbers


class Low(NamedTuple):
    """The fields of a view that are read in every step except those down the tree."""

    key_bits: int  # bits of a word's key in the trees
    value: int  # address of the runs of words
    prob_table: int
    entry: int  # bit address of the entries of words
    entries: int  # number of words with an entry; one more entry stands for all other words
    entry_bits: int
    begin_bits: int
    place_bits: int
    backoff_bits: int
    backoff_table: int
    list: int  # bit address of the lists of pairs
    flag_bits: int  # bits of the flags in a pair's value
    stored: int  # the bit that says that a pair is a root in some tree
    blank: int  # the bit that says that a pair is a blank; 0 where there are none
    extended: int  # if pairs have one flag: the first extended word; all later ones are, too
    pair_bits: int  # bits of a pair's flags and probability
    pair_prob_table: int


class Keys(NamedTuple):
    """The bits of a key in all trees of a model: a word's, and a root's (its 2-gram's number)."""

    key_bits: int
    root_key_bits: int


@inlined
def address_of(view):  # type: ignore[no-untyped-def]
    return np.int64(view.ctypes.data)


@inlined
def low_of(view):  # type: ignore[no-untyped-def]
    begin_bits, place_bits = of(view, at.BEGIN_BITS), of(view, at.PLACE_BITS)
    backoff_bits, flag_bits = of(view, at.WORD_BACKOFF_BITS), of(view, at.PAIR_FLAG_BITS)
    return Low(
        of(view, at.KEY_BITS),
        of(view, at.WORD_VALUE),
        of(view, at.WORD_PROB_TABLE),
        of(view, at.WORD_ENTRY) << _3,
        of(view, at.ENTRIES),
        begin_bits + place_bits + np.int64(WIDTH_BITS) + backoff_bits,
        begin_bits,
        place_bits,
        backoff_bits,
        of(view, at.WORD_BACKOFF_TABLE),
        of(view, at.LIST) << _3,
        flag_bits,
        min(flag_bits, _2),
        (flag_bits & _2) << _1,
        of(view, at.EXTENDED_FROM),
        of(view, at.PAIR_PROB_BITS) + flag_bits,
        of(view, at.PAIR_PROB_TABLE),
    )


@inlined
def keys_of(view):  # type: ignore[no-untyped-def]
    return Keys(of(view, at.KEY_BITS), of(view, at.ROOT_KEY_BITS))


@inlined
def roots_of(view):  # type: ignore[no-untyped-def]
    """Returns the bit address of the family of all roots, and the number of roots."""
    return of(view, at.TREE) << _3, of(view, at.ROOTS)


@inlined
def first_level(view):  # type: ignore[no-untyped-def]
    return view + np.int64(at.LEVEL << 3)


@inlined
def below(level):  # type: ignore[no-untyped-def]
    return level + np.int64(LEVEL_PLACES << 3)


# --------------------------------------------------------------------------- values and lists


@inlined
def log10_prob_of(code, table):  # type: ignore[no-untyped-def]
    """Returns the log10 P that a code stands for; `table` is from `view.table_or_base`."""
    if table > 0:
        return load_float32(table + (code << _2))
    return as_float32((code - table) | _SIGN)


@inlined
def open_list(bit, size, key_bits):  # type: ignore[no-untyped-def]
    """Opens a list; returns the bits of a directory entry (0: no directory), the bit where the keys
    begin, and the bits of a key."""
    leading = directory_bits(size)
    if leading == 0:
        return _0, bit, key_bits
    step = leading + _3
    return step, bit + ((_1 << leading) + _1) * step, key_bits - leading


@inlined
def open_ranks(bit, size, width):  # type: ignore[no-untyped-def]
    """Opens a list of ranks, as `open_list` does; if `width` is 0, the ranks are not stored."""
    if width == 0:
        return _0, bit, _0
    return open_list(bit, size, width)


# ------------------------------------------------------------------------------------- words


@inlined
def key_of(view, word):  # type: ignore[no-untyped-def]
    """The key of a word in the families of trees: keys, unlike ids, are spread evenly."""
    return mirrored(word, view.key_bits)


@inlined
def entry_of(low, word):  # type: ignore[no-untyped-def]
    return low.entry + min(word, low.entries) * low.entry_bits


@inlined
def ask_entry(low, word):  # type: ignore[no-untyped-def]
    """Prefetches a word's entry, and the next entry, which says where the word's pairs end."""
    entry = entry_of(low, word)
    prefetch(entry >> _3)
    prefetch((entry + low.entry_bits + low.begin_bits) >> _3)


@inlined
def list_after(low, word):  # type: ignore[no-untyped-def]
    """Finds the pairs that begin with a word; returns the number of the first pair, how many there
    are, the bit address of their list, and the bits of its keys."""
    entry = entry_of(low, word)
    first = field(entry, low.begin_bits)
    size = field(entry + low.entry_bits, low.begin_bits) - first
    entry += low.begin_bits
    bit = low.list + field(entry, low.place_bits)
    return first, size, bit, field(entry + low.place_bits, np.int64(WIDTH_BITS)) + _1


@inlined
def word_code(low, word):  # type: ignore[no-untyped-def]
    """Returns the code of the back-off weight of a one-word context."""
    return field(entry_of(low, word) + low.entry_bits - low.backoff_bits, low.backoff_bits)


@inlined
def word_backoff(low, word):  # type: ignore[no-untyped-def]
    code = word_code(low, word)
    if low.backoff_table:
        return load_float32(low.backoff_table + (code << _2))
    return as_float32(code)


@inlined
def ask_alone(low, word):  # type: ignore[no-untyped-def]
    prefetch(low.value + ((word >> _BLOCK) << _3))


@inlined
def alone(low, word):  # type: ignore[no-untyped-def]
    """Returns the log10 P of a 1-gram, and 1 if the word affects later words, else 0."""
    block = load64(low.value + ((word >> _BLOCK) << _3))
    place = word & np.int64(BLOCK_WORDS - 1)
    begun = ones_in((block >> np.int64(FIRST)) & mask_of(place + _1))
    run = (block & mask_of(np.int64(FIRST))) + begun - _1
    reaches = (block >> (place + np.int64(EXTENDED))) & _1
    return load_float32(low.prob_table + (run << _2)), reaches


# ------------------------------------------------------------------------------------- pairs


@inlined
def width_of(step, rest):  # type: ignore[no-untyped-def]
    """Returns how many bits a key has in a list that `open_list` opened."""
    return rest + max(step - _3, _0)


@inlined
def find_pair(low, size, bit, width, word):  # type: ignore[no-untyped-def]
    """Returns the index of `word` in a list from `list_after`, or -1; and the bit of its value."""
    if word >> width:  # above all words of the list
        return np.int64(-1), bit
    key = mirrored(word, width)
    step, keys, rest = open_list(bit, size, width)
    begin, end = _0, size
    if step:
        begin, end = two_fields(bit + (key >> rest) * step, step)
    bucket = keys + begin * (rest + low.pair_bits)
    place = find_key(bucket, rest, _0, end - begin, key & mask_of(rest))
    value = bucket + (end - begin) * rest + place * low.pair_bits
    return begin + place if place >= 0 else np.int64(-1), value


@inlined
def is_stored(low, value):  # type: ignore[no-untyped-def]
    """Whether the pair with this value is a root in some tree."""
    return value & low.stored


@inlined
def pair_state(low, value, word):  # type: ignore[no-untyped-def]
    """The state length of a pair with this value and this second word."""
    if low.flag_bits == 1:
        reaches = np.int64(low.extended <= word) & np.int64(word < low.entries)
        return _2 if value & _1 else reaches
    state = value & np.int64(NOT_EXTENDED)
    if state == NOT_EXTENDED:
        _, state = alone(low, word)
    return state


@inlined
def pair_prob(low, value):  # type: ignore[no-untyped-def]
    return log10_prob_of(value >> low.flag_bits, low.pair_prob_table)


@inlined
def ask_bits(bit):  # type: ignore[no-untyped-def]
    """Prefetches the cache line at a bit, and the next one."""
    prefetch(bit >> _3)
    prefetch((bit >> _3) + np.int64(64))


@inlined
def find_root(view, pair):  # type: ignore[no-untyped-def]
    """Returns the bit address of the record of this 2-gram's root; -1 if there is no such root."""
    family, count = roots_of(view)
    return find_child(family, count, pair, pair, of(view, at.ROOT_KEY_BITS))


# ----------------------------------------------------------------------------------- contexts


@inlined
def log10_weight_of(level, weight):  # type: ignore[no-untyped-def]
    """The log10 value of the weight that `open_record` returned."""
    if weight >> np.int64(32):
        return as_float32(weight)
    return load_float32(of(level, N_WEIGHT_TABLE) + (weight << _2))


@inlined
def record_bits(level):  # type: ignore[no-untyped-def]
    """Returns the bits that an n-gram of a level takes for flags, and for flags and probability."""
    return of(level, N_FLAG_BITS), of(level, N_VALUE_BITS)


@inlined
def matters(record, flag_bits):  # type: ignore[no-untyped-def]
    return flag_bits and record & _1


@inlined
def has_prob(record, flag_bits):  # type: ignore[no-untyped-def]
    """Whether a record is of an n-gram of the model, not of a blank."""
    return flag_bits < 2 or record & _2 == 0
