"""Chooses the server of a shard, and limits how many messages are sent again, or to two.

Plain data, owned by the loop; randomness is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dlm.client.deliver.pace import UNKNOWN_S


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
) -> str | None:
    """The server to ask: of two drawn at random, the less busy one (power of two choices).

    Args
        replicas     addresses of the servers that hold the shard
        outstanding  queries in flight to each
        avoided      asked only if there is no other
        slow         asked only if all others are avoided
        missed       avoided servers that were not reached lately: asked only after other avoided
                     ones, which may be draining and still answer
        tried        by this message: asked only after all others
    Returns
        None if there are none
    Paper
        Mitzenmacher 2001: two choices instead of one take the longest queue from logarithmic to
        doubly logarithmic, and need no agreement among clients
    """
    wanted = list(replicas)
    for worse in (tried, missed, avoided, slow):  # the strongest reason first
        wanted = [address for address in wanted if address not in worse] or wanted
    if len(wanted) <= 1:
        return wanted[0] if wanted else None
    first, second = chance.sample(wanted, 2)
    return second if outstanding.get(second, 0) < outstanding.get(first, 0) else first


class TokenBucket:
    """Limits how many messages are sent again, or to two servers: a share of all, plus a burst.

    Args
        share  of a token that each message earns
        most   tokens that can be saved; a client starts with all of them
    """

    __slots__ = ("_most", "_share", "saved")

    def __init__(self, share: float, most: float) -> None:
        self._share = share
        self._most = self.saved = most

    def earn(self) -> None:
        """A message was sent for the first time."""
        self.saved = min(self.saved + self._share, self._most)

    def spend(self) -> bool:
        """Takes a token; False if none is left."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


class Heard(NamedTuple):
    """What is known about a server that might take over a message.

    within_s  it answered nearly all of its latest messages in this time, or its heartbeats if it
              had no messages; inf if neither
    silent_s  how long it has had messages without answering any; 0 if it has none
    misses    whether it lately missed a message and has answered none since
    """

    within_s: float
    silent_s: float = 0.0
    misses: bool = False

    def would_answer(self, left_s: float) -> bool:
        """Whether it is expected to answer within `left_s`."""
        in_time = self.within_s <= left_s and self.silent_s <= max(self.within_s, UNKNOWN_S)
        return in_time and not self.misses


def may_take_over(heard: Mapping[str, Heard], left_s: float) -> list[str]:
    """Which servers may take over a message that one server has kept for half of its time.

    Never one that is slow or silent itself: if all servers of a shard are, no message is sent
    twice.

    Args
        heard   by address: servers that are up and were not asked
        left_s  until the answer is needed
    """
    return [address for address, one in heard.items() if one.would_answer(left_s)]
