"""How many cores of this machine were busy, with any process, or were stolen by its host."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

EVERY_S = 0.1
IDLE = (3, 4)  # of the columns of /proc/stat: idle, and waiting for a disk
COLUMNS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user


class BusyCores:
    """Samples /proc/stat several times per second, in a thread, until the end of the block."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loadtest-busy", daemon=True)

    def __enter__(self) -> BusyCores:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._looks.append((time.time(), _busy_s()))

    def between(self, begin: float, end: float) -> float:
        """Cores that were busy between two times of `time.time`, on average."""
        times, busy = np.array(self._looks).T
        first, last = np.interp([begin, end], times, busy)
        return float(last - first) / (end - begin)


def _busy_s() -> float:
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    ticks = [int(field) for field in line.split()[1 : COLUMNS + 1]]
    return sum(t for at, t in enumerate(ticks) if at not in IDLE) / os.sysconf("SC_CLK_TCK")
