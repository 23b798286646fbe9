"""Rows of ARPA text: arrays in, bytes out, no Python object, no GIL."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from dlm.ngram.kernels import bits_of, load64, raw

# No number takes more: a sign, nine digits, a point, an exponent.
NUMBER_BYTES = 24

_TENS = np.array([float(f"1e{n}") for n in range(61)], np.float64)
_INT_TENS = 10 ** np.arange(19, dtype=np.int64)
_PRUNED = np.uint32(1 << 31)
_MINUS, _POINT, _ZERO, _E = 45, 46, 48, 101
_TAB, _NEWLINE, _SPACE = 9, 10, 32

# Half the distance from a float32 of exponent e to the next smaller one, at e + 150, less a hair;
# below the normal range it is the same everywhere.
_HALVES = np.array([2.0 ** max(e - 24, -150) * 0.999999 for e in range(-150, 128)], np.float64)
_EXPONENT_SHIFT = np.uint64(52)
_FRACTION = np.uint64((1 << 52) - 1)


def store64(out: Any, at: Any, value: Any) -> None:
    """Puts a number as eight little-endian bytes into raw `out` from `at` on."""
    out[at : at + 8] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)


@intrinsic
def _store64(context, out, at, value):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.gep(args[0], [args[1]])
        builder.store(args[2], builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.uint64), codegen


@overload(store64)
def _compiled_store64(out, at, value):  # type: ignore[no-untyped-def]
    return lambda out, at, value: _store64(out, at, value)


@njit(cache=True, nogil=True, forceinline=True)
def put_number(value, out, at):  # type: ignore[no-untyped-def]
    """Writes a finite float32 with few digits that read back as it; where it ends.

    Guarantees
        the nearest float32 to the text is `value`; the fewest digits that surely do so
    Edge cases
        -0.0 is written 0
    Trusts
        NUMBER_BYTES of room
    """
    x = np.float64(value)
    if x == 0.0:
        out[at] = _ZERO
        return at + 1
    if x < 0:
        out[at] = _MINUS
        at += 1
        x = -x
    # 10 ** exponent <= x < 10 ** (exponent + 1)
    exponent = np.int64(0)
    if x >= 10.0:
        while exponent < 38 and x >= _TENS[exponent + 1]:
            exponent += 1
    else:
        while x * _TENS[-exponent] < 1.0:
            exponent -= 1
    # Closer to x than half the way to the next smaller float32, which is the nearer neighbour.
    bits = bits_of(x)
    power = np.int64(bits >> _EXPONENT_SHIFT) - 1023
    half = _HALVES[power + 150]
    if bits & _FRACTION == np.uint64(0) and power > -126:
        half *= 0.5
    digits = np.int64(7)
    while True:
        scale = digits - 1 - exponent
        if scale >= 0:
            whole = np.rint(x * _TENS[scale])
            near = whole / _TENS[scale]
        else:
            whole = np.rint(x / _TENS[-scale])
            near = whole * _TENS[-scale]
        if digits == 9 or abs(near - x) < half:
            break
        digits += 1
    number = np.int64(whole)
    if number >= _INT_TENS[digits]:  # rounded up to the next power of ten
        number //= 10
        exponent += 1
    while digits > 1 and number % 10 == 0:
        number //= 10
        digits -= 1
    if -5 <= exponent < 0:
        out[at] = _ZERO
        out[at + 1] = _POINT
        at += 2
        for _ in range(-exponent - 1):
            out[at] = _ZERO
            at += 1
        for k in range(digits):
            out[at + digits - 1 - k] = np.uint8(_ZERO + number % 10)
            number //= 10
        return at + digits
    # The point stands after so many digits.
    before = exponent + 1 if 0 <= exponent < 9 else np.int64(1)
    while digits < before:
        number *= 10
        digits += 1
    end = at + digits + (1 if digits > before else 0)
    place = end - 1
    for k in range(digits):
        if digits - k == before and k > 0:
            out[place] = _POINT
            place -= 1
        out[place] = np.uint8(_ZERO + number % 10)
        number //= 10
        place -= 1
    at = end
    if not 0 <= exponent < 9:
        out[at] = _E
        at += 1
        if exponent < 0:
            out[at] = _MINUS
            at += 1
            exponent = -exponent
        if exponent >= 10:
            out[at] = np.uint8(_ZERO + exponent // 10)
            at += 1
        out[at] = np.uint8(_ZERO + exponent % 10)
        at += 1
    return at


@njit(cache=True, nogil=True)
def put_rows(ids, log10_prob, log10_backoff, marks, begin, word_begin, word_bytes, out):  # type: ignore[no-untyped-def]
    """Writes n-grams as rows of an ARPA section, as far as there is room.

    Shapes
        ids            (n, order)  uint32   oldest word first
        log10_prob     (n,)        float32  finite
        log10_backoff  (n,)        float32  or empty: no such column
        marks          (n,)        uint32   or empty; where the highest bit is set, a row is left
                                            out
        begin          int         the first row to write
        word_begin, word_bytes     as in dlm.ngram.wordtable
        out            (bytes,)    uint8    filled
    Returns
        (the first row that was not written, bytes used)
    Trusts
        PAD_BYTES after the last of word_bytes, as WordTable has them
    """
    order = np.int64(ids.shape[1])
    words = raw(ids.reshape(len(ids) * order))
    begins, letters, text = raw(word_begin), raw(word_bytes), raw(out)
    size = np.int64(len(out))
    with_backoff = len(log10_backoff) > 0
    marked = len(marks) > 0
    at = np.int64(0)
    for i in range(begin, len(ids)):
        if marked and marks[i] & _PRUNED:
            continue
        needed = np.int64(2 * NUMBER_BYTES + 3)
        for k in range(order):
            word = np.int64(words[i * order + k])
            # Eight bytes are copied at a time, up to seven beyond the word.
            needed += begins[word + 1] - begins[word] + 1
        if at + needed + 8 > size:
            return np.int64(i), at
        at = put_number(log10_prob[i], text, at)
        separator = np.uint8(_TAB)
        for k in range(order):
            text[at] = separator
            at += 1
            separator = np.uint8(_SPACE)
            word = np.int64(words[i * order + k])
            letter, end = begins[word], begins[word + 1]
            while letter < end:
                store64(text, at, load64(letters, letter))
                at += 8
                letter += 8
            at += end - letter
        if with_backoff:
            text[at] = _TAB
            at = put_number(log10_backoff[i], text, at + 1)
        text[at] = _NEWLINE
        at += 1
    return np.int64(len(ids)), at
