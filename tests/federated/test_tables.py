"""The published privacy tables, recomputed, agree with what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from benchmarks.privacy_tables import ES_ES_OURS, blt_table_4, dpf_tables, gdp_tables
from dlm.federated.noise.banded import optimise_bandmf


def test_every_row_agrees_but_those_that_are_explained() -> None:
    """2 of BLT Table 4, 1 of GDP Table 1 (rounding for secure aggregation), none of Table 2."""
    rows = [line for line in blt_table_4().splitlines() if line.startswith("| ")][1:]
    assert sum("| yes |" in row for row in rows) == len(rows) - 1 - 2
    gdp = gdp_tables()
    assert gdp.count("| yes |") == 12 + 7
    assert gdp.count("| no |") == 1
    assert "differ in 0 of 42)" in dpf_tables(pld=False)


@pytest.mark.slow
def test_the_sensitivity_of_the_matrix_that_was_searched_for_is_what_the_table_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of es-ES, whose bands are wider than its gap."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    made = optimise_bandmf(2000, 400).truncated(1280)
    assert made.sensitivity(gap=297, max_participations=4) == pytest.approx(ES_ES_OURS, rel=1e-3)
