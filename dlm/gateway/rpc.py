"""The door by gRPC: dlm.v1.LanguageModel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from dlm.gateway.answers import SERVICE
from dlm.gateway.calls import CALLS, Dispatcher
from dlm.gateway.turns import Left
from dlm.server.poller import grpc
from dlm.server.refusals import Refusal, parse
from dlm.wire._pb import lm_pb2 as pb

DOOR = "grpc"


class Plain:
    """Messages as their bytes; see `Form`."""

    async def read(self, kind: Any, data: bytes, left: Left) -> Any:
        return parse(kind(), data)

    async def write(self, kind: Any, reply: bytes, left: Left) -> bytes:
        return reply


class RpcDoor:
    """Its handlers take and return bytes, so that what is no message is refused with a reason."""

    def __init__(self, calls: Dispatcher) -> None:
        self._calls = calls

    def handlers(self) -> Any:
        methods = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._one, name)) for name in CALLS
        }
        methods["ExtendStream"] = grpc.stream_stream_rpc_method_handler(self._many)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _one(self, call: str, data: bytes, context: Any) -> bytes:
        try:
            return await self._answer(call, data, context, context.time_remaining())
        except Refusal as refusal:
            await refusal.abort(context)

    async def _many(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Each step has the time of a call: the stream itself lives as long as its caller wants."""
        async for data in requests:
            try:
                reply = await self._answer("Extend", data, context, None, streamed=True)
            except Refusal as refusal:
                refused = pb.ExtendReply(
                    reason=refusal.reason.value,
                    message=refusal.message,
                    retry_after_ms=refusal.retry_ms,
                )
                reply = refused.SerializeToString()
            yield reply

    async def _answer(
        self, call: str, data: bytes, context: Any, left_s: float | None, streamed: bool = False
    ) -> bytes:
        metadata = context.invocation_metadata() or ()
        return await self._calls.answer(
            call, data, Plain(), door=DOOR, left_s=left_s, metadata=metadata, streamed=streamed
        )
