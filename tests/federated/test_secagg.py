"""What devices send is integers whose modular sum is the sum of their updates, and is bounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.devices.encoding import (
    Encoding,
    SecureAggregator,
    hadamard,
    modular_sum,
    padded_dimension,
)
from dlm.federated.keys import Key

KEY = Key.from_seed(31)


def sylvester(d: int) -> np.ndarray:
    """Hadamard's matrix by its definition."""
    return np.array([[1]]) if d == 1 else np.kron([[1, 1], [1, -1]], sylvester(d // 2))


@pytest.mark.parametrize("d", [1, 2, 4, 64, 256])
def test_the_fast_transform_is_hadamards_matrix(d: int) -> None:
    """Normalised, and its own inverse."""
    v = np.random.default_rng(d).normal(size=d)
    np.testing.assert_allclose(hadamard(v), sylvester(d) @ v / math.sqrt(d), atol=1e-12)
    np.testing.assert_allclose(hadamard(hadamard(v)), v, atol=1e-12)


def test_a_rotation_spreads_one_number_over_all() -> None:
    """Whose sum of squares stays: what the infinity-norm bound rests on."""
    one = np.zeros(1 << 16)
    one[77] = 3.0
    rotated = hadamard(one)
    assert np.allclose(np.abs(rotated), 3.0 / 256)
    assert np.linalg.norm(rotated) == pytest.approx(3.0)
    for wrong in (0, 3, 12):
        with pytest.raises(ConfigError, match="power of two"):
            hadamard(np.zeros(wrong))
    assert [padded_dimension(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("clip", "scale", "max_coordinate", "modulus", "ratio"),
    [
        # Worked out by hand from GDP Algorithm 2 for d = 2^22 and m = 6500.
        (5.0, 1e3, 75, 975_001, math.sqrt(1.0424)),
        (5.0, 1e4, 745, 9_685_001, math.sqrt(1.00044)),
        (1.0, 1e4, 149, 1_937_001, math.sqrt(1.0106)),
    ],
)
def test_bounds_are_those_of_the_paper(
    clip: float, scale: float, max_coordinate: int, modulus: int, ratio: float
) -> None:
    """2.4 M parameters, padded."""
    encoding = Encoding(2_400_000, clip, scale, 6500)
    assert encoding.padded == 1 << 22
    assert encoding.max_coordinate == max_coordinate
    assert encoding.modulus == modulus
    assert encoding.sensitivity_factor == pytest.approx(ratio, rel=2e-4)


def test_the_inflated_norm_is_the_printed_formula() -> None:
    """C^2 + d / (4 s^2) + sqrt(2 ln(1 / alpha)) (C / s + sqrt(d) / (2 s^2)); s makes it vanish."""
    for c, s, d, alpha in ((1.0, 100.0, 1024, math.exp(-0.5)), (3.0, 20.0, 64, 0.01)):
        squared = (
            c**2
            + d / (4 * s**2)
            + math.sqrt(2 * math.log(1 / alpha)) * (c / s + math.sqrt(d) / (2 * s**2))
        )
        found = Encoding(d, c, s, 10, alpha)
        assert found.inflated_norm == pytest.approx(math.sqrt(squared))
    assert Encoding(1024, 1.0, 1e9, 10).sensitivity_factor == pytest.approx(1.0, abs=1e-8)


def updates(count: int, size: int, norm: float, seed: int = 0) -> np.ndarray:
    """Updates of a given norm."""
    drawn = np.random.default_rng(seed).normal(size=(count, size))
    return np.asarray(norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def test_the_largest_updates_of_all_devices_do_not_wrap() -> None:
    """Each coordinate at its bound, in both directions; one report more would wrap."""
    encoding = Encoding(4, 1.0, 10.0, 3)
    top = np.full(4, 2 * encoding.max_coordinate)
    for shift in (top, 0 * top):
        total = modular_sum([shift] * 3, encoding.modulus)
        integers = total - 3 * encoding.max_coordinate
        assert np.abs(integers).max() == 3 * encoding.max_coordinate
    wrapped = modular_sum([top] * 4, encoding.modulus)
    assert (wrapped < top).all()
    with pytest.raises(PrivacyError, match=r"4 reports .* modulus .* 3"):
        encoding.decode(wrapped, 4, encoding.signs(KEY))


def test_rounding_is_unbiased() -> None:
    """Over many draws; rounding to the nearest, or down, is found out."""
    encoding = Encoding(64, 1.0, 30.0, 1)
    vector, signs = updates(1, 64, 0.7)[0], encoding.signs(KEY)
    draws = 4000
    decoded = np.array(
        [
            encoding.decode(encoding.encode(vector, signs, KEY.fold("draw", i)), 1, signs)
            for i in range(draws)
        ]
    )
    z = (decoded.mean(axis=0) - vector) / (decoded.std(axis=0) / math.sqrt(draws))
    assert np.abs(z).max() < 5
    rotated = hadamard(vector * 30.0 * signs)
    for biased in (np.rint(rotated), np.floor(rotated)):
        off = hadamard(biased) * signs / 30.0 - vector
        assert np.abs(off / (decoded.std(axis=0) / math.sqrt(draws))).max() > 5


@pytest.mark.parametrize("size", [1, 2, 5, 500])
def test_the_norm_is_bounded_always(size: int) -> None:
    """Over updates too long and too short, at a scale where rounding matters."""
    encoding = Encoding(size, 1.0, 3.0, 5)
    signs = encoding.signs(KEY)
    for i in range(300):
        vector = updates(1, size, 10.0 ** (i % 5 - 2), seed=i)[0]
        found = encoding.encode(vector, signs, KEY.fold(i)) - encoding.max_coordinate
        assert float((found**2).sum()) <= encoding.max_squared_norm
        assert np.abs(found).max() <= encoding.max_coordinate
    longest = math.sqrt(encoding.max_squared_norm) / encoding.scale
    assert longest == encoding.inflated_norm


def test_roundings_that_are_too_long_are_drawn_again() -> None:
    """Where every number lies half-way, lengths are binomial and the bound cuts into them."""
    d = 512
    scale = math.sqrt(d) / 2  # so that the clipped vector has exactly these halves
    for alpha, cut in ((math.exp(-0.5), 0.99), (0.999, 0.6)):
        encoding = Encoding(d, 1.0, scale, 1, alpha)
        signs = encoding.signs(KEY)
        vector = hadamard(np.full(d, 0.5)) * signs / scale
        lengths = [
            int(
                ((encoding.encode(vector, signs, KEY.fold(i)) - encoding.max_coordinate) ** 2).sum()
            )
            for i in range(200)
        ]
        assert max(lengths) <= encoding.max_squared_norm
        free = np.random.default_rng(1).binomial(d, 0.5, 20_000)
        assert (free <= encoding.max_squared_norm).mean() < cut  # so that some were drawn again
        assert abs(np.mean(lengths) - free[free <= encoding.max_squared_norm].mean()) < 4


def test_a_huge_update_moves_the_sum_by_no_more_than_the_inflated_norm() -> None:
    """Clipped by the encoding itself; one that is not finite is refused."""
    encoding = Encoding(200, 1.0, 50.0, 4)
    signs = encoding.signs(KEY)
    huge = encoding.encode(1e12 * updates(1, 200, 1.0)[0], signs, KEY)
    moved = encoding.decode(huge, 1, signs)
    assert np.linalg.norm(moved) <= encoding.inflated_norm
    # Against the clip alone, C would be passed: that is what accounting has to know.
    assert np.linalg.norm(moved) > 1.0
    for bad in (math.nan, math.inf):
        with pytest.raises(PrivacyError, match="not finite"):
            encoding.encode(np.full(200, bad), signs, KEY)


def test_a_report_that_is_none_is_refused() -> None:
    """It is a number modulo M: others are refused, as are wrong sizes."""
    encoding = Encoding(10, 1.0, 10.0, 3)
    good = encoding.encode(np.zeros(10), encoding.signs(KEY), KEY)
    for bad in (-1, encoding.modulus):
        report = good.copy()
        report[3] = bad
        with pytest.raises(PrivacyError, match="outside"):
            modular_sum([good, report], encoding.modulus)
    with pytest.raises(ConfigError, match="no reports to add up"):
        modular_sum([], encoding.modulus)
    with pytest.raises(ConfigError, match="11 numbers; expected 10"):
        encoding.encode(np.zeros(11), encoding.signs(KEY), KEY)
    with pytest.raises(ConfigError, match=r"expected \(16,\)"):
        encoding.decode(good[:10], 1, encoding.signs(KEY))


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.0},
        {"scale": math.inf},
        {"report_goal": 0},
        {"alpha": 1.0},
        {"scale": 1e18, "report_goal": 10**6},
        {"dimension": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    """At construction."""
    with pytest.raises(ConfigError):
        Encoding(**{"dimension": 8, "clip_norm": 1.0, "scale": 1.0, "report_goal": 2, **settings})


def tree(count: int) -> dict[str, Any]:
    """Updates of a small model, stacked."""
    random = np.random.default_rng(9)
    return {
        "dense": random.normal(size=(count, 6, 5)).astype(np.float32) / 20,
        "bias": [random.normal(size=(count, 3)).astype(np.float32) / 20],
    }


def test_secure_aggregation_gives_the_plain_sum() -> None:
    """Of a stack, of a list of trees, and of parts added one after the other, bit for bit."""
    jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
    stack = tree(8)
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(8)]
    plain = jax.tree.map(lambda leaf: leaf.sum(axis=0), stack)
    secure = SecureAggregator(1.0, 1e7, 8)
    summed = secure.sum(stack, KEY)
    assert jax.tree.structure(plain) == jax.tree.structure(summed)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    running = secure.zero(each[0])
    for part in (slice(0, 3), slice(3, 3), slice(3, 8)):
        running = secure.add(running, jax.tree.map(lambda leaf, p=part: leaf[p], stack), KEY)
    for other in (secure.sum(each, KEY), secure.result(running, 8)):
        for a, b in zip(jax.tree.leaves(summed), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
    empty = secure.result(secure.zero(each[0]), 0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(empty))


def test_a_secure_round_refuses_what_would_break_its_bound() -> None:
    """More devices than the goal, another rotation in the middle, a wrong number of reports."""
    jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
    secure, stack = SecureAggregator(1.0, 1e4, 5), tree(4)
    running = secure.add(secure.zero(jax.tree.map(lambda leaf: leaf[0], stack)), stack, KEY)
    with pytest.raises(PrivacyError, match="8 reports"):
        secure.add(running, stack, KEY)
    with pytest.raises(PrivacyError, match="two keys in one round"):
        secure.add(running, jax.tree.map(lambda leaf: leaf[:1], stack), KEY.fold("other"))
    with pytest.raises(PrivacyError, match=r"4 devices were added, .* asked for 5"):
        secure.result(running, 5)
    with pytest.raises(ConfigError, match="no updates, so their shape is unknown"):
        secure.sum([], KEY)
    assert secure.sensitivity_factor(33) == Encoding(33, 1.0, 1e4, 5).sensitivity_factor


@pytest.mark.parametrize("bound", [0.01, 1.0, 30.0])
def test_a_clip_norm_that_changes_is_inflated_by_the_same_factor(bound: float) -> None:
    """What was rounded for a large norm would make an update of a small one far longer."""
    pytest.importorskip("jax", reason="pip install -e '.[train]'")
    secure = SecureAggregator(1.0, 100.0, 4)
    update = np.full(500, bound / math.sqrt(500), np.float32)
    running = secure.add(secure.zero(update, bound), update[None], KEY)
    assert running.total is not None
    integers = running.total - running.encoding.max_coordinate
    sent = float(np.linalg.norm(integers)) / secure.scale * bound
    assert bound * 0.9 < sent <= bound * secure.sensitivity_factor(500)
    np.testing.assert_allclose(
        np.linalg.norm(secure.result(running, 1) - update), 0, atol=0.25 * bound
    )
    for wrong in (0.0, math.inf, math.nan):
        with pytest.raises(PrivacyError, match="clip norm of a round"):
            secure.zero(update, wrong)
