"""When a message leaves: a window of messages in flight for each shard.

Pure: `step(state, event, now)` returns the next state and what to do. While the window is full,
work gathers; a message that comes back takes all that has gathered with it, so batching needs no
timer, and queries of concurrent utterances share a message.

=========  ================================  ==========================================
event      while                             then
=========  ================================  ==========================================
Submit     in_flight < limit                 Send it alone
Submit     in_flight == limit                it waits
Submit     too much waits already            Refuse it, unless a part of the call was let in
Done       nothing waits                     in_flight falls
Done       something waits                   Send what waits, in as many messages as the
                                             window has room for
any        something is past its deadline    Expire it first
any        a lease has run out               in_flight falls first: Unanswered
=========  ================================  ==========================================

A place in the window is a lease: it ends with its message, or `LEASE_GRACE_S` after the message's
deadline if nobody said that it ended. So nothing that can happen to a thread or a process between
the two (an exception from a signal handler, say) takes a place for good.

What waits is bounded, in queries by what a few messages can carry, and in time by what the shard
has lately answered (`pace.py`): where the queries ahead would take half of the time that a new call
has left, waiting would only use up the deadlines of all. It is refused at once, while there is time
to do without. What is sent when nothing else is in flight is never refused: so a shard that was
slow is found to be quick again.

Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from dlm.client.pace import PATIENCE, Pace

T = TypeVar("T")

MAX_QUEUED_ITEMS = 4096  # works that wait, however small: each is a caller
LEASE_GRACE_S = 2.0  # seconds: a transport that ends calls at their deadline is never this late


@dataclass(frozen=True, slots=True)
class QueuedItem(Generic[T]):
    """What waits to be asked: an item, its queries, and its deadline on the clock of `now`.

    more  a further part of a call, which is not refused any more
    """

    item: T
    queries: int
    deadline: float
    more: bool = False


@dataclass(frozen=True, slots=True)
class Submit(Generic[T]):
    """New work."""

    work: QueuedItem[T]


@dataclass(frozen=True, slots=True)
class Done:
    """A message came back, well or badly; one whose lease has run out counts for nothing.

    answered  with answers, which tell the pace of the shard
    gone      nobody took it: no server is there, or none lets this client in. How long that took
              is no pace, and what was known of the pace ends with the servers
    """

    message: int
    answered: bool = True
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Send(Generic[T]):
    """Action: send these in one message, which `Done` then names."""

    works: tuple[QueuedItem[T], ...]
    message: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Expire(Generic[T]):
    """Action: this waited past its deadline; tell its caller."""

    work: QueuedItem[T]


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """Action: too much waits already; tell its caller."""

    work: QueuedItem[T]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Action: the transport never said how this message ended; do not trust its connection."""

    message: int


Action: TypeAlias = Send[T] | Expire[T] | Refuse[T] | Unanswered


class Lease(NamedTuple):
    """A message in flight: its number, until when its place is its own, and its queries."""

    message: int
    until: float
    queries: int


class Window(NamedTuple, Generic[T]):
    """State of one shard's queue. (A tuple: one is made at each event, and these are quick.)

    leases       of what is in flight, oldest first
    queued       queries that wait
    earliest     no work that waits has a deadline before this
    max_waiting  queries that may wait
    pace         of the shard's answers
    Guarantees  0 <= in_flight <= limit; something waits only while in_flight == limit
    """

    limit: int
    max_queries: int
    leases: tuple[Lease, ...] = ()
    waiting: tuple[QueuedItem[T], ...] = ()
    queued: int = 0
    earliest: float = inf
    next_message: int = 0
    max_waiting: int = 65536
    pace: Pace = Pace()

    @property
    def in_flight(self) -> int:
        """Messages on their way."""
        return len(self.leases)

    @property
    def ahead(self) -> int:
        """Queries in flight, or waiting."""
        return self.queued + sum(lease.queries for lease in self.leases)

    def without(self, message: int) -> Window[T]:
        """The window without that message, and with nothing that waits."""
        leases = tuple(lease for lease in self.leases if lease.message != message)
        return self._replace(leases=leases, waiting=(), queued=0, earliest=inf)

    def refuses(self, queries: int, deadline: float, now: float) -> bool:
        """Whether new work would be refused, unless something came back or ran out meanwhile."""
        leases = self.leases
        if not leases:
            return False
        if len(leases) >= self.limit and (
            self.queued >= self.max_waiting or len(self.waiting) >= MAX_QUEUED_ITEMS
        ):
            return True
        return self.pace.seconds(self.ahead + queries) > PATIENCE * (deadline - now)


def step(
    state: Window[T], event: Submit[T] | Done, now: float
) -> tuple[Window[T], list[Action[T]]]:
    """The next state and what to do, in order; see the table above."""
    limit, max_queries, leases, waiting, queued, earliest, message, max_waiting, pace = state
    actions: list[Action[T]] = []
    pace = pace.passed(now, bool(leases))
    if isinstance(event, Done):
        for lease in leases:
            if lease.message == event.message and event.answered:
                pace = pace.answered(lease.queries)
        if event.gone:
            pace = Pace(at=now)
        leases = tuple(lease for lease in leases if lease.message != event.message)
    if any(lease.until <= now for lease in leases):
        actions += [Unanswered(lease.message) for lease in leases if lease.until <= now]
        leases = tuple(lease for lease in leases if lease.until > now)
    if earliest <= now:
        actions += [Expire(w) for w in waiting if w.deadline <= now]
        waiting = tuple(w for w in waiting if w.deadline > now)
        queued = sum(w.queries for w in waiting)
        earliest = min((w.deadline for w in waiting), default=inf)
    if isinstance(event, Submit):
        work = event.work
        if work.deadline <= now:
            actions.append(Expire(work))
        elif not work.more and state._replace(
            leases=leases, waiting=waiting, queued=queued, pace=pace
        ).refuses(work.queries, work.deadline, now):
            actions.append(Refuse(work))
        else:
            waiting = (*waiting, work)
            queued += work.queries
            earliest = min(earliest, work.deadline)
    taken = 0
    while taken < len(waiting) and len(leases) < limit:
        first, queries = taken, 0
        while taken < len(waiting) and (
            taken == first or queries + waiting[taken].queries <= max_queries
        ):
            queries += waiting[taken].queries
            taken += 1
        works = waiting[first:taken]
        actions.append(Send(works, message))
        until = max(w.deadline for w in works) + LEASE_GRACE_S
        leases = (*leases, Lease(message, until, queries))
        message += 1
        queued -= queries
    if taken:
        waiting = waiting[taken:]
    if not waiting:
        earliest = inf
    return Window(
        limit, max_queries, leases, waiting, queued, earliest, message, max_waiting, pace
    ), actions
