"""Turns the signals that end a command into exceptions, so that unfinished output is removed."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Sent by Ctrl-C; by a service manager or `timeout`; by a terminal that closes.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.5  # `timeout` sends its signal twice at once: that is one request to end
RAISE_AGAIN_S = 0.05


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a server to finish and end: SIGHUP too, unless `nohup` started it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in END_SIGNALS if number != signal.SIGHUP or not ignored]


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Inside the block, each of `stop_signals` calls `stop`. Afterwards they do nothing: the
    process ends by itself, with its own status. After an error, they work as before."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in stop_signals()}
    try:
        yield
    except BaseException:
        for number, handler in previous.items():
            signal.signal(number, handler)
        raise
    for number in previous:
        signal.signal(number, signal.SIG_IGN)


class EndSignals:
    """Raises the first end signal in the main thread; the second ends the process at once.

    Both wait while the main thread runs a compiler or compiled code. Python drops an exception
    that is raised in a callback from C or in a finalizer: the first signal is then raised again
    at short intervals, until its exception is not dropped.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._raised: BaseException | None = None
        self._hook = sys.unraisablehook

    def install(self) -> None:
        """Handles the end signals, except those that the parent process ignored, as under nohup."""
        for number in END_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._ended)
        signal.signal(signal.SIGALRM, self._again)
        sys.unraisablehook = self._dropped
        # Stop the alarm at exit: without Python's handler, it would kill the process. What is
        # registered first is called last, after functions that may drop a signal and set the alarm.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)

    def _ended(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self._raise()
        elif now - self._first[1] >= SAME_S:
            try:
                if "dlm.files" in sys.modules:  # importing it would delay the start
                    sys.modules["dlm.files"].remove_unfinished()
            finally:
                os._exit(128 + self._first[0])

    def _raise(self) -> None:
        assert self._first is not None
        number, _ = self._first
        self._raised = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise self._raised

    def _again(self, _number: int, _frame: FrameType | None) -> None:
        if self._first is not None:
            self._raise()

    def _dropped(self, what: Any) -> None:
        if what.exc_value is self._raised is not None:
            if not sys.is_finalizing():
                signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_S)
        else:
            self._hook(what)


end_signals = EndSignals()
