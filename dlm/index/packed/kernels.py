"""The packed lists and offsets that bits in memory make up: writing, reading and checking them.

A packed column is an array of uint64; bit i is bit i % 64 of word i // 64, the lowest first. Every
packed column ends with a spare word, so that eight bytes can be read from where any field begins.
Above 500 lines: what writes a list stands beside what reads and checks it.
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
OFFSET_BLOCK = 16  # offsets that share a base
DIRECT = 8  # lists of at most so many keys have no directory

_ONE = np.int64(1)


@inlined
def put(words, bit, width, value):  # type: ignore[no-untyped-def]
    """Writes a field into `words`, whose bits there are 0."""
    word = bit >> np.int64(6)
    shift = bit & np.int64(63)
    words[word] |= np.uint64(value) << np.uint64(shift)
    if shift + width > 64:
        words[word + 1] |= np.uint64(value) >> np.uint64(np.int64(64) - shift)


@kernel("out uint64[:], int64, int64, int64, uint64[:]")
def put_all(words, first_bit, stride, width, values):  # type: ignore[no-untyped-def]
    """Writes values[i], of `width` bits, at first_bit + i * stride of words that are 0 there."""
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


@inlined
def offset_at(address, base_bits, delta_bits, exceptions, i):  # type: ignore[no-untyped-def]
    """Offset i of packed offsets; see `packed.columns.Offsets`.

    Whether a block is stored in full elsewhere is hard to predict, so both cases are one load, from
    an address that is selected.
    """
    j = i & np.int64(OFFSET_BLOCK - 1)
    at = (i >> np.int64(4)) * (base_bits + np.int64(1) + np.int64(OFFSET_BLOCK - 1) * delta_bits)
    head = get(address, at, base_bits + np.int64(1))
    base = head >> np.int64(1)
    whole = head & np.int64(1)
    # The first of a block has no distance: what is read there is masked away.
    width = delta_bits if j else np.int64(0)
    at += base_bits + np.int64(1) + (j - np.int64(1)) * width
    width = base_bits if whole else width
    at = (base * np.int64(OFFSET_BLOCK) + j) * base_bits if whole else at
    address = exceptions if whole else address
    return get(address, at, width) + (np.int64(0) if whole else base)


@kernel("int64, int64, int64, int64, out int64[:]")
def get_offsets(address, base_bits, delta_bits, exceptions, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = offset_at(address, base_bits, delta_bits, exceptions, np.int64(i))


# By width of a key: how many keys one load holds, ones at their lowest and highest bits, and what
# turns a bit number into the number of a key (DIVIDE / 2**16 is 1 / width, rounded up).
_WIDTHS = range(33)
LANES = np.array([57 // max(w, 1) for w in _WIDTHS], np.int64)
ONES = np.array([sum(1 << (i * w) for i in range(57 // max(w, 1))) for w in _WIDTHS], np.int64)
HIGHS = np.array(
    [sum(1 << (i * w + w - 1) for i in range(57 // w)) if w else 0 for w in _WIDTHS], np.int64
)
DIVIDE = np.array([-(-(1 << 16) // max(w, 1)) for w in _WIDTHS], np.int64)


@inlined
def directory_bits(entries):  # type: ignore[no-untyped-def]
    """Leading bits of a key that choose its bucket, in a list of `entries`; 0: no directory."""
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
    """Place of `target` among the keys low .. high - 1 of `width` bits, from bit `keys`; else -1.

    Several keys are compared at once: in the difference of a word and a word of targets, a key
    that is equal is a lane of zeros, and subtracting one from each lane borrows at the lowest such
    lane first (Mycroft 1987).
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
    """Place of `target` among `count` keys of `width` bits from bit `bit` on, else `count` or more.

    As `find_key`, but without a branch for as many keys as two loads hold: how many of them a
    search needs is hard to predict.
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
    place = begin + ((trailing_zeros(equal) * DIVIDE[width]) >> np.int64(16))
    if equal == 0:
        place = count
        if count > lanes + lanes:
            place = find_key(bit, width, lanes + lanes, count, target)
            place = place if place >= 0 else count
    return place


@inlined
def put_list(words, at, key_bits, value_bits, low_bits, keys, low, high, first, n):  # type: ignore[no-untyped-def]
    """Writes a list of n keys and their values, low | high << low_bits, from `first` on.

    A list of more than DIRECT keys begins with a directory: for each bucket, chosen by the leading
    bits of a key, the number of entries before it. Then follows each bucket: the rest of its keys,
    then their values, so that one search reads adjacent cache lines. A short list is one bucket.
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
            put(words, at, low_bits, low[i])
            put(words, at + low_bits, value_bits - low_bits, high[i])
            at += value_bits
    if leading:
        put(words, directory, size, n)


@inlined
def get_list(at, key_bits, value_bits, low_bits, keys, low, high, first, n):  # type: ignore[no-untyped-def]
    """The inverse of `put_list`; `at` is eight times an address."""
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
            low[i] = field(at, low_bits)
            high[i] = field(at + low_bits, value_bits - low_bits)
            at += value_bits


@kernel("int64[:], int64, int64, out int64[:]")
def key_list_bits(begin, key_bits, value_bits, out):  # type: ignore[no-untyped-def]
    """out[i + 1] - out[i] = bits of key list i, which has begin[i + 1] - begin[i] entries."""
    total = np.int64(0)
    out[0] = 0
    for i in range(len(begin) - 1):
        total += list_bits(np.int64(begin[i + 1] - begin[i]), np.int64(key_bits), value_bits)
        out[i + 1] = total


@kernel(
    "out uint64[:], int64[:], int64[:], int64, int64, int64, out uint32[:], out uint64[:], out "
    "uint64[:]"
)
def put_key_lists(words, bits, begin, key_bits, value_bits, low_bits, keys, low, high):  # type: ignore[no-untyped-def]
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        n = np.int64(begin[i + 1]) - first
        put_list(
            words, np.int64(bits[i]), np.int64(key_bits), value_bits, low_bits, keys, low, high,
            first, n,
        )  # fmt: skip


@kernel(
    "int64, int64[:], int64[:], int64, int64, int64, out uint32[:], out uint64[:], out uint64[:]"
)
def get_key_lists(address, bits, begin, key_bits, value_bits, low_bits, keys, low, high):  # type: ignore[no-untyped-def]
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        n = np.int64(begin[i + 1]) - first
        get_list(
            (address << np.int64(3)) + np.int64(bits[i]), np.int64(key_bits), value_bits, low_bits,
            keys, low, high, first, n,
        )  # fmt: skip


@inlined
def head_bits(entries, parent_size):  # type: ignore[no-untyped-def]
    if entries == parent_size:
        return _ONE
    return np.int64(2) * bit_length(entries + _ONE)


@inlined
def read_head(bit, parent_size):  # type: ignore[no-untyped-def]
    """Entries of the rank list at `bit`, and the bits of its head.

    The head is a one where the list is all of its parent's; else a zero and the Elias gamma code of
    the entries + 1: as many zeros as there are bits after the leading one, that one, those bits.
    """
    x = load64(bit >> np.int64(3)) >> (bit & np.int64(7))
    if x & _ONE:
        return parent_size, _ONE
    x = (x >> _ONE) & mask_of(np.int64(56))
    zeros = trailing_zeros(x)
    more = (x >> (zeros + _ONE)) & mask_of(zeros)
    return (_ONE << zeros) + more - _ONE, np.int64(2) * zeros + np.int64(2)


@inlined
def rank_bits(entries, parent_size):  # type: ignore[no-untyped-def]
    """Bits of a rank in a list of `entries`; where it is all of its parent's, ranks are places."""
    return np.int64(0) if entries == parent_size else bit_length(parent_size - _ONE)


@kernel("int64[:], int64[:], int64, out int64[:]")
def rank_list_bits(begin, parent_size, value_bits, out):  # type: ignore[no-untyped-def]
    """out[i + 1] - out[i] = bits of rank list i, in a list of parent_size[i] entries."""
    total = np.int64(0)
    out[0] = 0
    for i in range(len(begin) - 1):
        n = np.int64(begin[i + 1] - begin[i])
        size = np.int64(parent_size[i])
        total += head_bits(n, size)
        if n == size:
            total += n * value_bits
        else:
            total += list_bits(n, rank_bits(n, size), value_bits)
        out[i + 1] = total


@kernel(
    "out uint64[:], int64[:], int64[:], int64[:], int64, int64, out uint32[:], out uint64[:], "
    "out uint64[:]"
)
def put_rank_lists(words, bits, begin, parent_size, value_bits, low_bits, ranks, low, high):  # type: ignore[no-untyped-def]
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        n = np.int64(begin[i + 1]) - first
        size = np.int64(parent_size[i])
        at = np.int64(bits[i])
        if n == size:
            put(words, at, _ONE, _ONE)
            at += _ONE
            for j in range(n):
                put(words, at, low_bits, low[first + j])
                put(words, at + low_bits, value_bits - low_bits, high[first + j])
                at += value_bits
            continue
        length = bit_length(n + _ONE)
        put(words, at + length, _ONE, _ONE)
        put(words, at + length + _ONE, length - _ONE, (n + _ONE) & mask_of(length - _ONE))
        at += np.int64(2) * length
        put_list(words, at, rank_bits(n, size), value_bits, low_bits, ranks, low, high, first, n)


@kernel("int64, int64[:], int64[:], out int64[:]")
def read_heads(address, bits, parent_size, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        n, _ = read_head((address << np.int64(3)) + np.int64(bits[i]), np.int64(parent_size[i]))
        out[i] = n


@kernel(
    "int64, int64[:], int64[:], int64[:], int64, int64, out uint32[:], out uint64[:], out uint64[:]"
)
def get_rank_lists(address, bits, begin, parent_size, value_bits, low_bits, ranks, low, high):  # type: ignore[no-untyped-def]
    for i in range(len(begin) - 1):
        first = np.int64(begin[i])
        size = np.int64(parent_size[i])
        at = (address << np.int64(3)) + np.int64(bits[i])
        n, head = read_head(at, size)
        at += head
        if n == size:
            for j in range(n):
                ranks[first + j] = j
                low[first + j] = field(at, low_bits)
                high[first + j] = field(at + low_bits, value_bits - low_bits)
                at += value_bits
        else:
            get_list(at, rank_bits(n, size), value_bits, low_bits, ranks, low, high, first, n)


@inlined
def good_prob(code, limit):  # type: ignore[no-untyped-def]
    """Whether a probability's code stands for a value; `limit` is above the largest."""
    return code < limit


@inlined
def good_backoff(code, limit):  # type: ignore[no-untyped-def]
    """The same of a weight; a `limit` of 0 says that codes are bits: finite, and not -0.0."""
    if limit:
        return code < limit
    return (code >> np.int64(23)) & np.int64(255) != 255 and code != np.int64(1 << 31)


@kernel("int64, int64, int64, int64, int64, int64, bool")
def check_values(address, count, shift, stride, width, limit, is_prob):  # type: ignore[no-untyped-def]
    """The first of `count` fields at shift + i * stride that is no code; -1: none."""
    for i in range(count):
        code = get(address, np.int64(i) * stride + shift, width)
        if not (good_prob(code, limit) if is_prob else good_backoff(code, limit)):
            return i
    return np.int64(-1)


@inlined
def check_list(  # type: ignore[no-untyped-def]
    at, n, key_bits, key_limit, value_bits, flag_bits, prob_bits, prob_limit, backoff_limit
):
    """0 if the list of n keys at bit `at` follows the rules; else the number of a broken one."""
    leading = directory_bits(n)
    rest = key_bits - leading
    size = bit_length(n)
    directory = at
    if leading:
        at += ((_ONE << leading) + _ONE) * size
        if field(directory, size) != 0 or field(directory + (_ONE << leading) * size, size) != n:
            return np.int64(1)
    begin, end = np.int64(0), n
    for bucket in range(_ONE << leading):
        if leading:
            begin = field(directory, size)
            directory += size
            end = field(directory, size)
            if end < begin or end > n:
                return np.int64(1)
        last = np.int64(-1)
        for _ in range(begin, end):
            key = field(at, rest)
            if key <= last or (bucket << rest) + key >= key_limit:
                return np.int64(2)
            last = key
            at += rest
        for _ in range(begin, end):
            if not good_prob(field(at + flag_bits, prob_bits), prob_limit):
                return np.int64(3)
            far = flag_bits + prob_bits
            if far < value_bits and not good_backoff(
                field(at + far, value_bits - far), backoff_limit
            ):
                return np.int64(3)
            at += value_bits
    return np.int64(0)


@kernel("int64, int64[:], int64[:], int64, int64, int64, int64, int64, int64")
def check_key_lists(  # type: ignore[no-untyped-def]
    address, places, begin, key_bits, value_bits, flag_bits, prob_bits, prob_limit, backoff_limit
):
    """The first list that breaks a rule and which: 1 directory, 2 keys, 3 values, 4 place."""
    for i in range(len(begin) - 1):
        n = np.int64(begin[i + 1]) - np.int64(begin[i])
        bits = list_bits(n, np.int64(key_bits), np.int64(value_bits))
        if places[i + 1] - places[i] != bits:
            return i, np.int64(4)
        fault = check_list(
            (address << np.int64(3)) + places[i], n, np.int64(key_bits), _ONE << key_bits,
            np.int64(value_bits), np.int64(flag_bits), np.int64(prob_bits), prob_limit,
            backoff_limit,
        )  # fmt: skip
        if fault:
            return i, fault
    return -1, np.int64(0)


@kernel("int64, int64[:], int64[:], int64, int64, int64, out int64[:]")
def check_rank_lists(address, places, parent_size, value_bits, flag_bits, prob_limit, sizes):  # type: ignore[no-untyped-def]
    """As `check_key_lists`, for rank lists; sizes[i] = entries of list i."""
    for i in range(len(sizes)):
        size = np.int64(parent_size[i])
        at = (address << np.int64(3)) + places[i]
        bits = places[i + 1] - places[i]
        n, head = read_head(at, size)
        # A head of more bits is no gamma code: its zeros go on past what was loaded.
        if head > 58 or n < 0 or n > size or bits < head:
            return i, np.int64(4)
        if n == size:
            if head != _ONE or bits != head + n * value_bits:
                return i, np.int64(4)
            at += head
            for _ in range(n):
                if not good_prob(field(at + flag_bits, value_bits - flag_bits), prob_limit):
                    return i, np.int64(3)
                at += value_bits
        else:
            width = rank_bits(n, size)
            if bits != head + list_bits(n, width, np.int64(value_bits)):
                return i, np.int64(4)
            fault = check_list(
                at + head, n, width, size, np.int64(value_bits), np.int64(flag_bits),
                np.int64(value_bits - flag_bits), prob_limit, _ONE,
            )  # fmt: skip
            if fault:
                return i, fault
        sizes[i] = n
    return -1, np.int64(0)


@kernel("int64, int64, int64, int64, int64[:], int64, int64")
def check_ids(address, count, stride, width, begin, inverse, words):  # type: ignore[no-untyped-def]
    """The first parent whose keys (fixed fields from `begin`) do not rise or stand for no word."""
    mask = mask_of(width)
    for i in range(len(begin) - 1):
        last = np.int64(-1)
        for j in range(begin[i], begin[i + 1]):
            key = get(address, np.int64(j) * stride, width)
            if key <= last or (key * inverse) & mask >= words:
                return i
            last = key
    return -1


@kernel("int64, int64[:], int64[:], int64, int64, int64, int64[:], out int64[:], out int64[:]")
def words_of_pairs(address, places, begin, key_bits, value_bits, inverse, pairs, first, second):  # type: ignore[no-untyped-def]
    """The ids of both words of pair pairs[i]; `pairs` rises."""
    mask = mask_of(key_bits)
    word = np.int64(0)
    i = np.int64(0)
    while i < len(pairs):
        # The list that holds the pair, and all others of `pairs` that it holds.
        low, high = word, np.int64(len(begin) - 1)
        while high - low > 1:
            middle = (low + high) >> _ONE
            if begin[middle] <= pairs[i]:
                low = middle
            else:
                high = middle
        word = low
        before = np.int64(begin[word])
        n = np.int64(begin[word + 1]) - before
        at = (address << np.int64(3)) + places[word]
        leading = directory_bits(n)
        rest = key_bits - leading
        directory = at
        size = bit_length(n)
        if leading:
            at += ((_ONE << leading) + _ONE) * size
        start, end = np.int64(0), n
        for bucket in range(_ONE << leading):
            if leading:
                start = field(directory, size)
                directory += size
                end = field(directory, size)
            while i < len(pairs) and pairs[i] - before < end:
                key = (bucket << rest) | field(at + (pairs[i] - before - start) * rest, rest)
                first[i] = word
                second[i] = (key * inverse) & mask
                i += 1
            at += (end - start) * (rest + value_bits)


@kernel("int64, int64[:], int64[:], int64, int64, int64, int64")
def check_list_ids(address, places, begin, key_bits, value_bits, inverse, words):  # type: ignore[no-untyped-def]
    """The first list of pairs with a key that stands for no word, or a state of 3; -1: none."""
    mask = mask_of(key_bits)
    for i in range(len(begin) - 1):
        n = np.int64(begin[i + 1]) - np.int64(begin[i])
        at = (address << np.int64(3)) + places[i]
        leading = directory_bits(n)
        rest = key_bits - leading
        directory = at
        size = bit_length(n)
        if leading:
            at += ((_ONE << leading) + _ONE) * size
        first, end = np.int64(0), n
        for bucket in range(_ONE << leading):
            if leading:
                first = field(directory, size)
                directory += size
                end = field(directory, size)
            for _ in range(first, end):
                key = (bucket << rest) | field(at, rest)
                if (key * inverse) & mask >= words:
                    return i
                at += rest
            for _ in range(first, end):
                if field(at, np.int64(2)) == 3:
                    return i
                at += value_bits
    return -1


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
    """Two sums modulo 2**64 of hashes of the n-grams (n, k): the same in whatever order they come.

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
