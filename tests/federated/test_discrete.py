"""Noise on a grid: the law of what is released, by enumeration, and how far rounding can be off."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("scipy", reason="pip install -e '.[train]'")

from dlm.errors import PrivacyError
from dlm.federated.account.sampled import log_moment
from dlm.federated.keys import Key
from dlm.federated.noise import make_mechanism
from dlm.federated.noise.banded import BandMF
from dlm.federated.noise.blt import Blt, BltParameters
from dlm.federated.noise.discrete import (
    BltNoise,
    DiscreteNoise,
    WeightedNoise,
    discrete,
)
from dlm.federated.noise.discrete_gaussian import whole_deviation
from dlm.federated.noise.mechanism import Mechanism
from dlm.federated.noise.tree import TreeAggFull
from federated.linear import dense_toeplitz, node_matrix

Whole = NDArray[np.int64]
Floats = NDArray[np.float64]
BLT = BltParameters((0.93, 0.4), (0.35, 0.25))
BAND = np.array([[0.8, 0, 0], [0.8, 0.6, 0], [0.7, 0.6, 0.3]])


def dense_banded(rows: Floats) -> Floats:
    """C from its rows, each from the diagonal backwards."""
    dense = np.zeros((len(rows), len(rows)))
    for t, row in enumerate(rows):
        for back, value in enumerate(row[: t + 1]):
            dense[t, t - back] = value
    return dense


def full_tree(rounds: int) -> tuple[TreeAggFull, Floats]:
    """The mechanism, and the lower triangular C whose C^T C is that of all nodes."""
    full, nodes = TreeAggFull(rounds), node_matrix(rounds)
    square = np.linalg.cholesky((nodes.T @ nodes)[::-1, ::-1])[::-1, ::-1].T
    np.testing.assert_allclose(np.diag(square), 1 / full.conditionals()[0])
    return full, square


def matrices(rounds: int) -> dict[str, tuple[Mechanism, Floats]]:
    """Each mechanism whose noise is as many draws as rounds, and its C."""
    toeplitz = make_mechanism("bandfhu", rounds=rounds, bands=2)
    rows = BAND[:rounds, :rounds]
    return {
        "gaussian": (make_mechanism("gaussian", rounds=rounds), np.eye(rounds)),
        "blt": (Blt(rounds, BLT), dense_toeplitz(BLT.coefs(rounds), rounds)),
        "bandfhu": (toeplitz, dense_toeplitz(toeplitz.parameters_of()[0], rounds)),
        "bandmf": (BandMF(rows), dense_banded(rows)),
        "tree-full": full_tree(rounds),
    }


# Sums of a round for the users that both neighbours have, and what the one user adds: each may
# depend on all that was released before. (round, released so far) -> (others, own)
Sums = Callable[[int, list[Whole]], tuple[Whole, Whole]]


def turning(bound: int) -> Sums:
    """A user whose contribution turns its sign by what was released, as gradients may."""

    def sums(now: int, released: list[Whole]) -> tuple[Whole, Whole]:
        if not released:
            return np.zeros(1, np.int64), np.full(1, bound)
        odd = sum(released) % 2 == 0
        return 3 * released[-1] // 2 + now, np.where(odd, bound, -bound)

    return sums


def same(bound: int) -> Sums:
    """A user who sends the same in every round."""
    return lambda now, released: (np.zeros(1, np.int64), np.full(1, bound))


def released_paths(
    noise: DiscreteNoise, sums: Sums, own: bool, draws: list[list[Whole]]
) -> list[Whole]:
    """What each row of draws releases, round by round."""
    out: list[Whole] = []
    buffers = noise.init(Key.from_seed(0), len(draws[0][0])).buffers
    for now, fresh in enumerate(draws):
        others, mine = sums(now, out)
        drawn, buffers = noise.advance(now, fresh, buffers, math.inf)
        out.append(others + (mine if own else 0) + drawn)
    return out


def draws_behind(noise: DiscreteNoise, sums: Sums, own: bool, released: list[Whole]) -> list[Whole]:
    """The draws that released these paths: noise is a bijection, whatever the sums."""
    buffers = noise.init(Key.from_seed(0), len(released[0])).buffers
    found: list[Whole] = []
    for now, seen in enumerate(released):
        others, mine = sums(now, released[:now])
        total = seen - others - (mine if own else 0)
        correlated, _ = noise.advance(now, [np.zeros_like(total)], buffers, math.inf)
        found.append(total - correlated)
        again, buffers = noise.advance(now, [found[-1]], buffers, math.inf)
        assert np.array_equal(again, total)
    return found


def log_law(draws: list[Whole], deviations: list[float]) -> Floats:
    """Natural logarithm of the probability of rows of draws."""
    total = np.zeros(len(draws[0]))
    for row, deviation in zip(draws, deviations, strict=True):
        places = np.arange(-400, 401)
        norm = math.log(np.exp(-(places**2) / (2 * deviation**2)).sum())
        total += -(row**2) / (2 * deviation**2) - norm
    return total


def renyi(first: Floats, second: Floats, order: float) -> float:
    """Renyi divergence of laws whose logarithms are given at all paths that matter."""
    terms = order * first + (1 - order) * second
    top = terms.max()
    return float((top + math.log(np.exp(terms - top).sum())) / (order - 1))


def grid(radii: list[int]) -> list[Whole]:
    """All rows of whole numbers within these radii, a column each."""
    axes = np.meshgrid(*[np.arange(-r, r + 1) for r in radii], indexing="ij")
    return [axis.ravel().astype(np.int64) for axis in axes]


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("sums", [same(2), turning(2), turning(3)])
@pytest.mark.parametrize("name", ["gaussian", "blt", "bandfhu", "bandmf", "tree-full"])
def test_the_law_of_released_paths_is_within_rho_whatever_was_released(
    name: str, sums: Sums, rounds: int
) -> None:
    """All paths of up to three rounds: both divergences at several orders, and on every path the
    sum of what its rounds cost, which adaptive composition needs."""
    mechanism, matrix = matrices(rounds)[name]
    noise = discrete(mechanism)
    sigma = 2.0
    deviations = [sigma / matrix[t, t] for t in range(rounds)]
    axes = grid([math.ceil(8 * d) + 6 for d in deviations])
    released = released_paths(noise, sums, True, [[axis] for axis in axes])
    assert len({*zip(*(r.tolist() for r in released), strict=True)}) == len(axes[0])
    own = draws_behind(noise, sums, True, released)
    assert all(np.array_equal(a, b) for a, b in zip(own, axes, strict=True))
    other = draws_behind(noise, sums, False, released)

    mine = np.stack(
        [np.broadcast_to(sums(t, released[:t])[1], axes[0].shape) for t in range(rounds)]
    )
    sensitivity = float(np.linalg.norm(matrix @ mine, axis=0).max())
    # What accounting takes is no less, for a user in every round with its clip norm.
    bound = float(np.abs(mine).max())
    assert sensitivity <= mechanism.sensitivity(gap=1, max_participations=rounds) * bound * (
        1 + 1e-9
    )
    added = noise.added(1, sigma)
    rho = (sensitivity + added) ** 2 / (2 * sigma**2)

    first, second = log_law(own, deviations), log_law(other, deviations)
    assert np.exp(first).sum() > 1 - 1e-9
    assert np.exp(second).sum() > 1 - 1e-9
    for order in (1.01, 1.5, 2.0, 3.0):
        assert renyi(first, second, order) <= order * rho * (1 + 1e-9)
        assert renyi(second, first, order) <= order * rho * (1 + 1e-9)
    spent = sum((a - b) ** 2 / (2 * d**2) for a, b, d in zip(own, other, deviations, strict=True))
    assert np.max(spent) <= rho * (1 + 1e-12)
    if name == "gaussian":
        assert added == 0


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("sums", [same(1), turning(1)])
def test_a_tree_releases_what_noisy_nodes_tell_and_no_more(sums: Sums, rounds: int) -> None:
    """Its law is that of a function of nodes with discrete Gaussian noise: rounding is free."""
    mechanism = make_mechanism("tree", rounds=rounds)
    noise, sigma = discrete(mechanism), 1.0
    parts = {1: [1], 2: [1, 2], 3: [1, 2, 1]}[rounds]
    rho = mechanism.sensitivity(gap=1, max_participations=rounds) ** 2 / (2 * sigma**2)
    laws = []
    for own in (True, False):
        axes = grid([10] * sum(parts))
        split = np.cumsum([0, *parts])
        draws = [axes[a:b] for a, b in itertools.pairwise(split)]
        released = released_paths(noise, sums, own, draws)
        chance = np.exp(log_law(axes, [sigma] * len(axes)))
        paths = np.stack(released, axis=1)
        found, place = np.unique(paths, axis=0, return_inverse=True)
        law = np.zeros(len(found))
        np.add.at(law, place.ravel(), chance)
        laws.append(dict(zip(map(tuple, found.tolist()), law, strict=True)))
    both = [path for path in laws[0] if path in laws[1]]
    first, second = (np.log([law[path] for path in both]) for law in laws)
    assert np.exp(first).sum() > 1 - 1e-9
    for order in (1.01, 2.0, 3.0):
        assert renyi(first, second, order) <= order * rho * (1 + 1e-9)
        assert renyi(second, first, order) <= order * rho * (1 + 1e-9)


@pytest.mark.parametrize("name", ["blt", "bandfhu", "bandmf", "tree-full"])
def test_rounding_is_within_kappa_of_the_row_in_exact_arithmetic(name: str) -> None:
    """Over many rounds of numbers as large as in a run, against fractions."""
    rounds, size, deviation = 150, 7, 40.0 * 2**32
    mechanism: Mechanism
    if name == "blt":
        mechanism = Blt(rounds, BltParameters((0.9999999999, 0.99, 0.6), (0.01, 0.1, 0.2)))
        matrix = dense_toeplitz(mechanism.parameters.coefs(rounds), rounds)
    elif name == "tree-full":
        mechanism, matrix = full_tree(rounds)
    elif name == "bandfhu":
        mechanism = make_mechanism(name, rounds=rounds, bands=20)
        matrix = dense_toeplitz(mechanism.parameters_of()[0], rounds)
    else:
        rows = np.random.default_rng(1).uniform(0.1, 1, (rounds, 5))
        rows[:, 0] += 2
        mechanism = BandMF(np.where(np.arange(5) <= np.arange(rounds)[:, None], rows, 0))
        matrix = dense_banded(mechanism.rows)
    noise = discrete(mechanism)
    assert isinstance(noise, BltNoise | WeightedNoise)
    kappa = noise.kappa(deviation)
    assert 0.5 < kappa < 4
    random = np.random.default_rng(3)
    buffers = noise.init(Key.from_seed(0), size).buffers
    past: list[Whole] = []
    worst = 0.0
    # Whole multiples of 2^-60: the rows of C to that precision are what is compared with.
    exact = [[int(Fraction(value) * 2**80) for value in row] for row in matrix.tolist()]
    slack = 2.0**-40 if name != "tree-full" else 2.0**-3  # of the oracle's own matrix
    for now in range(rounds):
        fresh = np.rint(random.normal(0, deviation / matrix[now, now], size)).astype(np.int64)
        drawn, buffers = noise.advance(now, [fresh], buffers, noise.limit(deviation))
        for i in range(size):
            row = sum(exact[now][s] * int(past[s][i]) for s in range(now))
            error = Fraction(row, exact[now][now]) + int(drawn[i]) - int(fresh[i])
            worst = max(worst, abs(float(error)))
        past.append(drawn)
        assert [b.shape for b in buffers] == noise.shapes(now + 1, size)
    assert 0.4 < worst <= kappa + slack


def test_a_stream_goes_on_from_its_buffers_to_the_bit_and_no_round_shares_draws() -> None:
    """The same key and state give the same numbers; other rounds, parts and keys give others."""
    noise = discrete(make_mechanism("tree", rounds=4))
    state = noise.init(Key.from_seed(4), 50)
    first, state = noise.step(state, [(49, 1e9), (1, 1e6)])
    kept = [buffer.copy() for buffer in state.buffers]
    second, after = noise.step(state, [(49, 1e9), (1, 1e6)])
    again, _ = noise.step(state, [(49, 1e9), (1, 1e6)])
    assert np.array_equal(second, again)
    assert all(np.array_equal(a, b) for a, b in zip(kept, state.buffers, strict=True))
    other, _ = noise.step(state._replace(key=Key.from_seed(5)), [(49, 1e9), (1, 1e6)])
    assert not np.any(other == second)
    assert not np.any(first == second)
    assert abs(int(first[-1])) < 1e8
    with pytest.raises(PrivacyError, match="must not be saved"):
        pickle.dumps(after)
    assert "not shown" in repr(after)
    for _ in range(2):
        _, after = noise.step(after, [(50, 1e9)])
    with pytest.raises(PrivacyError, match="was made for 4 rounds"):
        noise.step(after, [(50, 1e9)])


def test_what_is_too_large_for_the_bound_is_refused() -> None:
    """Noise beyond the limit that rounding is bounded for, and trees that 64 bits cannot hold."""
    noise = discrete(Blt(3, BLT))
    start = noise.init(Key.from_seed(0), 2)
    with pytest.raises(PrivacyError, match="above which rounding errors"):
        noise.advance(0, [np.array([1, 1 << 40])], start.buffers, 2.0**30)
    tree = discrete(make_mechanism("tree", rounds=2000))
    with pytest.raises(PrivacyError, match="do not fit in 64 bits"):
        tree.step(tree.init(Key.from_seed(0), 1), [(1, 2.0**46)])
    with pytest.raises(PrivacyError, match="lower the noise multiplier"):
        whole_deviation(2.0**60)


@pytest.mark.parametrize("q", [0.01, 0.2, 0.7])
@pytest.mark.parametrize("shift", [(1,), (3,), (1, 2)])
def test_sampled_discrete_noise_has_the_moments_of_the_gaussian(
    shift: tuple[int, ...], q: float
) -> None:
    """By enumeration, at whole orders: the divergence from the sum without the user is that of the
    sampled Gaussian, and the one to it is no larger."""
    sigma = 2.0
    axes = grid([40 if len(shift) == 1 else 25] * len(shift))
    without = log_law(axes, [sigma] * len(axes))
    moved = [axis - by for axis, by in zip(axes, shift, strict=True)]
    mixed = np.logaddexp(
        math.log1p(-q) + without, math.log(q) + log_law(moved, [sigma] * len(axes))
    )
    norm = math.hypot(*shift)
    for order in (2, 3, 4, 5):
        gaussian = log_moment(q, sigma / norm, order - 1) / (order - 1)
        assert renyi(mixed, without, order) == pytest.approx(gaussian, rel=1e-6)
        assert renyi(without, mixed, order) <= gaussian
