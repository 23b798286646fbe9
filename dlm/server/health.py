"""Defines the states of a server, and reports them through the standard health service.

The transitions only decide; `life` acts on them. A draining server never becomes ready again,
and a state is announced before it is acted on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import Enum, IntEnum
from typing import Any

from grpc_health.v1 import health_pb2

from dlm.server.poller import grpc
from dlm.wire._pb import shard_pb2 as pb

SHARD_SERVICE = "dlm.v1.Shard"
HEALTH_SERVICE = "grpc.health.v1.Health"


class ServingState(IntEnum):
    WARMING = pb.SERVER_STATE_WARMING
    READY = pb.SERVER_STATE_READY
    DRAINING = pb.SERVER_STATE_DRAINING


class Event(Enum):
    WARMED = "the warm-up has ended"
    FAILED = "the warm-up has failed"
    STOP = "a signal asked the server to stop"
    DRAINED = "no messages are in flight any longer, or the time to finish them has passed"


class Action(Enum):
    ANNOUNCE = "tell the health service"
    PUBLISH = "write the ready file and call on_ready"
    DRAIN = "wait for what is in flight"
    CLOSE = "close the port and end"


TRANSITIONS: dict[tuple[ServingState, Event], tuple[ServingState, tuple[Action, ...]]] = {
    (ServingState.WARMING, Event.WARMED): (ServingState.READY, (Action.ANNOUNCE, Action.PUBLISH)),
    (ServingState.WARMING, Event.FAILED): (ServingState.DRAINING, (Action.ANNOUNCE, Action.CLOSE)),
    (ServingState.WARMING, Event.STOP): (ServingState.DRAINING, (Action.ANNOUNCE, Action.DRAIN)),
    (ServingState.WARMING, Event.DRAINED): (ServingState.WARMING, ()),
    (ServingState.READY, Event.WARMED): (ServingState.READY, ()),
    (ServingState.READY, Event.FAILED): (ServingState.READY, ()),
    (ServingState.READY, Event.STOP): (ServingState.DRAINING, (Action.ANNOUNCE, Action.DRAIN)),
    (ServingState.READY, Event.DRAINED): (ServingState.READY, ()),
    (ServingState.DRAINING, Event.WARMED): (ServingState.DRAINING, ()),
    (ServingState.DRAINING, Event.FAILED): (ServingState.DRAINING, ()),
    (ServingState.DRAINING, Event.STOP): (ServingState.DRAINING, (Action.CLOSE,)),
    (ServingState.DRAINING, Event.DRAINED): (ServingState.DRAINING, (Action.CLOSE,)),
}


def step(state: ServingState, event: Event) -> tuple[ServingState, tuple[Action, ...]]:
    return TRANSITIONS[state, event]


def serving_status(state: ServingState) -> int:
    response = health_pb2.HealthCheckResponse
    return int(response.SERVING if state is ServingState.READY else response.NOT_SERVING)


class HealthService:
    """Serves grpc.health.v1.Health for "" (the whole server) and for `service`."""

    def __init__(self, state: ServingState, service: str = SHARD_SERVICE) -> None:
        self._service = service
        self._services = frozenset({"", service, HEALTH_SERVICE})
        self._state = state
        self._in_trouble = False
        self._closed = False
        self._changed = asyncio.Condition()

    async def announce(self, state: ServingState, *, in_trouble: bool = False) -> None:
        """Reports `state` from now on, also to watchers; NOT_SERVING if `in_trouble`."""
        async with self._changed:
            self._state, self._in_trouble = state, in_trouble
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _status(self, service: str) -> int | None:
        state = ServingState.DRAINING if self._in_trouble else self._state
        return serving_status(state) if service in self._services else None

    async def check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"this server has no such service; use {self._service}",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            status = self._watched(request.service)
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status
            async with self._changed:
                # This comparison sees changes since the yield, so none is missed.
                if self._watched(request.service) == sent:
                    if self._closed:
                        return
                    await self._changed.wait()

    def _watched(self, service: str) -> int:
        status = self._status(service)
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN if status is None else status)

    def handlers(self) -> Any:
        reply = health_pb2.HealthCheckResponse.SerializeToString
        request = health_pb2.HealthCheckRequest.FromString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check, request, reply),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, request, reply),
            },
        )
