"""Converts ARPA rows between text and arrays. The kernels use no Python objects and no GIL.

Reading stops at an irregular row, which `rows.py` then reads on its own. As in
`dlm.ngram.kernels`, every array of bytes extends `PAD_BYTES` beyond the range that is read.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from dlm.jit import inlined, kernel
from dlm.ngram.digit_kernels import NUMBER_BYTES, put_number, store64
from dlm.ngram.kernels import (
    ARPA_DELIMITERS,
    NEWLINE,
    RETURN,
    SPACE,
    TAB,
    U0,
    U3,
    U8,
    U32,
    UNK_ROW,
    WORD_BYTES,
    WORDS,
    bits_of,
    find_word,
    hash_word,
    load64,
    prefetch,
    put_word,
    raw,
    scan_word,
)
from dlm.ngram.memory_kernels import trailing_zeros

# The number of rows whose words' slots are prefetched before the first row is looked up.
_AT_ONCE = 16

_U9, _U10, _U16, _U48, _U64 = (np.uint64(n) for n in (9, 10, 16, 48, 64))
_HIGH_BITS = np.uint64(0x8080808080808080)
_ZEROS = np.uint64(0x3030303030303030)
_NO_DIGIT = np.uint64(0x7676767676767676)  # when added, sets the high bit of each byte above 9
_WHOLE_BYTES = np.uint64(0x78)
_PAIRS = np.uint64(0x000000FF000000FF)
# Pairs are two bytes apart: these factors put pairs 0 and 2, or 1 and 3, in the upper half.
_TO_UPPER = np.uint64(100 + (1_000_000 << 32))
_TO_LOWER = np.uint64(1 + (10_000 << 32))
_UINT_TENS = 10 ** np.arange(9, dtype=np.uint64)
# Powers of ten that a double holds exactly.
_TENS = np.array([float(f"1e{n}") for n in range(23)], np.float64)
_EXACT_TENS = 22
# The number of digits that always fit in a uint64.
_DIGITS = 19
# The bits of a double that decide its rounding to float32; they equal `_HALF` at a midpoint.
_ROUNDED_BITS = np.uint64(0x1FFFFFFF)
_HALF = np.int64(0x10000000)
# A bound, in units in the last place, on the error of the double in `read_number`: half a unit each
# for converting the digits and for up to two scalings, and less than one for digits left out.
_DOUBT = np.int64(8)
_MIN_NORMAL_FLOAT32 = np.float64(2.0**-126)
_MAX_FLOAT32 = np.float64(2.0**128 - 2.0**104)
_INF_LETTERS = np.uint64(int.from_bytes(b"inf", "little"))
_THREE_BYTES = np.uint64(0xFFFFFF)
_LOWER_CASE = np.uint64(0x202020)

# An n-gram whose mark has this bit is left out.
LEFT_OUT = np.uint32(1 << 31)
# Bytes that may be overwritten after a row.
SPARE_BYTES = 8


@inlined
def read_number(text, at):  # type: ignore[no-untyped-def]
    """The float32 nearest to the decimal number at `at`, ties to even; never -0.0.

    Returns     (whether the number is certain, the number as float32, the place after it)
    Guarantees  a certain number equals rows.float32_of of the same text. Text that is not a number,
                overflows, is below the normal range, or is too near the midpoint of two float32 for
                a double to decide, gives no certain number; nor does an infinity, except -inf, in
                any mix of upper and lower case
    Trusts      after the number, a byte that cannot belong to one, and PAD_BYTES more
    """
    unsure = (False, np.float32(0.0), at)
    negative = text[at] == 45
    if negative or text[at] == 43:
        at += 1
    begin = at
    value = U0
    digit = np.uint64(text[at]) - _U48  # a byte below "0" wraps around to more than 9
    while digit <= _U9:
        value = value * _U10 + digit
        at += 1
        digit = np.uint64(text[at]) - _U48
    digits = at - begin
    scale = np.int64(0)
    if text[at] == 46:
        at += 1
        fraction = at
        # Reads up to eight digits at once: two neighbours make a pair, and four pairs the number.
        some = load64(text, at) ^ _ZEROS
        other = ((some + _NO_DIGIT) | some) & _HIGH_BITS
        zeros = np.uint64(trailing_zeros(np.int64(other)))
        count = zeros & _WHOLE_BYTES if other != U0 else _U64
        if count != U0:
            some <<= _U64 - count
            some = some * _U10 + (some >> U8)
            some = ((some & _PAIRS) * _TO_UPPER + ((some >> _U16) & _PAIRS) * _TO_LOWER) >> U32
            at += np.int64(count >> U3)
            value = value * _UINT_TENS[at - fraction] + some
        digit = np.uint64(text[at]) - _U48
        while digit <= _U9:
            value = value * _U10 + digit
            at += 1
            digit = np.uint64(text[at]) - _U48
        scale = fraction - at
        digits -= scale
    if digits == 0:
        if (
            negative
            and at == begin
            and (load64(text, at) & _THREE_BYTES) | _LOWER_CASE == _INF_LETTERS
        ):
            return True, np.float32(-np.inf), at + 3
        return unsure
    if digits > _DIGITS:
        # Keeps the leading digits; the rest is less than one unit of the last digit kept.
        value = U0
        kept = np.int64(0)
        for i in range(begin, at):
            if text[i] != 46:
                if kept < _DIGITS:
                    value = value * _U10 + (np.uint64(text[i]) - _U48)
                    kept += value != U0
                else:
                    scale += 1
    if text[at] | 32 == 101:
        at += 1
        down = text[at] == 45
        if down or text[at] == 43:
            at += 1
        begin = at
        exponent = np.int64(0)
        digit = np.uint64(text[at]) - _U48
        while digit <= _U9:
            exponent = min(exponent * 10 + np.int64(digit), np.int64(100_000))
            at += 1
            digit = np.uint64(text[at]) - _U48
        if at == begin:
            return unsure
        scale += -exponent if down else exponent
    if value == U0:
        return True, np.float32(0.0), at
    double = np.float64(value)
    if scale < 0:
        if scale < -_EXACT_TENS:
            if scale < -2 * _EXACT_TENS:
                return unsure
            double /= _TENS[_EXACT_TENS]
            scale += _EXACT_TENS
        double /= _TENS[-scale]
    elif scale > 0:
        if scale > _EXACT_TENS:
            if scale > 2 * _EXACT_TENS:
                return unsure
            double *= _TENS[_EXACT_TENS]
            scale -= _EXACT_TENS
        double *= _TENS[scale]
    if not (_MIN_NORMAL_FLOAT32 <= double <= _MAX_FLOAT32):
        return unsure
    beside = np.int64(bits_of(double) & _ROUNDED_BITS) - _HALF
    if -_DOUBT <= beside <= _DOUBT:
        return unsure
    return True, np.float32(-double if negative else double), at


@inlined
def skip_spaces(text, at):  # type: ignore[no-untyped-def]
    while text[at] == SPACE or text[at] == TAB:
        at += 1
    return at


@inlined
def read_row_end(text, at, top):  # type: ignore[no-untyped-def]
    """Reads the rest of a row after its words: perhaps a back-off weight, and the end of the line.

    Args     at   the delimiter after the last word
             top  whether the order is the highest, so that only a weight of 0 is regular
    Returns  (whether the rest is regular, the weight as float32, the place of the newline)
    Trusts   what `read_number` trusts; a newline at or after `at`
    """
    weight = np.float32(0.0)
    at = skip_spaces(text, at)
    if text[at] != NEWLINE and text[at] != RETURN:
        sure, weight, at = read_number(text, at)
        if not sure or weight == -np.inf or (top and weight != 0):
            return False, weight, at
        at = skip_spaces(text, at)
    if text[at] == RETURN:
        at += 1
    return text[at] == NEWLINE, weight, at


@kernel(
    "uint8[:], int64, int64, int64, bool, bool, uint64[:], int64[:], uint8[:], out uint32[:, "
    ":], out float32[:], out float32[:], int64"
)
def read_ngrams(  # type: ignore[no-untyped-def]
    text,
    begin,
    end,
    longest,
    top,
    unk_in_model,
    slots,
    word_begin,
    word_bytes,
    ids,
    log10_prob,
    log10_backoff,
    row,
):
    """Reads rows of n-grams from text[begin] on, up to the first that is irregular.

    Shapes      text (T,);  begin, end  whole lines: text[end - 1] is a newline
                longest  bytes of the longest line that is regular
                top  whether the order is the highest;  unk_in_model  whether id 0 is regular
                slots, word_begin, word_bytes  as in `find_word`
                ids (n, order), log10_prob (n,), log10_backoff (n,)  filled from `row` on
    Returns     (the row after the last that was read, the place of that row's line, or `end` after
                the last line)
    Guarantees  a row that was read equals what rows.split_row makes of its line
    Trusts      PAD_BYTES after `end`, which arpa.ArpaReader adds
    """
    order = ids.shape[1]
    slots, mask = raw(slots), np.uint64(len(slots) - 2)
    word_begin, word_bytes, text = raw(word_begin), raw(word_bytes), raw(text)
    delimiters = raw(ARPA_DELIMITERS)
    line = np.empty(_AT_ONCE + 1, np.int64)
    word_at = np.empty((_AT_ONCE, order), np.int64)
    lengths = np.empty((_AT_ONCE, order), np.int64)
    firsts = np.empty((_AT_ONCE, order), np.uint64)
    hashes = np.empty((_AT_ONCE, order), np.uint64)
    regular = True
    while regular and begin < end and row < len(log10_prob):
        # Splits some rows and prefetches their words' slots before looking up the first row.
        count = np.int64(0)
        while count < min(_AT_ONCE, len(log10_prob) - row) and begin < end:
            line[count] = begin
            sure, prob, at = read_number(text, skip_spaces(text, begin))
            # If the number ends before the field does, the field is not a number.
            regular = sure and prob <= 0 and (text[at] == SPACE or text[at] == TAB)
            if not regular:
                break
            for k in range(order):
                start = skip_spaces(text, at)
                at, first = scan_word(text, start, delimiters)
                h = hash_word(text, start, at - start, first)
                prefetch(slots, h & mask)
                word_at[count, k] = start
                lengths[count, k] = at - start
                firsts[count, k] = first
                hashes[count, k] = h
                regular &= at != start
            ended, backoff, at = read_row_end(text, at, top)
            regular &= ended and at - begin <= longest
            if not regular:
                break
            log10_prob[row + count] = prob
            log10_backoff[row + count] = backoff
            count += 1
            begin = at + 1
        line[count] = begin
        for i in range(count):
            for k in range(order):
                word = find_word(
                    slots,
                    mask,
                    word_begin,
                    word_bytes,
                    text,
                    word_at[i, k],
                    lengths[i, k],
                    firsts[i, k],
                    hashes[i, k],
                )
                if word < 0 or (word == 0 and not unk_in_model):
                    return row + i, line[i]
                ids[row + i, k] = word
        row += count
    return row, begin


@kernel(
    "uint8[:], int64, int64, int64, bool, int64, out int64[:], out uint64[:], out int64[:], out "
    "uint8[:], out uint32[:, :], out float32[:], out float32[:], int64"
)
def read_words(  # type: ignore[no-untyped-def]
    text,
    begin,
    end,
    longest,
    top,
    first_row,
    state,
    slots,
    word_begin,
    word_bytes,
    ids,
    log10_prob,
    log10_backoff,
    row,
):
    """Reads rows of 1-grams like `read_ngrams`, and enters their words into the table.

    Shapes   first_row  row of the section at which the arrays begin
             state (3,)  WORDS, WORD_BYTES and UNK_ROW, brought up to date
    Returns  what `read_ngrams` returns; a word already in the table makes its row irregular
    Trusts   what `read_ngrams` trusts; room for each row in slots and word_begin, and for the text
             in word_bytes, which wordtable.WordTable.reserve makes
    """
    slots, mask = raw(slots), np.uint64(len(slots) - 2)
    word_begin, word_bytes, text = raw(word_begin), raw(word_bytes), raw(text)
    delimiters = raw(ARPA_DELIMITERS)
    rows = len(log10_prob)
    while begin < end and row < rows:
        sure, prob, at = read_number(text, skip_spaces(text, begin))
        if not sure or prob > 0 or (text[at] != SPACE and text[at] != TAB):
            break
        start = skip_spaces(text, at)
        at, first = scan_word(text, start, delimiters)
        length = at - start
        h = hash_word(text, start, length, first)
        found = find_word(slots, mask, word_begin, word_bytes, text, start, length, first, h)
        regular, backoff, at = read_row_end(text, at, top)
        if not regular or length == 0 or at - begin > longest:
            break
        if found == 0 and state[UNK_ROW] < 0:
            state[UNK_ROW] = first_row + row
            # <unk> and <UNK> have the same length, so the file's spelling replaces the stored one.
            for i in range(length):
                word_bytes[i] = text[start + i]
            ids[row, 0] = 0
        elif found >= 0:
            break
        else:
            word = state[WORDS]
            put_word(slots, mask, word, h, length, first)
            here = state[WORD_BYTES]
            for i in range(length):
                word_bytes[here + i] = text[start + i]
            state[WORDS] = word + 1
            state[WORD_BYTES] = here + length
            word_begin[word + 1] = here + length
            ids[row, 0] = word
        log10_prob[row] = prob
        log10_backoff[row] = backoff
        row += 1
        begin = at + 1
    return row, begin


@kernel("uint32[:, :], float32[:], float32[:], uint32[:], int64, int64[:], uint8[:], out uint8[:]")
def put_rows(ids, log10_prob, log10_backoff, marks, begin, word_begin, word_bytes, text):  # type: ignore[no-untyped-def]
    """Writes n-grams as the lines of an ARPA section, as far as there is room.

    Shapes   ids (n, k)  oldest word first;  log10_prob (n,);  begin  the first row to write
             log10_backoff (n,)  or empty for no such column
             marks (n,)  or empty; rows whose mark has LEFT_OUT are skipped
             word_begin (V + 1,);  word_bytes  and PAD_BYTES after the last word, as in WordTable
             text  filled; a few bytes after those written are overwritten, too
    Returns  (the first row that was not written, bytes written)
    Trusts   ids < V; numbers that are not NaN (writer.write_arpa, estimate.interpolate.rows)
    """
    order = np.int64(ids.shape[1])
    words = raw(ids.reshape(len(ids) * order))
    begins, letters, out = raw(word_begin), raw(word_bytes), raw(text)
    size = np.int64(len(text))
    backoff, marked = len(log10_backoff) > 0, len(marks) > 0
    fixed = np.int64((2 if backoff else 1) * (NUMBER_BYTES + 1) + order + 1)
    at = np.int64(0)
    for row in range(begin, len(ids)):
        if marked and marks[row] & LEFT_OUT:
            continue
        needed = fixed
        for i in range(order):
            word = np.int64(words[row * order + i])
            needed += begins[word + 1] - begins[word]
        # Eight bytes are copied at a time, up to seven beyond the word.
        if at + needed + SPARE_BYTES > size:
            return np.int64(row), at
        at = put_number(out, at, log10_prob[row])
        separator = np.uint8(TAB)
        for i in range(order):
            out[at] = separator
            at += 1
            separator = np.uint8(SPACE)
            word = np.int64(words[row * order + i])
            letter, end = begins[word], begins[word + 1]
            while letter < end:
                store64(out, at, load64(letters, letter))
                at += 8
                letter += 8
            at += end - letter
        if backoff:
            out[at] = TAB
            at = put_number(out, at + 1, log10_backoff[row])
        out[at] = NEWLINE
        at += 1
    return np.int64(len(ids)), at
