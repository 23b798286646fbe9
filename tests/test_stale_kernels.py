"""Compiled kernels do not outlive a change to a file whose functions they took in."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlm import jit

ROOT = Path(__file__).parents[1]
FOUND = "    return np.int64(h & np.uint64(4095))\n"
CHANGED = "    return np.int64(h & np.uint64(0x00))\n"
# A kernel that is compiled in a second, and takes in a function of another file.
SCRIPT = """
import numpy as np
from dlm.server.kernels import check
words = np.arange(4, dtype=np.uint32)
slots = np.zeros(4096, np.uint16)
slots[0] = 1
print(*check(np.full(2, 2, np.uint8), words, words[:2], 3, 9, 9, slots, 0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_change_to_a_shared_function_makes_its_users_compile_again(
    named: bool, tmp_path: Path
) -> None:
    """Even one that leaves size and times, as an upgrade may; wherever kernels are kept.

    A hash that is out of its table must change an answer though its caller's file stands.
    """
    shutil.copytree(
        ROOT / "dlm", tmp_path / "dlm", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environ |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    if named:
        environ["NUMBA_CACHE_DIR"] = str(tmp_path / "kept")

    def answer() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert answer() == ["0", "0"]
    assert answer() == ["0", "0"]
    shared = tmp_path / "dlm" / "ngram" / "kernels.py"
    text = shared.read_text(encoding="utf-8")
    assert text.count(FOUND) == 1
    before = shared.stat()
    shared.write_text(text.replace(FOUND, CHANGED), encoding="utf-8")
    os.utime(shared, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shared.stat().st_size == before.st_size
    assert answer() != ["0", "0"]


def imported_constants(path: Path) -> set[Path]:
    """The modules of dlm that a file imports constants from, or imports whole."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dlm"):
            continue
        place = ROOT / str(node.module).replace(".", "/")
        for alias in node.names:
            if (place / f"{alias.name}.py").exists():
                found.add(place / f"{alias.name}.py")
            elif path.name == "kernels.py" or alias.name.isupper():
                found.add(place.with_suffix(".py"))
    return found


def test_every_file_whose_text_is_in_a_kernel_counts() -> None:
    """Kernels, the modules they import, and those that the constants of these come from."""
    counted = {path for name in jit.SOURCES for path in (ROOT / "dlm").rglob(name)}
    kernels = {path for path in counted if path.name == "kernels.py"}
    assert len(kernels) > 10
    assert {other for path in counted for other in imported_constants(path)} <= counted
