"""Patterns of participation and the sensitivities that follow, against enumeration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from dlm.errors import ConfigError
from dlm.federated.noise import participation
from dlm.federated.noise.participation import (
    banded_sensitivity,
    forest_sensitivity_squared,
    forest_sizes,
    gap_from_min_separation,
    min_separation_from_gap,
    most_participations,
    toeplitz_sensitivity,
)
from federated.linear import node_matrix


def patterns(rounds: int, gap: int, max_participations: int) -> Iterator[tuple[int, ...]]:
    """Every set of rounds that one user may take part in."""

    def further(pattern: tuple[int, ...], first: int) -> Iterator[tuple[int, ...]]:
        yield pattern
        if len(pattern) < max_participations:
            for r in range(first, rounds):
                yield from further((*pattern, r), r + gap)

    yield from further((), 0)


def enumerated(gram: NDArray[np.float64], gap: int, max_participations: int) -> list[float]:
    """Squares of the largest sensitivity over all patterns, for 1 to `max_participations`
    participations."""
    size = np.abs(gram)
    best = [0.0] * (max_participations + 1)
    for pattern in patterns(len(gram), gap, max_participations):
        value = float(size[np.ix_(pattern, pattern)].sum()) if pattern else 0.0
        best[len(pattern)] = max(best[len(pattern)], value)
    return [max(best[: k + 1]) for k in range(1, max_participations + 1)]


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 8, 9, 15, 16, 19])
@pytest.mark.parametrize("gap", [1, 2, 3, 7])
def test_the_sensitivity_of_trees_is_that_of_the_worst_pattern(
    rounds: int, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration over the dense matrix of nodes; as short gaps and as long ones are counted."""
    nodes = node_matrix(rounds)
    for max_participations, truth in enumerate(enumerated(nodes.T @ nodes, gap, 4), 1):
        for dense in (gap, 0):
            monkeypatch.setattr(participation, "DENSE_GAP", dense)
            found = forest_sensitivity_squared(tuple(forest_sizes(rounds)), gap, max_participations)
            assert found == truth


def test_many_participations_at_short_gaps_are_counted_in_time() -> None:
    """Every other of 6,000 rounds is half a second's work; of a complete tree the sum is known."""
    of_nodes = sum((4096 >> level) * (1 << level - 1) ** 2 for level in range(1, 13))
    assert forest_sensitivity_squared((4096,), 2, 2048) == 2048 + of_nodes
    one_less = forest_sensitivity_squared((4096,), 2, 2047)
    assert 2047 + of_nodes - 2 * 2048 * 12 < one_less < 2048 + of_nodes
    assert forest_sensitivity_squared(tuple(forest_sizes(6000)), 2, 3000) > 2048 + of_nodes


@pytest.mark.parametrize("rounds", [1, 12, 31, 32, 45, 100, 129])
def test_trees_that_the_gap_alone_bounds_are_counted_in_a_way_of_their_own(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which agrees with the one that counts every number of participations."""
    sizes = tuple(forest_sizes(rounds))
    for gap in (1, 2, 3, 5, 6, 7, 11, 12):
        most = most_participations(rounds, gap)
        counted = participation._dense_forest(sizes, gap, most)
        assert forest_sensitivity_squared(sizes, gap, most) == counted
        with monkeypatch.context() as changed:
            changed.setattr(participation, "DENSE_GAP", 0)
            assert forest_sensitivity_squared(sizes, gap, most + 5) == counted


def test_the_trees_of_several_segments_share_one_pattern() -> None:
    """Restarts do not forget who took part before: the gap reaches over them."""
    for first, second in [(5, 6), (8, 3), (1, 9)]:
        nodes = np.zeros((64, first + second))
        a, b = node_matrix(first), node_matrix(second)
        nodes[: len(a), :first] = a
        nodes[len(a) : len(a) + len(b), first:] = b
        for gap in (1, 3, 4):
            sizes = (*forest_sizes(first), *forest_sizes(second))
            found = forest_sensitivity_squared(sizes, gap, 3)
            assert found == enumerated(nodes.T @ nodes, gap, 3)[-1]


@pytest.mark.parametrize("gap", [1, 2, 4, 9])
def test_the_sensitivity_of_a_toeplitz_matrix_is_that_of_the_worst_pattern(gap: int) -> None:
    """BLT Theorem 3.1, by enumeration."""
    rounds = 12
    coefs = np.sort(np.random.default_rng(gap).uniform(0, 1, rounds))[::-1].copy()
    matrix = sum(np.eye(rounds, k=-d) * c for d, c in enumerate(coefs))
    for max_participations, truth in enumerate(enumerated(matrix.T @ matrix, gap, 3), 1):
        found = toeplitz_sensitivity(coefs, rounds, gap, max_participations) ** 2
        assert found == pytest.approx(truth, rel=1e-12)


def test_a_toeplitz_matrix_whose_worst_pattern_is_not_known_is_refused() -> None:
    """Theorem 3.1 is for coefficients that do not rise and are not negative."""
    with pytest.raises(ValueError, match="non-increasing"):
        toeplitz_sensitivity(np.array([1.0, 0.2, 0.3]), 8, 2, 2)
    with pytest.raises(ValueError, match="non-negative"):
        toeplitz_sensitivity(np.array([1.0, -0.1]), 8, 2, 2)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("gap", [1, 2, 4])
def test_the_sensitivity_of_a_banded_matrix_is_exact_or_above(width: int, gap: int) -> None:
    """Exact where a participation meets only its neighbours, else never below the truth."""
    rounds = 12
    rng = np.random.default_rng(width * 10 + gap)
    matrix = np.tril(np.triu(rng.normal(size=(rounds, rounds)), 0).T)
    matrix = np.where(np.subtract.outer(range(rounds), range(rounds)) < width, matrix, 0)
    gram = matrix.T @ matrix
    bands = np.zeros((width, rounds))
    for d in range(width):
        bands[d, : rounds - d] = np.diagonal(gram, d)
    for max_participations, squared in enumerate(enumerated(gram, gap, 4), 1):
        found, exact = banded_sensitivity(bands, gap, max_participations)
        truth = np.sqrt(squared)
        assert exact == (width <= 2 * gap or max_participations == 1)
        if exact:
            assert found == pytest.approx(truth, rel=1e-12)
        else:
            assert truth <= found * (1 + 1e-12)
            assert found <= 1.6 * truth  # a bound that says nothing would be true as well


@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_a_gap_beyond_all_rounds_is_one_participation(rounds: int) -> None:
    """BLT Table 4 has MinS 2001 in 2,000 rounds."""
    bands = np.ones((min(rounds, 3), rounds))
    for max_participations in (1, 4):
        assert banded_sensitivity(bands, rounds + 2, max_participations) == (1.0, True)
        assert toeplitz_sensitivity(np.array([1.0]), rounds, rounds + 2, max_participations) == 1.0
        sizes = tuple(forest_sizes(rounds))
        one = forest_sensitivity_squared(sizes, rounds, 1)
        assert forest_sensitivity_squared(sizes, rounds + 2, max_participations) == one


def test_the_papers_count_the_rounds_between() -> None:
    """MinS 341 is a gap of 342; and their MaxP is less than what may happen."""
    assert gap_from_min_separation(341) == 342
    assert min_separation_from_gap(342) == 341
    with pytest.raises(ConfigError, match="-1"):
        gap_from_min_separation(-1)
    assert most_participations(930, gap_from_min_separation(212)) == 5  # GDP Table 1 prints 4


def test_more_participations_than_fit_are_those_that_fit() -> None:
    """A bound larger than what the rounds leave room for changes nothing."""
    sizes = tuple(forest_sizes(20))
    assert forest_sensitivity_squared(sizes, 7, 3) == forest_sensitivity_squared(sizes, 7, 99)
