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
import os
from dlm.jit import kernel
@kernel
def twice(x):
    return 2 * x
print(twice(3))
folder = os.environ["NUMBA_CACHE_DIR"]
print(folder)
print(*os.listdir(folder))
print(sum(len(files) for _, _, files in os.walk(folder)))
"""


def test_a_private_folder_is_used_and_removed_where_no_other_can_be_written(
    tmp_path: Path,
) -> None:
    """The folder exists while the process runs, and not after."""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    answer, folder, inside, files = out.stdout.splitlines()
    assert answer == "6"
    assert (inside, files) == ("dlm", "1")
    assert Path(folder) != tmp_path
    assert not Path(folder).exists()
