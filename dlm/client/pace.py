"""How fast a shard has lately answered while it was asked: what waiting will cost.

Pure, and small: a lane keeps one (`lane.py`). Times are of the clock of `now`, in seconds.
"""

from __future__ import annotations

from typing import NamedTuple

# Busy seconds after which what was seen counts half: long beside one message, short beside the
# minute in which an operator looks.
HORIZON_S = 1.0
# The first answers say nothing: they pay for making connections, and for what wakes up.
FIRST_ANSWERS = 8
# The part of the time left that waiting may take by this estimate; the rest is for its error.
PATIENCE = 0.5


class Pace(NamedTuple):
    """Decayed sums over the time in which anything was in flight.

    answers  messages answered since the start
    queries  queries in them, the older ones counting less
    busy_s   how long anything was in flight, likewise
    at       when that was last brought up to date
    """

    answers: int = 0
    queries: float = 0.0
    busy_s: float = 0.0
    at: float = 0.0

    def passed(self, now: float, busy: bool) -> Pace:
        """Time has passed, with something in flight or nothing."""
        answers, queries, busy_s, at = self
        if not busy:
            return Pace(answers, queries, busy_s, now)
        busy_s += now - at
        if busy_s > HORIZON_S:
            # However long nothing came: half a horizon of it is kept, and as little of the queries.
            keep = 0.5 * HORIZON_S / busy_s
            return Pace(answers, queries * keep, busy_s * keep, now)
        return Pace(answers, queries, busy_s, now)

    def answered(self, queries: int) -> Pace:
        """A message came back with answers."""
        answers = self.answers + 1
        if answers <= FIRST_ANSWERS:
            return Pace(answers, 0.0, 0.0, self.at)
        return Pace(answers, self.queries + queries, self.busy_s, self.at)

    def seconds(self, queries: int) -> float:
        """How long so many queries will take; 0 while too little is known."""
        return queries * self.busy_s / self.queries if self.queries > 0.0 else 0.0
