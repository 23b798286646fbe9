"""Every row of the speed tables under pytest-benchmark, in CPU time: `pytest --benchmark-only`.

Rounds of a row run together here; `table.py` lets rows take turns, and is what ratios come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import rows, settings
from benchmarks.settings import MissingError

ROUNDS = 5

SHAPES = {"batches": rows.batch_rows, "sentences": rows.sentence_rows}
CASES = [
    pytest.param(arpa, shape, name, id=f"{settings.title(arpa)}-{shape}-{name}")
    for arpa in settings.ARPA_FILES
    for shape, makers in SHAPES.items()
    for name in makers(arpa)
]

_exact_sums: dict[tuple[Path, str], dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """Drivers end with the module."""
    yield
    rows.close()


@pytest.mark.benchmark(timer=rows.cpu_clock, disable_gc=True)
@pytest.mark.parametrize(("arpa", "shape", "name"), CASES)
def test_speed(arpa: Path, shape: str, name: str, benchmark: BenchmarkFixture) -> None:
    """The whole workload a round; exact rows of a model and shape answer the same."""
    try:
        settings.arpa_files()
        row = SHAPES[shape](arpa)[name]()
    except MissingError as exc:
        pytest.skip(str(exc))
    benchmark.group = f"{settings.title(arpa)}, {shape}, {row.queries:,} queries a round"
    total = benchmark.pedantic(row.ask, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["queries"] = row.queries
    if benchmark.stats:
        benchmark.extra_info["ns_per_query"] = benchmark.stats.stats.median * 1e9 / row.queries
    benchmark.extra_info["log10_sum"] = total
    if row.exact:
        sums = _exact_sums.setdefault((arpa, shape), {})
        sums[name] = total
        rows.agree(sums, set(sums))
