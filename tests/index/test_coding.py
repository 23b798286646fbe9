"""Quantised values are the nearest of a codebook that beats bins of equal counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from dlm.errors import ConfigError
from dlm.index.coding import coding_of
from dlm.index.making import build_shard_set
from dlm.index.ngrams import NgramTables
from index.oracle import quantise, quantised, read_tables
from models import random_model


def samples(seed: int, count: int, kind: str) -> np.ndarray:
    """Values like a model's: smooth, in clumps, or few distinct ones; specials among them."""
    rng = np.random.default_rng(seed)
    values = {
        "smooth": lambda: -rng.gamma(2.0, 1.0, count),
        "clumps": lambda: -rng.choice([1.0, 1.001, 3.0, 7.5], count) - 1e-3 * rng.random(count),
        "few": lambda: -rng.choice(rng.random(40), count),
        "weights": lambda: rng.normal(-0.3, 0.4, count),
        "outliers": lambda: -np.where(rng.random(count) < 0.01, 90.0, rng.random(count)),
    }[kind]().astype(np.float32)
    values[rng.random(count) < 0.1] = 0
    if kind != "weights":
        values[rng.random(count) < 0.02] = -np.inf
    return values


def own(values: np.ndarray) -> np.ndarray:
    """Where a value is neither 0 nor -inf."""
    return np.isfinite(values) & (values != 0)


def error(values: np.ndarray, found: np.ndarray) -> float:
    """Sum of squares."""
    kept = own(values)
    return float(((values[kept].astype(np.float64) - found[kept]) ** 2).sum())


def by_equal_counts(values: np.ndarray, bits: int) -> np.ndarray:
    """As KenLM does: sorted, cut in bins of as many each, a bin's mean for its values."""
    kept = np.flatnonzero(own(values))
    bins = (1 << bits) - len(np.unique(values[~own(values)]))
    place = kept[np.argsort(values[kept], kind="stable")]
    out = values.copy()
    edges = np.searchsorted(np.arange(1, len(place) + 1), np.arange(1, bins) * len(place) / bins)
    for part in np.split(place, edges):
        if len(part):
            out[part] = values[part].astype(np.float64).mean()
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@example(0, 979, 3, "smooth")  # needs more rounds than there are
@given(
    seed=st.integers(0, 1 << 20),
    count=st.integers(0, 3000),
    bits=st.integers(2, 8),
    kind=st.sampled_from(["smooth", "clumps", "few", "weights", "outliers"]),
)
def test_quantised_values_keep_the_promises(seed: int, count: int, bits: int, kind: str) -> None:
    """0 and -inf stay, few values are left, each the nearest, the order and the signs too."""
    values = samples(seed, count, kind)
    before = values.copy()
    found = quantise(values, bits)
    assert values.tobytes() == before.tobytes()
    assert found.dtype == np.float32
    kept = own(values)
    assert found[~kept].tobytes() == values[~kept].tobytes()
    assert own(found[kept]).all()
    assert len(np.unique(found)) <= 1 << bits
    assert quantise(values, bits).tobytes() == found.tobytes()
    if not kept.any():
        return
    book = np.unique(found[kept]).astype(np.float64)
    if len(np.unique(values)) <= 1 << bits:
        assert found.tobytes() == values.tobytes()
    nearest = np.abs(values[kept].astype(np.float64)[:, None] - book).min(axis=1)
    missed = np.abs(values[kept].astype(np.float64) - found[kept]) - nearest
    assert missed.max() <= 1e-6 * np.abs(values[kept]).max()
    if kind != "few":  # where a bin can end between two values that are equal, it may do better
        assert error(values, found) <= error(values, by_equal_counts(values, bits)) * 1.0001 + 1e-9


def tables(path: Path) -> NgramTables:
    return read_tables(path)[0]


def test_a_quantised_model_has_the_same_ngrams_blanks_and_zeros(tmp_path: Path) -> None:
    """Order 1 stays; weights appear and disappear nowhere."""
    model = tables(random_model(5, per_order=400, words=30).write(tmp_path / "m.arpa"))
    found = quantised(model, 3)
    assert found.counts() == model.counts()
    assert found.blanks() == model.blanks()
    for k, (one, two) in enumerate(zip(model.tables, found.tables, strict=True), 1):
        assert (one.rows == two.rows).all()
        assert (one.blank == two.blank).all()
        assert ((one.log10_backoff == 0) == (two.log10_backoff == 0)).all()
        assert ((one.log10_prob == 0) == (two.log10_prob == 0)).all()
        if k == 1:
            assert one.log10_prob.tobytes() == two.log10_prob.tobytes()
            assert one.log10_backoff.tobytes() == two.log10_backoff.tobytes()
        else:
            assert len(np.unique(two.log10_prob[~two.blank])) <= 8
            assert len(np.unique(two.log10_backoff)) <= 4
            assert one.log10_prob.tobytes() != two.log10_prob.tobytes()
    again = quantised(found, 3)
    assert again.model_id() == found.model_id()


@pytest.mark.parametrize(
    ("encoding", "bits"),
    [("exact", 8), ("exact", 0), ("trie", None), ("", None), ("EXACT", 8)]
    + [("compact", bits) for bits in (-8, 0, 1, 2, 17, 31, 33)],
)
def test_a_coding_that_cannot_be_is_refused(
    encoding: str, bits: int | None, tmp_path: Path
) -> None:
    """Before anything is read or written."""
    with pytest.raises(ConfigError, match=r"bits|encoding"):
        coding_of(encoding, bits)
    with pytest.raises(ConfigError):
        build_shard_set(tmp_path / "none.arpa", tmp_path / "set", 1, encoding=encoding, bits=bits)
    assert list(tmp_path.iterdir()) == []
