"""The stages of a long command, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from dlm.progress import compiling_notice

COUNT_S = 5.0  # between two lines that count compiled kernels


def stage_printer(*, quiet: bool = False, timed: bool = True) -> Callable[[str], None]:
    """A printer of progress lines, with the seconds since this call if `timed`; mute if `quiet`.

    From here on it also reports when the command waits for kernels to compile.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            stamp = f"[{time.monotonic() - began:6.1f} s] " if timed else ""
            print(f"{stamp}{line}", file=sys.stderr)

    compiling_notice.use(tell, every_s=COUNT_S)
    return tell
