"""dlm: n-gram language models served from many machines, exactly."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

__version__ = "0.1.0"


def _can_write(folder: Path) -> bool:
    """Whether a file can be made in `folder`; permissions alone do not always tell."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _give_numba_a_cache() -> None:
    """Names a folder for compiled kernels where neither of numba's own can be written.

    Without any, numba refuses to import a cached function: in a read-only image, say. The folder is
    this process's own and goes with it, since what lies in a shared one would be executed.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    while not user.exists() and user != user.parent:
        user = user.parent
    if any(_can_write(folder) for folder in (Path(__file__).parent, user)):
        return
    try:
        folder = tempfile.mkdtemp(prefix="dlm-numba-")
    except OSError:
        return  # nothing can be written at all; numba's own message says it
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a child that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.environ["NUMBA_CACHE_DIR"] = folder


_give_numba_a_cache()
