"""The stages of a long command, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def stage_printer(*, quiet: bool = False) -> Callable[[str], None]:
    """Prints a line with the seconds since this call before it; nothing where `quiet`."""
    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr)

    return tell
