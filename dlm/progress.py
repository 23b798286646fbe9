"""How far a long job is: what is being done, how fast, and how long it will take yet."""

from __future__ import annotations

import time
from collections.abc import Callable

Tell = Callable[[str], None]


class ProgressReporter:
    """Tells the stages of a job, and how far each is, at most every few seconds.

    Args
        tell         takes a line
        interval_s   between two lines of a stage; suggested 5
        clock        seconds, never going back
    """

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
        """Says what is being done from now on.

        Args
            total, unit  of what `step` counts; total 0 where it is not known
        """
        self._name, self._unit = name, unit
        self._done, self._total = 0, total
        self._began_s = self._reported_s = self._clock()
        self.tell(name)

    def step(self, done: int) -> None:
        """So many more of the stage's units are done: says so, if it is time to."""
        self._done += done
        self.at(min(self._done, self._total), self._total, self._done, self._unit)

    def at(self, done: float, total: float, counted: int, unit: str) -> None:
        """Says how far the stage is, if it is time to.

        Args
            done, total  in whatever measure; total 0 where it is not known
            counted      of the unit that the rate is told in
        """
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
