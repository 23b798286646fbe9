"""The published privacy tables: what the page of the part prints is what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax", reason="needs the packages of dlm[train]")

from benchmarks.privacy_tables import BEGIN, END, blt_table_4, gdp_tables

README = Path(__file__).parents[2] / "dlm" / "federated" / "README.privacy.md"


def test_the_readme_prints_the_tables_as_they_are_computed() -> None:
    """Those that take no optimisation, cell by cell."""
    text = README.read_text(encoding="utf-8")
    written = text[text.index(BEGIN) : text.index(END)]
    assert blt_table_4() in written
    assert gdp_tables() in written


def test_every_row_agrees_but_those_that_are_explained() -> None:
    """2 of BLT Table 4, 1 of GDP Table 1 (rounding for secure aggregation), none of Table 2."""
    rows = [line for line in blt_table_4().splitlines() if line.startswith("| ")][1:]
    assert sum("| yes |" in row for row in rows) == len(rows) - 1 - 2
    gdp = gdp_tables()
    assert gdp.count("| yes |") == 12 + 7
    assert gdp.count("| no (") == 1
