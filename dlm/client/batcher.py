"""When a message leaves: a window of messages in flight for each shard.

Pure: `step(state, event, now)` returns the next state and what to do. While the window is full,
work gathers; a message that comes back takes all that has gathered with it, so batching needs no
timer, and queries of concurrent utterances share a message.

=========  ================================  ==========================================
event      while                             then
=========  ================================  ==========================================
Submit     in_flight < limit                 Send it alone
Submit     in_flight == limit                it waits
Done       nothing waits                     in_flight falls
Done       something waits                   Send what waits, in as many messages as the
                                             window has room for
any        something is past its deadline    Expire it first
=========  ================================  ==========================================

Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """What waits to be asked: an item, its queries, and its deadline on the clock of `now`."""

    item: T
    queries: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Submit(Generic[T]):
    """New work."""

    work: Work[T]


@dataclass(frozen=True, slots=True)
class Done:
    """A message came back, well or badly."""


@dataclass(frozen=True, slots=True)
class Send(Generic[T]):
    """Action: send these in one message."""

    works: tuple[Work[T], ...]


@dataclass(frozen=True, slots=True)
class Expire(Generic[T]):
    """Action: this waited past its deadline; tell its caller."""

    work: Work[T]


Action: TypeAlias = Send[T] | Expire[T]


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """State of one shard's queue.

    earliest  no work that waits has a deadline before this
    Guarantees  0 <= in_flight <= limit; something waits only while in_flight == limit
    """

    limit: int
    max_queries: int
    in_flight: int = 0
    waiting: tuple[Work[T], ...] = ()
    earliest: float = field(default=inf, compare=False)


def step(
    state: Window[T], event: Submit[T] | Done, now: float
) -> tuple[Window[T], list[Action[T]]]:
    """The next state and what to do, in order; see the table above."""
    in_flight, waiting, earliest = state.in_flight, state.waiting, state.earliest
    if isinstance(event, Submit):
        waiting = (*waiting, event.work)
        earliest = min(earliest, event.work.deadline)
    else:
        if in_flight == 0:
            raise ValueError("a message came back that was never sent")
        in_flight -= 1
    actions: list[Action[T]] = []
    if earliest <= now:
        actions += [Expire(w) for w in waiting if w.deadline <= now]
        waiting = tuple(w for w in waiting if w.deadline > now)
        earliest = min((w.deadline for w in waiting), default=inf)
    taken = 0
    while taken < len(waiting) and in_flight < state.limit:
        first, queries = taken, 0
        while taken < len(waiting) and (
            taken == first or queries + waiting[taken].queries <= state.max_queries
        ):
            queries += waiting[taken].queries
            taken += 1
        actions.append(Send(waiting[first:taken]))
        in_flight += 1
    waiting = waiting[taken:]
    if not waiting:
        earliest = inf
    return replace(state, in_flight=in_flight, waiting=waiting, earliest=earliest), actions
