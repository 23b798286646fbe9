"""The models behind one port, which may change: which of them a call is for; the first if it names
none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from dlm.errors import ConfigError, ProtocolError
from dlm.server.exchange import ExchangeStream
from dlm.server.health import SHARD_SERVICE, ServingState
from dlm.server.poller import grpc
from dlm.server.security import replies_to
from dlm.server.service import ShardService
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

M = TypeVar("M", pb.ScoreRequest, pb.DescribeRequest, pb.DownloadRequest, pb.HeartbeatRequest)

# The first bytes of a ScoreRequest or ContextBlockRequest with its fields in order, as all known
# writers have them: field 1, 16 bytes.
_FIRST_FIELD = b"\x0a" + bytes([codec.SHARD_SET_BYTES])
_FIRST_END = len(_FIRST_FIELD) + codec.SHARD_SET_BYTES


class Models:
    """The services of one server process, one per shard set; ConfigError if one is given twice.

    Args  changes  whether `change` will be called
    """

    def __init__(self, services: Sequence[ShardService], *, changes: bool = False) -> None:
        self._changes = changes
        self.default = services[0]
        self.turns = self.default.admission.turns
        self._by_set = {service.shard_set: service for service in services}
        if len(self._by_set) != len(services):
            for service in services:
                service.close()
            raise ConfigError(
                "two of the folders hold the same shard set; give each model once "
                f"(found: {', '.join(service.shard_set.hex() for service in services)})"
            )
        self._tell()

    def _tell(self) -> None:
        for service in self:
            service.admission.turns = self.turns
            service.admission.held = lambda: tuple(one.shard_set for one in self._open())
            if len(self) > 1 or self._changes:
                service.admission.load = lambda: self.in_flight

    def change(self, services: Sequence[ShardService]) -> list[ShardService]:
        """Serves these from now on, the first by default; returns those that no message reaches any
        longer, which may still have messages in flight."""
        old = [service for service in self if service not in services]
        before, self.default = self.default, services[0]
        state, refuses = before.admission.state, before.admission.refuses
        self._by_set = {service.shard_set: service for service in services}
        for service in self:
            service.admission.state, service.admission.refuses = state, refuses
        if self.default is not before:  # streams stay open, and count as the default's
            self.default.metrics.streams += before.metrics.streams
            before.metrics.streams = 0
        self._tell()
        return old

    def __iter__(self) -> Iterator[ShardService]:
        return iter(self._by_set.values())

    def __len__(self) -> int:
        return len(self._by_set)

    @property
    def state(self) -> ServingState:
        return self.default.state

    @state.setter
    def state(self, state: ServingState) -> None:
        for service in self:
            service.admission.state = state

    @property
    def refuses(self) -> bool:
        return self.default.admission.refuses

    @refuses.setter
    def refuses(self, refuses: bool) -> None:
        for service in self:
            service.admission.refuses = refuses

    def is_wanted(self, quiet_s: float) -> bool:
        """Whether a message is in flight, or may be about to come: a stream is open, and its last
        message came less than `quiet_s` ago."""
        if self.in_flight:
            return True
        streams = sum(service.metrics.streams for service in self)
        return streams > 0 and any(service.admission.asked_within(quiet_s) for service in self)

    @property
    def in_flight(self) -> int:
        return sum(service.metrics.in_flight for service in self)

    async def idle(self) -> None:
        while self.in_flight:
            for service in self:
                await service.admission.idle()

    def close(self) -> None:
        for service in self:
            service.close()

    # ------------------------------------------------------------- the choice

    def find(self, shard_set: bytes) -> ShardService:
        """The service that checks and answers a message for `shard_set`; the first that the caller
        may ask if none has it, or if it may not ask that one.

        It refuses the message, for the first reason in the order of the contract (a damaged
        message is CHECKSUM, not another set). Each service checks that the message names its own
        set, so a mistake here cannot become an answer.
        """
        found = self._by_set.get(shard_set, self.default)
        return found if found.admission.is_open() else next(self._open(), found)

    def _open(self) -> Iterator[ShardService]:
        return (service for service in self if service.admission.is_open())

    def find_for(self, data: bytes) -> ShardService:
        """`find` for a serialized ScoreRequest or ContextBlockRequest, before it is checked."""
        if data.startswith(_FIRST_FIELD):
            named = data[len(_FIRST_FIELD) : _FIRST_END]
        else:
            named = self._named(pb.ScoreRequest(), data)
        return self.find(named)

    def _named(self, message: M, data: bytes) -> bytes:
        try:
            return bytes(codec.parse(message, data).shard_set)
        except ProtocolError:
            return b""

    def _chosen(self, message: M, data: bytes) -> ShardService:
        return self.find(self._named(message, data))

    # -------------------------------------------------------------- the calls

    async def score(self, data: bytes, context: Any) -> bytes:
        return await self.find_for(data).score(data, context)

    async def context_block(self, data: bytes, context: Any) -> bytes:
        return await self.find_for(data).context_block(data, context)

    async def exchange(self, _: Any, context: Any) -> None:
        """Each message of the stream goes to the service that it names."""
        async with replies_to(context) as replies:
            counts = lambda: self.default.metrics  # noqa: E731
            await ExchangeStream(self.find, counts, self.turns, context, replies).run()

    async def describe(self, data: bytes, context: Any) -> bytes:
        return await self._chosen(pb.DescribeRequest(), data).describe(data, context)

    async def heartbeat(self, data: bytes, context: Any) -> bytes:
        return await self._chosen(pb.HeartbeatRequest(), data).heartbeat(data, context)

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        chunks: Any = self._chosen(pb.DownloadRequest(), data).download(data, context)
        async with aclosing(chunks):  # a client that stops half-way frees its place
            async for chunk in chunks:
                yield chunk

    def handlers(self) -> Any:
        calls: Any = self if self._changes or len(self._by_set) > 1 else self.default
        return grpc.method_handlers_generic_handler(
            SHARD_SERVICE,
            {
                "Score": grpc.unary_unary_rpc_method_handler(calls.score),
                "ContextBlock": grpc.unary_unary_rpc_method_handler(calls.context_block),
                "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
                "Describe": grpc.unary_unary_rpc_method_handler(calls.describe),
                "Download": grpc.unary_stream_rpc_method_handler(calls.download),
                "Heartbeat": grpc.unary_unary_rpc_method_handler(calls.heartbeat),
            },
        )
