"""Compiled kernels do not outlive a change to a file whose functions they took in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOUND = "    return np.int64(h & np.uint64(4095))\n"
CHANGED = "    return np.int64(4095)\n"
# A kernel that is compiled in a second, and takes in a function of another file.
SCRIPT = """
import numpy as np
from dlm.server.kernels import check
words = np.arange(4, dtype=np.uint32)
slots = np.zeros(4096, np.uint16)
slots[4095] = 1
print(*check(np.full(2, 2, np.uint8), words, words, 3, 9, slots, 0))
"""


def test_a_change_to_a_shared_function_makes_its_users_compile_again(tmp_path: Path) -> None:
    """A hash that is out of its table must change an answer though its caller's file stands."""
    shutil.copytree(
        ROOT / "dlm", tmp_path / "dlm", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environ["PYTHONPATH"] = str(tmp_path)

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
    shared.write_text(text.replace(FOUND, CHANGED), encoding="utf-8")
    assert answer() != ["0", "0"]
