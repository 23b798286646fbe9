"""Kernels that draw discrete Gaussians and sum earlier noise. They run without the GIL."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math

import numpy as np

from dlm.jit import inlined, kernel

WORDS = 3  # random words of 64 bits per trial
STRIPS = 16  # maximum strips per standard deviation
# A comparison closer than this is in doubt. In double precision, the error of a comparison is below
# 2^-50, a thousandth of this: six roundings of 2^-53 and a unit in the last place of exp.
DOUBT = 2.0**-40
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_TOP_BYTE = np.uint64(56)


@inlined
def _scaled(word, span):  # type: ignore[no-untyped-def]
    """Returns both halves of word * span: a place below span, and a remainder that shows bias."""
    word_high, word_low = word >> _HALF, word & _LOW
    span_high, span_low = span >> _HALF, span & _LOW
    low = word_low * span_low
    middle = word_high * span_low + (low >> _HALF)
    other = word_low * span_high + (middle & _LOW)
    high = word_high * span_high + (middle >> _HALF) + (other >> _HALF)
    return high, word * span


@kernel(
    "uint64[:], int64, out int64[:], int64, uint64[:], uint64[:], uint8[:], uint64, uint64, int64"
)
def draw(words, trial, drawn, filled, edges, sure, guide, span, luck, strips):  # type: ignore[no-untyped-def]
    """Fills `drawn` with discrete Gaussian numbers, until it is full or words run out.

    Shapes
        words   (n,)  uint64  random words; trial t reads words 3 t, 3 t + 1 and 3 t + 2
        drawn   (m,)  int64   the numbers; draws are written from index `filled` on
        edges   (k,)  uint64  floor(2^64 P(strip < i)), i = 1 .. k
        sure    (k,)  uint64  floor(2^63 p), p being the least acceptance probability in strip i
        guide   (256,) uint8  how many edges are below every word with this top byte
        span    places in a strip; `luck` is 2^64 mod span; `strips` are per standard deviation
    Returns     (trial, filled, doubt); `doubt` is true if 64 bits do not decide the trial, which
                then has to be repeated in exact arithmetic
    Guarantees  every decision is that of exact arithmetic
    Trusts      span * strips is the standard deviation, as `discrete_gaussian._fill` sets it
    Paper       Karney 2016, Algorithm D, with strips of a 16th of the standard deviation
    """
    trials = len(words) // WORDS
    last = len(edges) - 1
    while trial < trials and filled < len(drawn):
        first = words[WORDS * trial]
        strip = np.int64(guide[first >> _TOP_BYTE])
        while strip < last and edges[strip] < first:
            strip += 1
        if edges[strip] <= first:  # the word equals an edge, or is beyond the last one
            return trial, filled, True
        place, rest = _scaled(words[WORDS * trial + 1], span)
        third = words[WORDS * trial + 2]
        chance, negative = third >> _ONE, third & _ONE
        if rest < luck or (negative and strip == 0 and place == np.uint64(0)):
            trial += 1  # rejects a biased place, or a second zero
            continue
        if chance >= sure[strip]:
            part = np.float64(place) / np.float64(span)
            exponent = part * (2.0 * strip + part) / (2.0 * strips * strips)
            excess = np.float64(chance) * 2.0**-63 - math.exp(-exponent)
            if abs(excess) < DOUBT:
                return trial, filled, True
            if excess > 0.0:
                trial += 1
                continue
        size = strip * np.int64(span) + np.int64(place)
        drawn[filled] = -size if negative else size
        filled += 1
        trial += 1
    return trial, filled, False


@kernel("int64[:], float64[:, :], float64[:], float64[:], out int64[:], out float64[:, :]")
def blt_noise(fresh, buffers, decay, scale, noise, after):  # type: ignore[no-untyped-def]
    """One round of BLT: a fresh draw minus the rounded sum of the scaled buffers.

    Shapes
        fresh, noise    (d,)    int64
        buffers, after  (k, d)  float64  buffers before the round, and after decay plus `noise`
    Returns             the largest absolute value in `noise` and `after`
    """
    largest = 0.0
    for i in range(len(fresh)):
        held = 0.0
        for j in range(len(decay)):
            held += scale[j] * buffers[j, i]
        new = fresh[i] - np.int64(np.rint(held))
        noise[i] = new
        added = np.float64(new)
        largest = max(largest, abs(added))
        for j in range(len(decay)):
            kept = decay[j] * buffers[j, i] + added
            after[j, i] = kept
            largest = max(largest, abs(kept))
    return largest
