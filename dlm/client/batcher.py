"""When a message leaves: a window of messages in flight for each shard.

Pure: `step(state, event, now)` returns the next state and what to do. While the window is full,
work gathers; a message that comes back takes all that has gathered with it, so batching needs no
timer, and queries of concurrent utterances share a message.

=========  ================================  ==========================================
event      while                             then
=========  ================================  ==========================================
Submit     in_flight < window                Send it alone
Submit     in_flight == window               it waits
Done       nothing waits                     in_flight falls
Done       something waits                   Expire what is past its deadline, Send the rest
                                             in as many messages as fit the window
=========  ================================  ==========================================

Paper: DLM 3.3 merges the messages of one utterance's position; gathering across utterances is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """What waits to be asked: an item, its number of queries, and its deadline on the clock of `now`."""

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

    Guarantees  0 <= in_flight <= limit; something waits only while in_flight == limit
    """

    limit: int
    max_queries: int
    in_flight: int = 0
    waiting: tuple[Work[T], ...] = ()


def step(
    state: Window[T], event: Submit[T] | Done, now: float
) -> tuple[Window[T], list[Action[T]]]:
    """The next state and what to do, in order; see the table above."""
    if isinstance(event, Submit):
        state = replace(state, waiting=(*state.waiting, event.work))
    else:
        if state.in_flight == 0:
            raise ValueError("a message came back that was never sent")
        state = replace(state, in_flight=state.in_flight - 1)
    if state.in_flight == state.limit:
        return state, []
    actions: list[Action[T]] = [Expire(w) for w in state.waiting if w.deadline <= now]
    alive = [w for w in state.waiting if w.deadline > now]
    in_flight = state.in_flight
    while alive and in_flight < state.limit:
        taken, queries = 1, alive[0].queries
        while taken < len(alive) and queries + alive[taken].queries <= state.max_queries:
            queries += alive[taken].queries
            taken += 1
        actions.append(Send(tuple(alive[:taken])))
        del alive[:taken]
        in_flight += 1
    return replace(state, in_flight=in_flight, waiting=tuple(alive)), actions
