"""How long a message has been under way: what clocks of two machines can tell without being equal.

The client stamps each message with its own clock. The difference to ours is the clocks' distance
plus the time under way; its least value of late is taken for a message that waited nowhere, and
whatever a message has above it, it spent in queues. The least value is taken over one to two
windows, since clocks drift (50 parts in a million move 3 ms in a minute).
"""

from __future__ import annotations

from math import inf

WINDOW_S = 60.0


class Lateness:
    """Of one stream."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._begun = -inf
        self._before = inf  # least difference of the window before
        self._least = inf  # of this window

    def of(self, sent_us: int, now: float) -> float:
        """Seconds that a message stamped `sent_us` has waited, seen at `now`; at least 0.

        Args
            now  seconds on a clock that never goes back
        """
        if self._first is None:
            self._first = now
        difference = now - sent_us * 1e-6
        if now - self._begun >= WINDOW_S:
            self._begun = now
            self._before, self._least = self._least, inf
        self._least = min(self._least, difference)
        # Whatever the stamps say, nothing of this stream waited longer than it has been open.
        return min(difference - min(self._least, self._before), now - self._first)
