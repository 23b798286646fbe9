"""The kernel gives the oracle's bits, compiled and not, on any model in any number of shards."""

from __future__ import annotations

import bisect
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.index import kernels
from dlm.index.local import LocalModel
from dlm.ngram.backoff import DictModel
from models import HAND_MADE, PlainModel, assert_equals_oracle, build, queries, random_model


def compare(model: PlainModel, folder: Path, shards: int, count: int) -> None:
    """Builds `model` and compares `count` answers with the oracle's."""
    local = LocalModel.open(build(model, folder, shards))
    oracle = DictModel.from_arpa(folder / "model.arpa")
    asked = queries(oracle, count)
    assert_equals_oracle(local.score(*asked), oracle, *asked)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", HAND_MADE)
def test_kernel_gives_the_bits_of_the_oracle_on_models_made_by_hand(
    name: str, shards: int, tmp_path: Path
) -> None:
    """Each model holds something that real models seldom do."""
    compare(HAND_MADE[name], tmp_path, shards, 800)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    order=st.integers(1, 7),
    per_order=st.integers(0, 60),
    shards=st.integers(1, 9),
    unk=st.booleans(),
    missing_suffixes=st.booleans(),
)
def test_kernel_gives_the_bits_of_the_oracle_on_random_models(
    seed: int, order: int, per_order: int, shards: int, unk: bool, missing_suffixes: bool
) -> None:
    """Suffixes missing, weights zero or positive, the unknown word absent."""
    model = random_model(
        seed, order=order, per_order=per_order, unk=unk, missing_suffixes=missing_suffixes
    )
    with tempfile.TemporaryDirectory() as folder:
        compare(model, Path(folder), shards, 200)


@pytest.mark.parametrize("seed", range(4))
def test_kernel_as_plain_python_gives_the_bits_of_the_oracle(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source itself is right, apart from what the compiler makes of it."""
    monkeypatch.setattr(kernels, "score_groups", kernels.score_groups.py_func)
    monkeypatch.setattr(kernels, "find", kernels.find.py_func)
    compare(random_model(seed, order=2 + seed, unk=bool(seed % 2)), tmp_path, 2, 200)


@pytest.mark.parametrize("find", [kernels.find, kernels.find.py_func])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_find_agrees_with_bisect(find: object, dtype: type) -> None:
    """Present and absent keys, empty stretches and both ends, with either type of offset."""
    rng = random.Random(5)
    for _ in range(200):
        keys = sorted(rng.sample(range(60), rng.randrange(0, 30)))
        begin = rng.randrange(len(keys) + 1)
        end = rng.randrange(begin, len(keys) + 1)
        key = rng.randrange(60)
        at = bisect.bisect_left(keys, key, begin, end)
        expected = at if at < end and keys[at] == key else -1
        array = np.array(keys, np.uint32)
        assert find(array, dtype(begin), dtype(end), np.uint32(key)) == expected  # type: ignore[operator]


def test_kernel_reads_what_a_read_only_map_holds(tmp_path: Path) -> None:
    """Columns map files; a signature compiled for writable arrays would not take them."""
    local = LocalModel.open(build(random_model(1), tmp_path))
    assert not any(column.flags.writeable for column in local.low.columns)
    assert not any(c.flags.writeable for s in local.shards for c in s.columns if len(c))
