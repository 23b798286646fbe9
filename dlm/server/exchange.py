"""Finds which of a port's models a call is for; and runs an Exchange, a stream of Scores and
ContextBlocks for any of these models.

Each small message is answered before the next is read: a client that sends too fast delays only its
own stream. Large ones are answered in threads, out of order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from math import inf
from typing import Any

from dlm.errors import ConfigError, ProtocolError
from dlm.logs import EventLog
from dlm.server.admission import Release, ShardAdmission, Turns
from dlm.server.answers import Located
from dlm.server.health import SHARD_SERVICE, ServingState
from dlm.server.metrics import ServerMetrics
from dlm.server.poller import grpc
from dlm.server.refusals import Refusal, too_late
from dlm.server.replies import Replies
from dlm.server.security import replies_to
from dlm.server.service import ShardService
from dlm.wire import codec, pairs
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason

logger = EventLog(__name__)

# Name of a call -> its request type, and the method of `ShardService` that answers it.
UNARY: dict[str, tuple[Any, str]] = {
    "Score": (pb.ScoreRequest, "score"),
    "ContextBlock": (pb.ContextBlockRequest, "context_block"),
    "Describe": (pb.DescribeRequest, "describe"),
    "Heartbeat": (pb.HeartbeatRequest, "heartbeat"),
}

# The first bytes of a message that names a shard set: field 1, with 16 bytes. All known writers
# put the fields in order. (A heartbeat names its set elsewhere, and has no bytes in field 1.)
_FIRST_FIELD = b"\x0a" + bytes([codec.SHARD_SET_BYTES])
_FIRST_END = len(_FIRST_FIELD) + codec.SHARD_SET_BYTES

# The largest reply that is sent with the operation that receives the next message. gRPC does not
# say whether the client has read it, so it does not count as in flight. Such a reply takes about
# as much memory as an idle stream, and the limits on streams bound the number of both.
PAIRED_BYTES = 16_384
WINDOW_S = 60.0  # window of `Lateness`


class Lateness:
    """How long a message was in transit, measured with two clocks that are not synchronised.

    The client stamps each message with its own clock. The difference from this process's clock is
    the offset of the clocks plus the time in transit. The smallest recent difference is taken as
    that of a message that waited nowhere; a message's excess over it was spent in queues. The
    minimum is over one to two windows, since clocks drift (50 parts per million are 3 ms per
    minute).
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._begun = -inf
        self._before = inf  # smallest difference of the previous window
        self._least = inf  # smallest difference of this window

    def of(self, sent_us: int, now: float) -> float:
        """Seconds, at least 0, that a message stamped `sent_us` has waited until `now`."""
        if self._first is None:
            self._first = now
        difference = now - sent_us * 1e-6
        if now - self._begun >= WINDOW_S:
            self._begun = now
            self._before, self._least = self._least, inf
        self._least = min(self._least, difference)
        # Whatever the stamps say, no message waited longer than its stream has been open.
        return min(difference - min(self._least, self._before), now - self._first)


class ExchangeStream:
    """Serves one stream, on the event loop.

    Args  find     returns the model of a message, by its shard set
          metrics  returns the current counts of the process
    """

    def __init__(
        self,
        find: Callable[[bytes], ShardService],
        metrics: Callable[[], ServerMetrics],
        turns: Turns,
        context: Any,
        replies: Replies,
    ) -> None:
        self._find, self._metrics, self._turns = find, metrics, turns
        self._context, self._replies = context, replies
        self._call, self._loop = pairs.call_of(context), asyncio.get_running_loop()
        self._lateness = Lateness()
        self._room = turns.room_of_connection()
        self._large: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._metrics().streams += 1
        try:
            await self._read_all()
            if self._large:
                await asyncio.gather(*self._large, return_exceptions=True)
            await self._replies.flush()
        finally:
            self._metrics().streams -= 1
            for task in list(self._large):
                task.cancel()

    async def _read_all(self) -> None:
        data = await self._context.read()
        while data is not grpc.aio.EOF:
            reply = await self._take(data)
            data = None
            if reply is not None:
                data = await pairs.send_and_receive(self._call, reply, self._loop)
            if data is None:
                data = await self._context.read()

    async def _take(self, data: bytes) -> bytes | None:
        """Answers one message; returns the reply if `_read_all` is to send it with its next read.

        Nothing in `_take` may outlive the message: an idle stream must not hold its last model.
        """
        self._replies.check()
        try:
            message = codec.parse(pb.ScoreRequest(), data)
        except ProtocolError:
            await self._break_off(len(data))
        queries = len(message.words) // codec.WORD_BYTES
        with ExitStack() as held:
            if queries > self._turns.most:
                await self._room.acquire()
                held.callback(self._room.release)
            release = held.callback(await self._turns.take(queries))
            return await self._answer(message, queries, held, release)

    async def _answer(
        self, message: pb.ScoreRequest, queries: int, held: ExitStack, release: Release
    ) -> bytes | None:
        """Answers a message for `_take`.

        Args  held     closed when the reply is written
              release  ends the message's turn
        """
        replies, arrived = self._replies, time.perf_counter()
        model = self._find(message.shard_set)
        admission = model.admission
        try:
            admission.enter()
        except Refusal as overload:
            release()
            # This reply is limited like any other: if a client does not read replies, its messages
            # are not read either.
            await replies.put(self._refuse(model, message, overload), model.metrics.write_s.add)
            return None
        located = posted = None
        try:
            late, waited_s = self._admit(model, message)
            if message.context_block:
                located = model.answerer.locate(message)
                posted = time.perf_counter()
                small = located.size <= model.config.inline_queries
                if not small:
                    release()
                    release = held.callback(await self._turns.take(located.size))
                answered = model.answerer.list(located, late) if small else None
            else:
                small = queries <= model.config.inline_queries
                answered = model.answerer.score(message, late) if small else None
        except asyncio.CancelledError:
            admission.leave()
            raise
        except Exception as exc:  # noqa: BLE001 - later messages must be answered
            release()
            await replies.put(self._refuse(model, message, exc), model.written)
            return None
        if answered is None:
            large = self._answer_large(model, message, located, arrived, late, waited_s, release)
            self._begin(large, model, held.pop_all())
            return None
        release()
        model.count(answered, arrived, waited_s, posted)
        if self._goes_with_next(answered.data, admission):
            admission.leave()
            return answered.data
        await replies.put(answered.data, model.written)
        return None

    def _goes_with_next(self, reply: bytes, admission: ShardAdmission) -> bool:
        """Whether a reply is sent with the next read. The first reply is not, since gRPC sends
        metadata with it; nor is any reply while others are in flight."""
        return (
            self._call is not None
            and len(reply) <= PAIRED_BYTES
            and self._replies.is_idle
            and not self._large
            and admission.phase.state is ServingState.READY
        )

    def _begin(
        self, large: Coroutine[Any, Any, None], model: ShardService, held: ExitStack
    ) -> None:
        task = asyncio.create_task(large)
        self._large.add(task)

        def finished(_: object) -> None:
            self._large.discard(task)
            model.admission.leave()
            held.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                # Usually, the client disconnected before the reply came.
                logger.info("server.reply.undelivered", extra={"error": type(error).__name__})

        task.add_done_callback(finished)

    async def _answer_large(
        self,
        model: ShardService,
        message: pb.ScoreRequest,
        located: Located | None,
        arrived: float,
        late: float | None,
        waited_s: float,
        release: Release,
    ) -> None:
        posted = time.perf_counter()
        try:
            if located is None:
                answered = await model.in_thread(model.answerer.score, message, late)
            else:
                answered = await model.in_thread(model.answerer.list, located, late)
        except asyncio.CancelledError:  # the client, or malformed bytes, ended the stream
            model.metrics.abandoned += 1
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the error, the client is told
            reply = self._refuse(model, message, exc)
        else:
            model.count(answered, arrived, waited_s, posted)
            reply = answered.data
        finally:
            release()
        model.metrics.write_s.add(await self._replies.write(reply))

    def _admit(self, model: ShardService, message: pb.ScoreRequest) -> tuple[float | None, float]:
        """Returns the time until which an answer is useful, and the seconds that the message has
        waited; raises `Refusal`."""
        now = model.clock()
        waited_s = self._lateness.of(message.sent_us, now)
        model.admission.require_ready()
        late = None
        if message.timeout_us:
            late = now - waited_s + message.timeout_us * 1e-6
            if now >= late:
                raise too_late()
        return late, waited_s

    def _refuse(self, model: ShardService, message: pb.ScoreRequest, exc: Exception) -> bytes:
        return model.refusal("exchange", exc).reply(message.sequence)

    async def _break_off(self, size: int) -> None:
        """Ends a stream after bytes that are not a message: a reply could not name the message,
        and later bytes cannot be trusted either."""
        self._metrics().refusals[Reason.MALFORMED] += 1
        for task in list(self._large):  # end them before the client is told that the stream ended
            task.cancel()
        await self._replies.flush()
        said = (
            f"received {size} bytes that are not a dlm.v1.ScoreRequest; open a new stream and send "
            "the request again"
        )
        await Refusal(Reason.MALFORMED, said).abort(self._context)


class Models:
    """The services of one server process, one per shard set; they may change. ConfigError if a set
    is given twice. The first service answers calls that name no set.

    Args  changes  whether `change` will be called
    """

    def __init__(self, services: Sequence[ShardService], *, changes: bool = False) -> None:
        self._changes = changes
        self.default = services[0]
        self.turns = self.default.admission.turns
        self.phase = self.default.admission.phase
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
            service.admission.phase = self.phase
            service.admission.held = lambda: tuple(one.shard_set for one in self._open())
            if len(self) > 1 or self._changes:
                service.admission.load = lambda: self.in_flight

    def change(self, services: Sequence[ShardService]) -> list[ShardService]:
        """Uses these services from now on, the first as the default; returns the services that
        no longer get new messages, but may still have some in flight."""
        old = [service for service in self if service not in services]
        before, self.default = self.default, services[0]
        self._by_set = {service.shard_set: service for service in services}
        if self.default is not before:  # the new default counts the streams, which stay open
            self.default.metrics.streams += before.metrics.streams
            before.metrics.streams = 0
        self._tell()
        return old

    def __iter__(self) -> Iterator[ShardService]:
        return iter(self._by_set.values())

    def __len__(self) -> int:
        return len(self._by_set)

    def is_wanted(self, quiet_s: float) -> bool:
        """Whether a message is in flight, or may be about to come: a stream is open, and its last
        message came less than `quiet_s` ago."""
        if self.in_flight:
            return True
        streams = sum(service.metrics.streams for service in self)
        return streams > 0 and any(service.admission.is_wanted(quiet_s) for service in self)

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
        """Returns the service that checks and answers a message for `shard_set`. If there is none,
        or the caller may not ask it, returns the first service that the caller may ask.

        That service refuses the message for the first reason in the contract's order, in which
        CHECKSUM, for a damaged message, precedes a wrong set. Each service checks that the message
        names its own set, so a mistake of `find` cannot become an answer.
        """
        found = self._by_set.get(shard_set, self.default)
        return found if found.admission.is_open() else next(self._open(), found)

    def _open(self) -> Iterator[ShardService]:
        return (service for service in self if service.admission.is_open())

    def find_for(self, kind: Any, data: bytes) -> ShardService:
        """`find` for a serialized message of this kind, before it is checked."""
        if data.startswith(_FIRST_FIELD):
            return self.find(data[len(_FIRST_FIELD) : _FIRST_END])
        try:
            return self.find(codec.parse(kind(), data).shard_set)
        except ProtocolError:
            return self.find(b"")

    # -------------------------------------------------------------- the calls

    async def _one(self, kind: Any, call: str, data: bytes, context: Any) -> bytes:
        return bytes(await getattr(self.find_for(kind, data), call)(data, context))

    async def exchange(self, _: Any, context: Any) -> None:
        """Passes each message of the stream to the service that the message names."""
        async with replies_to(context) as replies:
            counts = lambda: self.default.metrics  # noqa: E731
            await ExchangeStream(self.find, counts, self.turns, context, replies).run()

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        chunks: Any = self.find_for(pb.DownloadRequest, data).download(data, context)
        async with aclosing(chunks):  # so that a client that stops halfway frees its place
            async for chunk in chunks:
                yield chunk

    def handlers(self) -> Any:
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._one, kind, call)
                if self._changes or len(self) > 1
                else getattr(self.default, call)  # the only model parses the message
            )
            for name, (kind, call) in UNARY.items()
        }
        methods["Exchange"] = grpc.stream_stream_rpc_method_handler(self.exchange)
        methods["Download"] = grpc.unary_stream_rpc_method_handler(self.download)
        return grpc.method_handlers_generic_handler(SHARD_SERVICE, methods)
