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


def _forget_stale_kernels() -> None:
    """Removes compiled kernels that were made from other sources.

    numba compiles a kernel again when its own file changes, but not when a file changes whose
    functions it took in. So any change to any kernel, or to the numbers they share, makes all new.
    """
    package = Path(__file__).parent
    sources = sorted(
        path for name in ("kernels.py", "view.py", "low.py") for path in package.rglob(name)
    )
    facts = [(str(p.relative_to(package)), *_stamp(p)) for p in sources]
    text = repr(facts)
    note = package / "__pycache__" / "kernels.stamp"
    try:
        if note.exists() and note.read_text(encoding="utf-8") == text:
            return
        for path in sources:
            for compiled in (path.parent / "__pycache__").glob("*.nbi"):
                compiled.unlink(missing_ok=True)
        note.parent.mkdir(exist_ok=True)
        note.write_text(text, encoding="utf-8")
    except OSError:
        return  # nothing can be written here, so nothing was compiled here


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


_give_numba_a_cache()
_forget_stale_kernels()
