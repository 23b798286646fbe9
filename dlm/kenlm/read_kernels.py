"""Recovers the n-grams of a file: from a trie, one after another; from hash tables, by a search,
since hash tables hold only hashes of the words.

The key of an n-gram of words w1 ... wn, oldest first, is made from the last word backwards:
k = wn, then k = (k * OF_SUFFIX) ^ ((1 + w) * OF_WORD) mod 2^64 for w = w(n-1) ... w1. So it is
the XOR of a multiple of the suffix's key and a hash of the first word.

A filter rejects most candidates that are not in a table, before the table is read. The filter's
64-bit words are divided into classes by the low bits of keys, and the low bits of a candidate are
the XOR of those of its two halves. So candidates are taken one class at a time, and the part of the
filter that they read stays in the first-level cache.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.kenlm.kernels import (
    AT,
    BACKOFF_BITS,
    BACKOFFS,
    ENTRIES,
    ENTRY_SIZE,
    OF_SUFFIX,
    OF_WORD,
    ORDER,
    PROB_BITS,
    PROBS,
    WORD_BITS,
    WORDS,
    children_of,
    children_of_word,
    level_of,
    probe,
)
from dlm.ngram.memory_kernels import as_float32, field, load64, load_float32, of

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
_LOW_32 = np.int64((1 << 32) - 1)
_SIGN = np.int64(0x80000000)
# These shifts of a key choose the filter's word in its class, and three bits of that word.
_WORD_SHIFT, _FIRST, _SECOND, _THIRD = np.int64(20), np.int64(58), np.int64(52), np.int64(46)
_6_BITS = np.int64(63)
KEY_BYTES, PROB_BYTES = 8, 4


@inlined
def bucket_of(at, buckets, size, key):  # type: ignore[no-untyped-def]
    begin = np.int64(np.uint64(key) % np.uint64(buckets))
    return probe(at, buckets, size, at + begin * size, key)


@inlined
def passes(word, key):  # type: ignore[no-untyped-def]
    """Returns 1 if a key may have been entered in this word of the filter, otherwise 0."""
    hit = (word >> ((key >> _FIRST) & _6_BITS)) & (word >> ((key >> _SECOND) & _6_BITS))
    return hit & (word >> ((key >> _THIRD) & _6_BITS)) & _1


@kernel("int64, int64, int64, int64, int64, out int64[:]")
def fill_filter(at, buckets, size, class_bits, word_bits, words):  # type: ignore[no-untyped-def]
    """Enters the keys of a table in its filter.

    Args    at, buckets, size  address of the table, number of buckets, and bytes per bucket
            class_bits         number of a key's low bits that are its class, at most 20
            word_bits          a class has 2**word_bits 64-bit words; at most 26
    Shapes  words              (2**(class_bits + word_bits),) int64, of zeros
    Returns  the number of keys
    """
    class_mask, word_mask = (_1 << class_bits) - _1, (_1 << word_bits) - _1
    keys = _0
    for i in range(buckets):
        key = load64(at + i * size)
        if key:
            keys += 1
            here = ((key & class_mask) << word_bits) | ((key >> _WORD_SHIFT) & word_mask)
            bits = _1 << ((key >> _FIRST) & _6_BITS)
            bits |= _1 << ((key >> _SECOND) & _6_BITS)
            words[here] |= bits | (_1 << ((key >> _THIRD) & _6_BITS))
    return keys


@kernel("int64, int64, int64")
def count_keys(at, buckets, size):  # type: ignore[no-untyped-def]
    keys = _0
    for i in range(buckets):
        keys += load64(at + i * size) != _0
    return keys


@kernel(
    "int64, int64, int64, int64, int64[:], int64, int64[:], int64[:], int64[:], uint32[:], "
    "uint32[:], out int64[:], out int64[:], out uint32[:, :]"
)
def pair_words(  # type: ignore[no-untyped-def]
    at, buckets, size, word_bits, words, chosen, first_begin, last_begin, hashes,
    first_ids, last_ids, state, candidates, found,
):  # fmt: skip
    """Finds the 2-grams of a table that consist of a first word of one class and any last word.

    Args    at, ..., words  the table and its filter, as `fill_filter` has them
            chosen          the class of first words
    Shapes
        first_begin  (classes + 1,)  int64   where the first words of each class begin
        last_begin   (classes + 1,)  int64   where the last words of each class begin
        hashes       (F + L,)        int64   what first words contribute to a key, by class; then
                                             what last words contribute, by class
        first_ids    (F,)            uint32
        last_ids     (L,)            uint32
        state        (2,)            int64   class of last words and first word to go on with; 0, 0
                                             at first; class -1 when all are done
        candidates   (C,)            int64   room for the last words of any class
        found        (R, 3)          uint32  filled: first word, last word, bucket
    Returns          number of rows filled; returns early when room for a class might run out
    """
    word_mask = (_1 << word_bits) - _1
    filter_at, hash_at = np.int64(words.ctypes.data), np.int64(hashes.ctypes.data)
    lasts_at = hash_at + (np.int64(len(first_ids)) << _3)
    rows = _0
    classes = np.int64(len(last_begin) - 1)
    begin, end = first_begin[chosen], first_begin[chosen + 1]
    c = state[0]
    i = begin + state[1]
    while c < classes:
        low, high = last_begin[c], last_begin[c + 1]
        if low < high:
            part = filter_at + ((np.int64(chosen) ^ c) << (word_bits + _3))
            while i < end:
                if rows + high - low > len(found):
                    state[0], state[1] = c, i - begin
                    return rows
                first = load64(hash_at + (i << _3))
                hits = _0
                for j in range(low, high):
                    key = first ^ load64(lasts_at + (j << _3))
                    word = load64(part + (((key >> _WORD_SHIFT) & word_mask) << _3))
                    candidates[hits] = j
                    hits += passes(word, key)
                for h in range(hits):
                    j = candidates[h]
                    bucket = bucket_of(at, buckets, size, first ^ load64(lasts_at + (j << _3)))
                    if bucket:
                        found[rows, 0] = first_ids[i]
                        found[rows, 1] = last_ids[j]
                        found[rows, 2] = (bucket - at) // size
                        rows += 1
                i += 1
        i = begin
        c += 1
    state[0], state[1] = np.int64(-1), _0
    return rows


@kernel("uint32[:], uint8[:], int64[:], int64, int64, out int64[:]")
def cut(suffix, goes_on, begin, first, budget, out):  # type: ignore[no-untyped-def]
    """Finds where a turn of `join` ends: after about `budget` candidates.

    Shapes
        suffix, goes_on, begin  as in `join`
        out  (3,) int64  filled: the n-gram after the turn's last, the turn's number of candidates,
                         and the most candidates of any one n-gram
    """
    total = most = _0
    p = first
    while p < len(suffix) and total < budget:
        if goes_on[p]:
            m = np.int64(suffix[p])
            here = begin[m + 1] - begin[m]
            total += here
            most = max(most, here)
        p += 1
    out[0], out[1], out[2] = p, total, most


@kernel(
    "int64, int64, int64, int64, int64, int64[:], uint32[:, :], uint32[:], uint8[:], int64[:], "
    "int64[:], int64, out int64[:], out int64[:], out uint32[:, :]"
)
def join(  # type: ignore[no-untyped-def]
    at, buckets, size, class_bits, word_bits, words, ids, suffix, goes_on, begin, halves, end,
    state, candidates, found,
):  # fmt: skip
    """Finds the n-grams of a table, given n-grams that may be their contexts and suffixes.

    Args    at, ..., words  the table and its filter, as `fill_filter` has them
            end             contexts with numbers below `end` are joined
    Shapes, k being the order below that of the table
        ids         (n, k)  uint32  n-grams of order k: the contexts
        suffix      (n,)    uint32  rank of each context's suffix in order k - 1
        goes_on     (n,)    uint8   whether a longer n-gram may begin with the context
        begin       (m + 1,) int64  for each n-gram of order k - 1: where `halves` begins to list
                                    the suffixes of order k that continue it
        halves      (s,)    int64   what each of these suffixes contributes to a key
        state       (1,)    int64   context to go on with; `end` when all are done
        candidates  (C,)    int64   room for the suffixes of one context
        found       (R, 3)  uint32  filled: context, suffix in `halves`, bucket
    Returns         rows found
    """
    class_mask, word_mask = (_1 << class_bits) - _1, (_1 << word_bits) - _1
    filter_at, halves_at = np.int64(words.ctypes.data), np.int64(halves.ctypes.data)
    rows = _0
    p = state[0]
    while p < end:
        if goes_on[p]:
            m = np.int64(suffix[p])
            low, high = begin[m], begin[m + 1]
            if rows + high - low > len(found):
                break
            first = (_1 + np.int64(ids[p, 0])) * OF_WORD
            hits = _0
            for j in range(low, high):
                key = first ^ load64(halves_at + (j << _3))
                here = ((key & class_mask) << word_bits) | ((key >> _WORD_SHIFT) & word_mask)
                word = load64(filter_at + (here << _3))
                candidates[hits] = j
                hits += passes(word, key)
            for h in range(hits):
                j = candidates[h]
                bucket = bucket_of(at, buckets, size, first ^ load64(halves_at + (j << _3)))
                if bucket:
                    found[rows, 0], found[rows, 1] = p, j
                    found[rows, 2] = (bucket - at) // size
                    rows += 1
        p += 1
    state[0] = p
    return rows


@kernel("uint32[:, :], out uint8[:]")
def claim(found, claims):  # type: ignore[no-untyped-def]
    """Marks the buckets in the last column of `found` (R, 3) uint32 as claimed, in `claims`
    (buckets,) uint8; returns how many were already claimed."""
    again = _0
    for i in range(len(found)):
        again += claims[found[i, 2]]
        claims[found[i, 2]] = 1
    return again


@kernel("int64, int64, uint32[:], out uint8[:], out uint8[:]")
def flags(at, size, bucket, is_suffix, goes_on):  # type: ignore[no-untyped-def]
    """Reads from signs whether a longer n-gram ends in each n-gram, or may begin with it.

    Shapes  bucket              (n,)  uint32
            is_suffix, goes_on  (n,)  uint8   filled
    """
    for i in range(len(bucket)):
        values = load64(at + np.int64(bucket[i]) * size + KEY_BYTES)
        is_suffix[i] = (values & _SIGN) == _0
        goes_on[i] = ((values >> np.int64(32)) & _LOW_32) != _SIGN


@kernel(
    "int64, int64, uint32[:], uint32[:], uint8[:], uint32[:, :], out int64[:], out int64[:], "
    "out uint32[:], out uint32[:]"
)
def suffixes(at, size, bucket, context, is_suffix, ids, begin, halves, rank, last):  # type: ignore[no-untyped-def]
    """Collects what `join` needs about the n-grams of an order that are suffixes.

    Shapes  bucket, context, is_suffix  (n,)    context: rank in the order below, rising
            ids       (n, k)    uint32
            begin     (m + 1,)  int64   filled; m n-grams of the order below
            halves    (s,)      int64   filled
            rank      (s,)      uint32  filled: the n-gram's rank in its order
            last      (s,)      uint32  filled: the n-gram's last word
    """
    s = _0
    m = _0
    for i in range(len(bucket)):
        while m <= np.int64(context[i]):
            begin[m] = s
            m += 1
        if is_suffix[i]:
            halves[s] = load64(at + np.int64(bucket[i]) * size) * OF_SUFFIX
            rank[s], last[s] = i, ids[i, ids.shape[1] - 1]
            s += 1
    while m < len(begin):
        begin[m] = s
        m += 1


@kernel(
    "uint32[:, :], uint32[:, :], uint32[:], uint32[:], out uint32[:, :], out uint32[:], "
    "out uint32[:], out uint32[:]"
)
def take(found, ids, rank, last, new_ids, context, suffix, bucket):  # type: ignore[no-untyped-def]
    """Writes the n-grams that `join` found.

    Shapes  found      (R, 3)      uint32  context, index in `rank` of the suffix, bucket
            ids        (n, k)      uint32  words of the contexts
            rank, last (s,)        uint32  ranks and last words of the suffixes
            new_ids    (R, k + 1)  uint32  filled, as are context, suffix and bucket, (R,) each
    """
    k = ids.shape[1]
    for i in range(len(found)):
        p, s = found[i, 0], found[i, 1]
        for j in range(k):
            new_ids[i, j] = ids[p, j]
        new_ids[i, k] = last[s]
        context[i], suffix[i], bucket[i] = p, rank[s], found[i, 2]


@kernel("int64, int64, bool, uint32[:], out float32[:], out float32[:]")
def values(at, size, top, bucket, prob, backoff):  # type: ignore[no-untyped-def]
    """Reads the stored values of n-grams; probabilities get a minus sign.

    Shapes  bucket         (n,)  uint32
            prob, backoff  (n,)  float32  filled; backoff is 0 at the highest order (`top`)
    """
    for i in range(len(bucket)):
        here = at + np.int64(bucket[i]) * size
        if top:  # the bucket's last eight bytes, so that nothing after the table is read
            both = load64(here + PROB_BYTES)
            prob[i] = as_float32((both >> np.int64(32)) | _SIGN)
            backoff[i] = np.float32(0.0)
        else:
            both = load64(here + KEY_BYTES)
            prob[i] = as_float32((both & _LOW_32) | _SIGN)
            backoff[i] = as_float32(both >> np.int64(32))


# ------------------------------------------------------------------------------------- a trie

# Columns of an order's cursor: an n-gram, the end of its children, and its first word.
NODE, CHILDREN_END, WORD = range(3)
CURSOR_FIELDS = 3
# What `read_trie` returns for a damaged file.
BAD_POINTER, BAD_WORD = -1, -2


@inlined
def entry_at(view, order, i):  # type: ignore[no-untyped-def]
    level = level_of(view, order)
    return (of(level, AT) << _3) + i * of(level, ENTRY_SIZE)


@inlined
def children(view, order, i):  # type: ignore[no-untyped-def]
    if order == 1:
        return children_of_word(view, i)
    level, place = level_of(view, order), entry_at(view, order, i)
    skipped = of(level, WORD_BITS) + of(level, PROB_BITS) + of(level, BACKOFF_BITS)
    return children_of(level, place, place + skipped)


@kernel("int64, int64, int64, out int64[:, :], out uint32[:, :], out float32[:], out float32[:]")
def read_trie(view, order, first, cursors, ids, prob, backoff):  # type: ignore[no-untyped-def]
    """Reads n-grams of an order above 1, from n-gram `first` on.

    Shapes
        cursors  (order, CURSOR_FIELDS)  int64    of the orders below; before the first call, NODE
                                                  is -1, and the rest is 0
        ids      (n, order)              uint32   filled; oldest word first
        prob     (n,)                    float32  filled
        backoff  (n,)                    float32  filled; 0 at the highest order
    Returns      n, or BAD_POINTER or BAD_WORD where the file is damaged
    Guarantees   words below one node ascend, so no n-gram comes twice
    Trusts       first + n <= number of n-grams; each call begins where the previous one ended
    """
    words, level = of(view, WORDS), level_of(view, order)
    top = order == of(view, ORDER)
    word_bits, prob_bits = of(level, WORD_BITS), of(level, PROB_BITS)
    backoff_bits = of(level, BACKOFF_BITS)
    probs, backoffs = of(level, PROBS), of(level, BACKOFFS)
    before = np.int64(-1)
    node = cursors[order - 1, NODE]
    for i in range(len(prob)):
        target = first + i
        k = order - 1
        while k >= 1 and target >= cursors[k, CHILDREN_END]:
            while target >= cursors[k, CHILDREN_END]:
                here = cursors[k, NODE] + 1
                if here >= (words if k == 1 else of(level_of(view, k), ENTRIES)):
                    return np.int64(BAD_POINTER)
                begin, end = children(view, k, here)
                if begin != cursors[k, CHILDREN_END]:
                    return np.int64(BAD_POINTER)
                cursors[k, NODE], cursors[k, CHILDREN_END] = here, end
            target = cursors[k, NODE]
            word = target
            if k > 1:
                word = field(entry_at(view, k, target), of(level_of(view, k), WORD_BITS))
            if word >= words:
                return np.int64(BAD_WORD)
            cursors[k, WORD] = word
            k -= 1
        at = entry_at(view, order, first + i)
        word = field(at, word_bits)
        if word >= words or (node == cursors[order - 1, NODE] and word <= before):
            return np.int64(BAD_WORD)
        node, before = cursors[order - 1, NODE], word
        ids[i, 0] = word
        for k in range(1, order):
            ids[i, order - k] = cursors[k, WORD]
        at += word_bits
        if probs:
            weight = np.float32(0.0)
            if not top:
                weight = load_float32(backoffs + (field(at, backoff_bits) << _2))
                at += backoff_bits
            prob[i] = load_float32(probs + (field(at, prob_bits) << _2))
            backoff[i] = weight
        else:
            prob[i] = as_float32(field(at, prob_bits) | _SIGN)
            backoff[i] = np.float32(0.0)
            if not top:
                backoff[i] = as_float32(field(at + prob_bits, backoff_bits))
    return np.int64(len(prob))


@kernel("int64")
def has_unk(view):  # type: ignore[no-untyped-def]
    first, end = children_of_word(view, np.int64(0))
    if first < end:
        return True
    bits = of(level_of(view, _2), WORD_BITS)
    found = False
    for i in range(of(level_of(view, _2), ENTRIES)):
        found |= field(entry_at(view, _2, i), bits) == 0
    return found
