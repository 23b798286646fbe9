"""Which server of a shard is asked, when its answer is late, and how many messages are sent twice.

Plain data, owned by the loop; time (in seconds) and randomness are passed in. Paper: Dean and
Barroso, The Tail at Scale, CACM 2013: a second request after a high percentile removes the tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

KEPT = 64  # answers that are remembered
EACH = 8  # answers after which the figures are recomputed
FORGET_S = 5.0  # the figures of a server that is silent for this long are forgotten
# The second largest of those kept: some 4 % of messages exceed that of the faster of two servers,
# however busy the machine. They earn more (`runtime.HEDGED`), so what is saved for a server that
# becomes slow is not spent before.
PERCENTILE = 0.99
# Under this no message is late: threads that compute keep the loop from its replies for as long.
LEAST_S = 0.005
# What a server is taken for until enough of its answers came.
UNKNOWN_S = 0.05
# A server stalls once so many of its messages in a row were late, until it answers one in less than
# twice that time or, as it may be well again, for so long: its median shows a delay only after half
# of `KEPT` answers. Were a single late message enough, any pause of a thread would move all load.
STALLED, STALLED_S = 3, 1.0


class Chance(Protocol):
    """As `random.Random`."""

    def sample(self, population: Sequence[str], k: int) -> list[str]:
        """`k` different ones."""


def choose(
    replicas: Sequence[str],
    outstanding: Mapping[str, int],
    avoided: frozenset[str],
    chance: Chance,
    slow: frozenset[str] = frozenset(),
    *,
    missed: frozenset[str] = frozenset(),
    tried: frozenset[str] = frozenset(),
    stalling: frozenset[str] = frozenset(),
) -> str | None:
    """The server to ask, None if there is none: of two drawn at random, the one with fewer queries
    outstanding.

    Args
        avoided      asked only if there is no other
        slow         asked only if all others are avoided
        missed       avoided servers that were not reached lately: asked only after other avoided
                     ones, which may be draining and still answer
        tried        by this message: asked only after all others
        stalling     asked only if all others are, or are slow
    Paper  Mitzenmacher 2001, the power of two choices: the longest queue is doubly logarithmic
    """
    wanted = list(replicas)
    for worse in (tried, missed, avoided, slow, stalling):  # the strongest reason first
        wanted = [address for address in wanted if address not in worse] or wanted
    if len(wanted) <= 1:
        return wanted[0] if wanted else None
    first, second = chance.sample(wanted, 2)
    return second if outstanding.get(second, 0) < outstanding.get(first, 0) else first


class TokenBucket:
    """Limits how many messages are sent again, or to two servers: each earns a share of a token,
    and at most so many are saved; a client starts with all of them."""

    __slots__ = ("_most", "_share", "saved")

    def __init__(self, share: float, most: float) -> None:
        self._share = share
        self._most = self.saved = most

    def earn(self) -> None:
        self.saved = min(self.saved + self._share, self._most)

    def spend(self) -> bool:
        """Takes a token; False if none is left."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


class Heard(NamedTuple):
    """What is known about a server that might take over a message: in which time it answered nearly
    all of its latest messages or, without any, heartbeats (inf if neither); how long it has
    answered none that it has; and whether it lately missed one and has answered none since."""

    within_s: float
    silent_s: float = 0.0
    misses: bool = False

    def would_answer(self, left_s: float) -> bool:
        in_time = self.within_s <= left_s and self.silent_s <= max(self.within_s, UNKNOWN_S)
        return in_time and not self.misses


def may_take_over(heard: Mapping[str, Heard], left_s: float) -> list[str]:
    """Which servers, up and not asked yet, may take over a message that one has kept for half of
    its time. Never one that is slow or silent itself: if all of a shard are, no message is sent
    twice."""
    return [address for address, one in heard.items() if one.would_answer(left_s)]


class Usual:
    """The latest answers of one server; `late_s`, the percentile after which an answer is late, and
    the median are inf while too few came, and `at` -inf before the first."""

    __slots__ = (
        *("_late_at", "_lates", "_missed_at", "_new", "_times", "_waited_s"),
        *("at", "late_s", "median_s"),
    )

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self._new = self._lates = 0
        self._waited_s = 0.0
        self.at = self._missed_at = self._late_at = -inf
        self.median_s = self.late_s = inf

    def note(self, took_s: float, now: float) -> None:
        if now - self.at > FORGET_S:
            self._times.clear()
            self._new = 0
            self.median_s = self.late_s = inf
        self.at = now
        if took_s < 2 * self._waited_s:
            self._lates = 0
        self._times.append(took_s)
        self._new += 1
        if self._new >= EACH:
            self._new = 0
            rising = sorted(self._times)
            self.median_s = rising[len(rising) // 2]
            self.late_s = rising[int(PERCENTILE * (len(rising) - 1))]

    def known(self, now: float) -> bool:
        return self.late_s < inf and now - self.at <= FORGET_S

    def late(self, waited_s: float, now: float) -> None:
        """A message was late: it had been there for `waited_s`. Of those that one pause of the
        server made late, one counts."""
        if now - waited_s >= self._late_at:
            self._lates += 1
            self._waited_s, self._late_at = waited_s, now

    def stalls(self, now: float) -> bool:
        return self._lates >= STALLED and now - self._late_at <= STALLED_S

    def miss(self, now: float) -> None:
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
    """Seconds after which a message to a shard is late: the percentile of its fastest server, but
    not of one that stalls, whose answers are from before; if all do, of the slowest."""
    known = [one for one in servers if one.known(now)]
    slowest_s = max((one.late_s for one in known), default=UNKNOWN_S)
    late_s = min((one.late_s for one in known if not one.stalls(now)), default=slowest_s)
    return max(late_s, LEAST_S)
