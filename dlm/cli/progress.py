"""The stages of a long command, on standard error."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPILING = "compiling kernels (once per version)"
SILENT_S = 1.0
# By its name: dlm.jit imports numba, which takes longer than refusing a wrong option.
_jit = logging.getLogger("dlm.jit")


def stage_printer(*, quiet: bool = False, timed: bool = True) -> Callable[[str], None]:
    """Prints a line, with the seconds since this call before it if `timed`; nothing if `quiet`.

    From here on it also says when the command has to wait for kernels to compile.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            stamp = f"[{time.monotonic() - began:6.1f} s] " if timed else ""
            print(f"{stamp}{line}", file=sys.stderr)

    for handler in [one for one in _jit.handlers if isinstance(one, CompilingNotice)]:
        _jit.removeHandler(handler)
    if not quiet:
        _jit.setLevel(logging.DEBUG)
        _jit.addHandler(CompilingNotice(tell))
    return tell


class CompilingNotice(logging.Handler):
    """Says once that kernels compile, if that takes longer than `silent_s` from the first on.

    For kernels that compile when they are first called: `compile_kernels` counts those that compile
    ahead, and hides them from here (`compiling_is_shown`).
    """

    def __init__(self, tell: Callable[[str], None], silent_s: float = SILENT_S) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell
        self._silent_s = silent_s
        self._began_s: float | None = None
        self._depth = 0  # a kernel compiles what it takes in
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Takes `jit.compiling` and `jit.compiled`."""
        begins = getattr(record, "event", None) == "jit.compiling"
        self._depth = max(self._depth + (1 if begins else -1), 0)
        if begins and self._began_s is None:
            self._began_s = time.monotonic()
            timer = threading.Timer(self._silent_s, self._look)
            timer.daemon = True
            timer.start()
        self._look()

    def _look(self) -> None:
        with self.lock or threading.RLock():
            waited_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
            if self._depth and waited_s >= self._silent_s and not self._told:
                self._told = True
                self._tell(COMPILING)


@contextmanager
def compiling_is_shown() -> Iterator[None]:
    """While something else says how far compiling is: no notice."""
    disabled, _jit.disabled = _jit.disabled, True
    try:
        yield
    finally:
        _jit.disabled = disabled
