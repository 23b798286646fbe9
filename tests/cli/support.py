"""Starting the command, and waiting for what it does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from cluster import WAIT_S


def command(*arguments: object) -> list[str]:
    """The command line of `dlm` in this environment."""
    return [sys.executable, "-m", "dlm.cli.main", *map(str, arguments)]


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Waits until `holds()`, while `process` lives."""
    limit = time.monotonic() + WAIT_S
    while not holds():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < limit, "not within the bound"
        time.sleep(0.02)
