"""Compiles kernels before the work begins, and reports it if that takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from dlm.jit import compile_ahead
from dlm.progress import COMPILING

SILENT_S = 1.0


class _Progress:
    """A line on standard error: rewritten on a terminal, elsewhere printed at most twice."""

    def __init__(self) -> None:
        self._done = self._of = 0
        self._shown = self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(SILENT_S, self._show)
        self._timer.daemon = True

    def tell(self, done: int, of: int) -> None:
        """Records how many are done."""
        with self._lock:
            self._done, self._of = done, of
            if done == 0:
                self._timer.start()
            elif self._shown and sys.stderr.isatty():
                self._print()

    def end(self) -> None:
        """Stops showing progress."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if not self._shown:
                return
            if sys.stderr.isatty():
                print(file=sys.stderr)
            elif self._done == self._of:
                self._print()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._shown = True
                self._print()

    def _print(self) -> None:
        line = f"{COMPILING}: {self._done} of {self._of}"
        begin, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        print(begin + line, end=end, file=sys.stderr, flush=True)


def compile_kernels(kernels: Sequence[Any]) -> int:
    """Compiles the kernels that the cache lacks, and returns how many; see `jit.compile_ahead`."""
    progress = _Progress()
    try:
        return compile_ahead(kernels, progress.tell)
    finally:
        progress.end()
