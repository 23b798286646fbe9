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
# Looks in a row without a sign of life after which a worker is given up: far above what a busy loop
# takes. Before its first sign it has longer, since a machine that starts is busy.
SILENT_LOOKS = 10
START_LOOKS = 60
# Looks until it must be ready, its loop turning all along: the warm-up may read from a slow disk.
READY_LOOKS = 600


@dataclass(slots=True)
class Pulse:
    """Whether a worker is alive: from its fork on, and until it ends.

    Counted in looks of whoever watches, never in seconds: where the whole machine was paused, no
    look was made, and nobody is given up.

    looks         made before it was ready; -1 from then on
    silent_looks  made since the last sign of life
    has_beaten    whether there was one
    """

    looks: int = 0
    silent_looks: int = 0
    has_beaten: bool = False

    def beat(self) -> None:
        """Its event loop turns."""
        self.silent_looks = 0
        self.has_beaten = True

    def ready(self) -> None:
        """It answers; a sign of life like any beat."""
        self.beat()
        self.looks = -1

    def stuck_reason(self) -> str | None:
        """One look; where the worker is to be given up, why."""
        self.silent_looks += 1
        silence = SILENT_LOOKS if self.has_beaten else START_LOOKS
        if self.silent_looks > silence:
            return f"gave no sign of life for {silence} looks, one every {BEAT_S:g} s"
        if self.looks >= 0:
            self.looks += 1
            if self.looks > READY_LOOKS:
                return f"was not ready after {READY_LOOKS} looks, one every {BEAT_S:g} s"
        return None


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
