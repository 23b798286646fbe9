"""Reports the progress of a long job: its stage, its speed, and the remaining time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Tell = Callable[[str], None]

COMPILING = "compiling kernels (first run only)"
COUNT_S = 5.0  # seconds between two lines that count compiled kernels


class ProgressReporter:
    """Calls `tell` with the stages of a job and their progress, at most every few seconds."""

    def __init__(
        self,
        tell: Tell,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tell = tell
        self._interval_s = interval_s
        self._clock = clock
        self._name = self._unit = ""
        self._done = self._total = 0
        self._began_s = self._reported_s = clock()

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        """Starts a stage of `total` units, which `step` counts; `total` is 0 if unknown."""
        self._name, self._unit = name, unit
        self._done, self._total = 0, total
        self._began_s = self._reported_s = self._clock()
        self.tell(name)

    def step(self, done: int) -> None:
        """Counts further units of the stage as done, and reports them if a report is due."""
        self._done += done
        self.at(min(self._done, self._total), self._total, self._done, self._unit)

    def at(self, done: float, total: float, counted: int, unit: str) -> None:
        """Reports `done` of `total` (0: unknown), in any measure, if a report is due."""
        now = self._clock()
        if now - self._reported_s < self._interval_s:
            return
        self._reported_s = now
        elapsed = now - self._began_s
        line = f"{self._name}: {counted:,} {unit}, {_rate(counted / elapsed)} {unit}/s"
        if total and done:
            left = elapsed * (total - done) / done
            line += f", {100 * done / total:.0f} %, {left:,.0f} s left"
        self.tell(line)


def _rate(each_s: float) -> str:
    return f"{each_s:,.0f}" if each_s >= 10 else f"{each_s:.2g}"


class CompilingNotice:
    """Reports that kernels compile at their first call, once this has taken `silent_s` in total.

    dlm.jit calls `begin` and `end`, which may nest, from one thread at a time. It has no lock:
    a fork in another thread could leave it locked for ever.

    tell      called with each line to show, including those about downloads
    every_s   seconds between two lines that count the kernels compiled so far
    spent_s   seconds spent compiling since `use`, except inside `hidden`
    """

    def __init__(
        self,
        tell: Tell,
        *,
        every_s: float = COUNT_S,
        silent_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._silent_s = silent_s
        self._depth = 0  # a kernel compiles the kernels that it calls
        self._hidden = 0
        self.use(tell, every_s=every_s)

    def use(self, tell: Tell, *, every_s: float = COUNT_S) -> None:
        """Sends lines to `tell` from now on, as if nothing had been compiled so far."""
        self.tell, self._every_s = tell, every_s
        self._compiled, self._ahead = 0, ""
        self.spent_s, self._began_s = 0.0, self._clock()
        self._due = [True]  # emptied by the thread that reports the first line
        self._told_s = self._began_s

    @property
    def is_logged(self) -> bool:
        """Whether lines are logged, since no command has chosen where they go."""
        return self.tell is _log

    def begin(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._hidden:
            return
        self._began_s = self._clock()
        if self._due:
            timer = threading.Timer(max(self._silent_s - self.spent_s, 0.0), self._look)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started
                timer.start()

    def end(self, kernels: int = 1) -> None:
        self._look()
        self._depth = max(self._depth - 1, 0)
        if not self._depth and not self._hidden:
            self._compiled += kernels
            self.spent_s += self._clock() - self._began_s

    @contextmanager
    def compiling(self, kernels: int) -> Iterator[Callable[[int, int], None]]:
        """Counts kernels that are compiled ahead: yields a function to call with the number done
        and the total."""

        def count(done: int, of: int) -> None:
            self._ahead = f": {done} of {of}"
            self._look()

        self._ahead = f": 0 of {kernels}"
        self.begin()
        try:
            yield count
        finally:
            self._ahead = ""
            self.end(kernels)

    def _look(self) -> None:
        if not self._depth or self._hidden:
            return
        now = self._clock()
        if self._due:
            if self.spent_s + now - self._began_s < self._silent_s:
                return
            with suppress(IndexError):  # another thread was quicker
                self._due.pop()
                self._told_s = now
                self.tell(COMPILING + self._ahead)
        elif now - self._told_s >= self._every_s:
            self._told_s = now
            self.tell(COMPILING + (self._ahead or f": {self._compiled} so far"))

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Keeps silent in the block, where its caller reports progress; then prints only counts."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1
            self._due.clear()
            self._told_s = self._clock()


def _log(line: str) -> None:
    # The message has no event name and no fields, since Python prints it as it is if logging is
    # not configured.
    event = "jit.compiling" if line.startswith(COMPILING) else "client.download.progress"
    extra = {"event": event, "progress": line}
    logging.getLogger("dlm.jit").warning("dlm: %s", line, extra=extra)


# The notice of this process. A library only logs it; commands print it.
compiling_notice = CompilingNotice(_log)
