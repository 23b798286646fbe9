"""The fast form of a device's training and of a cohort's sum, against plain loops."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.errors import ConfigError  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from dlm.federated.training.engine import LocalEngine, RoundSums  # noqa: E402
from dlm.federated.training.local import LocalConfig, UserWork, user_update, work_of  # noqa: E402
from dlm.federated.training.rnn import RnnConfig  # noqa: E402
from federated import oracle  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiling")

MODEL = RnnConfig(17, 6, 8)
BASE = LocalConfig(learning_rate=0.7, batch_size=3, unroll=4)
# Few, since each takes seconds to compile; every setting is in one of them.
VARIANTS = {
    "fedavg, clipped once": BASE,
    "clipped after each batch, per layer": dataclasses.replace(
        BASE, clip_after="batch", clip_kind="per_layer"
    ),
    "a stream, two epochs": dataclasses.replace(BASE, packing="stream", epochs=2),
    "fedsgd, weighted": dataclasses.replace(BASE, algorithm="fedsgd", example_cap=8.0),
    "side by side, a stream after each batch": dataclasses.replace(
        BASE, users_at_once=3, packing="stream", clip_after="batch"
    ),
}
# Users with much, little and hardly any text: batches are ragged.
SIZES = [[9, 4, 17], [2], [30] * 4, [1, 1, 1], [5] * 11]


@cache
def params(seed: int = 0) -> Any:
    """A model whose parameters are all different."""
    fresh = jax.jit(rnn.init, static_argnums=1)(jax.random.key(seed), MODEL)
    leaves, shape = jax.tree.flatten(fresh)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        shape, [leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), "float32") for leaf in leaves]
    )


def cohort(config: LocalConfig, sizes: list[list[int]] = SIZES) -> list[UserWork]:
    """Users of some lengths of utterances."""
    rng = np.random.default_rng(5)
    return [
        work_of(
            [rng.integers(3, MODEL.vocab_size, n).astype(np.int32) for n in lengths],
            config,
            np.random.default_rng(i),
        )
        for i, lengths in enumerate(sizes)
    ]


@cache
def engine(config: LocalConfig) -> LocalEngine:
    """Blocks of two users, compiled once for all tests."""
    return LocalEngine(MODEL, config, block=2)


def sums(
    config: LocalConfig, users: list[UserWork], bound: float, tracked: float = 1.0
) -> RoundSums:
    """The engine's sums."""
    return engine(config).sums(params(), users, jnp.float32(bound), jnp.float32(tracked), None)


@cache
def compiled(config: LocalConfig) -> Any:
    """(parameters, batches, used, bound) -> a user's update."""
    return jax.jit(partial(user_update, model=MODEL, config=config))


def one_update(
    config: LocalConfig, batches: Any, bound: float, used: int | None = None, start: Any = None
) -> Any:
    """One user's update, with room for 16 batches."""
    room = np.full((16, *batches.shape[1:]), -1, np.int32)
    room[: len(batches)] = batches
    count = len(batches) if used is None else used
    begun = params() if start is None else start
    return compiled(config)(begun, room, jnp.int32(count), jnp.float32(bound))


def norm(tree: Any) -> float:
    """L2 norm in float64."""
    return oracle.norm_of(tree)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cohorts_sum_is_that_of_plain_loops(name: str) -> None:
    """Ragged users, blocks that are not full, both with clipping and without any to do."""
    config = VARIANTS[name]
    users = cohort(config)
    assert len({len(user.batches) for user in users}) > 1 or config.algorithm == "fedsgd"
    for bound in (0.3, 1e6):
        fast = sums(config, users, bound)
        slow = oracle.round_sum(params(), users, bound, model=MODEL, config=config)
        assert norm(slow) > 0.1
        for a, b in zip(*map(jax.tree.leaves, (fast.update, slow)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5 * max(1.0, norm(slow)))
        assert float(fast.users) == len(users)
        assert float(fast.weight) == pytest.approx(sum(user.weight for user in users), rel=1e-6)
        least = 0 if bound > 1 else 1 if config.clip_after == "batch" else 3
        assert float(fast.clipped) >= least


def test_the_plain_form_can_tell_clipping_after_each_batch_from_clipping_once() -> None:
    """Otherwise the comparison above would be of one thing twice."""
    users = cohort(BASE)
    results = [
        oracle.round_sum(params(), users, 0.3, model=MODEL, config=config)
        for config in (BASE, dataclasses.replace(BASE, clip_after="batch"))
    ]
    difference = jax.tree.map(np.subtract, *results)
    assert norm(difference) > 0.05 * norm(results[0])


@pytest.mark.parametrize("clip_after", ["user", "batch"])
@pytest.mark.parametrize("size", [1.0, 1e18])
def test_an_update_is_never_longer_than_the_bound(clip_after: Any, size: float) -> None:
    """Also where the device's numbers explode: then it hands in zeros, and says so."""
    config = dataclasses.replace(BASE, clip_after=clip_after)
    start = jax.tree.map(lambda leaf: size * leaf, params())
    for user in cohort(config):
        got = one_update(config, user.batches, 0.25, start=start)
        assert norm(got.update) <= 0.25
        assert bool(got.finite) == (size == 1.0)
        assert (norm(got.update) > 0.01) == (size == 1.0)


@pytest.mark.parametrize("clip_after", ["user", "batch"])
def test_a_device_that_overflowed_once_hands_in_zeros(clip_after: Any) -> None:
    """With clipping after each batch too, where a later step could hide it."""
    broken = {**params(), "embedding": params()["embedding"].at[4].set(jnp.inf)}
    work = np.full((16, 3, 5), -1, np.int32)
    work[0, 0, :3] = [1, 4, 2]
    work[1, 0, :3] = [1, 5, 2]
    config = dataclasses.replace(BASE, clip_after=clip_after)
    got = compiled(config)(broken, work, jnp.int32(2), jnp.float32(0.25))
    assert not bool(got.finite)
    assert norm(got.update) == 0.0
    assert float(got.norm) == np.inf


def test_a_user_whose_text_has_no_tokens_hands_in_zeros() -> None:
    """And the round goes on: whether it does must not tell what somebody wrote."""
    config = LocalConfig(0.5, batch_size=2, unroll=4, example_cap=9.0)
    for text in ([], [np.array([], np.int32)] * 2):
        work = work_of(text, config, np.random.default_rng(1))
        found = one_update(config, work.batches, 1.0)
        assert (norm(found.update), bool(found.finite), float(found.targets)) == (0.0, True, 0.0)
        assert work.weight == 0.0
    for changed in ({"algorithm": "fedsgd"}, {"packing": "stream"}, {"example_cap": 0.0}):
        other = work_of([], dataclasses.replace(config, **changed), np.random.default_rng(1))
        np.testing.assert_array_equal(other.batches, np.full((1, 2, 5), -1))
        assert other.weight == (1.0 if "example_cap" in changed else 0.0)


def test_the_count_below_the_tracked_norm_is_centred() -> None:
    """Sum of b - 1/2: filled-up places count for nothing, users that were refused as above it."""
    users = cohort(BASE)
    norms = [float(one_update(BASE, user.batches, 1e6).norm) for user in users]
    middle = float(np.median(norms)) * 1.0001
    got = sums(BASE, users, 0.1, middle)
    assert float(got.below) == sum(n <= middle for n in norms) - 0.5 * len(users) == 0.5


class Listing:
    """An aggregator that keeps what devices send."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.keys: list[Any] = []

    def zero(self, template: Any, bound: float | None = None) -> Any:
        """Zeros."""
        return jax.tree.map(np.zeros_like, template)

    def add(self, total: Any, updates: Any, key: Any) -> Any:
        """Adds up and remembers."""
        self.keys.append(key)
        for place in range(len(jax.tree.leaves(updates)[0])):
            self.seen.append(jax.tree.map(lambda leaf: np.asarray(leaf[place]), updates))  # noqa: B023
        return jax.tree.map(lambda t, u: t + np.asarray(u).sum(0), total, updates)

    def result(self, total: Any, reports: int) -> Any:
        """The sum, for as many as came."""
        assert reports == len(self.seen)
        return total

    def sensitivity_factor(self, dimension: int) -> float:
        """As if encoding had made updates longer."""
        return 1.5 + 0 * dimension


@pytest.mark.parametrize("name", ["side by side, a stream after each batch"])
def test_an_aggregator_is_given_each_users_clipped_and_weighted_update(name: str) -> None:
    """And what it gives back is the round's sum; the other sums are as without it."""
    config = VARIANTS[name]
    users = cohort(config)
    aggregator = Listing()
    outside = LocalEngine(MODEL, config, aggregator=aggregator)
    got = outside.sums(params(), users, jnp.float32(0.3), jnp.float32(0.2), "the key")
    inside = sums(config, users, 0.3, 0.2)
    assert len(aggregator.seen) == len(users)
    assert set(aggregator.keys) == {"the key"}
    for update, user in zip(aggregator.seen, users, strict=True):
        assert norm(update) <= 0.3 * user.weight * (1 + 1e-6)
    for a, b in zip(*map(jax.tree.leaves, (got, inside)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert outside.sensitivity_factor(10) == 1.5
    assert engine(config).sensitivity_factor(10) == 1.0


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (UserWork(np.zeros((1, 3, 4), np.int32), 1.0), "shape"),
        (UserWork(np.zeros((0, 3, 5), np.int32), 1.0), "shape"),
        (UserWork(np.zeros((1, 3, 5), np.int32), 1.01), "weight is 1.01"),
        (UserWork(np.zeros((1, 3, 5), np.int32), float("nan")), "weight is nan"),
    ],
)
def test_work_of_another_shape_or_weight_is_refused(work: UserWork, message: str) -> None:
    """A weight above 1 would void the clip norm."""
    with pytest.raises(ConfigError, match=message):
        sums(BASE, [work], 1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"algorithm": "fedsgd", "epochs": 2}, "fedsgd computes a single gradient"),
        ({"clip_after": "round"}, "clip_after"),
        ({"example_cap": -1.0}, "example_cap"),
    ],
)
def test_impossible_local_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    """With what was found."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **changed)
