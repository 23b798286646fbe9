"""The notebooks run as they stand, and print what stands below their cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from notebooks import VARIES, code_cells, outputs, run

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "dlm").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
TRAINS = {"dlm/federated/private.ipynb"}
MOST_CELLS = 24
MOST_LINES = 8


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def test_notebooks_are_found() -> None:
    """One for decoders, one for private training."""
    assert {"dlm/asr/kenlm.ipynb"} | TRAINS <= set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_short_and_was_run_in_order(name: str) -> None:
    """Few cells, few lines below each, and the page of its folder leads to it."""
    notebook = read(name)
    cells = code_cells(notebook)
    assert len(notebook["cells"]) <= MOST_CELLS
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert len(outputs(cell).splitlines()) <= MOST_LINES
    path = ROOT / name
    assert f"]({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_stands_below_its_cells(tmp_path: Path, name: str) -> None:
    """All cells; where a tag says that the output varies, only that there is some."""
    if name in TRAINS:
        pytest.importorskip("jax", reason="pip install -e '.[train]'")
    notebook = read(name)
    for cell, printed in zip(code_cells(notebook), run(notebook, tmp_path), strict=True):
        if VARIES in cell["metadata"].get("tags", ()):
            assert bool(printed) == bool(outputs(cell))
        else:
            assert printed == outputs(cell), "".join(cell["source"])
