"""How long a server usually takes to answer a message; when another is asked as well.

Pure: times are passed in, in seconds.

Paper: Dean and Barroso, The Tail at Scale, CACM 2013: a second request after the 95th percentile
costs a few percent of load, and takes the tail off. A bucket bounds it here: what would be asked
twice while everything is slow would make that worse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

KEPT = 64  # answers that are remembered
EACH = 8  # answers after which the figures are made anew
FORGET_S = 5.0  # a server that answered nothing for so long is not known any more
PERCENTILE = 0.95
# Under this no message is late: threads that compute keep the loop from its replies for as long.
LEAST_S = 0.005
# What a server is taken for until enough of its answers came.
UNKNOWN_S = 0.05


class Usual:
    """The latest answers of one server.

    Attributes
        median_s, late_s  the median, and the percentile from which an answer is late; inf while
                          too few came
    """

    __slots__ = ("_at", "_new", "_times", "late_s", "median_s")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self._new = 0
        self._at = -inf
        self.median_s = self.late_s = inf

    def note(self, took_s: float, now: float) -> None:
        """An answer took so long."""
        if now - self._at > FORGET_S:
            self._times.clear()
            self._new = 0
            self.median_s = self.late_s = inf
        self._at = now
        self._times.append(took_s)
        self._new += 1
        if self._new >= EACH:
            self._new = 0
            rising = sorted(self._times)
            self.median_s = rising[len(rising) // 2]
            self.late_s = rising[int(PERCENTILE * (len(rising) - 1))]

    def known(self, now: float) -> bool:
        """Whether enough answers came lately."""
        return self.late_s < inf and now - self._at <= FORGET_S


def late_after(servers: Iterable[Usual], now: float) -> float:
    """Seconds after which a message to a shard with these servers is late: the percentile of the
    one that is fastest."""
    late_s = min((one.late_s for one in servers if one.known(now)), default=UNKNOWN_S)
    return max(late_s, LEAST_S)
