"""Searches a KenLM file in place for words, and for n-grams in hash tables or tries.

Everything is reached through a view, an array of int64 that `view.py` makes from a layout. The
layout's sections are inside the file, but their content is not trusted: ids, pointers and ranges
are clamped to their sections, and every probe is bounded by the size of its table. So a damaged
file gives wrong scores, but causes no read outside the file and no endless search.

Arithmetic is in float32, in KenLM's order (`lm/model.cc`, ScoreExceptBackoff and FullScore).
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    as_float32,
    bits_of_float32,
    field,
    load32,
    load64,
    load_float32,
    mask_of,
    multiply_high,
    of,
    prefetch,
)

# Indices into a view.
(
    IS_TRIE,
    ORDER,
    WORDS,  # the number of words; ids are below it
    HASHES,  # address of the words' hashes
    HASH_COUNT,
    HASH_SHARE,  # 2**64 // HASH_COUNT; see `remainder`
    UNIGRAMS,  # address of the 1-grams
    UNIGRAM_BYTES,
    BEGIN,  # id of <s>
    END,  # id of </s>
    LEVELS,  # the fields of order 2 begin here; those of order 3 and so on follow
) = range(11)
# Indices into a level: the fields of an order, from 2 up.
(
    AT,  # address of the entries
    ENTRIES,  # number of buckets, or of n-grams in a trie
    SHARE,  # 2**64 // ENTRIES; see `remainder`
    ENTRY_SIZE,  # bytes of a bucket, or bits of an n-gram
    WORD_BITS,
    PROB_BITS,
    BACKOFF_BITS,
    NEXT_BITS,
    HIGHS,  # address of the pointers' high bits; 0: pointers are whole
    HIGH_COUNT,
    PROBS,  # address of the probabilities by code; 0: not quantised
    BACKOFFS,
    CHILDREN,  # number of n-grams of the next order
    LEVEL_PLACES,
) = range(14)

PAD_BYTES = 8  # bytes that must follow a text whose words are hashed

_0, _1, _2, _3, _4, _7, _8, _12 = (np.int64(n) for n in (0, 1, 2, 3, 4, 7, 8, 12))
_31, _32 = np.int64(31), np.int64(32)
_LOW_31, _LOW_32 = np.int64((1 << 31) - 1), np.int64((1 << 32) - 1)
_SIGN = np.int64(1 << 31)
_TOP = np.int64(-(1 << 63))
# DO NOT CHANGE: KenLM's files depend on these multipliers: that of MurmurHash64A and, in the key
# of an n-gram, those of the suffix's key and of the first word.
_M = np.int64(0xC6A4A7935BD1E995 - (1 << 64))
OF_SUFFIX = np.int64(8978948897894561157)
OF_WORD = np.int64(17894857484156487943 - (1 << 64))
_LOW_17 = np.int64((1 << 17) - 1)
_47 = np.int64(47)
_NEAR, _HALVINGS = np.int64(4), 3  # entries on each side of an estimate; halvings to search them


# ------------------------------------------------------------------------------------- words


@inlined
def level_of(view, n):  # type: ignore[no-untyped-def]
    """Returns the address of the view's fields for order n, from 2 up."""
    return view + ((np.int64(LEVELS) + (n - _2) * np.int64(LEVEL_PLACES)) << _3)


@inlined
def below(a, b):  # type: ignore[no-untyped-def]
    return (a ^ _TOP) < (b ^ _TOP)


@inlined
def murmur(at, length):  # type: ignore[no-untyped-def]
    """Returns MurmurHash64A, with seed 0, of `length` bytes; eight more bytes must be readable."""
    h = length * _M
    end = at + length
    while at + _8 <= end:
        k = load64(at) * _M
        k ^= (k >> _47) & _LOW_17
        h = (h ^ (k * _M)) * _M
        at += _8
    if at < end:
        h = (h ^ (load64(at) & mask_of((end - at) << _3))) * _M
    h ^= (h >> _47) & _LOW_17
    h *= _M
    return h ^ ((h >> _47) & _LOW_17)


@inlined
def remainder(key, size, share):  # type: ignore[no-untyped-def]
    """Returns key % size, of unsigned numbers, without a division. `share` is 2**64 // size, or
    2**64 - 1 if `size` is 1; the quotient found with `share` is at most 2 too low."""
    rest = key - multiply_high(key, share) * size
    if not below(rest, size):
        rest -= size
    if not below(rest, size):
        rest -= size
    return rest


@inlined
def probe(at, buckets, entry_bytes, here, key):  # type: ignore[no-untyped-def]
    """Searches a hash table for a key, from the bucket at `here` on; returns the address of the
    key's bucket, or 0. A full table, which KenLM never writes, is searched once around."""
    last = at + (buckets - _1) * entry_bytes
    for _ in range(buckets):
        found = load64(here)
        if found == key:
            return here
        if found == _0:
            break
        here = at if here == last else here + entry_bytes
    return _0


@inlined
def rank_of(at, count, key):  # type: ignore[no-untyped-def]
    """Returns the index of a hash among the sorted hashes at an address, or -1. Hashes are spread
    evenly, so the index is estimated first, as in `child_of`."""
    if count < _1:
        return np.int64(-1)
    place, each = multiply_high(key, count), np.float64(count) / 2.0**64
    for _ in range(2):
        away = key - load64(at + (place << _3))
        place = min(max(place + np.int64(np.float64(away) * each), _0), count - _1)
    high = min(place + _NEAR, count)
    low = max(high - _NEAR - _NEAR, _0)
    here, last = at + (low << _3), at + ((high - _1) << _3)
    step = np.int64(16) * _NEAR
    for _ in range(_HALVINGS):
        step >>= _1
        there = min(here + step, last)
        here = here if below(key, load64(there)) else there
    if load64(here) != key:
        here, rest = at, count  # the hash is far away or missing: search all hashes by halving
        while rest > _1:
            half = rest >> _1
            there = here + (half << _3)
            here = here if below(key, load64(there)) else there
            rest -= half
    return (here - at) >> _3 if load64(here) == key else np.int64(-1)


@inlined
def ask_word(view, key):  # type: ignore[no-untyped-def]
    count = of(view, HASH_COUNT)
    if of(view, IS_TRIE):
        prefetch(of(view, HASHES) + (multiply_high(key, count) << _3))
    else:
        i = remainder(key, count, of(view, HASH_SHARE))
        prefetch(of(view, HASHES) + i * _12)


@inlined
def word_id(view, key):  # type: ignore[no-untyped-def]
    at, count = of(view, HASHES), of(view, HASH_COUNT)
    if of(view, IS_TRIE):
        found = rank_of(at, count, key) + _1
    else:
        found = _0
        begin = at + remainder(key, count, of(view, HASH_SHARE)) * _12
        bucket = probe(at, count, _12, begin, key)
        if bucket:
            found = load32(bucket + _8)
    return found if found < of(view, WORDS) else _0


@kernel("int64, uint8[:], int64[:], out uint32[:]")
def find_words(view, text, begin, ids):  # type: ignore[no-untyped-def]
    """Finds the ids of words by their hashes; 0 for words that the model lacks.

    Shapes  text   (bytes,)  uint8  the words without separators; then PAD_BYTES more bytes
            begin  (n + 1,)  int64  where each word begins; then the end of the last word
            ids    (n,)      uint32  filled
    """
    at = np.int64(text.ctypes.data)
    for i in range(len(ids)):
        ids[i] = word_id(view, murmur(at + begin[i], begin[i + 1] - begin[i]))


# ----------------------------------------------------------------------------------- n-grams
# An n-gram is found from its last word back: in a hash table by its key, in a trie among the
# children of its suffix.


@inlined
def negative(bits):  # type: ignore[no-untyped-def]
    """Returns the float32 with these bits and a minus sign: KenLM uses the sign bit as a flag."""
    return as_float32(bits | _SIGN)


@inlined
def is_flagged(bits):  # type: ignore[no-untyped-def]
    """Whether the sign bit is set: in a hash table, it marks an n-gram that no other ends in."""
    return (bits & _SIGN) != _0


@inlined
def clamped(first, end, most):  # type: ignore[no-untyped-def]
    """Limits a range of children to the section of their order."""
    first = min(max(first, _0), most)
    return first, min(max(end, first), most)


@inlined
def children_of_word(view, word):  # type: ignore[no-untyped-def]
    at = of(view, UNIGRAMS) + word * of(view, UNIGRAM_BYTES) + _8
    most = of(level_of(view, _2), ENTRIES)
    return clamped(load64(at), load64(at + of(view, UNIGRAM_BYTES)), most)


@inlined
def key_of(node, word):  # type: ignore[no-untyped-def]
    return (node * OF_SUFFIX) ^ ((word + _1) * OF_WORD)


@inlined
def bucket_of(level, key):  # type: ignore[no-untyped-def]
    i = remainder(key, of(level, ENTRIES), of(level, SHARE))
    return of(level, AT) + i * of(level, ENTRY_SIZE)


@inlined
def ask_child(view, level, first, end, word):  # type: ignore[no-untyped-def]
    """Prefetches the estimated place of a word among the children `first` to `end` in a trie: ids
    are in the order of hashes, and so spread evenly."""
    share = np.float32(word) / np.float32(of(view, WORDS))
    place = first + np.int64(np.float32(end - first) * share)
    prefetch(of(level, AT) + ((place * of(level, ENTRY_SIZE)) >> _3))


@inlined
def aim(level, each, first, end, place, word):  # type: ignore[no-untyped-def]
    """Improves `place`, an estimate of where a word is among children, using the word found there;
    `each` is 1 / (number of words of the model)."""
    there = field((of(level, AT) << _3) + place * of(level, ENTRY_SIZE), of(level, WORD_BITS))
    place += np.int64(np.float32(word - there) * each * np.float32(end - first))
    return min(max(place, first), end - _1)


@inlined
def child_near(level, first, end, place, word):  # type: ignore[no-untyped-def]
    """Returns the first bit of a word's entry among the children `first` to `end`, or 0. `place`
    estimates which child has the word."""
    size, mask, base = of(level, ENTRY_SIZE), mask_of(of(level, WORD_BITS)), of(level, AT) << _3
    high = min(place + _NEAR, end)
    low = max(high - _NEAR - _NEAR, first)
    at, last = base + low * size, base + (high - _1) * size
    step = size * (_NEAR + _NEAR)
    for _ in range(_HALVINGS):
        step >>= _1
        there = min(at + step, last)
        at = there if (load64(there >> _3) >> (there & _7)) & mask <= word else at
    found = (load64(at >> _3) >> (at & _7)) & mask
    if (found != word) & (((at == last) & (high < end)) | ((found > word) & (low > first))):
        count, at = end - first, base + first * size  # the word is not near: search all children
        while count > _1:
            half = count >> _1
            there = at + half * size
            at = there if (load64(there >> _3) >> (there & _7)) & mask <= word else at
            count -= half
        found = (load64(at >> _3) >> (at & _7)) & mask
    return at if found == word else _0


@inlined
def child_of(view, level, first, end, word):  # type: ignore[no-untyped-def]
    """Returns the first bit of a word's entry among the children `first` to `end`, or 0."""
    if first >= end:
        return _0
    place = first
    if end - first > _NEAR + _NEAR:
        each = np.float32(1) / np.float32(of(view, WORDS))
        place += np.int64(np.float32(end - first) * (np.float32(word) * each))
        place = aim(level, each, first, end, min(place, end - _1), word)
        place = aim(level, each, first, end, place, word)
    return child_near(level, first, end, place, word)


@inlined
def children_of(level, place, at):  # type: ignore[no-untyped-def]
    """Returns first and end of the children of an entry at bit `place`; its pointer is at `at`."""
    bits = of(level, NEXT_BITS)
    first, end = field(at, bits), field(at + of(level, ENTRY_SIZE), bits)
    highs = of(level, HIGHS)
    if highs:
        entry = (place - (of(level, AT) << _3)) // of(level, ENTRY_SIZE)
        # The high bits are the index of the table's last value that is not above this entry.
        here, last = highs, highs + ((of(level, HIGH_COUNT) - _1) << _3)
        rest = of(level, HIGH_COUNT)
        while rest > _1:
            there = here + ((rest >> _1) << _3)
            here = there if load64(there) <= entry else here
            rest -= rest >> _1
        first |= ((here - highs) >> _3) << bits
        while here < last and load64(here + _8) <= entry + _1:
            here += _8
        end |= ((here - highs) >> _3) << bits
    return clamped(first, end, of(level, CHILDREN))


@inlined
def values_of_word(view, is_trie, word):  # type: ignore[no-untyped-def]
    at = of(view, UNIGRAMS) + word * of(view, UNIGRAM_BYTES)
    backoff = load_float32(at + _4)
    if is_trie:
        first, end = children_of_word(view, word)
        return load_float32(at), backoff, first, end, first < end
    return negative(load32(at)), backoff, word, _0, not is_flagged(load32(at))


@inlined
def values_at(view, is_trie, n, place, node):  # type: ignore[no-untyped-def]
    """Reads the values of an n-gram.

    Args     place  in a hash table, the address of the n-gram's bucket; in a trie, its first bit
             node   in a hash table, the n-gram's key
    Returns  (log10 P, weight, node and end of the n-gram, whether a longer one may end in it); for
             node and end, see `find_longer`
    """
    level, is_longest = level_of(view, n), n == of(view, ORDER)
    backoff = np.float32(0)
    if not is_trie:
        bits = load32(place + _8)
        if is_longest:
            return as_float32(bits), backoff, node, _0, False
        return negative(bits), load_float32(place + _12), node, _0, not is_flagged(bits)
    bit = place + of(level, WORD_BITS)
    prob_bits, backoff_bits = of(level, PROB_BITS), of(level, BACKOFF_BITS)
    probs = of(level, PROBS)
    if probs:
        prob = load_float32(probs + (field(bit + backoff_bits, prob_bits) << _2))
        if not is_longest:
            backoff = load_float32(of(level, BACKOFFS) + (field(bit, backoff_bits) << _2))
    else:
        prob = negative(field(bit, _31))
        if not is_longest:
            backoff = as_float32(field(bit + _31, _32))
    if is_longest:
        return prob, backoff, _0, _0, False
    first, end = children_of(level, place, bit + prob_bits + backoff_bits)
    return prob, backoff, first, end, first < end


@inlined
def find_longer(view, is_trie, n, node, end, word):  # type: ignore[no-untyped-def]
    """Finds the n-gram of n words that consists of `word`, then the n-gram at a node.

    Args     node, end  in a trie, first and end of the node's children; in a hash table, key and 0
    Returns  (found, and what `values_at` returns)
    """
    level = level_of(view, n)
    if is_trie:
        place = child_of(view, level, node, end, word)
    else:
        node = key_of(node, word)
        place = probe(
            of(level, AT), of(level, ENTRIES), of(level, ENTRY_SIZE), bucket_of(level, node), node
        )
    if not place:
        return False, np.float32(0), np.float32(0), _0, _0, False
    prob, backoff, node, end, goes_on = values_at(view, is_trie, n, place, node)
    return True, prob, backoff, node, end, goes_on


@inlined
def extends(backoff):  # type: ignore[no-untyped-def]
    """Whether a context can affect later words: its weight is not -0.0."""
    return bits_of_float32(backoff) != _SIGN


# ------------------------------------------------------------------------- tables to be written


@kernel("uint32[:, :], int64, int64, out int64[:]")
def keys_of(ids, begin, end, keys):  # type: ignore[no-untyped-def]
    """Computes the key of the words from `begin` to `end` of each n-gram.

    Shapes  ids   (n, k)  uint32  oldest word first
            keys  (n,)    int64   filled
    """
    for i in range(len(ids)):
        key = np.int64(ids[i, end - 1])
        for j in range(end - 2, begin - 1, -1):
            key = key_of(key, np.int64(ids[i, j]))
        keys[i] = key


@kernel("uint8[:], int64[:], out int64[:]")
def hash_words(text, begin, keys):  # type: ignore[no-untyped-def]
    """Computes the hashes of words.

    Shapes  text   (bytes,)  uint8  the words without separators; then eight more bytes
            begin  (n + 1,)  int64
            keys   (n,)      int64  filled
    """
    at = np.int64(text.ctypes.data)
    for i in range(len(keys)):
        keys[i] = murmur(at + begin[i], begin[i + 1] - begin[i])


@kernel("int64[:], uint32[:, :], out uint32[:, :]")
def fill_table(keys, values, table):  # type: ignore[no-untyped-def]
    """Enters keys in a table, one after another, as KenLM does.

    Shapes  keys    (n,)          int64   none is 0; fewer than the buckets
            values  (n, w)        uint32
            table   (b, 2 + w)    uint32  zeros, filled: key, low half first, and values
    Returns     index of the first key that the table already had, or n
    """
    buckets = np.uint64(len(table))
    for i in range(len(keys)):
        key = np.uint64(keys[i])
        low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
        at = np.int64(key % buckets)
        while table[at, 0] or table[at, 1]:
            if table[at, 0] == low and table[at, 1] == high:
                return i
            at = at + 1 if at + 1 < len(table) else 0
        table[at, 0], table[at, 1] = low, high
        for j in range(values.shape[1]):
            table[at, 2 + j] = values[i, j]
    return len(keys)
