"""Checks everything that the kernels trust about lists and records.

A value is read only after its place was checked, so nothing is read outside a column.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import DIRECT, directory_bits, list_bits, rank_bits
from dlm.index.packed.low import BLOCK_WORDS, EXTENDED, FIRST
from dlm.index.packed.record_kernels import (
    DEPTHS,
    LEVEL_PLACES,
    LONGEST,
    N_ESCAPE,
    N_FLAG_BITS,
    N_PROB_LIMIT,
    N_VALUE_BITS,
    N_WEIGHTS,
    WIDTH_BITS,
    id_of,
    open_bucket,
    open_few,
    open_many,
    read_gamma,
    read_head,
    record_at,
    words_bits,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import bit_length, field, get, load64, mask_of, mirrored, of, ones_in

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)

# The state of the current family of each length: how many words follow the shorter context; how
# many contexts and buckets are left; the current bucket's number; the directory (0: none), the bits
# of its distances, the first bucket. For the current bucket: the number of contexts, and how many
# are left; the bit of the keys, the bits of a key and of a distance, and the last key read.
(
    S_SIZE, S_COUNT, S_BUCKETS, S_BUCKET, S_DIRECTORY, S_STEP, S_FIRST, S_IN, S_LEFT, S_KEYS,
    S_WIDTH, S_INNER, S_LAST,
) = range(13)  # fmt: skip
LONGEST_STEP = 48  # maximum bits of a distance
FAULTS = ("", "directory", "keys", "values", "place", "head", "weight", "family")
DIRECTORY, KEYS, VALUES, PLACE, HEAD, WEIGHT, FAMILY = range(1, 8)


@inlined
def good_backoff(code, limit):  # type: ignore[no-untyped-def]
    """Whether the code of a weight is valid, that is, below `limit`. If `limit` is 0, codes are the
    bits of floats, which must be finite and not -0.0."""
    if limit:
        return code < limit
    return (code >> np.int64(23)) & np.int64(255) != 255 and code != np.int64(1 << 31)


@kernel("int64, int64, int64, int64, int64, int64")
def check_backoffs(address, count, shift, stride, width, limit):  # type: ignore[no-untyped-def]
    """Returns the first i whose field at shift + i * stride is not a weight's code, or -1."""
    for i in range(count):
        if not good_backoff(get(address, np.int64(i) * stride + shift, width), limit):
            return i
    return np.int64(-1)


@kernel("int64, int64, int64")
def check_words_value(address, words, runs):  # type: ignore[no-untyped-def]
    """Returns the first block of `word_value` that breaks a rule, or -1.

    Args  words, runs  how many words, and runs of equal probabilities, there are in all
    """
    begun = _0
    blocks = (words + BLOCK_WORDS - 1) // BLOCK_WORDS
    for i in range(blocks):
        block = load64(address + (np.int64(i) << _3))
        first = (block >> np.int64(FIRST)) & mask_of(np.int64(BLOCK_WORDS))
        extended = (block >> np.int64(EXTENDED)) & mask_of(np.int64(BLOCK_WORDS))
        here = min(np.int64(words) - np.int64(i) * np.int64(BLOCK_WORDS), np.int64(BLOCK_WORDS))
        wrong = block & mask_of(np.int64(FIRST)) != begun or (first | extended) >> here != 0
        if wrong or (i == 0 and first & _1 == 0):
            return i
        begun += ones_in(first)
    return np.int64(-1) if begun == runs else blocks


@inlined
def check_list(  # type: ignore[no-untyped-def]
    at, n, key_bits, of_words, words, value_bits, flag_bits, prob_limit
):
    """Returns 0 if the list of n keys at bit `at` follows the rules; else an index into FAULTS.

    Each key, or with `of_words` the word that it stands for, must be below `words`.
    """
    leading = directory_bits(n)
    rest = key_bits - leading
    size = bit_length(n)
    directory = at
    if leading:
        at += ((_1 << leading) + _1) * size
        if field(directory, size) != 0 or field(directory + (_1 << leading) * size, size) != n:
            return np.int64(DIRECTORY)
    begin, end = np.int64(0), n
    for bucket in range(_1 << leading):
        if leading:
            begin = field(directory, size)
            directory += size
            end = field(directory, size)
            if end < begin or end > n:
                return np.int64(DIRECTORY)
        last = np.int64(-1)
        for _ in range(begin, end):
            key = field(at, rest)
            word = (bucket << rest) | key
            if of_words:
                word = mirrored(word, key_bits)
            if key <= last or word >= words:
                return np.int64(KEYS)
            last = key
            at += rest
        for _ in range(begin, end):
            far = field(at + flag_bits, value_bits - flag_bits)
            if far >= prob_limit:  # not a probability's code
                return np.int64(VALUES)
            at += value_bits
    return np.int64(0)


@kernel("int64, int64[:], int64[:], int64[:], int64, int64, int64, int64")
def check_key_lists(address, places, begin, widths, words, value_bits, flag_bits, prob_limit):  # type: ignore[no-untyped-def]
    """Returns the first list that breaks a rule, or -1; and its fault's index in FAULTS."""
    for i in range(len(begin) - 1):
        n = np.int64(begin[i + 1]) - np.int64(begin[i])
        bits = list_bits(n, widths[i], np.int64(value_bits))
        if places[i + 1] - places[i] != bits:
            return i, np.int64(PLACE)
        fault = check_list(
            (address << np.int64(3)) + places[i], n, widths[i], True, words,
            np.int64(value_bits), np.int64(flag_bits), prob_limit,
        )  # fmt: skip
        if fault:
            return i, fault
    return -1, np.int64(0)


@inlined
def check_words(level, bit, size, width, most):  # type: ignore[no-untyped-def]
    """Returns the fault of a list of words, whose ranks must be below `most`; 0: no fault."""
    value_bits, flag_bits = of(level, N_VALUE_BITS), of(level, N_FLAG_BITS)
    limit = of(level, N_PROB_LIMIT)
    if width == 0:
        for _ in range(size):
            if field(bit + flag_bits, value_bits - flag_bits) >= limit:
                return np.int64(VALUES)
            bit += value_bits
        return _0
    return check_list(bit, size, width, False, most, value_bits, flag_bits, limit)


@inlined
def check_family(s, bit, end, size, count, key_bits):  # type: ignore[no-untyped-def]
    """Makes a family the current one; returns the bit of its first bucket, or -1 for a fault."""
    s[S_SIZE], s[S_COUNT], s[S_BUCKETS], s[S_BUCKET] = size, count, min(count, _1), _0
    s[S_DIRECTORY], s[S_LEFT], s[S_LAST] = _0, _0, -_1
    if count <= DIRECT:
        return bit
    s[S_WIDTH], step, directory, first = open_many(bit, count, key_bits)
    s[S_STEP], s[S_DIRECTORY], s[S_FIRST] = step, directory, first
    s[S_BUCKETS] = _1 << directory_bits(count)
    return first if first <= end and step <= LONGEST_STEP else -_1


@inlined
def check_bucket(s, at, end):  # type: ignore[no-untyped-def]
    """Opens the next bucket; returns the bit of its first record, or -1 for a fault."""
    if s[S_DIRECTORY]:
        far = field(s[S_DIRECTORY] + s[S_BUCKET] * s[S_STEP], s[S_STEP])
        s[S_IN], s[S_INNER], s[S_KEYS] = open_bucket(at)
        s[S_LAST] = -_1
        if s[S_FIRST] + far != at or s[S_KEYS] - at > 57 + 6:
            return -_1
    else:
        s[S_IN] = s[S_COUNT]
        s[S_WIDTH], s[S_INNER], s[S_KEYS] = open_few(at, s[S_IN])
    if s[S_IN] > s[S_COUNT] or s[S_INNER] > LONGEST_STEP:
        return -_1
    s[S_LEFT] = s[S_IN]
    s[S_BUCKETS] -= _1
    s[S_BUCKET] += _1
    first = record_at(s[S_KEYS], s[S_WIDTH], _0, s[S_IN], _0)
    first += max(s[S_IN] - _1, _0) * s[S_INNER]
    return first if first <= end else -_1


@inlined
def check_member(s, at, key_bits, is_root, words):  # type: ignore[no-untyped-def]
    """Whether a bucket's next context begins at `at`, with a valid word and key above the last."""
    place = s[S_IN] - s[S_LEFT]
    own = field(s[S_KEYS] + place * s[S_WIDTH], s[S_WIDTH])
    if s[S_DIRECTORY]:
        key = own
        word = id_of(((s[S_BUCKET] - _1) << s[S_WIDTH]) | own, key_bits, is_root)
    else:
        key = id_of(own, key_bits, is_root)
        word = own
    rises = key > s[S_LAST]
    s[S_LAST] = key
    begin = record_at(s[S_KEYS], s[S_WIDTH], s[S_INNER], s[S_IN], place)
    s[S_LEFT] -= _1
    s[S_COUNT] -= _1
    return rises and word < words and begin == at


@inlined
def check_end(s, at):  # type: ignore[no-untyped-def]
    """Whether a family ends at a bit, after all of its contexts."""
    if s[S_COUNT]:
        return False
    if s[S_DIRECTORY] == 0:
        return True
    return s[S_FIRST] + field(s[S_DIRECTORY] + s[S_BUCKET] * s[S_STEP], s[S_STEP]) == at


@kernel("int64, int64, int64, int64, int64, int64, int64, int64, int64[:], out int64[:, :]")
def check_records(  # type: ignore[no-untyped-def]
    levels, tree, bits, roots, root_key_bits, pairs, words, key_bits, most, counts
):
    """Returns the first root whose records break a rule, or -1; and its fault's index in FAULTS.

    Args    bits, roots   numbers of the tree's bits and roots;  pairs  number of 2-grams
    Shapes  most (L,)     by length, the most words that may follow contexts, in total
            counts (L, 2) added to: contexts, and words that follow contexts, by length
    """
    top = np.int64(len(counts))
    stack = np.zeros((DEPTHS, 13), np.int64)
    end = (tree << _3) + bits
    depth = _0
    at = check_family(stack[0], tree << _3, end, _0, roots, root_key_bits)
    if at < 0:
        return -_1, np.int64(DIRECTORY)
    while depth >= 0:
        s = stack[depth]
        root = roots - stack[0, S_COUNT] - _1
        if s[S_LEFT] == 0:
            if s[S_BUCKETS]:
                if at > end:
                    return root, np.int64(FAMILY)
                at = check_bucket(s, at, end)
                if at < 0:
                    return root, np.int64(FAMILY)
            else:
                if not check_end(s, at):
                    return root, np.int64(FAMILY)
                depth -= _1
            continue
        is_root = depth == 0
        if is_root:
            good = check_member(s, at, root_key_bits, True, pairs)
            root += _1
        else:
            good = check_member(s, at, key_bits, False, words)
        if not good:
            return root, np.int64(FAMILY)
        level = levels + ((depth * np.int64(LEVEL_PLACES)) << _3)
        parent_size = words if is_root else s[S_SIZE]
        # A part is read only if it begins at or before the end, so loads end in the spare word.
        if at > end:
            return root, np.int64(HEAD)
        size, head = read_head(at, parent_size, is_root)
        if head > 57 or size > parent_size:
            return root, np.int64(HEAD)
        at += head
        if at > end:
            return root, np.int64(WEIGHT)
        code, width = read_gamma(at)
        at += width
        if width > 57 or at > end:
            return root, np.int64(WEIGHT)
        if code - _1 == of(level, N_ESCAPE):
            if not good_backoff(field(at, np.int64(32)), _0):
                return root, np.int64(WEIGHT)
            at += np.int64(32)
        elif code > of(level, N_WEIGHTS):
            return root, np.int64(WEIGHT)
        count = _0
        if depth + _1 < top:
            if at > end:
                return root, np.int64(FAMILY)
            count, width = read_gamma(at)
            count -= _1
            at += width
            if width > 57 or count >= LONGEST or count > words:
                return root, np.int64(FAMILY)
        width = rank_bits(size, parent_size)
        if is_root:
            width = _0
            if size:
                width = field(at, np.int64(WIDTH_BITS)) + _1
                at += np.int64(WIDTH_BITS)
            # No rank needs more bits than a word id, and `width` bits must do for `size` ranks.
            if at > end or width > max(bit_length(words - _1), _1) or size > _1 << width:
                return root, np.int64(HEAD)
        length = words_bits(size, width, of(level, N_VALUE_BITS))
        counts[depth, 0] += _1
        counts[depth, 1] += size
        if at + length > end or counts[depth, 1] > most[depth]:
            return root, np.int64(VALUES)
        fault = check_words(level, at, size, width, parent_size)
        if fault:
            return root, fault
        at += length
        if count:
            depth += _1
            at = check_family(stack[depth], at, end, size, count, key_bits)
            if at < 0:
                return root, np.int64(FAMILY)
    return (-_1, _0) if at == end else (roots, np.int64(PLACE))
