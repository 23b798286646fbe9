"""Parts of calls that travel together, and their attempts at servers; the loop alone has them."""

from __future__ import annotations

import time

from dlm.client.deliver.asks import Asks
from dlm.client.deliver.call import Part
from dlm.client.deliver.lane import Lane
from dlm.client.deliver.runtime import Place, Runtime, Snapshot
from dlm.client.deliver.transport import Withdraw
from dlm.client.plan import router


class Message:
    """Parts that travel together, from their lane to their end.

    Attributes
        number   by which its lane knows it
        groups   its queries; place_of, where those of its parts stand, if they share any
        tried    addresses that it was sent to since it was last waited for
        rounds   times that all of them were tried in vain, and were waited for
        out      servers that have it now: one, or two where it was late
        ended    answered, or given up
    """

    __slots__ = (
        *("checksum", "deadline", "encode_s", "ended", "groups", "lane", "number", "out", "parts"),
        *("place", "place_of", "queued", "request", "rounds", "runtime", "shard", "snapshot"),
        "tried",
    )

    def __init__(
        self,
        runtime: Runtime,
        place: Place,
        lane: Lane[Part],
        number: int,
        snapshot: Snapshot,
        parts: list[Part],
    ) -> None:
        self.runtime, self.place, self.lane, self.number = runtime, place, lane, number
        self.snapshot, self.parts = snapshot, parts
        self.shard = place.shard
        # The latest deadline among them: an earlier caller stops waiting by itself.
        self.deadline = max([part.deadline for part in parts])
        self.queued = min([part.queued for part in parts])
        self.groups, self.place_of = router.gather([part.groups for part in parts])
        self.request, self.checksum = b"", 0
        self.encode_s = 0.0
        self.tried: list[str] = []
        self.rounds = 0
        self.out: list[Attempt] = []
        self.ended = False

    @property
    def asks(self) -> Asks:
        """What its parts ask, all the same."""
        return self.parts[0].call.asks


class Attempt:
    """A message at one server; `hedge` where it is the second that has it.

    withdraw  says that its answer is not wanted any more
    """

    __slots__ = (
        *("address", "hedge", "message", "queue_s", "replied", "since", "since_s", "withdraw"),
    )

    def __init__(self, message: Message, address: str, since: float, *, hedge: bool) -> None:
        self.message, self.address, self.since, self.hedge = message, address, since, hedge
        self.since_s = time.perf_counter()
        self.queue_s = self.since_s - message.queued
        self.replied = False
        self.withdraw: Withdraw | None = None
