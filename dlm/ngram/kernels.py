"""Turns text into words and ids. The kernels use no Python objects and no GIL.

Words are found in a hash table with open addressing. A *slot* is two numbers: the *entry*, with a
tag of the hash, the length and the id of a word, and the first eight bytes of the word, so that a
word of up to eight bytes is compared without another access. Id 0, the unknown word, is in no
slot, so an entry of 0 is a free slot; the word's two spellings are recognised where a search fails.
Eight bytes are read at a time: arrays of bytes must extend `PAD_BYTES` beyond the range that is
read, which the callers named under `Trusts` ensure: numba reads out of range silently.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dlm.jit import inlined, kernel
from dlm.ngram.memory_kernels import multiply_high, trailing_zeros

# Bytes after the last one of text or words, which are read but ignored.
PAD_BYTES = 8

# Fields of the state of `read_words`: words so far (with id 0), their bytes, row of <unk> or -1.
WORDS, WORD_BYTES, UNK_ROW = 0, 1, 2

# The number of words whose slots are prefetched before the first word is looked up.
_AT_ONCE = 16

# Stands for the rank of a missing word, or the number of a missing 2-gram.
NO_RANK = 0xFFFFFFFF  # DO NOT CHANGE: on the wire

TAB, NEWLINE, RETURN, SPACE = 9, 10, 13, 32

# Bytes that end a word of an ARPA file. `scan_word` allows no delimiter above a space.
ARPA_DELIMITERS = np.zeros(256, np.uint8)
ARPA_DELIMITERS[[TAB, NEWLINE, RETURN, SPACE]] = 1

_UNK_LOWER = np.uint64(int.from_bytes(b"<unk>", "little"))
_UNK_UPPER = np.uint64(int.from_bytes(b"<UNK>", "little"))

_ABOVE_SPACE = np.uint64(0x2121212121212121)
_HIGH_BITS = np.uint64(0x8080808080808080)
_MULTIPLIER = np.uint64(0xA0761D6478BD642F)
_LENGTH_MULTIPLIER = np.uint64(0xE7037ED1A0B428DB)
_ID_MASK = np.uint64(0xFFFFFFFF)
_TAG_SHIFT = np.uint64(40)
_LONGEST_IN_ENTRY = np.uint64(255)
U0, U1, U2, U3, U8, U32 = (np.uint64(n) for n in (0, 1, 2, 3, 8, 32))


# ------------------------------------------------------------------------- machine operations


@intrinsic
def raw(context, array):  # type: ignore[no-untyped-def]
    """The address of an array's data, without length and owner: counting references costs more than
    most functions here do. Only for arguments and constants: nothing keeps the array alive."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def prefetch(context, slots, at):  # type: ignore[no-untyped-def]
    """Prefetches index `at` of raw `slots`; changes nothing."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        # The cache line will be read soon and repeatedly, as data.
        how = [ir.Constant(number, n) for n in (0, 3, 1)]
        place = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        builder.call(function, [place, *how])
        return context.get_dummy_value()

    return types.void(slots, types.uint64), codegen


@intrinsic
def load64(context, text, at):  # type: ignore[no-untyped-def]
    """Eight bytes of raw `text` from `at` on, as a little-endian number."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.gep(args[0], [args[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(text, types.int64), codegen


@inlined
def fold(a, b):  # type: ignore[no-untyped-def]
    """Xors the upper and lower half of the product of two uint64, which mixes all their bits."""
    return np.uint64(multiply_high(np.int64(a), np.int64(b))) ^ (a * b)


@intrinsic
def bits_of(context, a):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(64))

    return types.uint64(types.float64), codegen


# ------------------------------------------------------------------------------------- words


@inlined
def hash_word(text, begin, length, first):  # type: ignore[no-untyped-def]
    """Hash of text[begin:begin + length]; `first` is its `bytes_at`. Trusts PAD_BYTES after it."""
    h = fold(np.uint64(length) * _LENGTH_MULTIPLIER ^ first, _MULTIPLIER)
    at = np.int64(8)
    while at < length:
        h = fold(h ^ bytes_at(text, begin + at, length - at), _MULTIPLIER)
        at += 8
    return h


@inlined
def bytes_at(text, at, count):  # type: ignore[no-untyped-def]
    """The next `count` bytes, but at most eight, as a number; count >= 0."""
    value = load64(text, at)
    if count < 8:
        value &= (U1 << (np.uint64(count) * U8)) - U1
    return value


@inlined
def scan_word(text, at, delimiters):  # type: ignore[no-untyped-def]
    """Returns the place of the delimiter that ends the word at `at`, and the word's `bytes_at`.

    Shapes  text (T,);  delimiters (256,)  not 0 for each delimiter; none is above a space
    Trusts  a delimiter at `at` or after it, and PAD_BYTES after that
    """
    begin = at
    first = load64(text, at)
    some = first
    while True:
        # The lowest bit set in `low` marks the first byte that is not above a space.
        low = (some - _ABOVE_SPACE) & ~some & _HIGH_BITS
        if low != U0:
            end = at + (trailing_zeros(np.int64(low)) >> np.int64(3))
            while delimiters[text[end]] == 0:  # a control character is part of a word
                end += 1
            break
        at += 8
        some = load64(text, at)
    if end - begin < 8:
        first &= (U1 << (np.uint64(end - begin) * U8)) - U1
    return end, first


@inlined
def note_word(text, at, delimiters, slots, mask, i, begins, lengths, firsts, hashes):  # type: ignore[no-untyped-def]
    """Notes the word at `at` as word i to look up, and prefetches its slot; returns its end."""
    end, first = scan_word(text, at, delimiters)
    h = hash_word(text, at, end - at, first)
    prefetch(slots, h & mask)
    begins[i] = at
    lengths[i] = end - at
    firsts[i] = first
    hashes[i] = h
    return end


@inlined
def find_word(slots, mask, word_begin, word_bytes, text, begin, length, first, h):  # type: ignore[no-untyped-def]
    """Id of the word text[begin:begin + length], or -1; 0 for both spellings of the unknown word.

    Shapes  slots (2**k,)  raw; each entry, then its word's first bytes; at least one entry is 0
            mask  len(slots) - 2: hash & mask is the place of an entry
            word_begin (n + 1 or more)  where each word begins in word_bytes
            first, h  `bytes_at` and `hash_word` of the word
    Cost    for a word of up to eight bytes, usually one place in `slots`
    Trusts  PAD_BYTES after the word and after all of word_bytes, which wordtable.WordTable adds
    """
    tag = ((h >> _TAG_SHIFT) << U8) | min(np.uint64(length), _LONGEST_IN_ENTRY)
    at = h & mask
    while True:
        entry = slots[at]
        if entry == U0:
            break
        if entry >> U32 == tag and slots[at + U1] == first:
            word = np.int64(entry & _ID_MASK)
            if length <= 8 or same_word(word_begin, word_bytes, word, text, begin, length):
                return word
        at = (at + U2) & mask
    if length == 5 and first in (_UNK_LOWER, _UNK_UPPER):
        return np.int64(0)
    return np.int64(-1)


@inlined
def same_word(word_begin, word_bytes, word, text, begin, length):  # type: ignore[no-untyped-def]
    start = word_begin[word]
    if word_begin[word + 1] - start != length:
        return False
    at = np.int64(0)
    while at < length:
        if bytes_at(word_bytes, start + at, length - at) != bytes_at(text, begin + at, length - at):
            return False
        at += 8
    return True


@inlined
def put_word(slots, mask, word, h, length, first):  # type: ignore[no-untyped-def]
    """Enters a word that the table lacks; trusts that a slot is free."""
    tag = ((h >> _TAG_SHIFT) << U8) | min(np.uint64(length), _LONGEST_IN_ENTRY)
    at = h & mask
    while slots[at] != U0:
        at = (at + U2) & mask
    slots[at] = tag << U32 | np.uint64(word)
    slots[at + U1] = first


@kernel("out uint64[:], int64[:], uint8[:], int64, int64")
def enter_words(slots, word_begin, word_bytes, begin, end):  # type: ignore[no-untyped-def]
    """Enters the words of ids begin <= id < end into `slots`, up to the first already entered.

    Returns  the id of that word, or `end`; the unknown word counts as already entered
    Trusts   what `find_word` trusts; begin >= 1; a slot for each word and one more
    """
    slots, mask = raw(slots), np.uint64(len(slots) - 2)
    word_begin, word_bytes = raw(word_begin), raw(word_bytes)
    for word in range(begin, end):
        later = word + _AT_ONCE
        if later < end:
            start = word_begin[later]
            length = word_begin[later + 1] - start
            first = bytes_at(word_bytes, start, length)
            prefetch(slots, hash_word(word_bytes, start, length, first) & mask)
        start = word_begin[word]
        length = word_begin[word + 1] - start
        first = bytes_at(word_bytes, start, length)
        h = hash_word(word_bytes, start, length, first)
        if find_word(slots, mask, word_begin, word_bytes, word_bytes, start, length, first, h) >= 0:
            return word
        put_word(slots, mask, word, h, length, first)
    return end


@kernel("uint64[:], int64[:], uint8[:], uint8[:], int64[:], int64[:], out uint32[:]")
def find_words(slots, word_begin, word_bytes, text, begin, end, ids):  # type: ignore[no-untyped-def]
    """Ids (n,) of the words text[begin[i]:end[i]]; 0 where the table lacks one.

    Trusts  0 <= begin <= end, within `text`, and what `find_word` trusts (wordtable.WordTable)
    """
    slots, mask = raw(slots), np.uint64(len(slots) - 2)
    word_begin, word_bytes, text = raw(word_begin), raw(word_bytes), raw(text)
    for i in range(len(ids)):
        later = i + _AT_ONCE
        if later < len(ids):
            length = end[later] - begin[later]
            first = bytes_at(text, begin[later], length)
            prefetch(slots, hash_word(text, begin[later], length, first) & mask)
        length = end[i] - begin[i]
        first = bytes_at(text, begin[i], length)
        h = hash_word(text, begin[i], length, first)
        word = find_word(slots, mask, word_begin, word_bytes, text, begin[i], length, first, h)
        ids[i] = max(word, 0)


# -------------------------------------------------------------------------------------- text


@kernel("uint8[:], int64, int64")
def count_newlines(text, begin, end):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    for byte in text[begin:end]:
        count += byte == NEWLINE
    return count


@kernel("uint64[:], int64[:], uint8[:], uint8[:], int64, uint8[:], out uint32[:], out int64[:]")
def find_text(slots, word_begin, word_bytes, text, end, delimiters, ids, sentence_begin):  # type: ignore[no-untyped-def]
    """Finds the ids of the words of text[:end], line by line; returns the number of words.

    Shapes  delimiters      (256,)        not 0 for delimiters; none above space
            ids             (words,)      filled
            sentence_begin  (lines + 1,)  filled: the first word of each line, then the number of
                                          words
    Trusts  text[end] is a newline, and PAD_BYTES follow; room for every word, and for one line more
            than text[:end] has newlines (wordtable.WordTable); what `find_words` trusts
    """
    slots, mask = raw(slots), np.uint64(len(slots) - 2)
    word_begin, word_bytes, text = raw(word_begin), raw(word_bytes), raw(text)
    delimiters = raw(delimiters)
    # Words whose slots are prefetched before the first of them is looked up.
    begins = np.empty(_AT_ONCE, np.int64)
    lengths = np.empty(_AT_ONCE, np.int64)
    firsts = np.empty(_AT_ONCE, np.uint64)
    hashes = np.empty(_AT_ONCE, np.uint64)
    at = np.int64(0)
    words = np.int64(0)
    lines = np.int64(1)
    sentence_begin[0] = 0
    more = True
    while more:
        asked = np.int64(0)
        while asked < _AT_ONCE:
            byte = text[at]
            if byte == NEWLINE:
                sentence_begin[lines] = words + asked
                lines += 1
                if at >= end:
                    more = False
                    break
                at += 1
            elif delimiters[byte] != 0:
                at += 1
            else:
                at = note_word(
                    text, at, delimiters, slots, mask, asked, begins, lengths, firsts, hashes
                )
                asked += 1
        for i in range(asked):
            word = find_word(
                slots, mask, word_begin, word_bytes, text, begins[i], lengths[i], firsts[i],
                hashes[i],
            )  # fmt: skip
            ids[words + i] = max(word, 0)
        words += asked
    return words


_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5_AND_8 = np.uint64(0x27D4EB2F165667C5 + 8)


@inlined
def _rotate(x, bits):  # type: ignore[no-untyped-def]
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@inlined
def slot_of(u, v):  # type: ignore[no-untyped-def]
    """The slot of the pair of ids (u, v), as in `partition.slots_of`."""
    lane = np.uint64(u) | (np.uint64(v) << np.uint64(32))
    h = (_rotate(lane * _P2, 31) * _P1) ^ _P5_AND_8
    h = _rotate(h, 27) * _P1 + _P4
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    h ^= h >> np.uint64(32)
    return np.int64(h & np.uint64(4095))
