"""Writes and reads lists that are packed as bits in memory.

A packed column is an array of uint64; bit i is bit i % 64 of word i // 64, the lowest first. Every
packed column ends with a spare word, so that eight bytes can be read from where any field begins.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    bit_length,
    field,
    get,
    load64,
    mask_of,
    trailing_zeros,
)

# DO NOT CHANGE: on disk.
DIRECT = 8  # lists of up to this many keys have no directory

_ONE = np.int64(1)


@inlined
def put(words, bit, width, value):  # type: ignore[no-untyped-def]
    """Writes a field into `words`, where its bits must be 0."""
    word = bit >> np.int64(6)
    shift = bit & np.int64(63)
    words[word] |= np.uint64(value) << np.uint64(shift)
    if shift + width > 64:
        words[word + 1] |= np.uint64(value) >> np.uint64(np.int64(64) - shift)


@kernel("out uint64[:], int64, int64, int64, uint64[:]")
def put_all(words, first_bit, stride, width, values):  # type: ignore[no-untyped-def]
    """Writes values[i] in `width` bits at bit first_bit + i * stride; these bits must be 0."""
    bit = np.int64(first_bit)
    for i in range(len(values)):
        put(words, bit, width, values[i])
        bit += stride


@kernel("int64, int64, int64, int64, out uint64[:]")
def get_all(address, first_bit, stride, width, out):  # type: ignore[no-untyped-def]
    bit = np.int64(first_bit)
    for i in range(len(out)):
        out[i] = get(address, bit, width)
        bit += stride


# By the width of a key: how many keys one load holds; masks of the keys' lowest, and highest, bits;
# the factor that turns a bit's index into a key's (DIVIDE / 2**16 is 1 / width, rounded up).
_WIDTHS = range(33)
LANES = np.array([57 // max(w, 1) for w in _WIDTHS], np.int64)
ONES = np.array([sum(1 << (i * w) for i in range(57 // max(w, 1))) for w in _WIDTHS], np.int64)
HIGHS = np.array(
    [sum(1 << (i * w + w - 1) for i in range(57 // w)) if w else 0 for w in _WIDTHS], np.int64
)
DIVIDE = np.array([-(-(1 << 16) // max(w, 1)) for w in _WIDTHS], np.int64)


@inlined
def directory_bits(entries):  # type: ignore[no-untyped-def]
    """Returns how many leading bits of a key choose its bucket; 0 if a list has no directory."""
    return bit_length(entries) - np.int64(3) if entries > DIRECT else np.int64(0)


@inlined
def list_bits(entries, key_bits, value_bits):  # type: ignore[no-untyped-def]
    leading = directory_bits(entries)
    directory = np.int64(0)
    if leading:
        directory = ((_ONE << leading) + _ONE) * bit_length(entries)
    return directory + entries * (key_bits - leading + value_bits)


@inlined
def find_key(keys, width, low, high, target):  # type: ignore[no-untyped-def]
    """Returns the index of `target` among keys low .. high - 1, or -1.

    Keys have `width` bits, and begin at bit `keys`. Several are compared at once, as lanes of one
    64-bit number. XOR with copies of `target` turns an equal key into a lane of zeros; subtracting
    1 from every lane then borrows at the lowest such lane first (Mycroft 1987).
    """
    if width == 0:
        return low if low < high else np.int64(-1)
    lanes = LANES[width]
    ones = ONES[width]
    highs = HIGHS[width]
    targets = target * ones
    bit = keys + low * width
    while low < high:
        x = (load64(bit >> np.int64(3)) >> (bit & np.int64(7))) ^ targets
        equal = (x - ones) & ~x & highs
        if equal:
            low += (trailing_zeros(equal) * DIVIDE[width]) >> np.int64(16)
            return low if low < high else np.int64(-1)
        low += lanes
        bit += lanes * width
    return np.int64(-1)


@inlined
def find_few(bit, width, count, target):  # type: ignore[no-untyped-def]
    """Returns the index of `target` among `count` keys of `width` bits at `bit`; else >= `count`.

    Unlike `find_key`, it searches two loads without a branch, which would be hard to predict.
    """
    lanes = LANES[width]
    ones = ONES[width]
    highs = HIGHS[width]
    targets = target * ones
    x = (load64(bit >> np.int64(3)) >> (bit & np.int64(7))) ^ targets
    equal = (x - ones) & ~x & highs
    more = bit + (lanes * width if count > lanes else np.int64(0))
    y = (load64(more >> np.int64(3)) >> (more & np.int64(7))) ^ targets
    second = (y - ones) & ~y & highs
    begin = np.int64(0) if equal else lanes
    equal = equal if equal else second
    # If no key is equal, trailing_zeros returns 64, so the index is 2 * lanes or more.
    place = begin + ((trailing_zeros(equal) * DIVIDE[width]) >> np.int64(16))
    if count > lanes + lanes and equal == 0:
        place = find_key(bit, width, lanes + lanes, count, target)
        place = place if place >= 0 else count
    return place


@inlined
def put_list(words, at, key_bits, value_bits, keys, values, first, n):  # type: ignore[no-untyped-def]
    """Writes n keys and their values, from index `first` on, as a list.

    The leading bits of a key choose its bucket. A list of more than DIRECT keys begins with a
    directory: for each bucket, the number of entries in earlier buckets. Then each bucket has its
    keys' other bits, followed by the values, in adjacent cache lines. A short list is one bucket.
    """
    leading = directory_bits(n)
    rest = key_bits - leading
    size = bit_length(n)
    directory = at
    if leading:
        at += ((_ONE << leading) + _ONE) * size
    j = np.int64(0)
    for bucket in range(_ONE << leading):
        begin = j
        if leading:
            put(words, directory, size, begin)
            directory += size
            while j < n and (np.int64(keys[first + j]) >> rest) == bucket:
                j += 1
        else:
            j = n
        for i in range(first + begin, first + j):
            put(words, at, rest, np.int64(keys[i]) & mask_of(rest))
            at += rest
        for i in range(first + begin, first + j):
            put(words, at, value_bits, values[i])
            at += value_bits
    if leading:
        put(words, directory, size, n)


@inlined
def get_list(at, key_bits, value_bits, keys, values, first, n):  # type: ignore[no-untyped-def]
    """The inverse of `put_list`; `at` is a bit's number, counted from address 0."""
    leading = directory_bits(n)
    rest = key_bits - leading
    size = bit_length(n)
    directory = at
    if leading:
        at += ((_ONE << leading) + _ONE) * size
    begin, end = np.int64(0), n
    for bucket in range(_ONE << leading):
        if leading:
            begin = field(directory, size)
            directory += size
            end = field(directory, size)
        for i in range(first + begin, first + end):
            keys[i] = (bucket << rest) | field(at, rest)
            at += rest
        for i in range(first + begin, first + end):
            values[i] = field(at, value_bits)
            at += value_bits


@kernel("int64[:], int64[:], int64, out int64[:]")
def key_list_bits(begin, widths, value_bits, out):  # type: ignore[no-untyped-def]
    """Makes out[i + 1] - out[i] the size in bits of list i, which has begin[i + 1] - begin[i]
    entries, with keys of widths[i] bits."""
    total = np.int64(0)
    out[0] = 0
    for i in range(len(begin) - 1):
        total += list_bits(np.int64(begin[i + 1] - begin[i]), widths[i], np.int64(value_bits))
        out[i + 1] = total


@kernel("out uint64[:], int64[:], int64[:], int64[:], int64, uint32[:], uint64[:]")
def put_key_lists(words, bits, begin, widths, value_bits, keys, values):  # type: ignore[no-untyped-def]
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        n = np.int64(begin[i + 1]) - first
        put_list(words, np.int64(bits[i]), widths[i], np.int64(value_bits), keys, values, first, n)


@kernel("int64, int64[:], int64[:], int64[:], int64, out uint32[:], out uint64[:]")
def get_key_lists(address, bits, begin, widths, value_bits, keys, values):  # type: ignore[no-untyped-def]
    """Reads what `put_key_lists` wrote, from the column at `address`."""
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        n = np.int64(begin[i + 1]) - first
        at = (address << np.int64(3)) + np.int64(bits[i])
        get_list(at, widths[i], np.int64(value_bits), keys, values, first, n)


@inlined
def rank_bits(entries, parent_size):  # type: ignore[no-untyped-def]
    """Returns how many bits a rank in a list takes; 0 if the list is as long as its parent's."""
    return np.int64(0) if entries == parent_size else bit_length(parent_size - _ONE)


_MIX_1 = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_FINAL = np.uint64(0x165667B19E3779F9)


@inlined
def mix(state, number, multiplier):  # type: ignore[no-untyped-def]
    """One step of the hash of an n-gram."""
    state = (state ^ np.uint64(number)) * multiplier
    return state ^ (state >> np.uint64(29))


@kernel("uint32[:, :], uint32[:], uint32[:]")
def hash_ngrams(rows, prob, backoff):  # type: ignore[no-untyped-def]
    """Returns two sums, modulo 2**64, of hashes of the n-grams (n, k), given in any sequence.

    `prob` and `backoff` (n,) are the bits of the values. DO NOT CHANGE: on disk; "Model id" in
    shards/FORMAT.md.
    """
    sums = np.zeros(2, np.uint64)
    for i in range(len(rows)):
        a = _MIX_2
        b = _FINAL
        for j in range(rows.shape[1]):
            a = mix(a, rows[i, j], _MIX_1)
            b = mix(b, rows[i, j], _MIX_2)
        a = mix(mix(a, prob[i], _MIX_1), backoff[i], _MIX_1)
        b = mix(mix(b, prob[i], _MIX_2), backoff[i], _MIX_2)
        sums[0] += (a ^ (a >> np.uint64(32))) * _FINAL
        sums[1] += (b ^ (b >> np.uint64(32))) * _FINAL
    return sums
