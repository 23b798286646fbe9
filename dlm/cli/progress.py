"""The stages of a long command, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def stage_printer(*, quiet: bool = False, timed: bool = True) -> Callable[[str], None]:
    """Prints a line, with the seconds since this call before it if `timed`; nothing if `quiet`."""
    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            stamp = f"[{time.monotonic() - began:6.1f} s] " if timed else ""
            print(f"{stamp}{line}", file=sys.stderr)

    return tell
