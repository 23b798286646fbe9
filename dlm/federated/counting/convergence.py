"""Tests whether a distribution of words has settled: the Z statistic, and the rate of new words.

The Z statistic of Bhattacharya and Valiant (2015) compares two samples of sizes m1 >= m2:

    Z = sum over words of [(m2 X - m1 Y)^2 - (m2^2 X + m1^2 Y)] / [m1^(3/2) m2 (X + Y)]

where X and Y are a word's counts. If both come from one distribution of independent words, the
bracket has expectation 0. Federated counts are not independent: a person repeats words, and L1
clipping scales a person's counts. Rounds are independent, so with variances estimated between
rounds (`Moments`), the bracket is unbiased again. The first k/2 rounds are compared with the k/2
after them; FNG's nested form, which compares k/2 with k rounds, is biased, but also computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def z_statistic(
    x: Floats, y: Floats, *, var_x: Floats | None = None, var_y: Floats | None = None
) -> float:
    """Measures how far two counts of words differ beyond chance; near 0 for chance alone.

    Shapes
        x, y          (words,)  float64  counts; words with x + y <= 0 are left out
        var_x, var_y  (words,)  float64  variances of the counts; None: the counts (Poisson)
    Returns      Z in units of its threshold, m1^(3/2) m2, with the larger size m1; 0 if a sample
                 is empty
    Paper        Bhattacharya and Valiant 2015, Algorithm 1 and section 3; FNG 3.2
    """
    if x.sum() < y.sum():
        x, y, var_x, var_y = y, x, var_y, var_x
    m1, m2 = float(x.sum()), float(y.sum())
    if m2 <= 0:
        return 0.0
    seen = x + y > 0
    a, b = x[seen], y[seen]
    va = a if var_x is None else var_x[seen]
    vb = b if var_y is None else var_y[seen]
    bracket = (m2 * a - m1 * b) ** 2 - (m2**2 * va + m1**2 * vb)
    return float((bracket / (a + b)).sum() / (m1**1.5 * m2))


class Moments(NamedTuple):
    """Sums over a group of rounds, to compare groups; u is a round's counts, n the round's size.

    Shapes
        total, squares, cross  (words,)  float64  sums over rounds of u, u^2 and n u
        length, sizes          ()        float    sums over rounds of n and n^2
    """

    total: Floats
    squares: Floats
    cross: Floats
    length: float
    sizes: float

    @classmethod
    def zero(cls, words: int) -> Moments:
        return cls(np.zeros(words), np.zeros(words), np.zeros(words), 0.0, 0.0)

    def plus(self, counts: Floats, size: float | None = None) -> Moments:
        """Adds a round, whose size is sum(u) unless `size` is given. Noise on every word of a long
        list drowns that sum, so all noised rounds get the same size."""
        n = float(counts.sum()) if size is None else size
        return Moments(
            self.total + counts,
            self.squares + counts**2,
            self.cross + n * counts,
            self.length + n,
            self.sizes + n**2,
        )

    def minus(self, other: Moments) -> Moments:
        return Moments(
            self.total - other.total,
            self.squares - other.squares,
            self.cross - other.cross,
            self.length - other.length,
            self.sizes - other.sizes,
        )

    def at(self, used: npt.NDArray[np.bool_]) -> Moments:
        """Returns the moments of the `used` words; round sizes still count all words."""
        of_words = self.total[used], self.squares[used], self.cross[used]
        return Moments(*of_words, self.length, self.sizes)

    def residual_squares(self, share: Floats) -> Floats:
        """Sum over rounds of (u - share n)^2: how far words deviate from their share of a round."""
        return self.squares - 2 * share * self.cross + share**2 * self.sizes


def z_between_rounds(x: Moments, y: Moments, rounds: int) -> float:
    """Returns Z for two groups of `rounds` rounds, with variances estimated between rounds.

    A count may vary because rounds differ in size, although the distribution does not change; so
    deviations are measured from a word's common share of the rounds. These residuals sum to 0 over
    all rounds, which costs one degree of freedom.
    """
    share = (x.total + y.total) / (x.length + y.length)
    factor = 2 * rounds / (2 * rounds - 1)
    return z_statistic(
        x.total,
        y.total,
        var_x=factor * x.residual_squares(share),
        var_y=factor * y.residual_squares(share),
    )


def grid() -> Iterator[int]:
    """Yields round counts for Z: 1, 2, 3, 4, 6, 8, 12, 16, ...; half an even count is one, too."""
    yield 1
    power = 2
    while True:
        yield power
        yield power * 3 // 2
        power *= 2


def on_grid(round_count: int) -> bool:
    return next(k for k in grid() if k >= round_count) == round_count


def new_word_rate(new_words: Sequence[int], window: int) -> float:
    """Share of the last `window` rounds in which a word was seen for the first time (FNG 3.2 and
    Figure 3)."""
    last = new_words[-window:]
    return sum(n > 0 for n in last) / len(last) if last else 0.0


def rounds_between_new(new_words: Sequence[int], window: int) -> float:
    """Recent rounds needed per new word: 1 / `new_word_rate`; infinity if none is new (FNG 3.2)."""
    rate = new_word_rate(new_words, window)
    return 1 / rate if rate else float("inf")
