"""Gives memory back that glibc holds free after floods of HTTP/2 frames (`malloc_trim`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from dlm.server.process import private_memory

GROWTH = 64 << 20  # bytes above those at the start, before it is worth a trim
WORTH = 8 << 20  # a trim that returns fewer bytes makes the next wait twice as long
LEAST_S, MOST_S = 5.0, 80.0  # between two; one takes about 10 ms per 100 MB, in its own thread


class TrimState(NamedTuple):
    """What decides when to trim next; `after` makes the next one.

    at_start  bytes of the process when it began to serve
    due_s     when it may trim next, on the caller's clock
    pause_s   seconds from a trim to the next
    """

    at_start: int
    due_s: float = 0.0
    pause_s: float = LEAST_S

    def is_due(self, size: int, now_s: float) -> bool:
        return now_s >= self.due_s and size >= self.at_start + GROWTH

    def after(self, before: int, size: int, now_s: float) -> TrimState:
        pause = LEAST_S if before - size >= WORTH else min(2 * self.pause_s, MOST_S)
        return TrimState(self.at_start, now_s + pause, pause)


def find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`, which runs without the GIL; None in another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class Heap:
    """Trims this process's heap when it is due; `size`: bytes now, when it begins to serve."""

    def __init__(self, size: int) -> None:
        self._trim = find_trim()
        self._state = TrimState(size)

    def is_due(self, size: int, now_s: float) -> bool:
        return self._trim is not None and self._state.is_due(size, now_s)

    def trim(self, now_s: float) -> None:
        assert self._trim is not None
        before = private_memory()
        self._trim(0)
        self._state = self._state.after(before, private_memory(), now_s)
