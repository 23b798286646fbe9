"""One thread a process that ends what has waited too long."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable


class Deadlines:
    """Calls functions at their times, on a thread of its own that starts with the first.

    A function must be quick and must not raise. It is called once, whether or not what it was for
    is over by then: it finds out by itself, which costs less than taking it back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call` at `when`, on the clock of time.monotonic."""
        with self._changed:
            earlier = not self._heap or when < self._heap[0][0]
            heapq.heappush(self._heap, (when, next(self._count), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dlm-deadlines", daemon=True)
                self._thread.start()
            elif earlier:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap:
                    self._changed.wait()
                left = self._heap[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                _, _, call = heapq.heappop(self._heap)
            call()


_of_process = Deadlines()


def deadlines() -> Deadlines:
    """Those of this process."""
    return _of_process


def _after_fork_in_child() -> None:
    global _of_process
    _of_process = Deadlines()


os.register_at_fork(after_in_child=_after_fork_in_child)
