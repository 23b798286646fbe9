"""Streams of noise: exactly the covariance that is claimed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("scipy", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError
from dlm.federated.noise import NAMES, make_mechanism
from dlm.federated.noise.banded import BandMF, optimise_bandmf
from dlm.federated.noise.blt import PRODUCTION, Blt, BltParameters
from dlm.federated.noise.mechanism import Mechanism
from dlm.federated.noise.toeplitz import BandedToeplitz, band_fhu, band_toep
from dlm.federated.noise.tree import TreeAgg, TreeAggFull
from federated.linear import PARTS, dense_toeplitz, linear_map, node_matrix


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
    for start, end in itertools.pairwise(edges):
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
def test_a_tree_streams_the_noise_of_its_nodes(rounds: int, restarts: tuple[int, ...]) -> None:
    """Against plain sums over nodes, with weights worked out from variances alone."""
    mechanism = TreeAgg(rounds, restarts)
    released = linear_map(mechanism)
    sums = running_sums(rounds) @ released
    np.testing.assert_allclose(sums @ sums.T, plain_tree(rounds, restarts), atol=1e-7)
    np.testing.assert_allclose(
        np.diagonal(plain_tree(rounds, restarts)), mechanism.prefix_variances(), atol=1e-12
    )


@pytest.mark.parametrize("rounds", [1, 2, 7, 16, 27])
def test_the_full_tree_streams_the_best_estimate_from_all_nodes(rounds: int) -> None:
    """Against the inverse of the dense matrix, though the stream holds a few sums only."""
    nodes = node_matrix(rounds)
    mechanism = TreeAggFull(rounds)
    released = linear_map(mechanism)
    dense = np.linalg.inv(nodes.T @ nodes)
    np.testing.assert_allclose(released @ released.T, dense, atol=1e-7)
    sums = running_sums(rounds)
    np.testing.assert_allclose(
        np.diagonal(sums @ dense @ sums.T), mechanism.prefix_variances(), rtol=1e-10
    )
    assert mechanism.buffer_count <= rounds.bit_length()


def test_independent_noise_is_a_draw_a_round() -> None:
    """Of standard deviation 1."""
    released = linear_map(make_mechanism("gaussian", rounds=5))[:, ::PARTS]
    np.testing.assert_allclose(released, np.eye(5), atol=1e-7)


def toeplitz_mechanisms() -> list[BandedToeplitz]:
    """Of one band, some, and all."""
    return [band_fhu(9, 1), band_fhu(12, 5), band_fhu(8, 8), band_toep(12, 4)]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("number", range(4))
def test_banded_toeplitz_noise_is_the_inverse_of_its_matrix(number: int) -> None:
    """Row by row, and so are its numbers."""
    mechanism = toeplitz_mechanisms()[number]
    n = mechanism.rounds
    dense = np.linalg.inv(dense_toeplitz(mechanism.coefs, n))
    released = linear_map(mechanism)[:, ::PARTS]
    np.testing.assert_allclose(released, dense, atol=1e-7)
    sums = running_sums(n) @ dense
    np.testing.assert_allclose(mechanism.prefix_variances(), np.sum(sums**2, 1), rtol=1e-10)


def test_blt_noise_is_the_inverse_of_its_matrix() -> None:
    """Row by row, for the BLT that trained keyboards; with four buffers and nothing else."""
    parameters = PRODUCTION[400]
    mechanism = Blt(40, parameters)
    dense = np.linalg.inv(dense_toeplitz(parameters.coefs(40), 40))
    released = linear_map(mechanism)[:, ::PARTS]
    np.testing.assert_allclose(released, dense, atol=1e-7)
    sums = running_sums(40) @ dense
    np.testing.assert_allclose(mechanism.prefix_variances(), np.sum(sums**2, 1), rtol=1e-10)
    assert mechanism.state_size(1_400_000) == 4 * 1_400_000


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("rounds", "bands"), [(6, 1), (20, 4), (24, 24)])
def test_banded_noise_is_the_inverse_of_its_matrix(rounds: int, bands: int) -> None:
    """Row by row; its columns have norm 1, as the accounting of BandMF takes for granted."""
    mechanism = optimise_bandmf(rounds, bands)
    dense = np.zeros((rounds, rounds))
    for t in range(rounds):
        for d in range(min(bands, t + 1)):
            dense[t, t - d] = mechanism.rows[t, d]
    np.testing.assert_allclose(np.linalg.norm(dense, axis=0), 1, rtol=1e-12)
    inverse = np.linalg.inv(dense)
    released = linear_map(mechanism)[:, ::PARTS]
    np.testing.assert_allclose(released, inverse, atol=1e-7)
    sums = running_sums(rounds) @ inverse
    np.testing.assert_allclose(mechanism.prefix_variances(), np.sum(sums**2, 1), rtol=1e-10)
    gram = dense.T @ dense
    for d in range(bands):
        np.testing.assert_allclose(
            mechanism.gram()[d, : rounds - d], np.diagonal(gram, d), atol=1e-12
        )
    assert mechanism.sensitivity(gap=bands, max_participations=3) == pytest.approx(
        np.sqrt(min(3, -(-rounds // bands)))
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounds", [0, 10**11])
def test_more_rounds_than_noise_can_be_planned_for_are_refused(name: str, rounds: int) -> None:
    """Rather than memory for each of them."""
    restarts = (1,) if name == "tree-restart" else ()
    with pytest.raises(ConfigError, match=f"{rounds:,}"):
        make_mechanism(name, rounds=rounds, restarts=restarts)


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


@pytest.mark.usefixtures("own_cache")
def test_every_mechanism_answers_the_protocol() -> None:
    """By name."""
    for name in NAMES:
        restarts = (2,) if name == "tree-restart" else ()
        mechanism = make_mechanism(name, rounds=4, gap=2, max_participations=2, restarts=restarts)
        assert isinstance(mechanism, Mechanism)
        assert mechanism.name == name
        assert (
            0
            < mechanism.rms_loss(gap=2, max_participations=2)
            <= mechanism.max_loss(gap=2, max_participations=2)
        )


def test_another_matrix_has_another_digest() -> None:
    """And the same one the same: that is what a run that goes on compares."""
    column = np.array([0.8, 0.6])
    made = [
        *(make_mechanism("tree", rounds=n) for n in (3, 4)),
        *(make_mechanism("tree-restart", rounds=4, restarts=(at,)) for at in (1, 2)),
        *(Blt(4, BltParameters((0.5,), (scale,))) for scale in (0.25, 0.25 + 1e-15)),
        BandedToeplitz("bandtoep", 4, column),
        BandedToeplitz("bandtoep", 4, np.array([0.6, 0.8])),
        BandMF(np.tile(column, (4, 1))),
    ]
    digests = [mechanism.digest() for mechanism in made]
    assert len(set(digests)) == len(made)
    assert Blt(4, BltParameters((0.5,), (0.25,), "elsewhere")).digest() == digests[4]
