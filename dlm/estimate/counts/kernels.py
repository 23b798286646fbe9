"""Kernels that turn text into ids, and ids into sorted, counted n-grams. They run without the GIL.

A *key* is an n-gram of the highest order with its most recent word first; n-grams that begin before
their sentence are padded with `<s>`, as in lmplz. Sorted keys are thus n-grams sorted by their
suffixes.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.kernels import (
    NEWLINE,
    PAD_BYTES,
    find_word,
    note_word,
    put_word,
    raw,
)

BOS, EOS = 1, 2

# The facts that `inspect` finds about a text.
HIGH, NUL, LESS_THAN, LONGEST_LINE, LONGEST_WORD, FACTS = 0, 1, 2, 3, 4, 5

# Entries of a state of `encode`: words so far and their bytes, then counts of what was read.
WORDS, WORD_BYTES, LINES, EMPTY, TOKENS, STATE = 0, 1, 2, 3, 4, 5

_AT_ONCE = 16
RADIX_BITS = 11
_RADIX = 1 << RADIX_BITS
_RADIX_SHIFT = np.uint64(RADIX_BITS)
_LOW_BITS = np.uint64(_RADIX - 1)
_U1 = np.uint64(1)


@kernel("uint8[:], int64, uint8[:], out int64[:]")
def inspect(text, end, delimiters, facts):  # type: ignore[no-untyped-def]
    """Finds the facts that tell whether text[:end] must be checked line by line.

    Shapes
        text        (T,)      uint8  whole lines
        delimiters  (256,)    uint8  not 0 for bytes that end a word
        facts       (FACTS,)  int64  filled: bytes above 127, NULs, `<`, longest line and word
    """
    line = np.int64(0)
    word = np.int64(0)
    longest_line = np.int64(0)
    longest_word = np.int64(0)
    high = np.int64(0)
    nul = np.int64(0)
    less = np.int64(0)
    for i in range(end):
        byte = text[i]
        high += byte >> np.uint8(7)
        less += byte == 60
        if delimiters[byte] != 0:
            longest_word = max(longest_word, i - word)
            word = i + 1
            if byte == NEWLINE:
                longest_line = max(longest_line, i - line)
                line = i + 1
        elif byte == 0:
            nul += 1
    facts[HIGH], facts[NUL], facts[LESS_THAN] = high, nul, less
    facts[LONGEST_LINE], facts[LONGEST_WORD] = longest_line, longest_word


@kernel(
    "uint8[:], int64, int64, uint8[:], int64, out uint64[:], out int64[:], out uint8[:], "
    "out int64[:], out uint32[:], int64"
)
def encode(text, at, end, delimiters, keep_empty, slots, word_begin, word_bytes, state, tokens, n):  # type: ignore[no-untyped-def]
    """Turns the lines of text[at:end] into ids; new words get the next ids.

    Shapes
        text        (T,)         uint8   whole lines
        state       (STATE,)     int64   added to
        tokens      (capacity,)  uint32  filled from n on: `<s>`, the words and `</s>` of each line
        the rest as in dlm.ngram.kernels
    Returns
        (where encoding stopped, how many tokens are filled). It stops at `end`, or at the first
        line for which there is no room among the tokens or the words
    Trusts
        text[end - 1] is a newline, and PAD_BYTES follow it; the text has no reserved word, which
        text.Reader ensures
    """
    mask = np.uint64(len(slots) - 2)
    free = np.int64(len(slots) // 3) - state[WORDS]
    capacity, bytes_capacity = len(tokens), len(word_bytes) - PAD_BYTES
    free = min(free, len(word_begin) - 1 - state[WORDS])
    begins = np.empty(_AT_ONCE, np.int64)
    lengths = np.empty(_AT_ONCE, np.int64)
    firsts = np.empty(_AT_ONCE, np.uint64)
    hashes = np.empty(_AT_ONCE, np.uint64)
    slots, delimiters, text = raw(slots), raw(delimiters), raw(text)
    begin_raw, bytes_raw = raw(word_begin), raw(word_bytes)
    words, used = state[WORDS], state[WORD_BYTES]
    lines, empty, read = state[LINES], state[EMPTY], state[TOKENS]
    while at < end:
        line, first_token = at, n
        if n + 2 > capacity:
            break
        tokens[n] = BOS
        n += 1
        full = False
        more = True
        while more:
            asked = 0
            while asked < _AT_ONCE:
                byte = text[at]
                if byte == NEWLINE:
                    more = False
                    break
                if delimiters[byte] != 0:
                    at += 1
                    continue
                at = note_word(
                    text, at, delimiters, slots, mask, asked, begins, lengths, firsts, hashes
                )
                asked += 1
            if n + asked + 1 > capacity:
                full = True
                break
            for i in range(asked):
                word = find_word(
                    slots, mask, begin_raw, bytes_raw, text, begins[i], lengths[i], firsts[i],
                    hashes[i],
                )  # fmt: skip
                if word < 0:
                    if free <= 0 or used + lengths[i] > bytes_capacity:
                        full = True
                        break
                    word = words
                    for k in range(lengths[i]):
                        bytes_raw[used + k] = text[begins[i] + k]
                    used += lengths[i]
                    words += 1
                    begin_raw[words] = used
                    put_word(slots, mask, word, hashes[i], lengths[i], firsts[i])
                    free -= 1
                tokens[n] = np.uint32(word)
                n += 1
            if full:
                break
        if full:
            at, n = line, first_token
            break
        at += 1
        lines += 1
        if n == first_token + 1:
            empty += 1
            if keep_empty == 0:
                n = first_token
                continue
        read += n - first_token - 1
        tokens[n] = EOS
        n += 1
    state[WORDS], state[WORD_BYTES] = words, used
    state[LINES], state[EMPTY], state[TOKENS] = lines, empty, read
    return at, n


@inlined
def word_at(tokens, end, depth):  # type: ignore[no-untyped-def]
    """Returns the word `depth` places before `end`, or `<s>` beyond the start of the sentence."""
    at = np.int64(end)
    for _ in range(depth):
        if tokens[at] == BOS:
            return np.uint32(BOS)
        at -= 1
    return tokens[at]


@kernel("uint32[:], uint32[:], int64, out int64[:]")
def histogram(tokens, ends, depth, counts):  # type: ignore[no-untyped-def]
    """Fills counts (words,): how often each word is `depth` places before an end. If ends (n,) is
    empty, all tokens but `<s>` are ends."""
    counts[:] = 0
    if len(ends) == 0:
        for token in tokens:
            counts[token] += 1
        counts[BOS] = 0
    for i in range(len(ends)):
        counts[word_at(tokens, ends[i], depth)] += 1


@kernel("uint32[:], uint32[:], int64, out int64[:], uint32[:], out uint32[:]")
def distribute(tokens, ends, depth, begin_of_bucket, bucket_of, out):  # type: ignore[no-untyped-def]
    """Puts each end into the bucket of the word `depth` places before the end; the order stays.

    Shapes
        ends             (n,)        uint32  if empty, all tokens but `<s>` are ends
        begin_of_bucket  (buckets,)  int64   where each bucket begins in `out`; changed
        bucket_of        (words,)    uint32  never decreasing
        out              (n,)        uint32  filled
    """
    begin, bucket_of, out = raw(begin_of_bucket), raw(bucket_of), raw(out)
    if len(ends) == 0:
        for i in range(len(tokens)):
            token = tokens[i]
            if token != BOS:
                bucket = np.int64(bucket_of[np.int64(token)])
                to = begin[bucket]
                out[to] = np.uint32(i)
                begin[bucket] = to + 1
    for i in range(len(ends)):
        bucket = np.int64(bucket_of[np.int64(word_at(tokens, ends[i], depth))])
        to = begin[bucket]
        out[to] = ends[i]
        begin[bucket] = to + 1


@kernel("uint32[:], int64, int64, out uint32[:]")
def key_at(tokens, end, order, row):  # type: ignore[no-untyped-def]
    """Writes the key that ends at `end` into the first `order` entries of row, uint32."""
    at = np.int64(end)
    for k in range(order):
        row[k] = tokens[at]
        if tokens[at] != BOS:
            at -= 1


@kernel(
    "uint32[:], uint32[:], int64, int64, out uint64[:], out uint64[:], out uint32[:], "
    "out int64[:], out uint32[:, :]"
)
def sort_keys(tokens, ends, order, bits, packed, sorting, places, starts, rows):  # type: ignore[no-untyped-def]
    """Sorts the distinct keys that end at some places, and counts how often each occurs.

    Shapes
        tokens   (T,)                uint32  each below 2 ** bits
        ends     (n,)                uint32  places of tokens that are not `<s>`; n >= 1
        packed   (parts * n,)        uint64  work space, like the next three arrays; a part holds
                                             as many words of a key as fit in 64 bits
        sorting  (2 * n,)            uint64
        places   (2 * n,)            uint32
        starts   (6 << RADIX_BITS,)  int64
        rows     (n, order + 1)      uint32  filled as far as there are keys: a key and its count
    Returns  how many keys there are
    Cost     a pass over the ends for each 11 bits in which keys differ
    """
    n = np.int64(len(ends))
    per_part = np.int64(64) // bits
    parts = (order + per_part - 1) // per_part
    out = raw(rows.reshape(len(rows) * (order + 1)))
    tokens, end_places, packed, starts = raw(tokens), raw(ends), raw(packed), raw(starts)
    key, place = raw(sorting), raw(places)
    shift = np.uint64(bits)
    for i in range(n):
        at = np.int64(end_places[i])
        word = np.int64(0)
        for part in range(parts):
            value = np.uint64(0)
            for _ in range(min(per_part, order - word)):
                token = tokens[at]
                value = value << shift | np.uint64(token)
                at -= np.int64(token != BOS)
                word += 1
            packed[part * n + i] = value

    here, there = np.int64(0), n
    for i in range(n):
        place[i] = np.uint32(i)
    for step in range(parts):
        part = parts - 1 - step
        used = bits * min(per_part, order - part * per_part)
        digits = (used + RADIX_BITS - 1) // RADIX_BITS
        for k in range(digits * _RADIX):
            starts[k] = 0
        for i in range(n):
            value = packed[part * n + np.int64(place[here + i])]
            key[here + i] = value
            for digit in range(digits):
                starts[digit * _RADIX + np.int64(value & _LOW_BITS)] += 1
                value >>= _RADIX_SHIFT
        for digit in range(digits):
            down = np.uint64(digit) * _RADIX_SHIFT
            base = np.int64(digit) * _RADIX
            if starts[base + np.int64(key[here] >> down & _LOW_BITS)] == n:
                continue  # all digits are equal
            total = np.int64(0)
            for k in range(_RADIX):
                count = starts[base + k]
                starts[base + k] = total
                total += count
            for i in range(n):
                value = key[here + i]
                slot = base + np.int64(value >> down & _LOW_BITS)
                to = starts[slot]
                starts[slot] = to + 1
                key[there + to] = value
                place[there + to] = place[here + i]
            here, there = there, here

    width = order + 1
    found = np.int64(0)
    before = np.int64(-1)
    low = (_U1 << shift) - _U1
    for i in range(n):
        at = np.int64(place[here + i])
        same = before >= 0
        if same:
            for part in range(parts):
                if packed[part * n + at] != packed[part * n + before]:
                    same = False
                    break
        if same:
            out[found * width - 1] += np.uint32(1)
            continue
        word = found * width + order
        out[word] = np.uint32(1)
        for step in range(parts):
            part = parts - 1 - step
            value = packed[part * n + at]
            for _ in range(min(per_part, order - part * per_part)):
                word -= 1
                out[word] = np.uint32(value & low)
                value >>= shift
        before = at
        found += 1
    return found
