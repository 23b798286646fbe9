"""Rows of text come back sorted, from memory and from runs on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlm.spill import text
from dlm.spill.text import Row, sorted_rows


@pytest.mark.parametrize("batch_rows", [1, 7, 512])
@pytest.mark.parametrize("memory_bytes", [1, 5_000, 1 << 30])
def test_rows_come_as_python_sorts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, batch_rows: int
) -> None:
    """Equal keys in their order; a run of one row, of some, and all in memory."""
    monkeypatch.setattr(text, "BATCH_ROWS", batch_rows)
    random = np.random.default_rng(0)
    keys = ["", "a", "ab", "b", "\u00e9", "\uffff", "\U0001f600"]
    rows: list[Row] = [
        (keys[k], i, f"{i} " * int(k)) for i, k in enumerate(random.integers(7, size=300))
    ]
    found = list(sorted_rows(iter(rows), tmp_path, memory_bytes))
    assert found == sorted(rows, key=lambda row: row[0])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"] * (memory_bytes < 1 << 30)


def test_nothing_sorted_is_nothing(tmp_path: Path) -> None:
    """And writes nothing."""
    assert list(sorted_rows([], tmp_path, 1)) == []
    assert list(tmp_path.iterdir()) == []
