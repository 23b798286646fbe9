"""Turns numbers into text. The kernels use no Python objects and no GIL.

They invert `read_number`. A float32 gets the fewest digits that read back as itself, and among
those the ones nearest to it, written as JavaScript and JSON writers do.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dlm.jit import inlined, kernel

# Bytes of the longest number: a sign, nine digits, a point and an exponent, or zeros before them.
NUMBER_BYTES = 20
# For `put_fixed` and `put_count`: decimals, bytes of room, and the limit of a number's size.
DECIMALS = 6
COUNT_BYTES = 20
FIXED_LIMIT = 2.0**53
FIXED_BYTES = 1 + 16 + 1 + DECIMALS

_MINUS, _PLUS, _POINT, _ZERO, _E = (ord(c) for c in "-+.0e")
_FRACTION_BITS = 23
_FRACTION_MASK = np.uint32((1 << _FRACTION_BITS) - 1)
_BIAS = 127 + _FRACTION_BITS
_U2, _U4, _U10, _U32 = (np.uint64(n) for n in (2, 4, 10, 32))
_LOW_HALF = np.uint64(0xFFFFFFFF)
_ONE, _U100 = np.uint64(1), np.uint64(100)
_TENS = 10 ** np.arange(10, dtype=np.uint64)
_ALL_TENS = 10 ** np.arange(20, dtype=np.uint64)
_MILLION = np.uint64(10**DECIMALS)
_HALF = np.uint64(1 << 63)
# The two digits of each number below 100.
_PAIRS = np.frombuffer("".join(f"{n:02}" for n in range(100)).encode(), np.uint8)

# Exponents of ten to scale by: -31 (largest float32) to 45 (smallest), and one more at each end.
_LEAST_POWER, _MOST_POWER = -32, 46


def _powers() -> np.ndarray:
    out = []
    for power in range(_LEAST_POWER, _MOST_POWER + 1):
        numerator, denominator = 10 ** max(power, 0), 10 ** max(-power, 0)
        # 2**63 <= 10**power * 2**shift < 2**64
        shift = 63 - _floor_log2_of_ten(power)
        scaled = (numerator << max(shift, 0)) // (denominator << max(-shift, 0))
        exact = (scaled * denominator << max(-shift, 0)) == (numerator << max(shift, 0))
        out.append(scaled + (not exact))
    return np.array(out, np.uint64)


def _floor_log2_of_ten(power: int) -> int:
    """Exponent of the largest power of two up to 10**power, for powers that `_powers` uses."""
    return (power * 1741647) >> 19


_POWERS = _powers()


@inlined
def _scaled(power_bits, number):  # type: ignore[no-untyped-def]
    """The upper 32 of 96 bits of a product; the last is also 1 if the exact product has a fraction.

    Two results compare as the exact products do, except that a last bit of 1 stands for any
    fraction: "rounding to odd".
    """
    upper = (power_bits >> _U32) * number + (((power_bits & _LOW_HALF) * number) >> _U32)
    rest = upper & _LOW_HALF
    return (upper >> _U32) | np.uint64(rest > _ONE)


@inlined
def shortest_digits(bits):  # type: ignore[no-untyped-def]
    """The shortest decimal that reads back as the positive, finite float32 with these bits.

    Returns  (digits, exponent): the value is digits * 10**exponent; digits may end in zeros
    Paper    Giulietti, The Schubfach way to render doubles (2021), for 32 bits: three products
             decide which decimals of the grid lie within half a step of the number
    """
    fraction = np.int64(bits & _FRACTION_MASK)
    biased = np.int64(bits >> np.uint32(_FRACTION_BITS))
    if biased != 0:
        significand = fraction | (1 << _FRACTION_BITS)
        exponent = biased - _BIAS
        if -_FRACTION_BITS <= exponent <= 0:
            low = -exponent
            if significand & ((1 << low) - 1) == 0:  # a whole number
                return np.uint64(significand >> low), np.int64(0)
    else:
        significand = fraction
        exponent = np.int64(1 - _BIAS)
    # A float32 at a power of two is nearer to the one below it than to the one above.
    closer_below = fraction == 0 and biased > 1
    # The step is the largest power of ten up to the width of the interval rounding to the number.
    tens = (exponent * 1262611 - (524031 if closer_below else 0)) >> 22
    shift = np.uint64(exponent + ((-tens * 1741647) >> 19) + 1)
    power = _POWERS[-tens - _LEAST_POWER]
    middle = np.uint64(4 * significand)
    low_end = _scaled(power, (middle - (_ONE if closer_below else _U2)) << shift)
    value = _scaled(power, middle << shift)
    high_end = _scaled(power, (middle + _U2) << shift)
    # The ends of the interval round to the number if the significand is even.
    odd = np.uint64(significand & 1)
    low_end += odd
    high_end -= odd
    digits = value // _U4
    if digits >= _U10:
        coarse = digits // _U10
        below = low_end <= coarse * _U10 * _U4
        above = (coarse + _ONE) * _U10 * _U4 <= high_end
        if below != above:
            return coarse + np.uint64(above), tens + 1
    below = low_end <= digits * _U4
    above = (digits + _ONE) * _U4 <= high_end
    if below != above:
        return digits + np.uint64(above), tens
    half = digits * _U4 + _U2
    up = value > half or (value == half and (digits & _ONE) == _ONE)
    return digits + np.uint64(up), tens


@kernel
def put_number(text, at, number):  # type: ignore[no-untyped-def]
    """Writes a float32 from text[at] on; returns where it ends.

    Guarantees  0 and -0 are `0`; infinities are `inf` and `-inf`; numbers with a decimal exponent
                from -6 to 9 are written out, others with an `e`
    Trusts      `number` is not NaN; there are NUMBER_BYTES of room
    """
    if number == 0:
        text[at] = _ZERO
        return at + 1
    if number < 0:
        text[at] = _MINUS
        at += 1
        number = -number
    if number == np.inf:
        for letter in (105, 110, 102):
            text[at] = letter
            at += 1
        return at
    digits, tens = shortest_digits(np.float32(number).view(np.uint32))
    while digits % _U10 == 0:
        digits //= _U10
        tens += 1
    count = np.int64(9)
    while count > 1 and digits < _TENS[count - 1]:
        count -= 1
    exponent = tens + count - 1
    if exponent < -6 or exponent > 9:
        # The first digit, a point and the others, and the exponent.
        _put_digits(text, at + (1 if count > 1 else 0), digits, count)
        if count > 1:
            text[at] = text[at + 1]
            text[at + 1] = _POINT
            at += count + 1
        else:
            at += 1
        text[at] = _E
        text[at + 1] = _MINUS if exponent < 0 else _PLUS
        at += 2
        size = np.uint64(abs(exponent))
        width = 2 if size >= 10 else 1
        _put_digits(text, at, size, width)
        return at + width
    if tens >= 0:
        _put_digits(text, at, digits, count)
        for i in range(tens):
            text[at + count + i] = _ZERO
        return at + count + tens
    whole = count + tens
    if whole > 0:
        _put_digits(text, at + 1, digits, count)
        for i in range(whole):
            text[at + i] = text[at + i + 1]
        text[at + whole] = _POINT
        return at + count + 1
    text[at] = _ZERO
    text[at + 1] = _POINT
    for i in range(-whole):
        text[at + 2 + i] = _ZERO
    at += 2 - whole
    _put_digits(text, at, digits, count)
    return at + count


@inlined
def _put_digits(text, at, digits, count):  # type: ignore[no-untyped-def]
    last = at + count - 1
    while last > at:
        rest = digits // _U100
        pair = np.int64(digits - rest * _U100) * 2
        text[last - 1] = _PAIRS[pair]
        text[last] = _PAIRS[pair + 1]
        digits = rest
        last -= 2
    if last == at:
        text[at] = _ZERO + np.int64(digits)


@kernel
def put_count(text, at, number):  # type: ignore[no-untyped-def]
    """Writes an integer >= 0 from text[at] on, with COUNT_BYTES of room; returns the end."""
    rest = np.uint64(number)
    count = np.int64(1)
    while count < len(_ALL_TENS) and rest >= _ALL_TENS[count]:
        count += 1
    _put_digits(text, at, rest, count)
    return at + count


@kernel
def put_fixed(text, at, number):  # type: ignore[no-untyped-def]
    """Writes a float64 with DECIMALS decimals, like `.6f`, from text[at] on; returns the end.

    Guarantees  the number's exact value is rounded, halves to even
    Trusts      `number` is not NaN, and below FIXED_LIMIT in size; there are FIXED_BYTES of room
    """
    if math.copysign(1.0, number) < 0:  # also for -0.0
        text[at] = _MINUS
        at += 1
        number = -number
    whole = np.uint64(number)
    # `fraction` has 64 bits; only a number below 2**-11 has bits beneath them. At most 10 bits are
    # beneath, unless all decimals are 0, so `beneath` is exact where it matters.
    scaled = (number - np.float64(whole)) * 2.0**64
    fraction = np.uint64(scaled)
    beneath = (scaled - np.float64(fraction)) * 1e6
    carried = np.uint64(beneath)
    lost = np.float64(carried) != beneath
    # fraction * 10**6 in 96 bits: the bits above the lower 64 are the decimals.
    low = (fraction & _LOW_HALF) * _MILLION + carried
    high = (fraction >> _U32) * _MILLION + (low >> _U32)
    decimals = high >> _U32
    rest = (high << _U32) | (low & _LOW_HALF)
    if rest > _HALF or (rest == _HALF and (lost or decimals & _ONE)):
        decimals += _ONE
        if decimals == _MILLION:
            decimals = np.uint64(0)
            whole += _ONE
    at = put_count(text, at, whole)
    text[at] = _POINT
    _put_digits(text, at + 1, decimals, np.int64(DECIMALS))
    return at + 1 + DECIMALS


@intrinsic
def store64(context, text, at, value):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.gep(args[0], [args[1]])
        builder.store(args[2], builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(text, types.int64, types.uint64), codegen
