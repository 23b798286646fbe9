"""How long a message has been in transit, measured with two clocks that are not synchronised.

The client stamps each message with its own clock. The difference from ours is the offset of the
clocks plus the time in transit. The least recent difference is taken as that of a message that
waited nowhere; whatever a message has above it was spent in queues. The minimum is taken over one
to two windows, since clocks drift (50 parts per million are 3 ms per minute).
"""

from __future__ import annotations

from math import inf

WINDOW_S = 60.0


class Lateness:
    def __init__(self) -> None:
        self._first: float | None = None
        self._begun = -inf
        self._before = inf  # least difference of the window before
        self._least = inf  # of this window

    def of(self, sent_us: int, now: float) -> float:
        """Seconds, at least 0, that a message stamped `sent_us` has waited until `now`."""
        if self._first is None:
            self._first = now
        difference = now - sent_us * 1e-6
        if now - self._begun >= WINDOW_S:
            self._begun = now
            self._before, self._least = self._least, inf
        self._least = min(self._least, difference)
        # Whatever the stamps say, no message waited longer than its stream has been open.
        return min(difference - min(self._least, self._before), now - self._first)
