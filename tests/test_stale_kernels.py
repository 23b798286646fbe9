"""Compiled kernels do not outlive a change to a file whose functions they took in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
from dlm.index.local import LocalModel
print(*LocalModel.open(sys.argv[1]).score_text("a b c\\nb c"))
"""


def test_a_change_to_a_shared_function_makes_its_users_compile_again(tmp_path: Path) -> None:
    """A search that finds nothing must change scores though its caller's file stands."""
    shutil.copytree(
        ROOT / "dlm", tmp_path / "dlm", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environ["PYTHONPATH"] = str(tmp_path)

    def scores() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(ROOT / "shards" / "tiny" / "exact-2")],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    before = scores()
    assert scores() == before
    shared = tmp_path / "dlm" / "index" / "packed" / "kernels.py"
    text = shared.read_text(encoding="utf-8")
    found = "            return low if low < high else np.int64(-1)\n"
    assert found in text
    shared.write_text(text.replace(found, "            return np.int64(-1)\n"), encoding="utf-8")
    assert scores() != before
