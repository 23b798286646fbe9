"""Which messages a service accepts now: by its state, what is in flight, and its shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from dlm.server.config import Access
from dlm.server.health import ServingState
from dlm.server.refusals import Refusal
from dlm.server.security import caller, may_ask
from dlm.wire import codec
from dlm.wire.status import Reason

Clock = Callable[[], float]

NOT_NAMED = (
    "the token of this call may ask for no model that is served here; the operator adds the id of "
    "one after models= to the token's line"
)


class InFlight(Protocol):
    """Where the messages being worked on are counted."""

    in_flight: int


class Admission:
    """By state and load; on the event loop.

    Args        clock  seconds that never go back
    Attributes  refuses  while DRAINING: rejects new messages
                load     messages that this process is working on, of all its models
    """

    def __init__(self, config: Access, metrics: InFlight, clock: Clock) -> None:
        self.state = ServingState.WARMING
        self.refuses = False
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

    def asked_within(self, seconds: float) -> bool:
        return self._clock() - self._asked < seconds

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
        if self.state is ServingState.WARMING:
            raise Refusal(
                Reason.NOT_READY, "this server is still warming up; ask a replica, or retry later"
            )
        if self.state is ServingState.DRAINING and self.refuses:
            raise Refusal(Reason.DRAINING, "this server is shutting down; ask a replica")


class ShardAdmission(Admission):
    """By the token of its caller, and by the shard that a message names, too.

    Attributes  held  shard sets of all models on this port that a caller may ask for; `Models`
                      sets it if there are several
    """

    def __init__(
        self,
        config: Access,
        metrics: InFlight,
        model: str,
        shard_set: bytes,
        shard: int,
        clock: Clock,
    ) -> None:
        super().__init__(config, metrics, clock)
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
