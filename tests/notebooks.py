"""Notebooks without Jupyter: their code cells run in order, and what each prints is kept.

`python tests/notebooks.py dlm/asr/kenlm.ipynb` runs one and writes what its cells print into it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dlm.files import write_whole

# As the tool nbval has it: a cell whose output is another one in each run.
VARIES = "nbval-ignore-output"
TIMEOUT_S = 600
# Runs in a process of its own: cells on standard input, on standard output what each has printed.
DRIVER = """
import contextlib, io, json, sys
cells, printed, names = json.load(sys.stdin), [], {"__name__": "__main__"}
for number, cell in enumerate(cells, 1):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(cell, f"<cell {number}>", "exec"), names)
    printed.append(said.getvalue())
print(json.dumps(printed))
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], folder: Path) -> list[str]:
    """What each cell of code prints when all run in order, in `folder`.

    Raises
        AssertionError  a cell failed; with its traceback
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outputs(cell: dict[str, Any]) -> str:
    """What stands below a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def write_outputs(path: Path) -> None:
    """Runs a notebook and puts below each cell what it printed."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        printed = run(notebook, Path(folder))
    for count, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": count, "outputs": [stream] if lines else []}
    write_whole(path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_outputs(Path(name))
