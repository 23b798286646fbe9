"""One user moves a sum by at most C, whatever they send."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.errors import ConfigError, PrivacyError  # noqa: E402
from dlm.federated.training import clip  # noqa: E402
from dlm.federated.training.clip import AdaptiveClip, ClippedDenominator, FixedDenominator  # noqa: E402
from federated import oracle  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiling")


def exact_norm(tree: Any) -> float:
    """L2 norm without rounding to speak of."""
    return math.sqrt(
        math.fsum(
            math.fsum(np.square(np.asarray(leaf, np.float64)).ravel().tolist())
            for leaf in jax.tree.leaves(tree)
        )
    )


def update(
    scale: float, seed: int = 0, shapes: tuple[tuple[int, ...], ...] = ((40, 30), (7,))
) -> Any:
    """Arrays of some shapes."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(0, scale, shape), "float32") for shape in shapes]


@pytest.mark.parametrize("kind", ["flat", "per_layer"])
@pytest.mark.parametrize("scale", [1e-12, 0.1, 1e3, 1e15])
@pytest.mark.parametrize("bound", [1e-6, 1.0, 1e6])
def test_the_norm_is_never_above_the_bound(kind: Any, scale: float, bound: float) -> None:
    """In exact arithmetic, over 24 orders of magnitude."""
    for seed in range(3):
        clipped = clip.clip(kind, update(scale, seed), bound)
        assert exact_norm(clipped.update) <= bound
        assert bool(clipped.finite)


def test_the_norm_of_a_large_update_is_never_above_the_bound() -> None:
    """Three million numbers, all alike or not: where float32 sums go wrong if added in a row."""
    for big in (
        [jnp.full((3_000_000,), 0.37)],
        [jnp.asarray(np.random.default_rng(1).lognormal(0, 3, 3_000_000), "float32")],
        [jnp.concatenate([jnp.asarray([4096.0]), jnp.full((3_000_000,), 1e-1)])],
    ):
        clipped = clip.clip_flat(big, 1.0)
        norm = float(np.linalg.norm(np.asarray(clipped.update[0], np.float64)))
        assert 1.0 - 4 * clip.MARGIN < norm <= 1.0
        assert float(clipped.norm) == pytest.approx(exact_norm_fast(big), rel=2e-5)


def exact_norm_fast(tree: Any) -> float:
    """L2 norm in float64."""
    return math.sqrt(sum(float(np.square(np.asarray(x, np.float64)).sum()) for x in tree))


@pytest.mark.parametrize("kind", ["flat", "per_layer"])
def test_clipping_is_that_of_the_plain_form(kind: Any) -> None:
    """Within the margin."""
    for bound in (0.1, 3.0, 1e4):
        fast = clip.clip(kind, update(1.0), bound).update
        slow = oracle.clip(kind, update(1.0), bound)
        for a, b in zip(fast, slow, strict=True):
            np.testing.assert_allclose(a, b, rtol=3 * clip.MARGIN)


@pytest.mark.parametrize("kind", ["flat", "per_layer"])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e25])
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_what_is_not_finite_becomes_zeros(kind: Any, poison: float, bound: float) -> None:
    """Of the edge-case table: inf, nan, and a norm beyond float32; all arrays, not one."""
    given = update(1.0)
    given[1] = given[1].at[3].set(poison)
    clipped = clip.clip(kind, given, bound)
    assert not bool(clipped.finite)
    assert float(clipped.norm) == math.inf
    assert all(not leaf.any() for leaf in clipped.update)


def test_each_layer_has_its_share_and_the_shares_make_the_bound() -> None:
    """S / sqrt(m) each; a layer that is short keeps what it has."""
    given = [jnp.full((100,), 1.0), jnp.full((4,), 1e-3)]
    clipped = clip.clip_per_layer(given, 2.0)
    assert exact_norm([clipped.update[0]]) == pytest.approx(2.0 / math.sqrt(2), rel=1e-4)
    assert np.array_equal(clipped.update[1], given[1])
    uneven = clip.clip_per_layer(given, 2.0, (0.6, 0.8))
    assert exact_norm([uneven.update[0]]) == pytest.approx(1.2, rel=1e-4)


@pytest.mark.parametrize("shares", [(0.9, 0.9), (1.0,), (-0.6, 0.8)])
def test_shares_that_make_more_than_the_bound_are_refused(shares: tuple[float, ...]) -> None:
    """Their squares must add up to 1 at most, one for each array."""
    with pytest.raises(PrivacyError, match="shares of the clip norm"):
        clip.clip_per_layer(update(1.0), 1.0, shares)


def test_weights_are_capped_at_one() -> None:
    """w_k = min(n_k / w^, 1)."""
    assert [clip.user_weight(n, 100.0) for n in (0, 25, 100, 900)] == [0.0, 0.25, 1.0, 1.0]
    assert clip.user_weight(5, None) == 1.0
    for cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="example cap"):
            clip.user_weight(5, cap)


@pytest.mark.parametrize("estimator", [FixedDenominator(20.0), ClippedDenominator(20.0)])
def test_no_user_moves_an_estimate_further_than_its_sensitivity(estimator: clip.Estimator) -> None:
    """Random cohorts with one user more, and the worst that the proof of Lemma 1 allows."""
    rng = np.random.default_rng(0)
    bound, worst = 3.0, 0.0
    for trial in range(300):
        users = int(rng.integers(0, 60))
        weights = rng.uniform(0, 1, users)
        if trial % 3 == 0:
            weights[:] = 1.0
        direction = rng.normal(size=5)
        spread = 0.0 if trial % 2 else 1.0
        vectors = direction + spread * rng.normal(size=(users, 5))
        vectors *= bound / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        new = -direction * bound / np.linalg.norm(direction)
        total = (weights[:, None] * vectors).sum(0)
        before = estimator.average(jnp.asarray(total), float(weights.sum()))
        after = estimator.average(jnp.asarray(total + new), float(weights.sum() + 1.0))
        worst = max(worst, float(jnp.linalg.norm(after - before)))
    limit = float(estimator.sensitivity(bound))
    assert worst <= limit * (1 + 1e-5)
    assert worst > 0.9 * limit  # the bound is reached, so it could not be smaller


def test_estimators_are_lemma_1s() -> None:
    """Values by hand, both sides of the clipped denominator, and the two sensitivities."""
    total = jnp.asarray([12.0])
    assert float(FixedDenominator(8.0).average(total, 100.0)[0]) == 1.5
    assert float(ClippedDenominator(8.0).average(total, 6.0)[0]) == 1.5
    assert float(ClippedDenominator(8.0).average(total, 12.0)[0]) == 1.0
    assert FixedDenominator(8.0).sensitivity(4.0) == 0.5
    assert ClippedDenominator(8.0).sensitivity(4.0) == 1.0
    for kind in (FixedDenominator, ClippedDenominator):
        for bad in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(PrivacyError, match="denominator"):
                kind(bad)


def test_restarts_are_the_papers() -> None:
    """128 + 1024 i."""
    adaptive = AdaptiveClip(count_stddev=1.0)
    at = np.flatnonzero(adaptive.restarts_after(jnp.arange(2500)))
    assert at.tolist() == [128, 1152, 2176]
    assert adaptive.restarts_within(2177) == (128, 1152)
    assert adaptive.restarts_within(2178) == (128, 1152, 2176)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"quantile": 1.0}, ConfigError),
        ({"learning_rate": 0.0}, ConfigError),
        ({"count_stddev": 0.0}, PrivacyError),
        ({"first_restart": -1}, ConfigError),
        ({"restart_every": 0}, ConfigError),
    ],
)
def test_an_impossible_adaptive_clip_is_refused(
    changed: dict[str, Any], error: type[Exception]
) -> None:
    """A count without noise above all."""
    with pytest.raises(error):
        AdaptiveClip(**{"count_stddev": 1.0, **changed})


def test_the_least_clip_norm_is_kept_to_by_numbers_whose_squares_vanish() -> None:
    """Just above and below where single precision ends; far below, nothing would be clipped."""
    for each in (1e-17, 1e-19, 3e-20, 1e-21, 1e-30):
        update = np.full(1 << 20, each, np.float32)
        for kind in ("flat", "per_layer"):
            left = np.asarray(clip.clip(kind, {"a": update}, clip.LEAST_NORM).update["a"])
            assert np.linalg.norm(left.astype(np.float64)) <= clip.LEAST_NORM
