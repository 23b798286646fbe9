"""One user moves a sum by no more than the clip norm, however many others are rounded with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.errors import ConfigError, PrivacyError  # noqa: E402
from dlm.federated import fixed_point  # noqa: E402
from dlm.federated.counting import unigrams  # noqa: E402
from dlm.federated.counting.unigrams import round_sum  # noqa: E402
from dlm.federated.training.engine import LocalEngine  # noqa: E402
from dlm.federated.training.local import LocalConfig, UserUpdate, UserWork  # noqa: E402
from dlm.federated.training.rnn import RnnConfig  # noqa: E402

# Casacuberta et al. 2022, in one coordinate: without the user, sums stay below 4096, where floats
# lie 2^-12 apart; with them they are above, where those 2^-11 apart round every contribution up.
BEFORE, AFTER = 4095, 2404
SMALL = 2.0**-12 * (1 + 2.0**-10)


def contributions(with_user: bool) -> np.ndarray[Any, Any]:
    """What 6,500 users hand in with a clip norm of 1, or 6,499 and nothing."""
    return np.array([*[1.0] * BEFORE, float(with_user), *[SMALL] * AFTER], np.float32)


def float_sum(given: np.ndarray[Any, Any]) -> float:
    """One after the other in float32, as sums were added up: the oracle of the attack."""
    total = np.float32(0.0)
    for one in given:
        total = np.float32(total + one)
    return float(total)


class Handed(LocalEngine):
    """Devices whose update is what their text says."""

    def _side_by_side(self, params: Any, batches: Any, used: Any, bound: Any) -> UserUpdate:
        value = jax.lax.bitcast_convert_type(batches[:, 0, 0, 0], jnp.float32)
        users = len(batches)
        zero = jnp.zeros(users)
        return UserUpdate({"one": value}, zero, jnp.ones(users, bool), zero, zero)


def engine_sum(given: np.ndarray[Any, Any], at_once: int) -> float:
    """The same through the engine's compiled loop."""
    engine = Handed(RnnConfig(17, 6, 8), LocalConfig(batch_size=1, unroll=1, users_at_once=at_once))
    cohort = []
    for bits in given.view(np.int32):
        batches = np.zeros((1, 1, 2), np.int32)
        batches[0, 0, 0] = bits
        cohort.append(UserWork(batches, 1.0))
    one = jnp.float32(1.0)
    sums = engine.sums({"one": jnp.float32(0.0)}, cohort, one, one, None)
    return float(sums.update["one"])


def test_sums_of_floats_can_be_moved_by_more_than_the_clip_norm() -> None:
    """The attack works where users are summed as floats: 1.58 times as far, 2.5 times the rho."""
    moved = float_sum(contributions(True)) - float_sum(contributions(False))
    assert moved > 1.58


@pytest.mark.promise("clip")
@pytest.mark.parametrize("at_once", [1, 4])
def test_the_engines_sum_is_moved_by_the_clip_norm_and_no_more(at_once: int) -> None:
    """The same users, through the loop that training runs."""
    moved = engine_sum(contributions(True), at_once) - engine_sum(contributions(False), at_once)
    assert moved == 1.0


@pytest.mark.promise("clip")
def test_counts_are_moved_by_lambda_and_no_more() -> None:
    """In float64 the same attack is 2^29 times weaker, and here it moves nothing at all."""
    others = [(np.array([0]), np.array([n])) for n in np.random.default_rng(1).random(5000) * 3]
    user = [(np.array([0]), np.array([7.0]))]
    for clip in (1.0, 0.3, 2.0 / 3.0):
        moved = round_sum([*user, *others], clip, 1) - round_sum(others, clip, 1)
        assert clip * (1 - 2.0**-38) < float(moved[0]) <= clip


def test_a_round_that_64_bits_have_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of counts and of updates: a sum that wraps is none."""
    monkeypatch.setitem(unigrams.MOST_DEVICES, unigrams.STEP_BITS, 3)
    one = (np.array([0]), np.array([1.0]))
    assert round_sum([one] * 3, 1.0, 1) == 3.0
    with pytest.raises(PrivacyError, match="more than 3 devices"):
        round_sum([one] * 4, 1.0, 1)
    monkeypatch.setattr(fixed_point, "MOST_UPDATES", 3)
    with pytest.raises(ConfigError, match="a cohort has 4 users; expected at most 3"):
        engine_sum(np.ones(4, np.float32), 1)


@pytest.mark.parametrize("bound", [1e-12, 0.3, 1.0, 1.5, 1000.0])
def test_a_sum_is_exact_whatever_the_order(bound: float) -> None:
    """Against Python's integers; negative numbers, carries and borrows among them."""
    scale = fixed_point.steps_per_unit(bound)
    assert math.frexp(scale)[0] == 0.5  # a power of two
    assert bound * scale <= 2**44
    rng = np.random.default_rng(3)
    drawn = (bound * rng.uniform(-1, 1, (200, 5))).astype(np.float32)
    drawn[:, 0], drawn[:, 1] = bound, -bound
    expected = np.trunc(drawn.astype(np.float64) * scale).astype(np.int64).sum(axis=0)
    add = jax.jit(fixed_point.plus)
    for order in (np.arange(200), rng.permutation(200)):
        total = fixed_point.zeros(drawn[0])
        for row in drawn[order]:
            total = add(total, jnp.asarray(row), scale)
        np.testing.assert_array_equal(fixed_point.values(total, scale) * scale, expected)


def test_nothing_becomes_longer() -> None:
    """Every number is cut towards 0; what is cut is less than 2^-43 of the bound."""
    update = np.random.default_rng(4).normal(size=1000).astype(np.float32)
    bound = float(np.linalg.norm(update.astype(np.float64)))
    scale = fixed_point.steps_per_unit(bound)
    found = fixed_point.values(fixed_point.plus(fixed_point.zeros(update), update, scale), scale)
    assert (np.abs(found) <= np.abs(update)).all()
    assert np.abs(found - update).max() < bound * 2.0**-43


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    """Nothing could be promised."""
    with pytest.raises(PrivacyError, match="clip norm of a round"):
        fixed_point.steps_per_unit(bound)
