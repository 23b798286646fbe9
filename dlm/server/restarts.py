"""When a worker that ended is started again, when one is given up. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass

# A worker that lived shorter than this, in seconds, may well die of the same cause again.
QUICK_S = 30.0
# Then the next start waits, in seconds: this, and twice as long with each further quick death.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
# A worker beats this often, in seconds, and its supervisor looks as often.
BEAT_S = 1.0
# Looks in a row without a beat after which it is given up: far above what a busy loop takes.
SILENT_LOOKS = 10


@dataclass(slots=True)
class Pulse:
    """Whether a worker's event loop still turns.

    Counted in looks of whoever watches, never in seconds: where the whole machine was paused, no
    look was made, and nobody is given up. Before its first beat a worker has as long as it takes.
    """

    silent_looks: int = -1

    def beat(self) -> None:
        """It said something."""
        self.silent_looks = 0

    def look(self) -> bool:
        """One look; True where it is to be given up."""
        if self.silent_looks < 0:
            return False
        self.silent_looks += 1
        return self.silent_looks > SILENT_LOOKS


def pause_after(lived_s: float, quick_deaths: int) -> tuple[int, float]:
    """What follows from the death of a worker.

    Args
        lived_s       seconds from its start to its end
        quick_deaths  quick deaths in a row before this one
    Returns
        quick deaths in a row from now on, and the seconds to wait before the next start

    Edge cases
        | the first quick death       | no pause: one crash costs nobody a second |
        | a long life                 | no pause, and the count begins anew       |
    """
    if lived_s >= QUICK_S:
        return 0, 0.0
    if quick_deaths == 0:
        return 1, 0.0
    doubled = FIRST_PAUSE_S * 2.0 ** min(quick_deaths - 1, 16)
    return quick_deaths + 1, min(doubled, LONGEST_PAUSE_S)
