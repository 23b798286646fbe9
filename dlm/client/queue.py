"""When a message is sent: a shard's queue has its waiting parts and its messages in flight."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, NamedTuple

from dlm.client.after import LEAST_S

# Nothing here waits or knows the time: the loop, which alone uses queues, passes it in.
#
# Idle shards are asked at once. While a message is in flight to any shard of the set, parts of
# other calls gather, and are sent together when the last comes back, since a call waits for its
# slowest shard: so batching needs no timer. If that takes twice as long as a shard mostly does
# (`holds_s`), or its own message longer than it usually does, its next one is sent, up to `limit`:
# neither a slow shard nor a stall may hold up the others.
#
# =========  ======================================  =============================================
# event      while                                   then
# =========  ======================================  =============================================
# submit     nothing is in flight                    `take` gives it at once
# submit     something is in flight, to any shard    it waits
# submit     too much waits already                  refused, unless a part of its call was let in
# done       nothing is in flight; something waits   `take` gives it, as much as a message holds
# time       what is in flight is older than usual   `take` gives what waits, up to `limit` messages
# time       what waits is past its deadline         `expire` gives it
# =========  ======================================  =============================================
#
# The queue is bounded: in queries, by the size of a few messages; in time, by how fast the shard
# has answered lately (`Pace`). If the queries ahead would take half of the time that a new call
# has left, the call is refused at once, while its caller still has time for a fallback. Its pace
# refuses nothing while nothing is in flight, so a shard that was slow is found to be fast again.
#
# Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is
# ours.

MAX_QUEUED_ITEMS = 4096  # waiting parts, however small: each is a caller
# Queries that may wait for a shard: a few messages' worth, and a minimum if messages are small.
MAX_WAITING_MESSAGES = 4
MIN_WAITING = 4096
# Busy seconds after which an observation counts half: much longer than one message, and much
# shorter than the minute in which an operator reacts.
HORIZON_S = 1.0
# The first answers are ignored: they include connecting, and waking up.
FIRST_ANSWERS = 8
# A message takes as long as so many queries, even if it has fewer: what waits goes in larger ones.
LEAST_QUERIES = 256
# By the estimate, waiting may take this share of the time left; the rest covers its error.
PATIENCE = 0.5


class Pace(NamedTuple):
    """Decayed sums over the time in which anything was in flight: messages answered since the
    start; their queries and busy seconds, with older ones counting less; and when that was last up
    to date."""

    answers: int = 0
    queries: float = 0.0
    busy_s: float = 0.0
    at: float = 0.0

    def passed(self, now: float, busy: bool) -> Pace:
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
        answers = self.answers + 1
        if answers <= FIRST_ANSWERS:
            return Pace(answers, 0.0, 0.0, self.at)
        return Pace(answers, self.queries + max(queries, LEAST_QUERIES), self.busy_s, self.at)

    def seconds(self, queries: int, since_s: float = 0.0) -> float:
        """How long `queries` queries will take, with `since_s` busy seconds after `at`; 0 while too
        little is known."""
        return queries * (self.busy_s + since_s) / self.queries if self.queries > 0.0 else 0.0


# Callers who were answered ask together if all ask again within this many times what the answer
# took, and within `LEAST_S`: one who came later would wait for the messages of the others.
AGAIN = 3.0


class Round:
    """When all shards of a set are asked together: not while messages are under way to any of them,
    since `began`; nor before all callers who were answered have asked again, if last time all did
    so in time."""

    __slots__ = ("_answered_at", "_came", "_expected", "_waits", "began", "under_way")

    def __init__(self) -> None:
        self.under_way = self._expected = self._came = 0
        self.began = self._answered_at = -inf
        self._waits = False

    def sent(self, now: float) -> None:
        if not self.under_way:
            self._waits = self._came >= self._expected
            self._came = self._expected = 0
            self.began = now
        self.under_way += 1

    def answered(self, callers: int, now: float) -> None:
        self._expected += callers
        self._answered_at = now

    def asked(self, now: float) -> None:
        self._came += now <= self._again_by

    @property
    def _again_by(self) -> float:
        return self._answered_at + min(AGAIN * (self._answered_at - self.began), LEAST_S)

    def free_at(self, usual_s: float) -> float:
        """When a shard with no message under way may be sent one that waits."""
        if self.under_way:
            return self.began + usual_s
        return self._again_by if self._waits and self._came < self._expected else -inf


class Queue:
    """One shard's queue of parts of calls, or whatever has `queries` and a `deadline`.

    Args
        round        that of all shards of its set
        limit        messages in flight, at most
        max_queries  of one message; larger work is sent alone
        usual_s      how long a message to this shard usually takes
    Attributes
        in_flight  number of the message -> its queries; `asked` in all
        earliest   no waiting work has a deadline before this
    """

    __slots__ = (
        *("asked", "earliest", "holds_s", "in_flight", "limit", "max_queries", "max_waiting"),
        *("pace", "queued", "round", "usual_s", "waiting", "_last", "_next"),
    )

    def __init__(
        self, limit: int, max_queries: int, usual_s: float = inf, round_: Round | None = None
    ) -> None:
        self.round = round_ or Round()
        self.limit = limit
        self.usual_s = self.holds_s = usual_s
        self.max_queries = max_queries
        self.max_waiting = max(MAX_WAITING_MESSAGES * max_queries, MIN_WAITING)
        self.waiting: deque[Any] = deque()
        self.queued = self.asked = 0
        self.in_flight: dict[int, int] = {}
        self.earliest = inf
        self.pace = Pace()
        self._last = -inf  # when a message was last sent
        self._next = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.in_flight

    @property
    def ahead(self) -> int:
        return self.queued + self.asked

    def refuses(self, queries: int, deadline: float, now: float) -> bool:
        """Whether new work would be refused; any thread may ask."""
        full = self.queued >= self.max_waiting or len(self.waiting) >= MAX_QUEUED_ITEMS
        if full and (self.in_flight or self.round.under_way):
            return self.earliest > now  # late work makes room
        if not self.in_flight:
            return False
        ahead, pace = self.queued + self.asked + queries, self.pace
        return pace.seconds(ahead, now - pace.at) > PATIENCE * (deadline - now)

    def submit(self, work: Any) -> None:
        """Queues `work`; the caller has asked `refuses`."""
        self.waiting.append(work)
        self.queued += work.queries
        if work.deadline < self.earliest:
            self.earliest = work.deadline

    def expire(self, now: float) -> list[Any]:
        if self.earliest > now:
            return []
        late = [work for work in self.waiting if work.deadline <= now]
        self.waiting = deque(work for work in self.waiting if work.deadline > now)
        self.queued = sum(work.queries for work in self.waiting)
        self.earliest = min((work.deadline for work in self.waiting), default=inf)
        return late

    def ready_at(self) -> float:
        """When a message may be sent; inf if nothing waits or too many are in flight."""
        if not self.waiting or len(self.in_flight) >= self.limit:
            return inf
        return self._last + self.usual_s if self.in_flight else -inf

    def due(self) -> float:
        """When to look at the queue; inf if nothing waits."""
        at = self.ready_at()
        if at == -inf:
            # Not past its deadline, nor later than other callers' messages take.
            at = min(self.round.free_at(self.holds_s), self.earliest - self.usual_s)
        return min(at, self.earliest)

    def take(self, now: float) -> tuple[int, list[Any]] | None:
        """The next message, if one may be sent: its number, for `done`, and its parts."""
        if self.ready_at() > now:
            return None
        self.pace = self.pace.passed(now, busy=bool(self.in_flight))
        waiting, works, queries = self.waiting, list[Any](), 0
        while waiting and (not works or queries + waiting[0].queries <= self.max_queries):
            work = waiting.popleft()
            works.append(work)
            queries += work.queries
        self.queued -= queries
        self.asked += queries
        if not waiting:
            self.earliest = inf
        number = self._next
        self._next += 1
        self._last = now
        self.in_flight[number] = queries
        self.round.sent(now)
        return number, works

    def done(self, number: int, now: float, *, answered: bool = True, gone: bool = False) -> bool:
        """A message came back; False if it had already. Only if `answered` does it show the shard's
        pace; if it is `gone`, since no server took it or lets this client in, the known pace ends
        with the servers."""
        queries = self.in_flight.pop(number, None)
        if queries is None:
            return False
        self.round.under_way -= 1
        self.pace = self.pace.passed(now, busy=True)
        self.asked -= queries
        if gone:
            self.pace = Pace(at=now)
        elif answered:
            self.pace = self.pace.answered(queries)
        return True

    def drop(self, number: int) -> None:
        """Ends a message that shows nothing about the pace; it may have ended already."""
        if number in self.in_flight:
            self.asked -= self.in_flight.pop(number)
            self.round.under_way -= 1

    def clear(self) -> list[Any]:
        works = list(self.waiting)
        self.waiting.clear()
        self.queued, self.earliest = 0, inf
        return works
