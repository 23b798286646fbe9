"""Search of a KenLM file where it lies: words, and n-grams of hash tables and of tries.

Everything is behind a view, an array of int64 that `view.py` makes of a layout. The layout's
sections lie inside of the file, but what they hold is not trusted: ids, pointers and ranges are
clamped to their sections, and every probe is bounded by the size of its table. So a damaged file
has wrong scores, but no read outside of it and no endless search.

Arithmetic is KenLM's, float32 in its order (`lm/model.cc`, ScoreExceptBackoff and FullScore).
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import load64, mask_of

# Places in a view.
(
    IS_TRIE,
    ORDER,
    WORDS,  # ids are below it
    HASHES,  # address
    HASH_COUNT,
    UNIGRAMS,  # address
    UNIGRAM_BYTES,
    BEGIN,  # id of <s>
    END,  # id of </s>
    LEVELS,  # from here on those of order 2, then those of order 3, ...
) = range(10)
# ... and in each level.
(
    AT,  # address
    ENTRIES,  # buckets, or n-grams
    ENTRY_SIZE,  # bytes of a bucket, or bits of an n-gram
    WORD_BITS,
    PROB_BITS,
    BACKOFF_BITS,
    NEXT_BITS,
    HIGHS,  # address; 0: pointers are whole
    HIGH_COUNT,
    PROBS,  # address of the values of codes; 0: not quantised
    BACKOFFS,
    CHILDREN,  # n-grams of the next order
    LEVEL_PLACES,
) = range(13)

PAD_BYTES = 8  # after a text whose words are hashed

_0, _1, _2, _3, _4, _8, _12 = (np.int64(n) for n in (0, 1, 2, 3, 4, 8, 12))
_32, _63 = np.int64(32), np.int64(63)
_LOW_32 = np.int64((1 << 32) - 1)
_TOP = np.int64(-(1 << 63))
_M = np.int64(0xC6A4A7935BD1E995 - (1 << 64))
_LOW_17 = np.int64((1 << 17) - 1)
_47 = np.int64(47)
_INTERPOLATED = 6  # steps of a search before it halves


@inlined
def of(view, place):  # type: ignore[no-untyped-def]
    """The number at a place of the view at an address."""
    return load64(view + (np.int64(place) << _3))


@inlined
def below(a, b):  # type: ignore[no-untyped-def]
    """a < b, as unsigned numbers."""
    return (a ^ _TOP) < (b ^ _TOP)


@inlined
def murmur(at, length):  # type: ignore[no-untyped-def]
    """MurmurHash64A with seed 0 of the `length` bytes at an address.

    Trusts  eight readable bytes after them
    """
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
def remainder(key, size):  # type: ignore[no-untyped-def]
    """key % size, as unsigned numbers."""
    return np.int64(np.uint64(key) % np.uint64(size))


@inlined
def probe(at, buckets, entry_bytes, key):  # type: ignore[no-untyped-def]
    """The address of the bucket of a key in a hash table, or 0.

    A full table, which KenLM never writes, is searched once around.
    """
    i = remainder(key, buckets)
    here = at + i * entry_bytes
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
    """Where a hash is in the sorted hashes at an address, from 0; or -1.

    Hashes are spread evenly: a few steps interpolate, the others halve.
    """
    low, high = _0, count
    before, after = 0.0, 2.0**64
    target = np.float64(np.uint64(key))
    steps = 0
    while low < high:
        middle = (low + high) >> _1
        if steps < _INTERPOLATED and after > before:
            share = (target - before) / (after - before)
            middle = low + np.int64(np.float64(high - low) * share)
            middle = min(max(middle, low), high - _1)
        steps += 1
        found = load64(at + (middle << _3))
        if found == key:
            return middle
        if below(found, key):
            low, before = middle + _1, np.float64(np.uint64(found))
        else:
            high, after = middle, np.float64(np.uint64(found))
    return np.int64(-1)


@inlined
def word_id(view, key):  # type: ignore[no-untyped-def]
    """The id of a word by its hash; 0 where the model lacks it."""
    if of(view, IS_TRIE):
        found = rank_of(of(view, HASHES), of(view, HASH_COUNT), key) + _1
    else:
        found = _0
        bucket = probe(of(view, HASHES), of(view, HASH_COUNT), _12, key)
        if bucket:
            # The last id ends with its bucket, so that eight bytes from four before it are read.
            found = (load64(bucket + _4) >> _32) & _LOW_32
    return found if found < of(view, WORDS) else _0


@kernel("int64, uint8[:], int64[:], out uint32[:]")
def find_words(view, text, begin, ids):  # type: ignore[no-untyped-def]
    """Ids of words by their hashes, 0 where the model lacks one.

    Shapes
        text   (bytes,)  uint8  the words one after another; then PAD_BYTES
        begin  (n + 1,)  int64  where each begins; the last is their end
        ids    (n,)      uint32  filled
    """
    at = np.int64(text.ctypes.data)
    for i in range(len(ids)):
        ids[i] = word_id(view, murmur(at + begin[i], begin[i + 1] - begin[i]))
