"""Where nothing can be written, kernels are compiled all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import tempfile
real = tempfile.TemporaryFile
def refuse(*args, **kwargs):
    raise OSError("read-only file system")
tempfile.TemporaryFile = refuse
import dlm, os
print(os.path.isdir(os.environ["NUMBA_CACHE_DIR"]))
print(os.environ["NUMBA_CACHE_DIR"])
"""


def test_a_private_cache_folder_is_used_and_removed_where_no_other_can_be_written() -> None:
    """The folder exists while the process runs, and not after."""
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    there, folder = out.stdout.split()
    assert there == "True"
    assert not Path(folder).exists()


def test_numbas_own_cache_is_used_where_it_can_be_written() -> None:
    """A checkout or an installation of one's own keeps its compiled kernels."""
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    script = "import dlm, os; print(os.environ.get('NUMBA_CACHE_DIR'))"
    out = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "None"
