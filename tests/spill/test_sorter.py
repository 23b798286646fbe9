"""Rows come back sorted, stable and whole, through one run or many, within the memory given."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from dlm.errors import ConfigError, SpillError
from dlm.spill import kernels, sort
from dlm.spill.sort import cut_key, sort_order
from dlm.spill.sorter import MIN_MEMORY_BYTES, Plan, SortedRuns, Sorter, discard

MEMORY = MIN_MEMORY_BYTES
TOP = 0xFFFFFFFF
KERNELS = ("column_range", "pack", "refine", "group_end", "gather", "merge")

Rows = NDArray[np.uint32]


def oracle(rows: Rows, key: int) -> list[list[int]]:
    """Python's own sort, which is stable."""
    return sorted(rows.tolist(), key=lambda row: row[:key])


def read(runs: SortedRuns, max_rows: int = 1000) -> list[list[int]]:
    """Every row, in the order in which they come."""
    return [row for block in runs.blocks(max_rows) for row in block.tolist()]


def zipf_rows(rows: int, width: int, seed: int = 0, words: int = 300) -> Rows:
    """Word ids as in text: small ones are frequent; the last column says where a row was."""
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(1 / np.arange(1, words + 1))
    ids = np.searchsorted(cumulative / cumulative[-1], rng.random((rows, width)))
    ids[:, -1] = np.arange(rows)
    return ids.astype(np.uint32)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Rows, int, Plan, int, list[int]]:
    """Rows, a key, a plan that makes many runs of them, threads, and where they are cut to add."""
    width = draw(st.integers(1, 5))
    key = draw(st.integers(1, width))
    values = st.one_of(st.integers(0, 2), st.sampled_from([TOP, TOP - 1, 0]), st.integers(0, TOP))
    table = draw(st.lists(st.lists(values, min_size=width, max_size=width), max_size=60))
    rows = np.array(table, np.uint32).reshape(-1, width)
    block_rows = draw(st.integers(1, 4))
    plan = Plan(
        capacity_rows=draw(st.integers(1, 20)),
        block_rows=block_rows,
        chunk_rows=block_rows * draw(st.integers(1, 3)),
        fan_in=draw(st.integers(2, 4)),
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    return rows, key, plan, draw(st.integers(1, 3)), [0, *cuts, len(rows)]


@given(problem=problems(), durable=st.booleans(), max_rows=st.integers(1, 30))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rows_come_as_python_sorts_them(
    problem: tuple[Rows, int, Plan, int, list[int]], durable: bool, max_rows: int
) -> None:
    """Through any number of runs and passes, twice, and again from the manifest."""
    rows, key, plan, threads, cuts = problem
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(sort, "PARALLEL_ROWS", 2)
        with Sorter(folder, rows.shape[1], key, MEMORY, threads) as sorter:
            sorter.plan = plan
            for begin, end in pairwise(cuts):
                sorter.add(rows[begin:end])
            runs = sorter.finish(durable)
        expected = oracle(rows, key)
        assert runs.rows == len(rows)
        assert len(runs.runs) <= plan.fan_in
        assert read(runs, max_rows) == expected
        assert read(runs, max_rows) == expected
        if durable or len(rows) > plan.capacity_rows:
            again = SortedRuns.open(folder, json.loads(json.dumps(runs.manifest())), MEMORY)
            assert read(again) == expected
        runs.remove()
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize("values", [1, 1000, TOP + 1])
@pytest.mark.parametrize(("width", "key"), [(1, 1), (3, 2), (24, 23)])
def test_memory_is_sorted_as_numpy_sorts_it(values: int, width: int, key: int) -> None:
    """Groups of equal rows of every size, at every level of a key, with threads and without."""
    rng = np.random.default_rng(values)
    rows = rng.integers(0, values, (20_000, width), dtype=np.uint64).astype(np.uint32)
    rows[:, : key // 2] %= 2  # so that the first levels leave large groups
    expected = np.lexsort(tuple(rows[:, j] for j in reversed(range(key))))
    packed = np.empty(len(rows), np.uint64)
    for threads in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sort, "PARALLEL_ROWS", 100)
            place_bits = sort_order(rows, key, packed, threads)
        assert np.array_equal(packed & np.uint64((1 << place_bits) - 1), expected)


def test_kernels_do_the_same_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, where a read out of range would raise."""
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, getattr(kernels, name).py_func)
    rows = zipf_rows(3000, 7, words=3)
    with Sorter(tmp_path, 7, 6, MEMORY) as sorter:
        sorter.plan = Plan(capacity_rows=1000, block_rows=16, chunk_rows=32, fan_in=2)
        sorter.add(rows)
        with sorter.finish() as runs:
            assert read(runs) == oracle(rows, 6)


@pytest.mark.parametrize("durable", [False, True])
def test_nothing_sorted_is_nothing(tmp_path: Path, durable: bool) -> None:
    """No rows give no block, and a manifest without runs."""
    with Sorter(tmp_path, 3, 2, MEMORY) as sorter:
        sorter.add(np.empty((0, 3), np.uint32))
        runs = sorter.finish(durable)
    assert runs.rows == 0
    assert read(runs) == []
    assert read(SortedRuns.open(tmp_path, runs.manifest(), MEMORY)) == []


def test_rows_of_any_layout_are_taken(tmp_path: Path) -> None:
    """Read-only, transposed or strided: they are copied."""
    rows = zipf_rows(200, 4)
    frozen = rows.copy()
    frozen.setflags(write=False)
    for view in (frozen, np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2]):
        with Sorter(tmp_path, 4, 2, MEMORY) as sorter:
            sorter.add(view)
            assert read(sorter.finish()) == oracle(rows, 2)


@given(
    low=st.lists(st.integers(0, TOP), min_size=1, max_size=6),
    spread=st.integers(0, 32),
    room=st.integers(1, 63),
)
def test_a_cut_key_has_every_bit_once(low: list[int], spread: int, room: int) -> None:
    """Levels are full but the last, and their segments put together are the key."""
    high = [min(TOP, value + (1 << spread) - 1) for value in low]
    level_begin, segments = cut_key(np.array(low, np.uint32), np.array(high, np.uint32), room)
    sizes = [int(segments[a:b, 3].sum()) for a, b in pairwise(level_begin)]
    assert all(size == room for size in sizes[:-1])
    assert 0 <= sizes[-1] <= room
    bits = [(h - v).bit_length() for v, h in zip(low, high, strict=True)]
    for column, count in enumerate(bits):
        mine = [(drop, keep) for c, base, drop, keep in segments.tolist() if c == column]
        assert sum(keep for _, keep in mine) == count
        drops = [count]
        for drop, keep in mine:
            assert drop == drops[-1] - keep
            drops.append(drop)


@given(
    memory=st.integers(MEMORY, 1 << 40), width=st.integers(1, 1024), threads=st.sampled_from([1, 2])
)
def test_a_plan_stays_within_its_memory(memory: int, width: int, threads: int) -> None:
    """Sorting and merging, however many runs there are."""
    plan = Plan.of(memory, width, threads)
    row = 4 * width
    chunks = 2 * plan.chunk_rows * row
    assert plan.chunk_rows % plan.block_rows == 0
    assert plan.block_rows >= 1
    assert plan.capacity_rows * (row + 8) + chunks < memory
    assert plan.fan_in >= 2
    buffers = 1 if threads == 1 else 2
    for runs in (1, 2, plan.fan_in // 2, plan.fan_in):
        read_bytes = runs * plan.read_blocks(runs) * plan.block_rows * row
        assert buffers * read_bytes + chunks < memory


def test_what_was_not_handed_over_is_removed(tmp_path: Path) -> None:
    """A sorter that is left before it has finished leaves nothing."""
    with Sorter(tmp_path, 2, 1, MEMORY) as sorter:
        sorter.plan = Plan(capacity_rows=10, block_rows=4, chunk_rows=4, fan_in=10)
        sorter.add(zipf_rows(100, 2))
        assert list(tmp_path.glob("rows-*.run"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="finish"):
        sorter.add(zipf_rows(1, 2))
    with pytest.raises(ValueError, match="finish"):
        sorter.finish()


def test_two_sorters_of_other_names_share_a_folder(tmp_path: Path) -> None:
    """And one of the same name is refused until the runs are discarded."""
    kept = []
    for name in ("bigrams", "trigrams"):
        with Sorter(tmp_path, 2, 1, MEMORY, name=name) as sorter:
            sorter.add(zipf_rows(100, 2, seed=len(name)))
            kept.append(sorter.finish(durable=True))
    (tmp_path / ".bigrams-000007.run.1-0abc.partial").touch()
    with pytest.raises(ConfigError, match="bigrams-"):
        Sorter(tmp_path, 2, 1, MEMORY, name="bigrams")
    discard(tmp_path, "bigrams")
    Sorter(tmp_path, 2, 1, MEMORY, name="bigrams")
    assert [path.name for path in tmp_path.iterdir()] == ["trigrams-000000.run"]
    assert read(kept[1]) == oracle(zipf_rows(100, 2, seed=8), 1)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    """With what is expected, and before anything is written."""
    with pytest.raises(ConfigError, match="8,388,608"):
        Sorter(tmp_path / "new", 4, 2, MEMORY - 1)
    for width, key in ((0, 0), (2, 0), (2, 3), (1025, 1)):
        with pytest.raises(ConfigError, match="1 <= key <= width <= 1024"):
            Sorter(tmp_path / "new", width, key, MEMORY)
    with pytest.raises(ConfigError, match="threads is 0"):
        Sorter(tmp_path / "new", 2, 1, MEMORY, threads=0)
    for name in ("", "a/b", "*", "a-b"):
        with pytest.raises(ConfigError, match=re.escape(repr(name))):
            Sorter(tmp_path / "new", 2, 1, MEMORY, name=name)
    assert not (tmp_path / "new").exists()


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    """A cast would change values without a word."""
    with Sorter(tmp_path, 4, 2, MEMORY) as sorter:
        for wrong in (np.zeros((2, 3), np.uint32), np.zeros(4, np.uint32), np.zeros((2, 4))):
            with pytest.raises(ValueError, match=r"expected uint32 .*\(n, 4\)"):
                sorter.add(wrong)  # type: ignore[arg-type]


def test_rows_in_memory_have_no_manifest(tmp_path: Path) -> None:
    """It would name nothing that another process could read."""
    with Sorter(tmp_path, 4, 2, MEMORY) as sorter:
        sorter.add(zipf_rows(10, 4))
        runs = sorter.finish()
    with pytest.raises(ValueError, match="durable=True"):
        runs.manifest()
    with pytest.raises(ValueError, match="expected 1 or more"):
        runs.blocks(0)
    runs.close()
    with pytest.raises(ValueError, match="closed"):
        runs.blocks(1)


def test_runs_that_memory_cannot_merge_are_refused(tmp_path: Path) -> None:
    """A process with less memory than the one that wrote them."""
    with Sorter(tmp_path, 2, 1, 64 << 20) as sorter:
        sorter.plan = Plan(capacity_rows=4, block_rows=4, chunk_rows=4, fan_in=100)
        sorter.add(zipf_rows(200, 2))
        runs = sorter.finish()
    with pytest.raises(ConfigError, match=r"merge 13 runs, but .* has 50"):
        SortedRuns.open(tmp_path, runs.manifest(), MEMORY)
    with SortedRuns.open(tmp_path, runs.manifest(), 64 << 20) as again:
        assert read(again) == read(runs)


def test_an_iterator_left_early_lets_go(tmp_path: Path) -> None:
    """Closing it ends its threads, and the next one starts from the beginning."""
    rows = zipf_rows(1000, 2)
    with Sorter(tmp_path, 2, 1, MEMORY) as sorter:
        sorter.plan = Plan(capacity_rows=100, block_rows=4, chunk_rows=4, fan_in=20)
        sorter.add(rows)
        runs = sorter.finish()
    blocks = runs.blocks(3)
    first = next(blocks).tolist()
    blocks.close()
    assert first == oracle(rows, 1)[:3]
    assert read(runs) == oracle(rows, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"format_version": 2},
        {"width": "2"},
        {"rows": 1},
        {"runs": [{"name": "../rows-000000.run", "rows": 100, "xxh3_64": ""}]},
        {"runs": [{"name": 5, "rows": 100, "xxh3_64": ""}]},
        {"runs": [{"name": "rows-000000.run", "rows": 100}]},
        {"runs": [{"name": "rows-000000.run", "rows": 0, "xxh3_64": ""}], "rows": 0},
        {"runs": 3},
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Each field, and names that lead out of the folder."""
    with Sorter(tmp_path, 2, 1, MEMORY) as sorter:
        sorter.add(zipf_rows(100, 2))
        runs = sorter.finish(durable=True)
    with pytest.raises(SpillError, match=f"manifest .*{tmp_path}"):
        SortedRuns.open(tmp_path, runs.manifest() | change, MEMORY)
