"""Streams of noise: exactly the covariance that is claimed, from a key used once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("jax", reason="needs the packages of dlm[train]")

import jax
import jax.numpy as jnp

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.noise import key_from_seed, key_from_system, make_mechanism
from dlm.federated.noise.mechanism import Mechanism
from dlm.federated.noise.tree import TreeAgg
from federated.linear import linear_map


def running_sums(rounds: int) -> NDArray[np.float64]:
    """A: the matrix of running sums."""
    return np.tril(np.ones((rounds, rounds)))


def plain_tree(rounds: int, restarts: tuple[int, ...] = ()) -> NDArray[np.float64]:
    """Covariance of the running sums' noise, node by node: the oracle of the stream.

    Each node's estimate is a vector of weights on nodes' draws, made by recursion from below.
    """
    nodes: dict[tuple[int, int], int] = {}

    def estimate(first: int, size: int) -> dict[int, float]:
        own = nodes.setdefault((first, size), len(nodes))
        if size == 1:
            return {own: 1.0}
        left, right = estimate(first, size // 2), estimate(first + size // 2, size // 2)
        below = {k: left.get(k, 0) + right.get(k, 0) for k in {*left, *right}}
        variance = sum(v * v for v in below.values())
        weight = variance / (1 + variance)  # of the node's own draw, which has variance 1
        return {own: weight, **{k: (1 - weight) * v for k, v in below.items()}}

    rows: list[dict[int, float]] = []
    before: dict[int, float] = {}
    edges = [0, *restarts, rounds]
    for start, end in zip(edges, edges[1:], strict=False):
        for count in range(1, end - start + 1):
            row = dict(before)
            place = start
            for bit in range(count.bit_length() - 1, -1, -1):
                if count >> bit & 1:
                    for k, v in estimate(place, 1 << bit).items():
                        row[k] = row.get(k, 0) + v
                    place += 1 << bit
            rows.append(row)
        before = rows[-1]
    dense = np.zeros((rounds, len(nodes)))
    for t, row in enumerate(rows):
        for k, v in row.items():
            dense[t, k] = v
    return dense @ dense.T


@pytest.mark.parametrize(
    ("rounds", "restarts"), [(1, ()), (13, ()), (32, ()), (21, (4,)), (30, (7, 8, 20))]
)
def test_a_tree_streams_the_noise_of_its_nodes(
    rounds: int, restarts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain sums over nodes, with weights worked out from variances alone."""
    mechanism = TreeAgg(rounds, restarts)
    released = linear_map(mechanism, monkeypatch)
    sums = running_sums(rounds) @ released
    np.testing.assert_allclose(sums @ sums.T, plain_tree(rounds, restarts), atol=2e-5)
    np.testing.assert_allclose(
        np.diagonal(plain_tree(rounds, restarts)), mechanism.prefix_variances(), atol=1e-12
    )


def test_a_wrong_restart_is_another_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above is known to see it."""
    sums = running_sums(21) @ linear_map(TreeAgg(21, (4,)), monkeypatch)
    assert np.abs(sums @ sums.T - plain_tree(21, (5,))).max() > 0.5


def test_independent_noise_is_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its map is a permutation."""
    released = linear_map(make_mechanism("gaussian", rounds=9), monkeypatch)
    np.testing.assert_array_equal(released @ released.T, np.eye(9))


@pytest.mark.parametrize("name", ["gaussian", "tree"])
def test_a_stream_resumes_to_the_bit(name: str) -> None:
    """The state after some rounds, copied through plain arrays, goes on as the first does."""
    mechanism = make_mechanism(name, rounds=12)
    template = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(5)}
    state = mechanism.init(key_from_seed(3), template)
    for _ in range(5):
        _, state = mechanism.step(state)
    data = jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
    data = pickle.loads(pickle.dumps(data))
    again = jax.tree.map(jnp.asarray, data)
    again = again._replace(key=jax.random.wrap_key_data(again.key, impl="threefry2x32"))
    for _ in range(7):
        noise, state = mechanism.step(state)
        same, again = mechanism.step(again)
        jax.tree.map(np.testing.assert_array_equal, noise, same)


@pytest.mark.parametrize("name", ["gaussian", "tree"])
def test_no_draw_is_used_twice(name: str) -> None:
    """Not in two rounds, nor in two parameters of one shape."""
    mechanism = make_mechanism(name, rounds=8)
    state = mechanism.init(key_from_seed(1), [jnp.zeros(4), jnp.zeros(4)])
    seen: list[float] = []
    for _ in range(8):
        noise, state = mechanism.step(state)
        seen += [float(x) for leaf in noise for x in leaf]
    assert len(set(seen)) == len(seen)


def test_rounds_without_noise_are_refused_or_poison_the_model() -> None:
    """Never a weaker guarantee in silence."""
    mechanism = make_mechanism("tree", rounds=2)
    state = mechanism.init(key_from_seed(0), jnp.zeros(3))
    for _ in range(2):
        _, state = mechanism.step(state)
    with pytest.raises(PrivacyError, match="round 2 has no noise"):
        mechanism.step(state)
    noise, _ = jax.jit(mechanism.step)(state)
    assert np.all(np.isnan(noise))


def test_a_restart_that_was_not_accounted_for_is_refused() -> None:
    """Only at the rounds that the sensitivity counts."""
    template = jnp.zeros(3)
    tree = make_mechanism("tree", rounds=4)
    with pytest.raises(PrivacyError, match="cannot be restarted|no restart"):
        tree.restart(tree.init(key_from_seed(0), template), key_from_seed(1))
    restarted = make_mechanism("tree-restart", rounds=4, restarts=(2,))
    state = restarted.init(key_from_seed(0), template)
    with pytest.raises(PrivacyError, match="round 0 is no restart"):
        restarted.restart(state, key_from_seed(1))
    for _ in range(2):
        _, state = restarted.step(state)
    other, _ = restarted.step(restarted.restart(state, key_from_seed(1)))
    same, _ = restarted.step(state)
    assert not np.array_equal(other, same)


def test_a_key_of_the_system_is_in_no_file() -> None:
    """It does not print, pickle or repeat itself."""
    first, second = key_from_system(), key_from_system()
    assert first.private
    assert not key_from_seed(0).private
    assert not np.array_equal(jax.random.key_data(first.key), jax.random.key_data(second.key))
    words = [str(word) for word in np.asarray(jax.random.key_data(first.key))]
    assert not any(word in repr(first) for word in words)
    with pytest.raises(PrivacyError, match="not written"):
        pickle.dumps(first)


def test_noise_takes_nothing_from_a_global_generator() -> None:
    """Whatever numpy's state is, before and after."""
    mechanism = make_mechanism("tree", rounds=3)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    state = mechanism.init(key_from_seed(5), jnp.zeros(4))
    first, _ = mechanism.step(state)
    np.random.seed(1)  # noqa: NPY002
    second, _ = mechanism.step(mechanism.init(key_from_seed(5), jnp.zeros(4)))
    np.testing.assert_array_equal(first, second)
    np.random.seed(0)  # noqa: NPY002
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_settings_that_no_mechanism_has_are_refused() -> None:
    """By name and by number."""
    for settings in [
        {"name": "treee", "rounds": 3},
        {"name": "tree", "rounds": 0},
        {"name": "tree", "rounds": 9, "restarts": (3,)},
        {"name": "tree-restart", "rounds": 9},
        {"name": "tree-restart", "rounds": 9, "restarts": (9,)},
        {"name": "tree-restart", "rounds": 9, "restarts": (4, 3)},
    ]:
        with pytest.raises(ConfigError):
            make_mechanism(**settings)  # type: ignore[arg-type]


def test_every_mechanism_answers_the_protocol() -> None:
    """By name."""
    for name in ("gaussian", "tree"):
        assert isinstance(make_mechanism(name, rounds=4), Mechanism)
