"""Every recorded table has its figures and its run, and renders."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chart import drawn
from benchmarks.results import FOLDER, markdown, rendered, runs


def test_every_table_has_a_run_and_renders() -> None:
    """A file for each row of runs.csv, and a row for each file; no cell is missing."""
    assert {path.stem for path in FOLDER.glob("*.csv")} == {*runs(), "runs"}
    for name, run in runs().items():
        assert all(run.values()), name
        assert rendered(name).count("\n| ") >= 3, name


def test_an_interval_stands_beside_its_value() -> None:
    """Of a value that has one."""
    head = ["model", "x", "x low", "x high", "y", "y +-"]
    rows = [["a", "1", "0", "2", "3", "1"], ["b", "1", "", "", "3", ""]]
    *_, first, second = markdown(head, rows)
    assert (first, second) == ("| a | 1 (0 to 2) | 3 ± 1 |", "| b | 1 | 3 |")


def test_the_chart_of_the_front_page_is_that_of_the_figures() -> None:
    """Otherwise run python tests/benchmarks/chart.py .github/speed.svg."""
    picture = Path(__file__).parents[2] / ".github/speed.svg"
    assert picture.read_text(encoding="utf-8") == drawn()
