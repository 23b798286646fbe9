"""Which messages a service accepts now: by its state, what is in flight, its shard; and whose turn
it is."""

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
# Work is counted in queries: what a message takes besides its queries, and how much is done in one
# round, a few milliseconds.
MESSAGE_WORK = 1024
WORK_AT_ONCE = 32 * MESSAGE_WORK
# How often the event loop looks at the network between two rounds. gRPC takes two looks to accept a
# call (`pairs.accepting_ahead`): more often than one begins, so that those of a flood wait here and
# not in gRPC's own line, where the last one comes last, whoever sent it. Each look may have to wait
# for a thread that computes in Python.
LOOKS = 4

NOT_NAMED = (
    "the token of this call may ask for no model that is served here; the operator adds the id of "
    "one after models= to the token's line"
)


class Fair:
    """What waits, in the order in which it would end if all who have something here were worked for
    at the same time: little work of one does not wait for much of another, nor one for the many
    items of another.

    Paper  Demers, Keshav and Shenker 1989
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int, int, str, Any]] = []
        self._of: dict[str, tuple[float, int]] = {}  # when the last item would end; how many wait
        self._now = 0.0  # work done for each
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
    """What is of one kind. Those that must wait take turns: clients share alike, and so do the
    connections of each.

    Args        free     how many more may be worked on at the same time
                at_once  work in a round; what begins may exceed it
                threads  whether threads do the work
    """

    def __init__(self, free: float, at_once: float, *, threads: bool = False) -> None:
        self.free, self._threads, self._most = free, threads, at_once
        self._left = at_once  # of this round
        self._clients = Fair()
        self._calls: WeakValueDictionary[str, Fair] = WeakValueDictionary()  # by client

    @property
    def is_spent(self) -> bool:
        """Whether nothing more begins in this round."""
        return self._left <= 0

    def begins(self, work: int) -> bool:
        """Begins this, if nothing waits and there is room."""
        if self._clients or self.free <= 0 or self.is_spent:
            return False
        self._begin(work)
        return True

    def wait(self, work: int) -> asyncio.Future[None]:
        """Has a result when it is the turn of the current call."""
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
        """Gives turns to what waits, as long as there is room."""
        while self._clients and self.free > 0 and not self.is_spent:
            turn, work = self._clients.take().take()
            if not turn.done():
                turn.set_result(None)
                self._begin(work)

    def _begin(self, work: int) -> None:
        self.free -= 1
        self._left -= MESSAGE_WORK if self._threads else work


class Turns:
    """Bounds the work between the looks of the event loop at the network, whoever and however many
    ask for it: a round of work, then `LOOKS` looks, since a call needs several from its first byte
    to its reply. What must wait is not read further.

    Args  most        queries of a message that counts as small; the others are large
          at_once     large ones that may be worked on at the same time
          threads     whether threads work on large ones
          in_a_round  work of each kind
          connection  large ones that the streams of one connection may have at work or unread
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
        self._looks = 0  # before the next round

    def room_of_connection(self) -> asyncio.Semaphore:
        """Where the streams of the current call's connection hold their large messages."""
        return self._rooms.setdefault(connection(), asyncio.Semaphore(self._connection))

    async def call(self) -> None:
        """Returns when the current call may be read, or refused: one call begins in a round."""
        await self._turn(self._calls, MESSAGE_WORK)

    async def take(self, work: int, within_s: float | None = None) -> Release:
        """Returns when it is the turn of the current call, with what to call once it is done, or
        more often.

        Args    work  queries, or what takes as long
        Raises  TimeoutError  its turn has not come in so many seconds
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
                if not turn.cancelled():  # it was its turn already
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
        """Begins to count looks, if the lane waits for the next round."""
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
    """Returns once the event loop has looked at the network as often as between two rounds."""
    for _ in range(LOOKS):
        await asyncio.sleep(0)


def _nothing() -> None:
    """After small work."""


@dataclass(slots=True)
class ServingPhase:
    """Of a process's life; `refuses`: rejects new messages, while DRAINING."""

    state: ServingState = ServingState.WARMING
    refuses: bool = False


class Admission:
    """By state and load; on the event loop.

    Args        clock  seconds that never go back
    Attributes  phase, turns  of all models of this process
                load  messages that this process is working on, of all its models
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
        self._asked = self._clock()
        self._metrics.in_flight += 1
        if (client := caller()) is not None:
            client.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its reply has been written, or never will be."""
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
        """Since the last message, or the start."""
        return self._clock() - self._asked

    # ------------------------------------------------------------------ refusals

    def overload(self) -> Refusal | None:
        """Why no message of this caller can be accepted now; None if one can."""
        load = self.load()
        if load >= self._config.max_in_flight:
            return Refusal(
                Reason.OVERLOADED,
                f"{load} messages are in flight; the server accepts at most "
                f"{self._config.max_in_flight}. Ask a replica, or retry later",
            )
        client = caller()
        if client is not None and client.in_flight >= self._config.client_in_flight:
            return Refusal(
                Reason.CLIENT_LIMIT,
                f"this client has {client.in_flight} messages in flight, which is its limit. Send "
                "fewer at once, or retry later",
            )
        return None

    def require_ready(self) -> None:
        if self.phase.state is ServingState.WARMING:
            raise Refusal(
                Reason.NOT_READY, "this server is still warming up; ask a replica, or retry later"
            )
        if self.phase.state is ServingState.DRAINING and self.phase.refuses:
            raise Refusal(Reason.DRAINING, "this server is shutting down; ask a replica")


class ShardAdmission(Admission):
    """By the token of its caller, and by the shard that a message names, too.

    Attributes  held  shard sets of all models on this port that a caller may ask for; `Models`
                      sets it if there are several
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
        """For calls that may name no shard set; a caller without any here is not to ask again."""
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
                "describe the servers again and open a new utterance",
            )
        if shard is not None and shard != self._shard:
            raise Refusal(
                Reason.WRONG_SHARD,
                f"the message is for shard {shard}, but this server holds shard {self._shard}; "
                "look up the address again",
            )
