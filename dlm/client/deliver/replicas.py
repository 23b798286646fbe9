"""Which of the servers of a shard is asked, and whether another may be asked again, or as well.

Plain data, which the loop owns; chance is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Protocol


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
    """The server to ask: of two drawn at random the one with less to do (power of two choices).

    Args
        replicas     addresses of those that hold the shard
        outstanding  queries in flight to each
        avoided      not to be asked while there is any other
        slow         not to be asked while there is any other that is not avoided either
        missed       of the avoided, those where nobody was found lately: not to be asked even
                     while there is another avoided one, which may drain and still answer
        tried        by this message already: not to be asked while there is any other at all
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
    """How many messages may be sent again, or to two servers: a share of those sent, and a burst.

    Args
        share  of a token that each message earns
        most   tokens that can be saved up; what a client begins with
    """

    __slots__ = ("_most", "_share", "saved")

    def __init__(self, share: float, most: float) -> None:
        self._share = share
        self._most = self.saved = most

    def earn(self) -> None:
        """A message was asked for the first time."""
        self.saved = min(self.saved + self._share, self._most)

    def spend(self) -> bool:
        """Takes a token; False where none is left."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


def may_hedge(
    replicas: Sequence[str],
    tried: Collection[str],
    avoided: Set[str],
    bucket: TokenBucket,
    *,
    all_slow: bool,
) -> bool:
    """Whether a message that is late (`pace.late_after`) is asked of a second server as well; then
    it is counted.

    Args
        replicas  addresses of those that hold the shard; tried, of these, who has it already
        avoided   of these, who is not well, or slow beside another
        bucket    what may be asked twice: a small part of all, and some at once
        all_slow  whether every server of the shard is slow: more work would not make it faster
    """
    return not all_slow and bool(set(replicas) - avoided - set(tried)) and bucket.spend()
