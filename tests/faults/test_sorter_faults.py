"""A sort that is damaged, killed, interrupted or out of room never gives wrong rows."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dlm.errors import SpillError
from dlm.spill import runs as run_files
from dlm.spill.sorter import MIN_MEMORY_BYTES, Plan, SortedRuns, Sorter

MEMORY = MIN_MEMORY_BYTES
WIDTH, KEY = 3, 2
PLAN = Plan(capacity_rows=100, block_rows=16, chunk_rows=32, fan_in=4)

Rows = NDArray[np.uint32]


def make_rows(count: int = 350) -> Rows:
    """With many equal keys; the last column tells rows apart."""
    rows = np.random.default_rng(3).integers(0, 9, (count, WIDTH), dtype=np.uint32)
    rows[:, -1] = np.arange(count)
    return rows


def sort(folder: Path, rows: Rows, threads: int = 2) -> SortedRuns:
    """Four runs of up to seven blocks."""
    with Sorter(folder, WIDTH, KEY, MEMORY, threads) as sorter:
        sorter.plan = PLAN
        sorter.add(rows)
        return sorter.finish()


def read(runs: SortedRuns) -> list[list[int]]:
    """Every row, in the order in which they come."""
    return [row for block in runs.blocks(50) for row in block.tolist()]


EXPECTED = sorted(make_rows().tolist(), key=lambda row: row[:KEY])


def reopened(folder: Path, manifest: dict[str, Any]) -> list[list[int]]:
    """What another process reads."""
    with SortedRuns.open(folder, manifest, MEMORY) as runs:
        return read(runs)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_of_a_run_is_checked(step: int, tmp_path: Path) -> None:
    """A flipped bit anywhere is found, by who made the runs and by who opens them."""
    runs = sort(tmp_path, make_rows())
    path = tmp_path / runs.runs[-1].name  # the shortest
    whole = path.read_bytes()
    rng = random.Random(1)
    for at in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        for reading in (lambda: read(runs), lambda: reopened(tmp_path, runs.manifest())):
            with pytest.raises(SpillError, match=r"rows-000003\.run.*build again"):
                reading()
    path.write_bytes(whole)
    assert read(runs) == EXPECTED


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_of_another_length_is_refused(tmp_path: Path, threads: int) -> None:
    """Truncated anywhere, or with something after its end."""
    runs = sort(tmp_path, make_rows(), threads)
    path = tmp_path / runs.runs[-1].name
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SpillError, match=r"bytes|begins|checksum"):
            read(runs)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SpillError, match=f"{len(whole) + 1:,} bytes.* {len(whole):,}"):
        read(runs)


def test_a_run_that_shrinks_while_it_is_read_is_found(tmp_path: Path) -> None:
    """After it was opened and its length compared."""
    runs = sort(tmp_path, make_rows(), threads=1)
    path = tmp_path / runs.runs[0].name
    blocks = runs.blocks(10)
    next(blocks)
    os.truncate(path, 400)
    with pytest.raises(SpillError, match="ends early"):
        list(blocks)


def test_blocks_and_runs_have_their_place(tmp_path: Path) -> None:
    """Two blocks of a run exchanged, a run in place of another, a run that is gone."""
    runs = sort(tmp_path, make_rows())
    first, second = (tmp_path / run.name for run in runs.runs[:2])
    whole, other = first.read_bytes(), second.read_bytes()
    header = run_files.HEADER_BYTES
    block = 16 * 4 * WIDTH + 8
    a, b = whole[header : header + block], whole[header + block : header + 2 * block]
    first.write_bytes(whole[:header] + b + a + whole[header + 2 * block :])
    with pytest.raises(SpillError, match=r"block 0 of 7 \(byte 56\).*checksum"):
        read(runs)
    first.write_bytes(other)
    with pytest.raises(SpillError, match="another run"):
        reopened(tmp_path, runs.manifest())
    first.unlink()
    with pytest.raises(SpillError, match="is missing"):
        reopened(tmp_path, runs.manifest())
    first.write_bytes(whole)
    assert reopened(tmp_path, runs.manifest()) == EXPECTED


def test_runs_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A manifest that names them with another key or width."""
    runs = sort(tmp_path, make_rows())
    with pytest.raises(SpillError, match=r"\(3, 2\).*\(3, 1\)"):
        SortedRuns.open(tmp_path, runs.manifest() | {"key": 1}, MEMORY)


def fail_at(step: int, error: BaseException) -> Callable[[Any], None]:
    """An os.fsync that raises once, at a call of that number; files and folders are synced."""
    calls = 0

    def fsync(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error

    return fsync


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("step", range(1, 14))
def test_a_disk_that_fills_up_late_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, threads: int
) -> None:
    """Some file systems look for room only when a file is synced; at each of the files."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", fail_at(step, full))
    with pytest.raises(OSError, match="No space left on device") as caught:
        sort(tmp_path, make_rows(600), threads)
    if step % 2:  # a file; else the folder
        assert f" {tmp_path} " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_synced_frees_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when the sorter is closed."""
    path = tmp_path / "rows-000000.run"
    _, written = run_files.write_run(path, WIDTH, KEY, 16, 16, [make_rows(16)])
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", fail_at(1, full))
    with pytest.raises(OSError, match="256 bytes"):
        run_files.publish(written)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", range(1, 40, 3))
def test_an_interrupt_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, threads: int
) -> None:
    """While a run is written or merged: what is there at that moment is whole or named partial."""
    checksum = run_files.xxhash.xxh3_64_intdigest
    calls = 0
    seen: list[str] = []

    class Interrupting:
        xxh3_64 = run_files.xxhash.xxh3_64

        @staticmethod
        def xxh3_64_intdigest(data: Any, seed: int = 0) -> int:
            nonlocal calls
            calls += 1
            if calls == place:
                seen.extend(path.name for path in tmp_path.iterdir())
                raise KeyboardInterrupt
            return int(checksum(data, seed=seed))

    monkeypatch.setattr(run_files, "xxhash", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        sort(tmp_path, make_rows(600), threads)
    assert all(name.endswith((".run", ".partial")) for name in seen)
    assert list(tmp_path.iterdir()) == []
