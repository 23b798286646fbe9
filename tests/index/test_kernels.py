"""The kernel gives the oracle's bits, compiled and not, on any model in any number of shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_kernel_reads_what_a_read_only_map_holds(tmp_path: Path) -> None:
    """Columns map files; a signature compiled for writable arrays would not take them."""
    local = LocalModel.open(build(random_model(1), tmp_path))
    assert not any(column.flags.writeable for column in local.low.arrays.values())
    assert not any(c.flags.writeable for s in local.shards for c in s.arrays.values())
