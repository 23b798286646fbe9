"""When to restart a worker that ended, and when to give one up. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass

# A worker that lived for less than this, in seconds, may well die of the same cause again.
QUICK_S = 30.0
# Then the next start waits this long, in seconds, and twice as long after each further quick death.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
# Seconds between the beats of a worker, and between the looks of its supervisor.
BEAT_S = 1.0
# Looks in a row without a sign of life after which a worker is given up: far more than a busy loop
# takes. Before its first sign it has longer, since a starting machine is busy.
SILENT_LOOKS = 10
START_LOOKS = 60
# Looks until it must be ready, while its loop runs: the warm-up may read from a slow disk.
READY_LOOKS = 600


@dataclass(slots=True)
class Pulse:
    """Whether a worker is alive, from its fork until it ends.

    Counted in looks of the supervisor, never in seconds: if the whole machine was paused, there
    were no looks, and no worker is given up.

    looks         made before it was ready; -1 from then on
    silent_looks  made since the last sign of life
    """

    looks: int = 0
    silent_looks: int = 0
    has_beaten: bool = False

    def beat(self) -> None:
        self.silent_looks = 0
        self.has_beaten = True

    def ready(self) -> None:
        self.beat()
        self.looks = -1

    def stuck_reason(self) -> str | None:
        """One look; the reason if the worker must be given up."""
        self.silent_looks += 1
        silence = SILENT_LOOKS if self.has_beaten else START_LOOKS
        if self.silent_looks > silence:
            return f"gave no sign of life for {silence * BEAT_S:g} s"
        if self.looks >= 0:
            self.looks += 1
            if self.looks > READY_LOOKS:
                return f"was not ready after {READY_LOOKS * BEAT_S:g} s"
        return None


def pause_after(lived_s: float, quick_deaths: int) -> tuple[int, float]:
    """Quick deaths in a row from now on, and the seconds to wait before the next start of a worker.

    The first quick death costs no pause, and a long life resets the count.
    """
    if lived_s >= QUICK_S:
        return 0, 0.0
    if quick_deaths == 0:
        return 1, 0.0
    doubled = FIRST_PAUSE_S * 2.0 ** min(quick_deaths - 1, 16)
    return quick_deaths + 1, min(doubled, LONGEST_PAUSE_S)
