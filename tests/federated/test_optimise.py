"""Optimised mechanisms: slopes and known optima."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from scipy.optimize import approx_fprime

from dlm.errors import ConfigError
from dlm.federated.noise.banded import BandMF, _inside, _solve, column_loss, optimise_bandmf
from dlm.federated.noise.blt import (
    PRODUCTION,
    Blt,
    BltParameters,
    _starts,
    log_loss,
    nearest_production,
    optimise_blt,
)
from dlm.federated.noise.toeplitz import band_fhu, band_toep, square_root_coefs, toeplitz_log_loss

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("error", ["max", "mean"])
@pytest.mark.parametrize("buffers", [1, 3])
def test_the_slope_of_a_blt_is_that_of_its_loss(error: str, buffers: int) -> None:
    """By differences; and the loss is that of the mechanism."""
    rng = np.random.default_rng(buffers)
    x = _starts(60, 7, buffers)[2] + rng.normal(size=2 * buffers) * 0.1
    value, slope = log_loss(x, 60, 7, 3, error)
    by_differences = approx_fprime(x, lambda y: log_loss(y, 60, 7, 3, error)[0], 1e-7)
    np.testing.assert_allclose(slope, by_differences, atol=2e-6)
    from dlm.federated.noise.blt import _decays, _scales

    decay, inverse = _decays(x)
    made = Blt(60, BltParameters(tuple(decay), tuple(_scales(decay, inverse))))
    loss = made.max_loss if error == "max" else made.rms_loss
    assert np.exp(value / 2) == pytest.approx(loss(gap=7, max_participations=3), rel=1e-9)


def test_the_published_blts_are_found() -> None:
    """BLT Table 3 and 4: MaxLoss of what trained keyboards, and what was simulated."""
    simulated = Blt(2052, optimise_blt(2052, 342, 6, buffers=2))
    assert simulated.max_loss(gap=342, max_participations=6) == pytest.approx(10.8063, abs=1e-4)
    published = Blt(4000, PRODUCTION[400]).max_loss(gap=400, max_participations=5)
    found = Blt(4000, optimise_blt(4000, 400, 5)).max_loss(gap=400, max_participations=5)
    assert published == pytest.approx(10.67219, abs=1e-5)
    assert found <= 1.01 * published
    assert nearest_production(300) is PRODUCTION[400]
    assert nearest_production(50) is PRODUCTION[100]
    assert nearest_production(1182) is PRODUCTION[1000]


@pytest.mark.parametrize(
    ("decay", "scale"),
    [((1.1,), (0.1,)), ((0.5,), (-0.1,)), ((0.5, 0.4), (0.1,)), ((0.9, 0.8), (0.7, 0.6))],
)
def test_a_blt_whose_sensitivity_is_not_known_is_refused(
    decay: tuple[float, ...], scale: tuple[float, ...]
) -> None:
    """Coefficients that rise or are negative."""
    with pytest.raises(ConfigError, match="BLT"):
        BltParameters(decay, scale)


def test_the_slope_of_banded_columns_is_that_of_their_loss() -> None:
    """By differences, where blocks are cut and where columns end; and the loss is the matrix's."""
    inside = _inside(14, 4)
    rng = np.random.default_rng(0)
    x = (square_root_coefs(4)[:, None] * inside)[inside] + rng.normal(size=inside.sum()) * 0.05

    def columns(y: np.ndarray) -> np.ndarray:
        out = np.zeros(inside.shape)
        out[inside] = y
        return out

    value, slope = column_loss(columns(x))
    by_differences = approx_fprime(x, lambda y: column_loss(columns(y))[0], 1e-7)
    np.testing.assert_allclose(slope[inside], by_differences, atol=2e-6)
    scaled = columns(x) / np.linalg.norm(columns(x), axis=0)
    rows = np.zeros((14, 4))
    for d in range(4):
        rows[d:, d] = scaled[d, : 14 - d]
    assert np.mean(BandMF(rows).prefix_variances()) == pytest.approx(value, rel=1e-12)


def test_the_banded_optimum_is_one_and_beats_all_toeplitz() -> None:
    """The same from another start and with a far finer tolerance; and truncation is a prefix."""
    found = optimise_bandmf(48, 8)
    loss = found.rms_loss(gap=8, max_participations=6)
    finer = np.sqrt(column_loss(_solve(48, 8, None, tolerance=1e-13))[0] * 6)
    assert loss == pytest.approx(finer, rel=1e-3)
    assert loss < band_toep(48, 8).rms_loss(gap=8, max_participations=6)
    assert loss < band_fhu(48, 8).rms_loss(gap=8, max_participations=6)
    first = found.truncated(20)
    np.testing.assert_array_equal(first.rows, found.rows[:20])
    with pytest.raises(ConfigError, match="48 rounds"):
        found.truncated(49)
    with pytest.raises(ConfigError, match="blt"):
        optimise_bandmf(6000, 100)


def test_the_bands_of_a_wider_matrix_cost_sensitivity_and_say_so() -> None:
    """Below half the bands the figure is an upper bound."""
    made = optimise_bandmf(48, 8)
    assert made.sensitivity_is_exact(gap=8, max_participations=3)
    assert made.sensitivity_is_exact(gap=4, max_participations=3)
    assert not made.sensitivity_is_exact(gap=3, max_participations=3)
    assert (
        made.sensitivity(gap=3, max_participations=3)
        >= made.sensitivity(gap=4, max_participations=3)
        > made.sensitivity(gap=8, max_participations=3)
    )


def test_the_slope_of_toeplitz_coefficients_is_that_of_their_loss() -> None:
    """By differences."""
    coefs = square_root_coefs(5) + np.random.default_rng(1).normal(size=5) * 0.02
    _, slope = toeplitz_log_loss(coefs, 30)
    by_differences = approx_fprime(coefs, lambda y: toeplitz_log_loss(y, 30)[0], 1e-7)
    np.testing.assert_allclose(slope, by_differences, atol=2e-6)
