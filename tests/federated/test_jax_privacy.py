"""jax-privacy 2.0.0, which is other people's code, as a second oracle of noise and sensitivity.

What we do that it does as well must give its numbers; where ours is to be better, a test shows how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("jax_privacy", reason="pip install -e '.[peers]'")

import jax
import jax.numpy as jnp
from jax_privacy.clipping import clip_pytree
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, toeplitz

from dlm.federated.noise.banded import BandMF, optimise_bandmf
from dlm.federated.noise.blt import PRODUCTION, Blt, BltParameters, optimise_blt
from dlm.federated.noise.toeplitz import band_toep
from dlm.federated.training.clip import clip_flat

PATTERNS = [(40, 1, 40), (40, 7, 3), (41, 10, 9), (64, 64, 5), (33, 5, 1)]


@pytest.fixture(autouse=True)
def doubles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their mechanisms in float64; a cache of this test alone."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    with jax.enable_x64():
        yield


def falling(rounds: int, seed: int) -> NDArray[np.float64]:
    """Coefficients from 1 down."""
    steps = np.random.default_rng(seed).random(rounds)
    return np.concatenate([[1.0], 1 - np.cumsum(steps)[:-1] / steps.sum()])


def band_matrix(rounds: int, bands: int, seed: int = 0) -> BandMF:
    """With columns of norm 1."""
    rng = np.random.default_rng(seed)
    columns = 0.5 ** np.arange(bands)[:, None] * (0.5 + 0.5 * rng.random((bands, rounds)))
    for d in range(bands):
        columns[d, rounds - d :] = 0
    columns /= np.linalg.norm(columns, axis=0)
    rows = np.zeros((rounds, bands))
    for d in range(bands):
        rows[d:, d] = columns[d, : rounds - d]
    return BandMF(rows)


def their_band_matrix(made: BandMF) -> banded.ColumnNormalizedBanded:
    """The same matrix, which they hold column by column."""
    rounds, bands = made.rows.shape
    params = np.zeros((rounds, bands))
    for d in range(bands):
        params[: rounds - d, d] = made.rows[d:, d]
    return banded.ColumnNormalizedBanded(params=jnp.asarray(params))


@pytest.mark.parametrize(
    "parameters", [*PRODUCTION.values(), BltParameters((0.9, 0.4), (0.3, 0.5))]
)
def test_losses_and_inverses_of_blts_are_theirs(parameters: BltParameters) -> None:
    """Theirs are squares of ours, whose two are root mean square and largest."""
    where = {"gap": 25, "max_participations": 4}
    ours = Blt(150, parameters)
    theirs = buffered_toeplitz.BufferedToeplitz.build(parameters.decay, parameters.scale)
    found = theirs.inverse().toeplitz_coefs(150)
    np.testing.assert_allclose(parameters.inverse_coefs(150), found, atol=1e-9)
    np.testing.assert_allclose(parameters.coefs(150), theirs.toeplitz_coefs(150), rtol=1e-12)
    for error, loss in (("max", ours.max_loss(**where)), ("mean", ours.rms_loss(**where))):
        theirs_is = buffered_toeplitz.LossFn.build_min_sep(
            150, error=error, min_sep=25, max_participations=4
        )
        assert loss**2 == pytest.approx(float(theirs_is.loss(theirs)), rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["max", "mean"])
def test_a_blt_is_optimised_as_well_as_theirs(error: str) -> None:
    """From other starts, to a loss that is not above theirs."""
    rounds, gap, most = 200, 50, 4
    found = optimise_blt(rounds, gap, most, buffers=2, error=error)
    ours = Blt(rounds, found)
    loss = ours.max_loss if error == "max" else ours.rms_loss
    theirs = buffered_toeplitz.optimize(
        n=rounds,
        min_sep=gap,
        max_participations=most,
        error=error,
        min_buffers=2,
        max_buffers=2,
    )
    of_theirs = BltParameters(
        tuple(np.asarray(theirs.buf_decay).tolist()),
        tuple(np.asarray(theirs.output_scale).tolist()),
    )
    other = Blt(rounds, of_theirs)
    best = other.max_loss if error == "max" else other.rms_loss
    where = {"gap": gap, "max_participations": most}
    assert loss(**where) <= best(**where) * (1 + 1e-4)


def test_errors_of_banded_matrices_are_theirs() -> None:
    """Running sum by running sum; and what we optimise is not above what they do."""
    made = optimise_bandmf(48, 8)
    theirs = banded.per_query_error(their_band_matrix(made))
    np.testing.assert_allclose(made.prefix_variances(), theirs, rtol=1e-9)
    start = their_band_matrix(made)
    best = banded.optimize(48, bands=8, max_optimizer_steps=200)
    assert np.mean(made.prefix_variances()) <= np.mean(banded.per_query_error(best)) * (1 + 1e-4)
    assert np.mean(banded.per_query_error(start)) == pytest.approx(np.mean(theirs))
    coefs = toeplitz.optimize_banded_toeplitz(48, 8)
    ours = band_toep(48, 8)
    loss = toeplitz.loss(strategy_coef=coefs, n=48)
    assert ours.rms_loss(gap=8, max_participations=1) ** 2 <= float(loss) * (1 + 1e-6)


@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_clipping_is_theirs_but_never_longer_than_the_norm() -> None:
    """Their norm is a plain sum in float32, and what they clip can be longer than it should; an
    update with a number that is none they keep in part. So ours stays."""
    rng = np.random.default_rng(0)
    longest = {"ours": 0.0, "theirs": 0.0}
    with jax.enable_x64(False):
        for seed in range(20):
            flat = np.asarray(rng.normal(size=300_001) * (1 + seed), np.float32)
            update = {"a": jnp.asarray(flat[:1000]), "b": jnp.asarray(flat[1000:])}
            theirs, norm = clip_pytree(update, 1.0)
            ours = clip_flat(update, 1.0)
            assert float(ours.norm) == pytest.approx(float(norm), rel=1e-5)
            for key in update:
                np.testing.assert_allclose(ours.update[key], theirs[key], rtol=1e-4, atol=1e-9)
            for who, found in (("ours", ours.update), ("theirs", theirs)):
                exact = np.concatenate([np.asarray(v, np.float64) for v in found.values()])
                longest[who] = max(longest[who], float(np.linalg.norm(exact)))
        broken = {"a": jnp.asarray([3.0, np.nan]), "b": jnp.asarray([4.0])}
        kept, _ = clip_pytree(broken, 1.0)
        assert float(jnp.abs(kept["b"][0])) > 0
        assert not any(np.any(v) for v in jax.tree.leaves(clip_flat(broken, 1.0).update))
    assert longest["ours"] <= 1.0 < longest["theirs"]
