"""Draws from the exact discrete Gaussian: integers x with weights exp(-x^2 / 2 deviation^2).

The draws are not rounded; only a draw beyond `LIMIT` standard deviations, which might not fit into
64 bits, is refused. Python's integers decide what 64 random bits cannot (`exact_trial`).

Paper  Canonne, Kamath and Steinke 2020 (distribution); Karney 2016, Algorithm D (trials)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dlm.errors import PrivacyError
from dlm.federated.keys import Key
from dlm.federated.noise.kernels import STRIPS, WORDS, draw
from dlm.federated.noise.stream import Words, WordStream

Whole = npt.NDArray[np.int64]
Bounds = Callable[[int], tuple[int, int]]  # bits -> (low, high) around a number times 2^bits

LIMIT = 64  # standard deviations; a draw beyond it has a probability below exp(-2048)
_REACH = 10  # standard deviations that the table covers
_TRIALS = 1 << 16  # maximum number of trials drawn at once


def whole_deviation(deviation: float) -> int:
    """Returns the draws' standard deviation: `deviation`, rounded up to a multiple of `STRIPS`.
    PrivacyError unless `deviation` is above 0, and draws fit into 64 bits."""
    if not 0 < deviation < 2.0**52:
        raise PrivacyError(
            f"the noise's standard deviation is {deviation} grid steps; it must be above 0 and "
            "below 2^52: raise or lower the noise multiplier"
        )
    # `deviation` was computed in double precision; a small margin covers the rounding errors.
    least = deviation * (1 + 2.0**-40)
    return STRIPS * int(-(-least // STRIPS))


def draw_discrete(key: Key, parts: Sequence[tuple[int, int]]) -> Whole:
    """Draws independent discrete Gaussians from a key's stream; each part is a count and a standard
    deviation. The distribution is exact, except that a draw beyond `LIMIT` standard deviations
    raises PrivacyError. The same key and parts give the same numbers."""
    stream, more = WordStream(key.fold("trials")), WordStream(key.fold("more"))
    out = np.empty(sum(count for count, _ in parts), np.int64)
    at = 0
    for count, deviation in parts:
        numbers = out[at : at + count]
        _fill(numbers, deviation, stream.words, more.words)
        if count and max(int(numbers.max()), -int(numbers.min())) > LIMIT * deviation:
            raise PrivacyError(
                f"a draw is beyond {LIMIT} standard deviations: the random generator is broken. "
                "Report this"
            )
        at += count
    return out


def _fill(
    out: Whole,
    deviation: int,
    words: Callable[[int], Words],
    more: Callable[[int], Words],
) -> None:
    table = _table(strips_of(deviation))
    span = deviation // table.strips
    luck = (1 << 64) % span
    filled = 0
    while filled < len(out):
        # A few more trials than numbers, since a rejected trial yields no number.
        wanted = 64 + (len(out) - filled) * 5 // (4 if table.strips > 4 else 3)
        block = words(WORDS * min(_TRIALS, wanted))
        trial, trials = 0, len(block) // WORDS
        while trial < trials and filled < len(out):
            trial, filled, doubt = draw(
                block, trial, out, filled, table.edges, table.sure, table.guide,
                np.uint64(span), np.uint64(luck), table.strips,
            )  # fmt: skip
            if doubt:
                found = exact_trial(block[WORDS * trial : WORDS * (trial + 1)], deviation, more)
                trial += 1
                if found is not None:
                    out[filled] = found
                    filled += 1


def strips_of(deviation: int) -> int:
    """Strips per standard deviation: the largest power of two dividing it, at most `STRIPS`."""
    return min(STRIPS, deviation & -deviation)


class _Table(NamedTuple):
    strips: int
    edges: npt.NDArray[np.uint64]
    sure: npt.NDArray[np.uint64]
    guide: npt.NDArray[np.uint8]


@functools.lru_cache(8)
def _table(strips: int) -> _Table:
    places = range(_REACH * strips)
    edges = [_floor(strip_edge(strips, i + 1), 64) for i in places]
    sure = [_floor(exp_bounds(2 * i + 1, 2 * strips * strips), 63) for i in places]
    guide = [sum(edge < top << 56 for edge in edges) for top in range(256)]
    return _Table(
        strips,
        np.array(edges, np.uint64),
        np.array(sure, np.uint64),
        np.array(guide, np.uint8),
    )


def _floor(bounds: Bounds, bits: int) -> int:
    """Returns floor(2^bits x) for the irrational number x that `bounds` gives."""
    for extra in itertools.count(64, 64):
        low, high = bounds(bits + extra)
        if low >> extra == high >> extra:
            return low >> extra
    raise AssertionError


def exact_trial(words: Words, deviation: int, more: Callable[[int], Words]) -> int | None:
    """Repeats a trial of `kernels.draw` in exact arithmetic, from the trial's words. Returns a
    number, or None if rejected. `more` gives further random words, for undecided comparisons."""
    strips = strips_of(deviation)
    span = deviation // strips
    first, second, third = (int(word) for word in words)
    strip_of, chance = _Uniform(first, 64, more), _Uniform(third >> 1, 63, more)
    strip = 0
    while not strip_of.is_below(strip_edge(strips, strip + 1)):
        strip += 1
    place, rest = divmod(second * span, 1 << 64)
    negative = third & 1
    if rest < (1 << 64) % span or (negative and strip == place == 0):
        return None
    # exp(-(x^2 - s^2) / 2 deviation^2) with x the number and s the start of its strip
    exponent = place * (2 * strip * span + place)
    if exponent and not chance.is_below(exp_bounds(exponent, 2 * deviation * deviation)):
        return None
    size = strip * span + place
    return -size if negative else size


class _Uniform:
    def __init__(self, value: int, bits: int, more: Callable[[int], Words]) -> None:
        self._value, self._bits, self._more = value, bits, more

    def is_below(self, bounds: Bounds) -> bool:
        while True:
            low, high = bounds(self._bits + 64)
            if (self._value + 1) << 64 <= low:
                return True
            if self._value << 64 >= high:
                return False
            self._value = (self._value << 64) | int(self._more(1)[0])
            self._bits += 64


def exp_bounds(numerator: int, denominator: int) -> Bounds:
    """Bounds on exp(-numerator / denominator).

    The argument is halved until it is below 1/2, the series is summed with 64 extra bits, and the
    sum is squared once per halving. Each term and square is rounded by less than a unit, and
    squaring at most doubles the error, which stays below 2^40 units.
    """

    def bounds(bits: int) -> tuple[int, int]:
        work = bits + 64
        halvings = max((2 * numerator // denominator).bit_length(), 1)
        if halvings > 24:
            raise PrivacyError(
                f"exp(-{numerator / denominator:g}) is out of range. This is a bug in dlm; report "
                "it"
            )
        part = (numerator << work) // (denominator << halvings)
        term = total = 1 << work
        for place in itertools.count(1):
            term = (term * part >> work) // place
            if not term:
                break
            total += -term if place & 1 else term
        for _ in range(halvings):
            total = total * total >> work
        return (total - (1 << 40)) >> 64, ((total + (1 << 40)) >> 64) + 1

    return bounds


@functools.lru_cache(1024)
def strip_edge(strips: int, index: int) -> Bounds:
    """Bounds on the probability of strips below `index`; strip i weighs exp(-i^2 / 2 strips^2)."""

    def bounds(bits: int) -> tuple[int, int]:
        low, high = _sums(strips, bits + 32, index)
        all_low, all_high = _sums(strips, bits + 32, _last(strips, bits + 32))
        # All strips after the last one added weigh less than a unit together.
        return (low << bits) // (all_high + 1), -(-(high << bits) // all_low)

    return bounds


def _last(strips: int, bits: int) -> int:
    # exp(-i^2 / 2 strips^2) < 2^-(bits + 16) for i > 1.2 strips sqrt(bits + 16), and falls fast.
    return 2 * strips * (int((bits + 16) ** 0.5) + 1)


@functools.lru_cache(64)
def _weights(strips: int, bits: int) -> tuple[list[int], list[int]]:
    """Running sums of lower and upper bounds on the weights of all strips."""
    pairs = [exp_bounds(i * i, 2 * strips * strips)(bits) for i in range(_last(strips, bits))]
    return tuple([0, *itertools.accumulate(side)] for side in zip(*pairs, strict=True))  # type: ignore[return-value]


def _sums(strips: int, bits: int, count: int) -> tuple[int, int]:
    low, high = _weights(strips, bits)
    last = len(low) - 1
    # The strips beyond the table of weights add less than a unit.
    return (low[count], high[count]) if count <= last else (low[last], high[last] + 1)
