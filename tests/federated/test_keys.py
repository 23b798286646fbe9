"""Randomness has a name; the same name is the same numbers, once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dlm.errors import PrivacyError
from dlm.federated.keys import Key


def test_the_same_name_is_the_same_numbers_and_another_is_not() -> None:
    """A number and its text are two names, and so are a name's parts joined otherwise."""
    root = Key.from_seed(7)
    assert root.fold("noise", 3).words(4).tolist() == root.fold("noise").fold(3).words(4).tolist()
    names: list[tuple[str | int, ...]] = [
        ("noise", 3),
        ("noise", "3"),
        ("noise3",),
        ("noise", 4),
        (3, "noise"),
        (),
    ]
    drawn = {tuple(root.fold(*name).words(4).tolist()) for name in names}
    assert len(drawn) == len(names)
    assert Key.from_seed(8).words(4).tolist() != root.words(4).tolist()
    assert root.words(2).tolist() == root.words(4)[:2].tolist()


def test_a_key_of_the_system_is_new_each_time_and_says_nothing_of_itself() -> None:
    """Neither printed nor pickled."""
    key = Key.from_system()
    assert not key.simulated and Key.from_seed(0).simulated
    assert key.words(8).tolist() != Key.from_system().words(8).tolist()
    assert repr(key.fold("noise", 1)) == "Key(noise/1, from the system)"
    with pytest.raises(PrivacyError, match="must not be copied"):
        pickle.dumps(key)


def ks_distance(sample: np.ndarray, cdf: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance of a sorted sample from its supposed distribution."""
    n = len(sample)
    return float(max((np.arange(1, n + 1) / n - cdf).max(), (cdf - np.arange(n) / n).max()))


def test_uniforms_and_signs_are_even() -> None:
    """And a sign is -1 or 1."""
    u = np.sort(Key.from_seed(2).uniforms(100_000))
    assert ks_distance(u, u) < 0.0087  # a chance of 1e-6
    assert u[0] >= 0 and u[-1] < 1
    signs = Key.from_seed(2).signs(10_001)
    assert set(signs.tolist()) == {-1, 1}
    assert len(signs) == 10_001
    assert abs(int(signs.astype(int).sum())) < 500
