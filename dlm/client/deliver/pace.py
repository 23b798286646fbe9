"""How fast a shard answers: how long waiting will take, and when a message is late.

Pure. Times are on the clock of `now`, in seconds. A lane has one `Pace`; each server has a `Usual`,
which decides when a message is late and goes to a second server as well.

Paper: Dean and Barroso, The Tail at Scale, CACM 2013: a second request after the 95th percentile
adds a few percent of load, and removes the tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

# Busy seconds after which an observation counts half: much longer than one message, and much
# shorter than the minute in which an operator reacts.
HORIZON_S = 1.0
# The first answers are ignored: they include connecting, and waking up.
FIRST_ANSWERS = 8
# By the estimate, waiting may take this share of the time left; the rest covers its error.
PATIENCE = 0.5

KEPT = 64  # answers that are remembered
EACH = 8  # answers after which the figures are recomputed
FORGET_S = 5.0  # the figures of a server that is silent for this long are forgotten
PERCENTILE = 0.95
# Under this no message is late: threads that compute keep the loop from its replies for as long.
LEAST_S = 0.005
# What a server is taken for until enough of its answers came.
UNKNOWN_S = 0.05


class Pace(NamedTuple):
    """Decayed sums over the time in which anything was in flight.

    answers  messages answered since the start
    queries  queries in them, with older ones counting less
    busy_s   how long anything was in flight, likewise
    at       when that was last brought up to date
    """

    answers: int = 0
    queries: float = 0.0
    busy_s: float = 0.0
    at: float = 0.0

    def passed(self, now: float, busy: bool) -> Pace:
        """The pace after time has passed; `busy` if something was in flight."""
        answers, queries, busy_s, at = self
        if not busy:
            return Pace(answers, queries, busy_s, now)
        busy_s += now - at
        if busy_s > HORIZON_S:
            # However long nothing came, keep half a horizon, and the queries in proportion.
            keep = 0.5 * HORIZON_S / busy_s
            return Pace(answers, queries * keep, busy_s * keep, now)
        return Pace(answers, queries, busy_s, now)

    def answered(self, queries: int) -> Pace:
        """A message came back with answers."""
        answers = self.answers + 1
        if answers <= FIRST_ANSWERS:
            return Pace(answers, 0.0, 0.0, self.at)
        return Pace(answers, self.queries + queries, self.busy_s, self.at)

    def seconds(self, queries: int, since_s: float = 0.0) -> float:
        """How long `queries` queries will take; 0 while too little is known.

        Args
            since_s  seconds that were busy after `at`
        """
        return queries * (self.busy_s + since_s) / self.queries if self.queries > 0.0 else 0.0


class Usual:
    """The latest answers of one server.

    Attributes
        median_s, late_s  the median, and the percentile after which an answer is late; inf while
                          too few came
        at                when the last one came; -inf for never
    """

    __slots__ = ("_missed_at", "_new", "_times", "at", "late_s", "median_s")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self._new = 0
        self.at = self._missed_at = -inf
        self.median_s = self.late_s = inf

    def note(self, took_s: float, now: float) -> None:
        """Records the time of an answer."""
        if now - self.at > FORGET_S:
            self._times.clear()
            self._new = 0
            self.median_s = self.late_s = inf
        self.at = now
        self._times.append(took_s)
        self._new += 1
        if self._new >= EACH:
            self._new = 0
            rising = sorted(self._times)
            self.median_s = rising[len(rising) // 2]
            self.late_s = rising[int(PERCENTILE * (len(rising) - 1))]

    def known(self, now: float) -> bool:
        """Whether enough answers came lately."""
        return self.late_s < inf and now - self.at <= FORGET_S

    def miss(self, now: float) -> None:
        """Records that it did not answer a message in time."""
        self._missed_at = now

    def misses(self, now: float) -> bool:
        """Whether it lately missed a message and has answered none since."""
        return self._missed_at > self.at and now - self._missed_at <= FORGET_S

    def within_s(self, now: float) -> float | None:
        """Seconds in which it answered nearly all of its latest messages, and the last one; None if
        it answered none lately."""
        if now - self.at > FORGET_S:
            return None
        return max(self.late_s, self._times[-1]) if self.late_s < inf else max(self._times)


def late_after(servers: Iterable[Usual], now: float) -> float:
    """Seconds after which a message to a shard with these servers is late: the percentile of the
    fastest one."""
    late_s = min((one.late_s for one in servers if one.known(now)), default=UNKNOWN_S)
    return max(late_s, LEAST_S)
