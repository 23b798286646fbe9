"""When a message leaves: a window of messages in flight for each shard.

Pure: `step(state, event, now)` returns the next state and what to do. While the window is full,
work gathers; a message that comes back takes all that has gathered with it, so batching needs no
timer, and queries of concurrent utterances share a message.

=========  ================================  ==========================================
event      while                             then
=========  ================================  ==========================================
Submit     in_flight < limit                 Send it alone
Submit     in_flight == limit                it waits
Submit     max_waiting queries wait already  Refuse it, unless a part of the call was let in
Done       nothing waits                     in_flight falls
Done       something waits                   Send what waits, in as many messages as the
                                             window has room for
any        something is past its deadline    Expire it first
any        a lease has run out               in_flight falls first: Lost
=========  ================================  ==========================================

A place in the window is a lease: it ends with its message, or `LEASE_GRACE_S` after the message's
deadline if nobody said that it ended. So nothing that can happen to a thread or a process between
the two (an exception from a signal handler, say) takes a place for good.

What waits is bounded by what a few messages can carry: beyond, waiting would only use up the
deadlines of all, so new calls are refused at once, while there is time to do without.

Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

MAX_WORKS = 4096  # works that wait, however small: each is a caller
LEASE_GRACE_S = 2.0  # seconds: a transport that ends calls at their deadline is never this late


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
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

    work: Work[T]


@dataclass(frozen=True, slots=True)
class Done:
    """A message came back, well or badly; one whose lease has run out counts for nothing."""

    message: int


@dataclass(frozen=True, slots=True)
class Send(Generic[T]):
    """Action: send these in one message, which `Done` then names."""

    works: tuple[Work[T], ...]
    message: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Expire(Generic[T]):
    """Action: this waited past its deadline; tell its caller."""

    work: Work[T]


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """Action: too much waits already; tell its caller."""

    work: Work[T]


@dataclass(frozen=True, slots=True)
class Lost:
    """Action: the transport never said how this message ended; do not trust its connection."""

    message: int


Action: TypeAlias = Send[T] | Expire[T] | Refuse[T] | Lost


class Window(NamedTuple, Generic[T]):
    """State of one shard's queue. (A tuple: one is made at each event, and these are quick.)

    leases       (message, until) of what is in flight, oldest first
    queued       queries that wait
    earliest     no work that waits has a deadline before this
    max_waiting  queries that may wait
    Guarantees  0 <= in_flight <= limit; something waits only while in_flight == limit
    """

    limit: int
    max_queries: int
    leases: tuple[tuple[int, float], ...] = ()
    waiting: tuple[Work[T], ...] = ()
    queued: int = 0
    earliest: float = inf
    next_message: int = 0
    max_waiting: int = 65536

    @property
    def in_flight(self) -> int:
        """Messages on their way."""
        return len(self.leases)

    @property
    def is_full(self) -> bool:
        """Whether a new call would be refused, unless something came back or ran out meanwhile."""
        return len(self.leases) >= self.limit and (
            self.queued >= self.max_waiting or len(self.waiting) >= MAX_WORKS
        )


def step(
    state: Window[T], event: Submit[T] | Done, now: float
) -> tuple[Window[T], list[Action[T]]]:
    """The next state and what to do, in order; see the table above."""
    limit, max_queries, leases, waiting, queued, earliest, message, max_waiting = state
    actions: list[Action[T]] = []
    if isinstance(event, Done):
        leases = tuple(lease for lease in leases if lease[0] != event.message)
    if any(until <= now for _, until in leases):
        actions += [Lost(lost) for lost, until in leases if until <= now]
        leases = tuple(lease for lease in leases if lease[1] > now)
    if earliest <= now:
        actions += [Expire(w) for w in waiting if w.deadline <= now]
        waiting = tuple(w for w in waiting if w.deadline > now)
        queued = sum(w.queries for w in waiting)
        earliest = min((w.deadline for w in waiting), default=inf)
    if isinstance(event, Submit):
        work = event.work
        if work.deadline <= now:
            actions.append(Expire(work))
        elif (
            len(leases) >= limit
            and (queued >= max_waiting or len(waiting) >= MAX_WORKS)
            and not work.more
        ):
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
        leases = (*leases, (message, max(w.deadline for w in works) + LEASE_GRACE_S))
        message += 1
        queued -= queries
    if taken:
        waiting = waiting[taken:]
    if not waiting:
        earliest = inf
    return Window(
        limit, max_queries, leases, waiting, queued, earliest, message, max_waiting
    ), actions
