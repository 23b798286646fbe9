"""Decides which messages a service accepts, by its state, load and shard, and whose turn it is."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from dlm.server.config import Access
from dlm.server.health import ServingState
from dlm.server.metrics import CallCounts
from dlm.server.refusals import Refusal
from dlm.server.security import caller, connection, may_ask
from dlm.wire import codec
from dlm.wire.status import Reason

Clock = Callable[[], float]
Release: TypeAlias = Callable[[], None]
# The fixed cost of a message, and the work of one round (a few milliseconds); both in queries.
MESSAGE_WORK = 1024
WORK_AT_ONCE = 32 * MESSAGE_WORK
# How often the event loop polls the network between two rounds. gRPC needs two polls to accept a
# call (`pairs.accepting_ahead`). Calls are accepted more often than they begin, so that a flood of
# calls waits in `Turns` and not in gRPC's own queue, which is first come, first served, whoever
# sent them. Each poll may have to wait for a thread that holds the GIL.
LOOKS = 4

NOT_NAMED = (
    "the token of this call allows no model that is served here; the operator must add a model's "
    "id after models= in the token's line"
)


class Fair:
    """Waiting items, in the order in which they would end if all clients were served at the same
    time: a client's small item waits neither for a large item nor for many items of another client.

    Paper  Demers, Keshav and Shenker 1989
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int, int, str, Any]] = []
        self._of: dict[str, tuple[float, int]] = {}  # by sender: end of last item, items waiting
        self._now = 0.0  # virtual time: work done for each client
        self._number = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, whose: str, work: int, item: Any) -> None:
        last, count = self._of.get(whose, (self._now, 0))
        ends = max(last, self._now) + work
        self._of[whose] = ends, count + 1
        self._number += 1
        heapq.heappush(self._items, (ends, self._number, work, whose, item))

    def take(self) -> Any:
        """Removes the first item."""
        _, _, work, whose, item = heapq.heappop(self._items)
        self._now += work / len(self._of)
        last, count = self._of.pop(whose)
        if count > 1:
            self._of[whose] = last, count - 1
        return item


class TurnLane:
    """Work of one kind. Items that must wait take turns: clients get equal shares, and so do the
    connections of a client.

    Args        free     how many more items may be worked on at the same time
                at_once  most work in a round; the last item that begins may exceed it
    """

    def __init__(self, free: float, at_once: float, *, threads: bool = False) -> None:
        self.free, self._threads, self._most = free, threads, at_once
        self._left = at_once  # work left in this round
        self._clients = Fair()
        self._calls: WeakValueDictionary[str, Fair] = WeakValueDictionary()  # queues by client

    @property
    def is_spent(self) -> bool:
        """Whether the work that this round may begin is used up."""
        return self._left <= 0

    def begins(self, work: int) -> bool:
        """Begins an item and returns True, if no item waits and there is room."""
        if self._clients or self.free <= 0 or self.is_spent:
            return False
        self._begin(work)
        return True

    def wait(self, work: int) -> asyncio.Future[None]:
        """A future that gets a result when it is the current call's turn."""
        turn = asyncio.get_running_loop().create_future()
        client = caller()
        name = "" if client is None else client.name
        calls = self._calls.setdefault(name, Fair())
        calls.put(connection(), work, (turn, work))
        self._clients.put(name, work, calls)
        return turn

    def next_round(self) -> None:
        self._left = self._most
        self.go_on()

    def go_on(self) -> None:
        """Gives turns to waiting items, as long as there is room."""
        while self._clients and self.free > 0 and not self.is_spent:
            turn, work = self._clients.take().take()
            if not turn.done():
                turn.set_result(None)
                self._begin(work)

    def _begin(self, work: int) -> None:
        self.free -= 1
        self._left -= MESSAGE_WORK if self._threads else work


class Turns:
    """Bounds the work between the event loop's polls of the network, no matter who or how many ask
    for it. `LOOKS` polls follow each round of work, since a call needs several polls from its
    first byte to its reply. Calls that must wait are not read further.

    Args  most        queries of the largest small message; messages with more are large
          at_once     large messages that may be worked on at the same time
          in_a_round  most work of each kind in a round
          connection  large messages of one connection's streams that may be in progress or unread
    """

    def __init__(
        self,
        most: int,
        at_once: int,
        *,
        threads: bool = False,
        connection: int = 1,
        in_a_round: int = WORK_AT_ONCE,
    ) -> None:
        self.most, self._connection = most, max(connection, 1)
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._calls, self._small = TurnLane(inf, MESSAGE_WORK), TurnLane(inf, in_a_round)
        self._large = TurnLane(at_once, in_a_round, threads=threads)
        self._lanes = [self._calls, self._small, self._large]
        self._looks = 0  # polls left before the next round

    def room_of_connection(self) -> asyncio.Semaphore:
        """The room for large messages that the streams of the current call's connection share."""
        return self._rooms.setdefault(connection(), asyncio.Semaphore(self._connection))

    async def call(self) -> None:
        """Returns when the current call may be read, or refused: one call begins per round."""
        await self._turn(self._calls, MESSAGE_WORK)

    async def take(self, work: int, within_s: float | None = None) -> Release:
        """Waits for the current call's turn; returns a function to call, at least once, after the
        work.

        Args    work  queries, or work that takes as long
        Raises  TimeoutError  the call's turn did not come within `within_s` seconds
        """
        lane = self._large if work > self.most else self._small
        await self._turn(lane, work + MESSAGE_WORK, within_s)
        return _nothing if lane is self._small else self._end_of(lane)

    async def _turn(self, lane: TurnLane, work: int, within_s: float | None = None) -> None:
        began = lane.begins(work)
        self._look(lane)
        if began:
            return
        turn = lane.wait(work)
        async with asyncio.timeout(within_s):
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the call already had its turn
                    self._end_of(lane)()
                raise

    def _end_of(self, lane: TurnLane) -> Release:
        held = ExitStack()

        @held.callback
        def end() -> None:
            lane.free += 1
            lane.go_on()
            self._look(lane)

        return held.close

    def _look(self, lane: TurnLane) -> None:
        """Starts the countdown to the next round, if the lane is spent and no countdown runs."""
        if lane.is_spent and not self._looks:
            self._looks = LOOKS
            asyncio.get_running_loop().call_soon(self._looked)

    def _looked(self) -> None:
        self._looks -= 1
        if self._looks:
            asyncio.get_running_loop().call_soon(self._looked)
            return
        for lane in self._lanes:
            lane.next_round()
            self._look(lane)


async def looks() -> None:
    """Waits for as many polls of the network as the event loop makes between two rounds."""
    for _ in range(LOOKS):
        await asyncio.sleep(0)


def _nothing() -> None:
    """The `Release` of small work, which has nothing to release."""


@dataclass(slots=True)
class ServingPhase:
    """A phase of a process's life; if `refuses`, a DRAINING process rejects new messages."""

    state: ServingState = ServingState.WARMING
    refuses: bool = False


class Admission:
    """Admits messages by state and load; on the event loop.

    Args        clock  seconds that never go back
    Attributes  phase, turns  shared by all models of this process
                load  messages of all models that this process is working on
    """

    def __init__(self, config: Access, metrics: CallCounts, turns: Turns, clock: Clock) -> None:
        self.phase = ServingPhase()
        self.turns = turns
        self.load: Callable[[], int] = lambda: metrics.in_flight
        self._config, self._metrics, self._clock = config, metrics, clock
        self._asked = float("-inf")  # when the last message came
        self._idle = asyncio.Event()
        self._idle.set()

    # ----------------------------------------------------------------- in flight

    def enter(self) -> None:
        """Counts a message of this caller; raises `Refusal` if none can be accepted now."""
        self._check_load()
        self._asked = self._clock()
        self._metrics.in_flight += 1
        if (client := caller()) is not None:
            client.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Releases a message whose reply has been written, or never will be."""
        self._metrics.in_flight -= 1
        if (client := caller()) is not None:
            client.in_flight -= 1
        if not self._metrics.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    @property
    def in_flight(self) -> int:
        return self._metrics.in_flight

    def is_wanted(self, quiet_s: float) -> bool:
        """Whether a message came less than `quiet_s` ago."""
        return self.idle_s < quiet_s

    @property
    def idle_s(self) -> float:
        """Seconds since the last message, or since the start."""
        return self._clock() - self._asked

    # ------------------------------------------------------------------ refusals

    def _check_load(self) -> None:
        load = self.load()
        if load >= self._config.max_in_flight:
            raise Refusal(
                Reason.OVERLOADED,
                f"{load} messages are in flight; the server accepts at most "
                f"{self._config.max_in_flight}. Ask a replica, or retry later",
            )
        client = caller()
        if client is not None and client.in_flight >= self._config.client_in_flight:
            raise Refusal(
                Reason.CLIENT_LIMIT,
                f"this client has {client.in_flight} messages in flight, which is its limit. Send "
                "fewer at once, or retry later",
            )

    def require_ready(self) -> None:
        if self.phase.state is ServingState.WARMING:
            raise Refusal(
                Reason.NOT_READY, "this server is still warming up; ask a replica, or retry later"
            )
        if self.phase.state is ServingState.DRAINING and self.phase.refuses:
            raise Refusal(Reason.DRAINING, "this server is shutting down; ask a replica")


class ShardAdmission(Admission):
    """Admits messages also by the token of the caller and by the shard that the message names.

    Attributes  held  returns the shard sets on this port that the caller may ask for; `Models`
                      sets this function
    """

    def __init__(
        self,
        config: Access,
        metrics: CallCounts,
        turns: Turns,
        model: str,
        shard_set: bytes,
        shard: int,
        clock: Clock,
    ) -> None:
        super().__init__(config, metrics, turns, clock)
        self.held: Callable[[], tuple[bytes, ...]] = lambda: (shard_set,)
        self._model, self._shard_set, self._shard = model, shard_set, shard

    def is_open(self) -> bool:
        """Whether the current call may ask for this model."""
        return may_ask(self._model, self._shard_set.hex())

    def require_ready(self) -> None:
        super().require_ready()
        if not self.is_open():
            raise Refusal(Reason.WRONG_SHARD_SET, NOT_NAMED)

    def require_open(self) -> None:
        """Refuses a caller that may use no model, in calls that need not name a shard set."""
        if not self.is_open():
            raise Refusal(Reason.UNAUTHENTICATED, NOT_NAMED)

    def require_same(self, shard_set: bytes, shard: int | None = None) -> None:
        if len(shard_set) != codec.SHARD_SET_BYTES:
            raise Refusal(
                Reason.MALFORMED,
                f"shard_set has {len(shard_set)} bytes; expected {codec.SHARD_SET_BYTES}",
            )
        if shard_set != self._shard_set:
            raise Refusal(
                Reason.WRONG_SHARD_SET,
                f"the message is for shard set {shard_set.hex()}, but this server holds "
                f"{' and '.join(one.hex() for one in self.held())}; "
                "call Describe again, and open a new utterance",
            )
        if shard is not None and shard != self._shard:
            raise Refusal(
                Reason.WRONG_SHARD,
                f"the message is for shard {shard}, but this server holds shard {self._shard}; "
                "look up the address of the shard's server again",
            )
