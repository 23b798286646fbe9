"""The tree of a shard is unpacked as it was packed."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.index.packed.tree import LevelPlain, tree_shape, unpack_tree
from index.oracle import pack_tree, tree_codes

KEY_BITS = 9


def random_level(
    rng: np.random.Generator, key: np.ndarray, parent_size: np.ndarray, deepest: bool, child: int
) -> tuple[LevelPlain, np.ndarray]:
    """A level whose lists are parts of their parents', some empty and some whole; their sizes."""
    count = len(key)
    sizes = rng.integers(0, parent_size + 1)
    whole = rng.random(count) < 0.2
    sizes[whole] = parent_size[whole]
    ranks = [
        np.sort(rng.choice(most, size, replace=False)) if size else np.zeros(0, np.int64)
        for most, size in zip(parent_size, sizes, strict=True)
    ]
    rank = np.concatenate([*ranks, np.zeros(0)]).astype(np.uint32)
    children = rng.integers(0, child + 1, count)
    blank = np.zeros(len(rank), bool)
    if not deepest and rng.random() < 0.5:  # a blank closes something longer
        blank = rng.random(len(rank)) < 0.1
    book = -rng.random(9).astype(np.float32)
    level = LevelPlain(
        key,
        np.where(rng.random(count) < 0.5, 0, rng.random(count)).astype(np.float32),
        np.concatenate([[0], np.cumsum(children)]).astype(np.int64)
        if not deepest
        else np.zeros(count + 1, np.int64),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        parent_size.astype(np.int64),
        rank,
        np.where(blank, np.float32(0), book[rng.integers(0, 9, len(rank))]),
        (rng.random(len(rank)) < 0.5) if not deepest else np.zeros(len(rank), bool),
        blank,
    )
    return level, sizes


def random_tree(
    rng: np.random.Generator, levels: int, pairs: int, roots: int, most: int
) -> list[LevelPlain]:
    """The levels; up to `most` words follow the second word of a pair."""
    lists = rng.integers(0, most + 1, pairs)
    out: list[LevelPlain] = []
    key = np.sort(rng.choice(pairs, roots, replace=False)).astype(np.uint32)
    parent_size = lists[key]
    for depth in range(levels):
        level, sizes = random_level(rng, key, parent_size, depth + 1 == levels, 3)
        if depth == 0:  # a tree does not know what follows shorter contexts than those of its roots
            level = replace(level, parent_size=level.parent_size * 0)
        out.append(level)
        below = np.diff(level.child)
        parts = [np.sort(rng.choice(1 << KEY_BITS, n, replace=False)) for n in below]
        key = np.concatenate([*parts, np.zeros(0)]).astype(np.uint32)
        parent_size = np.repeat(sizes, below)
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    levels=st.integers(0, 4),
    pairs=st.integers(0, 300),
    share=st.floats(0, 1),
    most=st.sampled_from([0, 1, 8, 9, 200]),
    table=st.sampled_from([0, 4, 1 << 31]),
)
def test_trees_come_back(
    seed: int, levels: int, pairs: int, share: float, most: int, table: int
) -> None:
    """No roots, all pairs roots, empty levels, lists empty and whole, values by table or not."""
    rng = np.random.default_rng(seed)
    plain = random_tree(rng, levels, pairs, int(pairs * share), most)
    packed = pack_tree(plain, pairs, KEY_BITS, tree_codes([plain], table))
    again = unpack_tree(packed)
    assert len(again) == levels
    for one, two in zip(plain, again, strict=True):
        for field in fields(LevelPlain):
            assert getattr(one, field.name).tolist() == getattr(two, field.name).tolist(), field


@pytest.mark.parametrize("numbers", [[], [0] * 3, [1, *[0] * 3], [0] * 5, [1 << 63, *[0] * 23]])
def test_a_shape_of_another_length_is_refused(numbers: list[int]) -> None:
    """The first number says how many levels there are."""
    with pytest.raises(ValueError, match="shape has"):
        tree_shape(np.array(numbers, np.uint64))
