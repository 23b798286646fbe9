"""Sorted columns are merged as one, equal rows added up, however little memory there is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dlm.spill import kernels, merge
from dlm.spill.column import Column, Memory
from dlm.spill.merge import merge_to_fan_in, merged_sums, smallest_neighbours

Rows = NDArray[np.uint32]
LARGEST = 0xFFFFFFFF


def counted(rng: np.random.Generator, rows: int, width: int, values: int = 6) -> Rows:
    """Different sorted keys, and a count behind each."""
    keys = np.unique(rng.integers(0, values, (rows, width - 1), dtype=np.uint32), axis=0)
    return np.column_stack([keys, rng.integers(1, 9, len(keys), dtype=np.uint32)])


def column_of(rows: Rows, memory: Memory) -> Column:
    """The rows, in a file if memory says so."""
    column = Column(np.uint32, rows.shape[1], memory=memory)
    column.append(rows[: len(rows) // 2])
    column.append(rows[len(rows) // 2 :])
    return column


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("width", [2, 3, 6])
@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_columns_are_merged_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, width: int, compiled: bool
) -> None:
    """Through several passes where memory allows few at once; held, and in files."""
    monkeypatch.setattr(merge, "MIN_PIECE", 5)
    if not compiled:
        for name in ("merge", "add_up"):
            monkeypatch.setattr(kernels, name, getattr(kernels, name).py_func)
    rng = np.random.default_rng(width)
    for limit_bytes in (0, 1000, 1 << 30):
        memory = Memory(limit_bytes, tmp_path)
        total: Counter[tuple[int, ...]] = Counter()
        columns = []
        for size in (0, 40, 1, 300, 80, 80, 7, 200):
            rows = counted(rng, size, width)
            columns.append(column_of(rows, memory))
            for *key, count in rows.tolist():
                total[tuple(key)] += count
        columns = merge_to_fan_in(columns, memory_bytes, memory)
        assert (len(columns) == 2) == (memory_bytes == 1)
        found: Counter[tuple[int, ...]] = Counter()
        keys = []
        for rows in merged_sums(columns, memory_bytes):
            for *key, count in rows.tolist():
                found[tuple(key)] += count
                keys.append(key)
        assert found == total
        assert keys == sorted(keys)
        for column in columns:
            column.remove()
        assert memory.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_merged_is_nothing(tmp_path: Path) -> None:
    """No column, and one without rows."""
    memory = Memory(0, tmp_path)
    assert list(merged_sums([], 1 << 20)) == []
    assert merge_to_fan_in([], 1 << 20, memory) == []
    assert list(merged_sums([Column(np.uint32, 3, memory=memory)], 1 << 20)) == []


@pytest.mark.parametrize("add_up", [kernels.add_up, kernels.add_up.py_func])
def test_a_sum_without_room_is_two_rows(add_up: kernels.add_up) -> None:
    """A count of 32 bits is never wrong in silence."""
    rows = np.array(
        [[1, LARGEST - 1], [1, 1], [1, 1], [1, 3], [2, 5], [3, LARGEST], [3, LARGEST]], np.uint32
    )
    expected = [[1, LARGEST], [1, 4], [2, 5], [3, LARGEST], [3, LARGEST]]
    assert rows[: add_up(rows)].tolist() == expected


@given(sizes=st.lists(st.integers(1, 99), min_size=3, max_size=12), fan_in=st.integers(2, 5))
def test_as_few_and_small_neighbours_are_merged_as_must_be(sizes: list[int], fan_in: int) -> None:
    """Until all can be read at once."""
    while len(sizes) > fan_in:
        chosen = smallest_neighbours(sizes, fan_in)
        count = chosen.stop - chosen.start
        assert 2 <= count <= fan_in
        assert count == fan_in or len(sizes) - count + 1 == fan_in
        sums = [sum(sizes[i : i + count]) for i in range(len(sizes) - count + 1)]
        assert all(sum(sizes[chosen]) <= total for total in sums)
        sizes = [*sizes[: chosen.start], sum(sizes[chosen]), *sizes[chosen.stop :]]
