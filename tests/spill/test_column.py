"""A column gives back what was put in it, from memory, a file without a name, or one with."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import SpillError
from dlm.spill.column import Column, Memory

KINDS = ["memory", "most", "limit", "file", "path"]


def column_of(kind: str, folder: Path, dtype: type = np.uint32, width: int = 0) -> Column:
    """An empty column of a kind; of `limit`, it goes to a file in between."""
    if kind == "memory":
        return Column(dtype, width)
    if kind == "most":
        return Column(dtype, width, most=100_000)
    if kind == "path":
        return Column(dtype, width, path=folder / "some.column")
    limit_bytes = 0 if kind == "file" else 1 << 14
    return Column(dtype, width, memory=Memory(limit_bytes, folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "dtype"), [(0, np.uint32), (1, np.uint64), (5, np.float32), (5, np.bool_)]
)
def test_what_is_appended_is_read_by_its_place(
    tmp_path: Path, kind: str, width: int, dtype: type
) -> None:
    """Whole, in parts, in chunks, and beyond its end."""
    rng = np.random.default_rng(0)
    column = column_of(kind, tmp_path, dtype, width)
    parts = []
    for size in (3, 0, 5000, 1, 20_000):
        part = rng.integers(0, 2, (size, width) if width else size).astype(dtype)
        column.append(part)
        parts.append(part)
    column.finish()
    whole = np.concatenate(parts)
    assert len(column) == len(whole)
    assert column.row_bytes == whole.itemsize * max(width, 1)
    for begin, end in ((0, len(whole)), (2, 5003), (7, 7), (25_000, 1 << 40), (1 << 40, 1 << 41)):
        found = column.read(begin, end)
        assert found.dtype == whole.dtype
        assert found.shape == whole[begin:end].shape
        assert np.array_equal(found, whole[begin:end])
    chunks = list(column.chunks(999))
    assert {len(chunk) for chunk in chunks[:-1]} == {999}
    assert np.array_equal(np.concatenate(chunks), whole)
    out = np.empty((70, width) if width else 70, dtype)
    column.read_into(4990, out)
    assert np.array_equal(out, whole[4990:5060])
    column.remove()
    assert len(column) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["memory", "most", "limit", "file"])
def test_rows_are_set_by_their_place(tmp_path: Path, kind: str) -> None:
    """In any order, in pieces."""
    column = column_of(kind, tmp_path)
    column.extend(10_000)
    for begin in reversed(range(0, 10_000, 700)):
        some = column.edit(begin, begin + 700)
        some[:] = np.arange(begin, begin + len(some))
        column.store(begin, some)
    assert column.read(0, 10_000).tolist() == list(range(10_000))


def test_rows_of_any_layout_are_taken(tmp_path: Path) -> None:
    """Strided, and of another type."""
    for kind in KINDS:
        column = column_of(kind, tmp_path, width=2)
        column.append(np.arange(12, dtype=np.int64).reshape(4, 3)[:, 1:])
        assert column.read(0, 4).tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]
        column.remove()


def test_what_is_held_is_counted_until_it_goes(tmp_path: Path) -> None:
    """Two columns under one limit: the one that does not fit is in a file."""
    memory = Memory(1000, tmp_path)
    small, large = (Column(np.uint32, memory=memory) for _ in range(2))
    small.append(np.zeros(100, np.uint32))
    large.append(np.zeros(100, np.uint32))
    assert memory.used_bytes == 800
    large.append(np.ones(100, np.uint32))
    assert (memory.used_bytes, memory.spilled_bytes) == (400, 400)
    assert large.read(99, 101).tolist() == [0, 1]
    small.spill()
    assert (memory.used_bytes, memory.spilled_bytes) == (0, 800)
    small.remove()
    large.remove()
    assert memory.used_bytes == 0


def test_a_finished_column_survives_its_process(tmp_path: Path) -> None:
    """The manifest, as JSON, is enough; what does not fit it is refused."""
    column = column_of("path", tmp_path, width=3)
    rows = np.arange(300, dtype=np.uint32).reshape(100, 3)
    column.append(rows)
    manifest = json.loads(json.dumps(column.finish().manifest()))
    assert np.array_equal(Column.open(tmp_path, manifest).read(0, 100), rows)
    path = tmp_path / "some.column"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"1", b"1" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(SpillError, match=r"some\.column"):
            Column.open(tmp_path, manifest)
    path.unlink()
    with pytest.raises(SpillError, match="is missing"):
        Column.open(tmp_path, manifest)


def test_a_file_that_ends_early_is_found(tmp_path: Path) -> None:
    """While it is read."""
    column = column_of("path", tmp_path)
    column.append(np.arange(100, dtype=np.uint32))
    column.finish()
    os.truncate(tmp_path / "some.column", 200)
    assert column.read(0, 50).tolist() == list(range(50))
    with pytest.raises(SpillError, match="ends early"):
        column.read(0, 51)


def open_below(folder: Path) -> int:
    """How many files of a folder this process has open; threads of others open some elsewhere."""
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += str(one.readlink()).startswith(f"{folder}/")
    return count


@pytest.mark.parametrize("kind", ["file", "path"])
def test_a_column_that_is_let_go_closes_its_file(tmp_path: Path, kind: str) -> None:
    """Whoever failed in between."""
    column = column_of(kind, tmp_path)
    column.append(np.zeros(9, np.uint32))
    assert open_below(tmp_path) == 1
    del column
    assert open_below(tmp_path) == 0
