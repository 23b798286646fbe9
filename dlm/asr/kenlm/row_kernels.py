"""A state with what its words lead to, and the search of a word after it.

A row holds the words that still matter, and for each of their lengths the back-off weight of that
context and the list of the words that follow it, so that a context is walked once for each state.
Rows are behind addresses: taking an array costs as much as a search.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dlm.index.packed.kernels import (
    field,
    find_key,
    get,
    load64,
    load_float32,
    mask_of,
    offset_at,
    prefetch,
    rank_bits,
    read_head,
    two_fields,
)
from dlm.index.packed.low import BLANK, PAIR_FLAG_BITS, STATE_LENGTH, STORED
from dlm.index.search import view as at
from dlm.index.search.kernels import find_near, log10_backoff_of, log10_prob_of, open_list, share
from dlm.jit import inlined

# A row: the number of its words, whether something is stored under the last two, and the words,
# newest first; uint32. Then of the context of each length the address of its list in bits, int64;
# how many words the list has, uint32; and its weight, float32.
HEAD_BYTES, CONTEXT_BYTES = 8, 16

_0, _1, _2, _3, _4 = np.int64(0), np.int64(1), np.int64(2), np.int64(3), np.int64(4)


@intrinsic
def load32(typingctx, address):  # type: ignore[no-untyped-def]
    """The uint32 at `address`, a multiple of four, as int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.zext(builder.load(pointer, align=4), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def store32(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Writes the low 32 bits of an int64 at `address`, a multiple of four."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store(builder.trunc(args[1], ir.IntType(32)), pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store64(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Writes an int64 at `address`, a multiple of eight."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[1], pointer, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def bits_of_float32(typingctx, value):  # type: ignore[no-untyped-def]
    """The bits of a float32, as an int64 from 0 up."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), codegen


@inlined
def of(numbers, place):  # type: ignore[no-untyped-def]
    """The number at a place of an array of int64 behind an address."""
    return load64(numbers + (np.int64(place) << _3))


@inlined
def word_at(row, i):  # type: ignore[no-untyped-def]
    """The word so many before the newest one."""
    return load32(row + np.int64(HEAD_BYTES) + (i << _2))


@inlined
def put_word_at(row, i, word):  # type: ignore[no-untyped-def]
    """Writes the word so many before the newest one."""
    store32(row + np.int64(HEAD_BYTES) + (i << _2), word)


@inlined
def put_context(context, bit, size, weight):  # type: ignore[no-untyped-def]
    """Writes the list and the weight of a context."""
    store64(context, bit)
    store32(context + np.int64(8), size)
    store32(context + np.int64(12), bits_of_float32(weight))


@inlined
def find_pair(view, first_word, word):  # type: ignore[no-untyped-def]
    """Where two words stand among the pairs.

    Returns
        (place in the list of the first, -1 where the pair is not there; address of its value in
        bits; entries of the list; the address of the list in bits; the number of its first pair)
    """
    begin_bits = of(view, at.BEGIN_BITS)
    place_bits = of(view, at.PLACE_BITS)
    entry_bits = begin_bits + place_bits + of(view, at.WORD_BACKOFF_BITS)
    entry = (of(view, at.WORD_ENTRY) << _3) + first_word * entry_bits
    first = field(entry, begin_bits)
    size = field(entry + entry_bits, begin_bits) - first
    bit = (of(view, at.LIST) << _3) + field(entry + begin_bits, place_bits)
    place, value = place_of(view, bit, size, word)
    return place, value, size, bit, first


@inlined
def place_of(view, bit, size, word):  # type: ignore[no-untyped-def]
    """The place of a word in a list of those that follow one word, -1 where it is not; and the
    address of its value in bits."""
    value_bits = (
        of(view, at.PAIR_PROB_BITS) + np.int64(PAIR_FLAG_BITS) + of(view, at.PAIR_BACKOFF_BITS)
    )
    key_bits = of(view, at.KEY_BITS)
    key = (word * of(view, at.MULTIPLIER)) & mask_of(key_bits)
    step, keys, rest = open_list(bit, size, key_bits)
    low, high = _0, size
    if step:
        low, high = two_fields(bit + (key >> rest) * step, step)
    bit = keys + low * (rest + value_bits)
    place = find_key(bit, rest, _0, high - low, key & mask_of(rest))
    value = bit + (high - low) * rest + place * value_bits
    return low + place if place >= 0 else np.int64(-1), value


@inlined
def walk(view, order, row, contexts):  # type: ignore[no-untyped-def]
    """Writes the contexts of a row, and whether something is stored under its last two words.

    Trusts  ids below the vocabulary's size, fewer words than the order
    """
    length = load32(row)
    store32(row + _4, _0)
    for k in range(length):
        put_context(contexts + np.int64(k * CONTEXT_BYTES), _0, _0, np.float32(0.0))
    if length == 0:
        return
    last = word_at(row, _0)
    begin_bits, place_bits = of(view, at.BEGIN_BITS), of(view, at.PLACE_BITS)
    backoff_bits = of(view, at.WORD_BACKOFF_BITS)
    entry_bits = begin_bits + place_bits + backoff_bits
    entry = (of(view, at.WORD_ENTRY) << _3) + last * entry_bits
    size = field(entry + entry_bits, begin_bits) - field(entry, begin_bits)
    code = field(entry + begin_bits + place_bits, backoff_bits)
    put_context(
        contexts,
        (of(view, at.LIST) << _3) + field(entry + begin_bits, place_bits),
        size,
        log10_backoff_of(code, of(view, at.WORD_BACKOFF_TABLE)),
    )
    if length == 1:
        return
    place, value, _, _, first = find_pair(view, word_at(row, _1), last)
    if place < 0:
        return
    near_bits = of(view, at.PAIR_PROB_BITS) + np.int64(PAIR_FLAG_BITS)
    code = field(value + near_bits, of(view, at.PAIR_BACKOFF_BITS))
    context = contexts + np.int64(CONTEXT_BYTES)
    weight = log10_backoff_of(code, of(view, at.PAIR_BACKOFF_TABLE))
    put_context(context, _0, _0, weight)
    if order < 3 or field(value, np.int64(PAIR_FLAG_BITS)) & np.int64(STORED) == 0:
        return
    store32(row + _4, _1)
    node = root_of(view, first + place)
    level = np.int64(at.LEVEL)
    k = _2
    while node >= 0:
        if k > 2:
            bits = of(view, level + at.N_BACKOFF_BITS)
            code = get(of(view, level + at.N_BACKOFF), node * bits, bits)
            weight = log10_backoff_of(code, of(view, level + at.N_BACKOFF_TABLE))
        bit = (of(view, level + at.N_LIST) << _3) + offset_at(
            of(view, level + at.N_PLACE),
            of(view, level + at.N_PLACE_BASE),
            of(view, level + at.N_PLACE_DELTA),
            of(view, level + at.N_PLACE_WIDE),
            node,
        )
        size, head = read_head(bit, size)
        put_context(context, bit + head, size, weight)
        if k == length:
            return
        target = (word_at(row, k) * of(view, at.MULTIPLIER)) & mask_of(of(view, at.KEY_BITS))
        node = child_of(view, level, node, target)
        level += at.LEVEL_PLACES
        context += np.int64(CONTEXT_BYTES)
        k += _1


@inlined
def ask_ahead(view, row, contexts, word):  # type: ignore[no-untyped-def]
    """Prefetches what a search and the walk after it will read, where that is known already."""
    word_bits = of(view, at.WORD_PROB_BITS) + _1
    prefetch(of(view, at.WORD_VALUE) + ((word * word_bits) >> _3))
    entry_bits = of(view, at.BEGIN_BITS) + of(view, at.PLACE_BITS) + of(view, at.WORD_BACKOFF_BITS)
    prefetch(of(view, at.WORD_ENTRY) + ((word * entry_bits) >> _3))
    for k in range(1, load32(row)):
        prefetch(load64(contexts + np.int64(k * CONTEXT_BYTES)) >> _3)


@inlined
def search(view, row, contexts, word):  # type: ignore[no-untyped-def]
    """One word after the words of a row.

    Returns
        (log10 P float32, length of the longest n-gram found with blanks, words that matter to the
        right)
    Guarantees
        as `index.search.kernels.score_groups`, a list at a time
    Trusts  an id below the vocabulary's size
    """
    length = load32(row)
    found, matched, reach = _1, _1, _0
    best = np.float32(0.0)
    if length >= 1:
        size = load32(contexts + np.int64(8))
        rank, value_at = place_of(view, load64(contexts), size, word)
        if rank >= 0:
            found, matched, reach, best = search_longer(
                view, contexts, length, size, rank, value_at
            )
    if matched == 1:
        best, alone = of_word(view, word)
        if found == 1:
            reach = alone
    return np.float32(weight_from(contexts, length, matched) + best), found, reach


@inlined
def of_word(view, word):  # type: ignore[no-untyped-def]
    """Of a 1-gram: log10 P, and 1 if it matters to the right."""
    word_bits = of(view, at.WORD_PROB_BITS) + _1
    value = get(of(view, at.WORD_VALUE), word * word_bits, word_bits)
    return log10_prob_of(value >> _1, of(view, at.WORD_PROB_TABLE)), value & _1


@inlined
def weight_from(contexts, length, matched):  # type: ignore[no-untyped-def]
    """The weights of the contexts of `length` words down to `matched`, added in that order."""
    total = np.float32(0.0)
    for k in range(length, matched - 1, -1):
        weight = contexts + (np.int64(k) * np.int64(CONTEXT_BYTES) - _4)
        total = np.float32(total + load_float32(weight))
    return total


@inlined
def search_longer(view, contexts, length, size, rank, value_at):  # type: ignore[no-untyped-def]
    """What stands beside a pair of words that was found, and then the lists of longer contexts.

    Args
        size, rank  entries of the list of the last word, and the place of the word in it
        value_at    address of the value of the pair, in bits
    Returns
        (longest n-gram found with blanks, longest with a probability, words that matter to the
        right, that log10 P, which means nothing where the second is 1)
    """
    near_bits = of(view, at.PAIR_PROB_BITS) + np.int64(PAIR_FLAG_BITS)
    value = field(value_at, near_bits)
    found, matched = _2, _1
    reach = value & np.int64(STATE_LENGTH)
    best = np.float32(0.0)
    if value & np.int64(BLANK) == 0:
        matched = _2
        best = log10_prob_of(value >> np.int64(PAIR_FLAG_BITS), of(view, at.PAIR_PROB_TABLE))
    level = np.int64(at.LEVEL)
    context = contexts
    for k in range(2, length + 1):
        shorter = size
        context += np.int64(CONTEXT_BYTES)
        size = load32(context + np.int64(8))
        if size == 0:
            break
        bit = load64(context)
        flag_bits = of(view, level + at.N_FLAG_BITS)
        record = of(view, level + at.N_PROB_BITS) + flag_bits
        width = rank_bits(size, shorter)
        low, high = _0, size
        if (width == 0 and size > 1) or size == shorter:
            place = rank  # all words of the shorter context follow: ranks are places
        else:
            step, keys, rest = open_list(bit, size, width)
            if step:
                low, high = two_fields(bit + (rank >> rest) * step, step)
            bit = keys + low * (rest + record)
            place = find_key(bit, rest, _0, high - low, rank & mask_of(rest))
            bit += (high - low) * rest
        if place < 0:
            break
        value = field(bit + place * record, record)
        found = np.int64(k) + _1
        if flag_bits and value & _1:
            reach = found
        if flag_bits < 2 or value & _2 == 0:
            matched = found
            best = log10_prob_of(value >> flag_bits, of(view, level + at.N_PROB_TABLE))
        rank = low + place
        level += at.LEVEL_PLACES
    return found, matched, reach, best


@inlined
def root_of(view, pair):  # type: ignore[no-untyped-def]
    """The root of a pair of words, -1 where the view holds none."""
    if of(view, at.LEVELS) == 0 or of(view, at.ROOTS) == 0:
        return np.int64(-1)
    key_bits, bucket_bits = of(view, at.ROOT_KEY_BITS), of(view, at.ROOT_BUCKET_BITS)
    bucket = pair >> key_bits
    low = get(of(view, at.ROOT_BUCKET), bucket * bucket_bits, bucket_bits)
    high = get(of(view, at.ROOT_BUCKET), (bucket + _1) * bucket_bits, bucket_bits)
    return find_key(of(view, at.ROOT_KEY) << _3, key_bits, low, high, pair & mask_of(key_bits))


@inlined
def child_of(view, level, node, target):  # type: ignore[no-untyped-def]
    """The child of a node with this key, -1 where it has none."""
    key_bits = of(view, at.KEY_BITS)
    child, base = of(view, level + at.N_CHILD), of(view, level + at.N_CHILD_BASE)
    delta, wide = of(view, level + at.N_CHILD_DELTA), of(view, level + at.N_CHILD_WIDE)
    first = offset_at(child, base, delta, wide, node)
    last = offset_at(child, base, delta, wide, node + _1)
    if last <= first:
        return np.int64(-1)
    keys = of(view, level + at.LEVEL_PLACES + at.N_KEY) << _3
    guess = first + share(target, last - first, key_bits)
    return find_near(keys, key_bits, first, last, guess, target)
