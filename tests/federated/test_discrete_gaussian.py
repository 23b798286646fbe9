"""Draws of the discrete Gaussian: their exact law, and a stream that is never read twice."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("scipy", reason="pip install -e '.[train]'")

from scipy import stats

from dlm.errors import PrivacyError
from dlm.federated.keys import Key
from dlm.federated.noise import discrete_gaussian, kernels
from dlm.federated.noise.discrete_gaussian import (
    draw_discrete,
    exact_trial,
    exp_bounds,
    strip_edge,
    whole_deviation,
)
from dlm.federated.noise.stream import WordStream

Words = NDArray[np.uint64]


def law(deviation: float, reach: int) -> NDArray[np.float64]:
    """Probabilities of -reach .. reach, by the definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * deviation**2))
    return np.asarray(weights / weights.sum())


@pytest.mark.promise("noise")
@pytest.mark.parametrize("deviation", [1, 2, 3, 5, 8, 16, 48])
def test_draws_have_the_law_of_the_definition(deviation: int) -> None:
    """Chi-squared over all numbers that are expected 20 times; the law next to it is told apart."""
    count, reach = 400_000, 10 * deviation
    drawn = draw_discrete(Key.from_seed(deviation), [(count, deviation)])
    found = np.bincount(drawn + reach, minlength=2 * reach + 1)

    def chance(of: float) -> float:
        expected = law(of, reach) * count
        often = expected > 20
        rest = [(~often * found).sum(), (~often * expected).sum()]
        seen = np.append(found[often], rest[0])
        hoped = np.append(expected[often], rest[1])
        return float(stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue)

    assert chance(deviation) > 1e-4
    assert chance(deviation * 1.03) < 1e-6


def test_large_draws_are_normal_to_their_last_bits() -> None:
    """Of 2^32 steps and more: the normal law in the large, and even last bits in the small."""
    count, deviation = 400_000, 48 << 28
    drawn = draw_discrete(Key.from_seed(1), [(count, deviation)])
    assert stats.kstest(drawn / deviation, "norm").pvalue > 1e-4
    assert stats.kstest(drawn / (1.01 * deviation), "norm").pvalue < 1e-3
    for bits in (1, 3, 8):
        places = np.bincount(drawn & ((1 << bits) - 1), minlength=1 << bits)
        assert stats.chisquare(places).pvalue > 1e-4
    # Places within a strip, by sixteenths of it.
    span = deviation // 16
    assert stats.chisquare(np.bincount(np.abs(drawn) % span * 256 // span)[1:-1]).pvalue > 1e-12


def counted(words: Words) -> Callable[[int], Words]:
    """A source of these words that knows where it is."""
    left = iter(words)
    return lambda count: np.array([next(left) for _ in range(count)], np.uint64)


@pytest.mark.parametrize("deviation", [1, 2, 6, 16, 48 << 28])
def test_each_trial_is_what_exact_arithmetic_makes_of_its_words(deviation: int) -> None:
    """The kernel, compiled and as Python, against whole numbers without any rounding."""
    words = WordStream(Key.from_seed(3)).words(kernels.WORDS * 600)
    more = WordStream(Key.from_seed(4))
    exact = [exact_trial(row, deviation, more.words) for row in words.reshape(-1, kernels.WORDS)]
    expected = [number for number in exact if number is not None]
    out = np.empty(len(expected), np.int64)
    discrete_gaussian._fill(out, deviation, lambda count: np.resize(words, count), more.words)
    assert out.tolist() == expected
    table = discrete_gaussian._table(discrete_gaussian.strips_of(deviation))
    span = deviation // table.strips
    slow = np.empty(100, np.int64)
    with np.errstate(over="ignore"):
        _, filled, doubt = kernels.draw.py_func(
            words, 0, slow, 0, table.edges, table.sure, table.guide,
            np.uint64(span), np.uint64((1 << 64) % span), table.strips,
        )  # fmt: skip
    assert (filled, doubt) == (100, False)
    assert slow.tolist() == expected[:100]


def test_what_64_bits_do_not_decide_is_decided_by_more() -> None:
    """Words at an edge of the strips, and one at the chance of acceptance: both ways come out."""
    deviation = 48
    table = discrete_gaussian._table(16)
    edge = int(table.edges[4])
    high, low = (counted(np.full(9, word, np.uint64)) for word in (2**64 - 1, 0))
    row = np.array([edge, 1, 0], np.uint64)  # the first place, +
    assert exact_trial(row, deviation, low) == 4 * 3
    assert exact_trial(row, deviation, high) == 5 * 3
    out = np.empty(1, np.int64)
    words = counted(np.resize(row, 10_000))
    discrete_gaussian._fill(out, deviation, words, low)
    assert out.tolist() == [4 * 3]
    # Beyond the table: the strip is found in exact arithmetic, however far.
    last = np.array([2**64 - 1, 1, 0], np.uint64)
    far = exact_trial(last, deviation, counted(np.array([2**64 - 1, 0], np.uint64)))
    assert far is not None and 11 * 48 < far < 14 * 48
    # The third place of strip 4: exp(-(14^2 - 12^2) / (2 * 48^2)) to 63 bits.
    chance = discrete_gaussian._floor(exp_bounds(14**2 - 12**2, 2 * 48**2), 63)
    second = -(-(2 << 64) // 3)
    for further, found in ((low, 14), (high, None)):
        row = np.array([edge - 1, second, chance << 1], np.uint64)
        assert exact_trial(row, deviation, further) == found


@pytest.mark.parametrize("ratio", [(1, 3), (7, 2), (1, 10**9), (40, 1), (123456789, 2 * 10**7)])
def test_bounds_on_exp_hold_and_are_narrow(ratio: tuple[int, int]) -> None:
    """Against decimal arithmetic of 120 digits."""
    with localcontext() as context:
        context.prec = 120
        exact = Fraction((Decimal(-ratio[0]) / Decimal(ratio[1])).exp())
    for bits in (64, 200):
        low, high = exp_bounds(*ratio)(bits)
        assert low <= exact * 2**bits <= high
        assert high - low <= 2


def test_the_strips_have_their_probabilities() -> None:
    """Edges against sums in double precision, and in order; their bounds are narrow."""
    weights = np.exp(-(np.arange(400) ** 2) / 512.0)
    for index in (1, 7, 40, 200):
        low, high = strip_edge(16, index)(100)
        assert 0 <= high - low <= 4
        assert low / 2**100 == pytest.approx(weights[:index].sum() / weights.sum(), rel=1e-13)
    assert np.all(np.diff(discrete_gaussian._table(16).edges.astype(object)) >= 0)


def test_a_name_gives_its_words_once_and_another_name_others() -> None:
    """No word twice, within a stream, over names, after a restart."""
    stream = WordStream(Key.from_seed(7))
    parts = np.concatenate([stream.words(5), stream.words(20_000), stream.words(3)])
    assert np.array_equal(parts, WordStream(Key.from_seed(7)).words(20_008))
    others = [Key.from_seed(7).fold(at, part) for at in range(20) for part in range(3)]
    every = np.concatenate([parts, *(WordStream(key).words(1000) for key in others)])
    assert len(np.unique(every)) == len(every)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(stream)


def test_the_words_are_those_of_the_cipher() -> None:
    """Key, counter 0 and nonce 0, and nothing mixed in."""

    class Known(Key):
        def material(self) -> bytes:
            return bytes(range(32))

    found = WordStream(Known(bytes(32), simulated=True)).words(8).astype("<u8").tobytes()
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(bytes(range(32)), bytes(16)), None).encryptor()
    assert found == cipher.update(bytes(64))


def test_a_deviation_is_rounded_up_to_whole_strips() -> None:
    """Never less than was asked for."""
    assert whole_deviation(1.0) == 16
    assert whole_deviation(32.0) == 48  # a little more is asked for, so that rounding is covered
    assert math.isclose(whole_deviation(1e12 / 3), 1e12 / 3, rel_tol=1e-10)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="must be above 0"):
            whole_deviation(wrong)
