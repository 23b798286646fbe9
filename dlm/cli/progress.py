"""The stages of a long command, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from dlm.progress import compiling_notice

SILENT_S = 1.0  # after which a command on a terminal reports that it is working

_waiting: list[threading.Timer] = []


def begin_waiting(silent_s: float = SILENT_S) -> None:
    """Reports after `silent_s` that the command is working, unless it reports a stage first.

    `stop_waiting` prevents it. Only on a terminal: nobody watches a pipe.
    """
    if not sys.stderr.isatty():
        return
    timer = threading.Timer(silent_s, lambda: print("working ...", file=sys.stderr, flush=True))
    timer.daemon = True
    _waiting.append(timer)
    timer.start()


def stop_waiting() -> None:
    """Cancels `begin_waiting`: something else is printed from here on."""
    while _waiting:
        _waiting.pop().cancel()


def stage_printer(*, quiet: bool = False, timed: bool = True) -> Callable[[str], None]:
    """A printer of progress lines, with the seconds since this call if `timed`; silent if `quiet`.

    From here on it also reports when the command waits for kernels to compile.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        stop_waiting()
        if not quiet:
            stamp = f"[{time.monotonic() - began:6.1f} s] " if timed else ""
            # In one write: threads that report at the same time would mix lines and their ends.
            sys.stderr.write(f"{stamp}{line}\n")

    compiling_notice.use(tell)
    return tell
