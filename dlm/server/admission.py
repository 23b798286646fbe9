"""Which messages does a service take now? Its state, its shard, and what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlm.server.config import ServerConfig
from dlm.server.health import ServingState
from dlm.server.metrics import ServerMetrics
from dlm.server.refusals import Refusal
from dlm.server.security import caller
from dlm.wire import codec
from dlm.wire.status import Reason

Clock = Callable[[], float]


class Admission:
    """Of one shard; on the event loop.

    Args
        shard_set, shard  what the service holds
        clock             seconds that never go back
    Attributes
        refuses  while DRAINING: no longer takes what comes
        held     shard sets of all models on this port; `Models` says so where there are several
        load     messages that this process works on, of all its models
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: ServerMetrics,
        shard_set: bytes,
        shard: int,
        clock: Clock,
    ) -> None:
        self.state = ServingState.WARMING
        self.refuses = False
        self.held: tuple[bytes, ...] = (shard_set,)
        self.load: Callable[[], int] = lambda: metrics.in_flight
        self._config, self._metrics, self._clock = config, metrics, clock
        self._shard_set, self._shard = shard_set, shard
        self._asked = float("-inf")  # when the last message came
        self._idle = asyncio.Event()
        self._idle.set()

    # ----------------------------------------------------------------- in flight

    def enter(self) -> None:
        """A message is taken."""
        self._asked = self._clock()
        self._metrics.in_flight += 1
        if (client := caller()) is not None:
            client.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """It is answered, and its reply written; or it never will be."""
        self._metrics.in_flight -= 1
        if (client := caller()) is not None:
            client.in_flight -= 1
        if not self._metrics.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Returns once no message is in flight."""
        await self._idle.wait()

    def asked_within(self, seconds: float) -> bool:
        """Whether a message came in the last `seconds`."""
        return self._clock() - self._asked < seconds

    # ------------------------------------------------------------------ refusals

    def overload(self) -> Refusal | None:
        """Why no message of this caller can be taken now; None where one can."""
        load = self.load()
        if load >= self._config.max_in_flight:
            return Refusal(
                Reason.OVERLOADED,
                f"{load} messages are in flight, {self._config.max_in_flight} at "
                "most are taken; ask a replica, or again later",
            )
        client = caller()
        if client is not None and client.in_flight >= self._config.client_in_flight:
            return Refusal(
                Reason.CLIENT_LIMIT,
                f"{client.in_flight} messages of this client are in flight, as many as one client "
                "may have; send fewer at once, or again later",
            )
        return None

    def require_ready(self) -> None:
        """Raises `Refusal` where the service answers nothing, not yet or no longer."""
        if self.state is ServingState.WARMING:
            raise Refusal(
                Reason.NOT_READY, "this server is still warming up; ask a replica, or again later"
            )
        if self.state is ServingState.DRAINING and self.refuses:
            raise Refusal(Reason.DRAINING, "this server is going away; ask a replica")

    def require_same(self, shard_set: bytes, shard: int | None = None) -> None:
        """Raises `Refusal` where a message means another shard set, or another shard."""
        if len(shard_set) != codec.SHARD_SET_BYTES:
            raise Refusal(
                Reason.MALFORMED,
                f"shard_set has {len(shard_set)} bytes, {codec.SHARD_SET_BYTES} expected",
            )
        if shard_set != self._shard_set:
            raise Refusal(
                Reason.WRONG_SHARD_SET,
                f"shard set {shard_set.hex()} was asked, this server holds "
                f"{' and '.join(one.hex() for one in self.held)}; "
                "describe the servers again and open a new handle",
            )
        if shard is not None and shard != self._shard:
            raise Refusal(
                Reason.WRONG_SHARD,
                f"shard {shard} was asked, this server holds {self._shard}; "
                "look the address up again",
            )
