"""Subtree records: a context and everything that is stored below it, as one run of bits.

A record holds how many words follow the context, its weight, the list of those words, and then the
contexts with one older word, each as a record: what a search reads next is nearby ("Records" in
shards/FORMAT.md). A `level` is the address of one context length's `tree.level_numbers`; bits count
from address 0 unless noted. This module has over 600 lines since writers are next to readers.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import numpy as np

from dlm.index.packed.kernels import (
    DIRECT,
    directory_bits,
    find_key,
    get_list,
    list_bits,
    put,
    put_list,
    rank_bits,
)
from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import (
    bit_length,
    field,
    load32,
    load64,
    mask_of,
    mirrored,
    of,
    trailing_zeros,
)

# Indices of the numbers by which a level's records are read; see `tree.level_numbers`.
(
    N_FLAG_BITS,
    N_VALUE_BITS,  # flags and probability
    N_PROB_TABLE,
    N_ESCAPE,
    N_WEIGHT_TABLE,
    N_PROB_LIMIT,
    N_WEIGHTS,
    LEVEL_PLACES,
) = range(8)
RAW = 1 << 32  # a flag above the bits of a weight that no table holds
DEPTHS = 16  # size of a stack of contexts, each one word longer than the previous one
# DO NOT CHANGE: on disk.
WIDTH_BITS, STEP_BITS = 5, 6  # bits of the fields for the widths of a family's keys and distances
LONGEST = 1 << 28  # no context has this many words after it, or contexts with one older word

_0, _1, _2, _3 = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


# ----------------------------------------------------------------------------- Elias gamma codes


@inlined
def gamma_bits(number):  # type: ignore[no-untyped-def]
    return _2 * bit_length(number) - _1


@inlined
def put_gamma(words, bit, number):  # type: ignore[no-untyped-def]
    """Writes a zero per bit below the top bit (at most 28), a one, those bits; returns the end."""
    more = bit_length(number) - _1
    rest = ((number & mask_of(more)) << _1) | _1
    put(words, bit, _2 * more + _1, rest << more)
    return bit + _2 * more + _1


@inlined
def read_gamma(bit):  # type: ignore[no-untyped-def]
    """Reads a number of at most 29 bits; returns the number, and the length of its code in bits."""
    x = load64(bit >> _3) >> (bit & np.int64(7))
    zeros = trailing_zeros(x)
    return (_1 << zeros) + ((x >> (zeros + _1)) & mask_of(zeros)), _2 * zeros + _1


# -------------------------------------------------------------------------------- what is read


@inlined
def read_head(bit, parent_size, is_root):  # type: ignore[no-untyped-def]
    """Reads how many words follow a context; returns this number, and the bits that it takes.

    A root stores the gamma code of the number + 1. Others store a one if the number is that of the
    shorter context, `parent_size`; else a zero, then the number's gamma code (`parent_size` for 0).
    """
    if is_root:
        size, width = read_gamma(bit)
        return size - _1, width
    x = load64(bit >> _3) >> (bit & np.int64(7))
    if x & _1:
        return parent_size, _1
    x = (x >> _1) & mask_of(np.int64(56))
    zeros = trailing_zeros(x)
    size = (_1 << zeros) + ((x >> (zeros + _1)) & mask_of(zeros))
    return _0 if size == parent_size else size, _2 * zeros + _2


@inlined
def open_record(level, bit, parent_size, is_root):  # type: ignore[no-untyped-def]
    """Reads the fields at the beginning of a record.

    Returns  (words that follow, bits of a rank, contexts with one older word, weight, bit of the
             list of words). The weight is an index into the level's table, or RAW | its bits
    """
    size, head = read_head(bit, parent_size, is_root)
    bit += head
    weight, width = read_gamma(bit)
    weight -= _1
    bit += width
    if weight == of(level, N_ESCAPE):
        weight = np.int64(RAW) | field(bit, np.int64(32))
        bit += np.int64(32)
    children = _0
    if of(level, N_FLAG_BITS):  # the longest contexts have no children
        children, width = read_gamma(bit)
        children -= _1
        bit += width
    if is_root:
        width = _0
        if size:
            width = field(bit, np.int64(WIDTH_BITS)) + _1
            bit += np.int64(WIDTH_BITS)
        return size, width, children, weight, bit
    return size, rank_bits(size, parent_size), children, weight, bit


@inlined
def width_before(bit):  # type: ignore[no-untyped-def]
    """Reads how many bits a rank has in a root's list at `bit`; the field precedes the list."""
    return field(bit - np.int64(WIDTH_BITS), np.int64(WIDTH_BITS)) + _1


@inlined
def words_bits(size, width, value_bits):  # type: ignore[no-untyped-def]
    """Returns the bits of a list of words, which has only values if ranks have no bits."""
    if width == 0:
        return size * value_bits
    return list_bits(size, width, value_bits)


# A family holds the contexts with one older word, by the word's id or key; or the roots, where the
# number of the 2-gram serves as id and key.


@inlined
def open_few(bit, count):  # type: ignore[no-untyped-def]
    """Opens a family of at most DIRECT; returns an id's bits, a distance's, and where ids begin."""
    width = field(bit, np.int64(WIDTH_BITS)) + _1
    bit += np.int64(WIDTH_BITS)
    step = _0
    if count > 1:
        step = field(bit, np.int64(STEP_BITS))
        bit += np.int64(STEP_BITS)
    return width, step, bit


@inlined
def open_many(bit, count, key_bits):  # type: ignore[no-untyped-def]
    """Opens a larger family; returns the bits of a key in its buckets and of a distance, and where
    the directory and the first bucket begin."""
    leading = directory_bits(count)
    step = field(bit, np.int64(STEP_BITS))
    bit += np.int64(STEP_BITS)
    return key_bits - leading, step, bit, bit + ((_1 << leading) + _1) * step


@inlined
def open_bucket(bit):  # type: ignore[no-untyped-def]
    """Opens a bucket; returns its number of contexts, a distance's bits, and where keys begin."""
    count, width = read_gamma(bit)
    count -= _1
    bit += width
    step = _0
    if count > 1:
        step = field(bit, np.int64(STEP_BITS))
        bit += np.int64(STEP_BITS)
    return count, step, bit


@inlined
def record_at(bit, width, step, count, place):  # type: ignore[no-untyped-def]
    """Returns the bit of record number `place` of `count` contexts whose keys are at `bit`."""
    bit += count * width
    far = field(bit + (place - _1) * step, step) if place else _0
    return bit + (count - _1) * step + far


@inlined
def ask_bucket(bit, count, key, key_bits):  # type: ignore[no-untyped-def]
    """The bit that a search for a key reads first, in a family of more than DIRECT contexts."""
    rest, step, directory, _ = open_many(bit, count, key_bits)
    return directory + (key >> rest) * step


@inlined
def bucket_of(bit, count, key, key_bits):  # type: ignore[no-untyped-def]
    """Returns the bit of the bucket that may hold a key, and the bits of a key in the bucket."""
    rest, step, directory, first = open_many(bit, count, key_bits)
    return first + field(directory + (key >> rest) * step, step), rest


@inlined
def find_in_bucket(bit, width, key):  # type: ignore[no-untyped-def]
    """Finds a key in a bucket; returns the bit of its record, or -1."""
    count, step, bit = open_bucket(bit)
    place = find_key(bit, width, _0, count, key & mask_of(width))
    return record_at(bit, width, step, count, place) if place >= 0 else place


@inlined
def find_among_few(bit, count, word):  # type: ignore[no-untyped-def]
    """Finds an id in a family of at most DIRECT contexts; returns its record's first bit, or -1."""
    if count == 0:
        return np.int64(-1)
    width, step, bit = open_few(bit, count)
    place = find_key(bit, width, _0, count, word & mask_of(width))
    if place < 0 or word >> width:
        return np.int64(-1)
    return record_at(bit, width, step, count, place)


@inlined
def find_child(bit, count, word, key, key_bits):  # type: ignore[no-untyped-def]
    """Finds a word in the family of `count` contexts at `bit`; returns its record's bit, or -1."""
    if count <= DIRECT:
        return find_among_few(bit, count, word)
    bucket, rest = bucket_of(bit, count, key, key_bits)
    return find_in_bucket(bucket, rest, key)


# ------------------------------------------------------------------------------- what is written


@inlined
def id_of(key, key_bits, is_root):  # type: ignore[no-untyped-def]
    return key if is_root else mirrored(key, key_bits)


@inlined
def few_bits(keys, sizes, first, count, key_bits, is_root):  # type: ignore[no-untyped-def]
    """Returns the bits of an id and of a distance in a family of at most DIRECT contexts, whose
    keys and record sizes begin at index `first`."""
    width = _1
    far = _0
    for i in range(first, first + count):
        width = max(width, bit_length(id_of(np.int64(keys[i]), key_bits, is_root)))
        if i > first:
            far += sizes[i - 1]
    return width, bit_length(far)


@inlined
def next_bucket(keys, i, end, rest):  # type: ignore[no-untyped-def]
    """Returns the index after the last context in the same bucket as context i."""
    bucket = np.int64(keys[i]) >> rest
    while i < end and np.int64(keys[i]) >> rest == bucket:
        i += 1
    return i


@inlined
def bucket_bits(sizes, first, end, width):  # type: ignore[no-untyped-def]
    """Returns the bits of a bucket without its records, of a distance in it, and of the records."""
    total = _0
    for i in range(first, end):
        total += sizes[i]
    count = np.int64(end - first)
    bits = gamma_bits(count + _1) + count * width
    step = _0
    if count > 1:
        step = bit_length(total - sizes[end - 1])
        bits += np.int64(STEP_BITS) + (count - _1) * step
    return bits, step, total


@inlined
def many_bits(keys, sizes, first, count, key_bits):  # type: ignore[no-untyped-def]
    """Returns the bits of all buckets and records in a family of more than DIRECT contexts."""
    rest = key_bits - directory_bits(count)
    buckets = _1 << directory_bits(count)
    bits = _0
    i = first
    while i < first + count:
        end = next_bucket(keys, i, first + count, rest)
        own, _, total = bucket_bits(sizes, i, end, rest)
        bits += own + total
        buckets -= _1
        i = end
    return bits + buckets  # each empty bucket takes one bit


@inlined
def family_bits(keys, sizes, first, count, key_bits, is_root):  # type: ignore[no-untyped-def]
    """Returns the bits of a family and its records."""
    if count == 0:
        return _0
    if count > DIRECT:
        bits = many_bits(keys, sizes, first, count, key_bits)
        directory = ((_1 << directory_bits(count)) + _1) * bit_length(bits)
        return np.int64(STEP_BITS) + directory + bits
    width, step = few_bits(keys, sizes, first, count, key_bits, is_root)
    bits = np.int64(WIDTH_BITS) + count * width
    if count > 1:
        bits += np.int64(STEP_BITS) + (count - _1) * step
    for i in range(first, first + count):
        bits += sizes[i]
    return bits


@kernel("uint32[:, :], int64[:], int64, int64, int64[:], uint32[:], int64[:], int64, out int64[:]")
def size_records(  # type: ignore[no-untyped-def]
    nodes, weights, escape, value_bits, widths, below, below_sizes, key_bits, sizes
):
    """Computes the bits of each context's record, including all records below it.

    Shapes  nodes (D, 6)  rows of `making.kernels.route`;  sizes (D,) filled
            weights (D,)  the codes of their weights
            widths (D,)   the bits of a rank, if the contexts are roots; else (0,)
            below, below_sizes (E,)  the keys of the contexts with one older word, in order, and the
                    bits of their records; none for the longest, whose `key_bits` is 0
    """
    child = _0
    for i in range(len(nodes)):
        size, parent_size = np.int64(nodes[i, 4]), np.int64(nodes[i, 5])
        if len(widths):
            width = widths[i]
            bits = gamma_bits(size + _1) + (np.int64(WIDTH_BITS) if size else _0)
        else:
            width = rank_bits(size, parent_size)
            bits = _1
            if size != parent_size:
                bits += gamma_bits(size if size else parent_size)
        bits += words_bits(size, width, np.int64(value_bits))
        bits += gamma_bits(weights[i] + _1)
        if weights[i] == escape:
            bits += np.int64(32)
        if key_bits:
            count = np.int64(nodes[i, 3])
            bits += gamma_bits(count + _1)
            bits += family_bits(below, below_sizes, child, count, np.int64(key_bits), False)
            child += count
        sizes[i] = bits


@kernel("uint32[:], int64[:], int64")
def root_bits(keys, sizes, key_bits):  # type: ignore[no-untyped-def]
    """Returns the bits of all roots (R,), given their 2-grams' numbers and their records' bits."""
    return family_bits(keys, sizes, _0, np.int64(len(keys)), np.int64(key_bits), True)


@kernel("out uint64[:], uint32[:], int64[:], int64, out int64[:]")
def put_roots(words, keys, sizes, key_bits, places):  # type: ignore[no-untyped-def]
    """Writes the fields before roots' records; fills `places` (R,) with the records' first bits."""
    put_family(words, _0, keys, sizes, _0, np.int64(len(keys)), np.int64(key_bits), True, places)
    return 0


@inlined
def put_family(words, bit, keys, sizes, first, count, key_bits, is_root, places):  # type: ignore[no-untyped-def]
    """Writes the fields before a family's records; fills `places` with the records' first bits."""
    if count == 0:
        return
    if count <= DIRECT:
        width, step = few_bits(keys, sizes, first, count, key_bits, is_root)
        put(words, bit, np.int64(WIDTH_BITS), width - _1)
        bit += np.int64(WIDTH_BITS)
        if count > 1:
            put(words, bit, np.int64(STEP_BITS), step)
            bit += np.int64(STEP_BITS)
        for i in range(first, first + count):
            put(words, bit, width, id_of(np.int64(keys[i]), key_bits, is_root))
            bit += width
        put_distances(words, bit, step, sizes, first, first + count, places)
        return
    leading = directory_bits(count)
    rest = key_bits - leading
    step = bit_length(many_bits(keys, sizes, first, count, key_bits))
    put(words, bit, np.int64(STEP_BITS), step)
    directory = bit + np.int64(STEP_BITS)
    begin = directory + ((_1 << leading) + _1) * step
    bit = begin
    i = first
    for bucket in range(_1 << leading):
        put(words, directory, step, bit - begin)
        directory += step
        end = i
        if i < first + count and np.int64(keys[i]) >> rest == bucket:
            end = next_bucket(keys, i, first + count, rest)
        _, inner, _ = bucket_bits(sizes, i, end, rest)
        bit = put_gamma(words, bit, end - i + _1)
        if end - i > 1:
            put(words, bit, np.int64(STEP_BITS), inner)
            bit += np.int64(STEP_BITS)
        for j in range(i, end):
            put(words, bit, rest, np.int64(keys[j]) & mask_of(rest))
            bit += rest
        bit = put_distances(words, bit, inner, sizes, i, end, places)
        i = end
    put(words, directory, step, bit - begin)


@inlined
def put_distances(words, bit, step, sizes, first, end, places):  # type: ignore[no-untyped-def]
    """Writes the later records' distances from the first; returns the bit after the last record."""
    begin = bit + max(np.int64(end - first - 1), _0) * step
    far = _0
    for i in range(first, end):
        if i > first:
            put(words, bit, step, far)
            bit += step
        places[i] = begin + far
        far += sizes[i]
    return begin + far


@kernel(
    "out uint64[:], int64[:], uint32[:, :], int64[:], int64, int64, int64[:], uint32[:], "
    "uint64[:], uint32[:], int64[:], int64, out int64[:]"
)
def put_records(  # type: ignore[no-untyped-def]
    words,
    places,
    nodes,
    weights,
    escape,
    value_bits,
    widths,
    ranks,
    values,
    below,
    below_sizes,
    key_bits,
    below_places,
):
    """Writes the records of some contexts; for the records below, it only finds the places.

    Shapes  words          zero wherever this writes
            places (D,)    where each record begins
            ranks, values (G,)  of the words that follow them
            below_places (E,) filled;  the others as in `size_records`
    """
    child = _0
    first = _0
    for i in range(len(nodes)):
        bit = places[i]
        size, parent_size = np.int64(nodes[i, 4]), np.int64(nodes[i, 5])
        width = rank_bits(size, parent_size)
        if len(widths):
            width = widths[i]
            bit = put_gamma(words, bit, size + _1)
        elif size == parent_size:
            put(words, bit, _1, _1)
            bit += _1
        else:
            bit = put_gamma(words, bit + _1, size if size else parent_size)
        bit = put_gamma(words, bit, weights[i] + _1)
        if weights[i] == escape:
            put(words, bit, np.int64(32), np.int64(nodes[i, 2]))
            bit += np.int64(32)
        count = _0
        if key_bits:
            count = np.int64(nodes[i, 3])
            bit = put_gamma(words, bit, count + _1)
        if len(widths) and size:
            put(words, bit, np.int64(WIDTH_BITS), width - _1)
            bit += np.int64(WIDTH_BITS)
        if width == 0:
            for j in range(first, first + size):
                put(words, bit, np.int64(value_bits), values[j])
                bit += value_bits
        else:
            put_list(words, bit, width, np.int64(value_bits), ranks, values, first, size)
            bit += list_bits(size, width, np.int64(value_bits))
        first += size
        put_family(
            words, bit, below, below_sizes, child, count, np.int64(key_bits), False, below_places
        )
        child += count


@kernel("out uint64[:], int64[:], int64[:], int64[:]")
def copy_bits(words, places, begins, ends):  # type: ignore[no-untyped-def]
    """Copies ranges of bits, each to its place in `words`, where all bits must be 0."""
    for i in range(len(begins)):
        bit = places[i]
        source = begins[i]
        left = ends[i] - source
        while left > 0:
            width = min(left, np.int64(56))
            put(words, bit, width, field(source, width))
            bit += width
            source += width
            left -= width


# ------------------------------------------------------- every record, one after another

# The state of the current family of each length: contexts left in its bucket, buckets left, bits of
# a bucket's keys (0: a family of at most DIRECT), the next bucket's number, the family's contexts.
F_LEFT, F_BUCKETS, F_REST, F_BUCKET, F_COUNT = range(5)


@inlined
def begin_family(bit, count, key_bits, f):  # type: ignore[no-untyped-def]
    """Begins a family, whose state is `f`; returns the bit of its first bucket."""
    f[F_LEFT], f[F_BUCKETS], f[F_REST], f[F_BUCKET], f[F_COUNT] = _0, _1, _0, _0, count
    if count > DIRECT:
        f[F_REST], _, _, bit = open_many(bit, count, key_bits)
        f[F_BUCKETS] = _1 << directory_bits(count)
    if count == 0:
        f[F_BUCKETS] = _0
    return bit


@inlined
def begin_bucket(bit, key_bits, is_root, f, keys, first):  # type: ignore[no-untyped-def]
    """Enters the family's bucket at `bit`; fills keys[first:]; returns where its records begin."""
    rest = f[F_REST]
    if rest:
        count, step, bit = open_bucket(bit)
        for i in range(count):
            keys[first + i] = (f[F_BUCKET] << rest) | field(bit + i * rest, rest)
        bit += count * rest
    else:
        count = f[F_COUNT]
        width, step, bit = open_few(bit, count)
        for i in range(count):
            keys[first + i] = id_of(field(bit + i * width, width), key_bits, is_root)
        bit += count * width
    f[F_LEFT] = count
    f[F_BUCKETS] -= _1
    f[F_BUCKET] += _1
    return bit + max(count - _1, _0) * step


@kernel(
    "int64, int64, int64, int64, int64[:], int64[:], out uint32[:], out uint32[:], "
    "out int64[:], out int64[:], out int64[:], out uint32[:], out uint64[:]"
)
def unpack_records(  # type: ignore[no-untyped-def]
    levels,
    tree,
    root_key_bits,
    key_bits,
    node_begin,
    gram_begin,
    key,
    weight,
    children,
    following,
    parent,
    ranks,
    values,
):
    """Unpacks all records into plain arrays, one context length after another.

    Shapes  node_begin, gram_begin (top + 1,)  where contexts and words of each length begin, end
            key, weight, children, following, parent (D,), ranks, values (G,)  filled; `weight` the
                    bits of weights, `parent` the size of the parent's list, 0 for roots
    Trusts  the records passed `check_records`
    """
    node, gram, named = node_begin.copy(), gram_begin.copy(), node_begin.copy()
    f, size_at = np.zeros((DEPTHS, 5), np.int64), np.zeros(DEPTHS, np.int64)
    depth = _0
    at = begin_family(tree << _3, node_begin[1], root_key_bits, f[0])
    while depth >= 0:
        if f[depth, F_LEFT] == 0:
            if f[depth, F_BUCKETS] == 0:
                depth -= _1
                continue
            if depth:
                at = begin_bucket(at, key_bits, False, f[depth], key, named[depth])
            else:
                at = begin_bucket(at, root_key_bits, True, f[0], key, named[0])
            named[depth] += f[depth, F_LEFT]
            continue
        f[depth, F_LEFT] -= _1
        level = levels + ((depth * np.int64(LEVEL_PLACES)) << _3)
        size, width, count, token, at = open_record(level, at, size_at[depth], depth == 0)
        d, g = node[depth], gram[depth]
        # If RAW is set, the bits below it are the weight itself.
        weight[d] = token
        if token < RAW:
            weight[d] = load32(of(level, N_WEIGHT_TABLE) + (token << _2))
        children[d], following[d], parent[d] = count, size, size_at[depth]
        value_bits = of(level, N_VALUE_BITS)
        get_words(at, size, width, value_bits, ranks, values, g)
        node[depth] += _1
        gram[depth] += size
        at += words_bits(size, width, value_bits)
        if count:
            depth += _1
            size_at[depth] = size
            at = begin_family(at, count, key_bits, f[depth])


@inlined
def get_words(bit, size, width, value_bits, ranks, values, first):  # type: ignore[no-untyped-def]
    """Reads the ranks and values of the words after a context into arrays, from index `first`."""
    if width == 0:
        for j in range(size):
            ranks[first + j] = j
            values[first + j] = field(bit, value_bits)
            bit += value_bits
    else:
        get_list(bit, width, value_bits, ranks, values, first, size)


@kernel("int64, int64, int64, out uint32[:], out int64[:], out int64[:]")
def list_roots(tree, end, key_bits, keys, begins, ends):  # type: ignore[no-untyped-def]
    """Lists the roots in stored order.

    Args    end  the bit at which the records end, from the beginning of `tree`
    Shapes  keys (R,) filled: the numbers of their 2-grams;  begins, ends (R,) filled: the bits of
            their records
    Trusts  the records passed `check_records`
    """
    count = np.int64(len(keys))
    f = np.zeros(5, np.int64)
    at = tree << _3
    directory, step, first = _0, _0, at
    if count > DIRECT:
        _, step, directory, first = open_many(at, count, key_bits)
    at = begin_family(at, count, key_bits, f)
    r = _0
    while f[F_BUCKETS]:
        if f[F_REST]:
            width = f[F_REST]
            some, inner, bit = open_bucket(at)
        else:
            some = count
            width, inner, bit = open_few(at, count)
        at = begin_bucket(at, key_bits, True, f, keys, r)
        until = (tree << _3) + end
        if count > DIRECT:
            until = first + field(directory + f[F_BUCKET] * step, step)
        # A record ends where the next one begins.
        for i in range(some):
            begins[r + i] = record_at(bit, width, inner, some, np.int64(i))
            if i:
                ends[r + i - 1] = begins[r + i]
        if some:
            ends[r + some - 1] = until
            at = until
        r += some


@kernel("int64, int64[:], int64, out uint32[:], out uint64[:], out int64[:, :], out int64[:, :]")
def count_records(levels, begins, key_bits, ranks, values, found, counts):  # type: ignore[no-untyped-def]
    """Counts what is below some roots.

    Shapes  begins (R,)  the bits of their records
            ranks, values (V,)  scratch space: as many as words
            found (R, 2) filled: contexts in each root's records, and words that follow contexts
            counts (top, 3)  added to, by length: contexts, words that follow, blanks among words
    Trusts  the records passed `check_records`
    """
    f, size_at = np.zeros((DEPTHS, 5), np.int64), np.zeros(DEPTHS, np.int64)
    for root in range(len(begins)):
        at = begins[root]
        depth = _0
        f[0, F_LEFT], f[0, F_BUCKETS] = _1, _0
        nodes, grams = _0, _0
        while depth >= 0:
            if f[depth, F_LEFT] == 0:
                if f[depth, F_BUCKETS] == 0:
                    depth -= _1
                    continue
                at = begin_bucket(at, key_bits, False, f[depth], ranks, _0)
                continue
            f[depth, F_LEFT] -= _1
            level = levels + ((depth * np.int64(LEVEL_PLACES)) << _3)
            size, width, count, _, at = open_record(level, at, size_at[depth], depth == 0)
            value_bits = of(level, N_VALUE_BITS)
            nodes += _1
            grams += size
            counts[depth, 0] += _1
            counts[depth, 1] += size
            if of(level, N_FLAG_BITS) == _2:
                get_words(at, size, width, value_bits, ranks, values, _0)
                for j in range(size):
                    counts[depth, 2] += np.int64(values[j] >> np.uint64(1)) & _1
            at += words_bits(size, width, value_bits)
            if count:
                depth += _1
                size_at[depth] = size
                at = begin_family(at, count, key_bits, f[depth])
        found[root, 0], found[root, 1] = nodes, grams
