"""The six calls of dlm.v1.Shard, from the bytes received to the bytes sent (proto/README.md), and
which of the models behind one port a call is for.

They run on the event loop; large messages are answered in a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm import __version__
from dlm.errors import ConfigError, ProtocolError
from dlm.index.layout import FileEntry
from dlm.server.admission import Clock, ShardAdmission, Turns
from dlm.server.answers import Answered, Answerer, OpenShard
from dlm.server.config import ServerConfig
from dlm.server.exchange import ExchangeStream
from dlm.server.health import SHARD_SERVICE, ServingState
from dlm.server.metrics import ServerMetrics
from dlm.server.poller import grpc
from dlm.server.process import Process
from dlm.server.refusals import Refusal, of_exception, parse
from dlm.server.security import models_named, replies_to
from dlm.tracing import Tracer
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import REASON_KEY, Reason

R = TypeVar("R")
# Answers the bytes of a message; does not start after the given time.
Work = Callable[[bytes, float | None], Awaitable[bytes]]


KIND_OF_FILE: dict[int, str] = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders",
}


class ShardService:
    """Answers for one shard.

    Args        clock  monotonic seconds, for deadlines and the uptime
                files  what `downloads.open_files` returned, if it must not open them again
    Guarantees  a Score is answered in full and correctly, or refused with a code and a reason;
                nothing that a client sends can end the process
    """

    def __init__(
        self,
        shard: OpenShard,
        config: ServerConfig,
        *,
        clock: Clock = time.monotonic,
        process: Process | None = None,
        files: Mapping[int, int] | None = None,
    ) -> None:
        self.shard, self.config, self.clock = shard, config, clock
        self.shard_set = shard.manifest.shard_set_bytes
        self.metrics = ServerMetrics()
        self.process = process or Process()
        # More than threads, so that none of them waits for the event loop.
        turns = Turns(
            config.inline_queries,
            4 * config.threads,
            threads=True,
            connection=config.client_in_flight // 2,
        )
        self.admission = ShardAdmission(
            config, self.metrics, turns, shard.manifest.model, self.shard_set, shard.index, clock
        )
        self.answerer = Answerer(
            shard,
            config.max_queries,
            self.admission.require_same,
            clock,
            self.metrics.slot_queries,
        )
        self.downloads = Downloads(shard, config, self.admission, self.metrics, files)
        self._tracer = Tracer(__version__) if config.trace else None
        self._started = clock()
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="dlm-score")

    def close(self) -> None:
        """Ends the threads and closes the files; work that no thread has started is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.downloads.close()

    @property
    def state(self) -> ServingState:
        return self.admission.state

    # ---------------------------------------------------- Score and ContextBlock

    async def score(self, data: bytes, context: Any) -> bytes:
        return await self._take("score", data, context, self._read_and_answer)

    async def context_block(self, data: bytes, context: Any) -> bytes:
        return await self._take("context_block", data, context, self._read_and_list)

    async def _take(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        if self._tracer is not None:
            return await self._take_traced(call, data, context, work, self._tracer)
        return await self._take_counted(call, data, context, work)

    async def _take_counted(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        metrics = self.metrics
        overload = self.admission.overload()
        if overload is not None:
            metrics.refused(overload.reason)
            return await overload.abort(context)
        self.admission.enter()
        try:
            remaining_s = context.time_remaining()
            late = None if remaining_s is None else self.clock() + remaining_s
            self.admission.require_ready()
            return await work(data, late)
        except asyncio.CancelledError:
            metrics.abandoned += 1
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the next message must be answered
            failure = self.refusal(call, exc)
        finally:
            self.admission.leave()
        return await failure.abort(context)

    async def _take_traced(
        self, call: str, data: bytes, context: Any, work: Work, tracer: Tracer
    ) -> bytes:
        span = tracer.proceed(
            f"dlm.{call}", context.invocation_metadata() or (), shard=self.shard.index
        )
        if span is None:
            return await self._take_counted(call, data, context, work)
        result = "abandoned"
        try:
            reply = await self._take_counted(call, data, context, work)
            result = "ok"
            return reply
        except asyncio.CancelledError:
            raise
        except BaseException:
            result = next((v for k, v in context.trailing_metadata() if k == REASON_KEY), "failed")
            raise
        finally:
            span.end(result)

    async def _read_and_answer(self, data: bytes, late: float | None) -> bytes:
        arrived = time.perf_counter()
        message = parse(pb.ScoreRequest(), data)
        message.ClearField("context_block")  # only Exchange carries those
        queries = len(message.words) // codec.WORD_BYTES
        return await self._in_turn(self.answerer.score, message, queries, late, arrived)

    async def _read_and_list(self, data: bytes, late: float | None) -> bytes:
        arrived = time.perf_counter()
        located = self.answerer.locate(data)
        return await self._in_turn(self.answerer.list, located, located.size, late, arrived)

    async def _in_turn(
        self,
        work: Callable[[Any, float | None], Answered],
        asked: Any,
        queries: int,
        late: float | None,
        arrived: float,
    ) -> bytes:
        posted = time.perf_counter()
        release = await self.admission.turns.take(queries)
        try:
            if queries <= self.config.inline_queries:
                answered = work(asked, late)
            else:
                answered = await self.in_thread(work, asked, late)
        finally:
            release()
        self.count(answered, arrived, posted=posted)
        return answered.data

    async def in_thread(
        self, work: Callable[[Any, float | None], Answered], asked: Any, late: float | None
    ) -> Answered:
        loop = asyncio.get_running_loop()
        whose = contextvars.copy_context()  # a refusal names only sets that the caller may ask for
        return await loop.run_in_executor(self._threads, whose.run, work, asked, late)

    def count(
        self,
        answered: Answered,
        arrived: float,
        waited_s: float = 0.0,
        posted: float | None = None,
    ) -> None:
        """Counts a request that was answered.

        Args  arrived  when it was read, after it had waited `waited_s`
              posted   when enough of it was read to hand it to a thread
        """
        read = arrived if posted is None else posted
        self.metrics.blocks += answered.blocks
        self.metrics.answered(
            answered.queries,
            answered.by_order,
            waited_s + answered.begun - read,
            read - arrived + answered.decode_s,
            answered.search_s,
            answered.encode_s,
        )

    def refusal(self, call: str, exc: Exception) -> Refusal:
        refusal = of_exception(call, exc, shard=self.shard.index)
        self.metrics.refused(refusal.reason)
        return refusal

    def written(self, write_s: float) -> None:
        """Counts the reply to an accepted message, and releases the message."""
        self.metrics.wrote(write_s)
        self.admission.leave()

    def warm_up(self, data: bytes) -> None:
        self.answerer.warm_up(data)

    # ------------------------------------------------- Describe and Heartbeat

    async def describe(self, data: bytes, context: Any) -> bytes:
        return await self._guard(context, "describe", lambda: self._describe(data))

    def _describe(self, data: bytes) -> bytes:
        request = parse(pb.DescribeRequest(), data)
        self.admission.require_open()
        if request.shard_set:
            self.admission.require_same(request.shard_set)
        reply = pb.DescribeReply(
            manifest=self.shard.manifest.text,
            shard=self.shard.index,
            state=pb.ServerState.Name(self.state),
            max_queries=self.config.max_queries,
            max_message_bytes=self.config.max_message_bytes,
            server_version=__version__,
            shard_set=self.shard_set,
            shard_sets=self.admission.held(),
            token_models=models_named(),
        )
        reply.checksum = codec.describe_checksum(reply)
        return bytes(reply.SerializeToString())

    async def heartbeat(self, data: bytes, context: Any) -> bytes:
        return await self._guard(context, "heartbeat", lambda: self._heartbeat(data))

    def _heartbeat(self, data: bytes) -> bytes:
        request = parse(pb.HeartbeatRequest(), data)
        self.admission.require_open()
        if request.shard_set:
            self.admission.require_same(request.shard_set, request.shard)
        reply = pb.HeartbeatReply(
            sequence=request.sequence,
            shard_set=self.shard_set,
            shard=self.shard.index,
            state=pb.ServerState.Name(self.state),
            instance=self.process.instance,
            messages=self.metrics.messages,
            queries=self.metrics.queries,
            refused=self.metrics.refused_total,
            in_flight=self.metrics.in_flight,
            uptime_ms=int(1000 * (self.clock() - self._started)),
            worker=self.process.worker,
            workers=self.process.workers,
            cpu_ms=self.process.cpu_ms(),
            memory_bytes=self.process.memory.bytes(),
        )
        reply.checksum = codec.heartbeat_checksum(reply)
        return bytes(reply.SerializeToString())

    # --------------------------------------------------------------- Download

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        download = await self._guard(context, "download", lambda: self.downloads.begin(data))
        self.metrics.downloads += 1
        try:
            while download.offset < download.entry.bytes:
                yield await self._guard(
                    context, "download", lambda: self.downloads.next_chunk(download)
                )
        finally:
            self.metrics.downloads -= 1

    async def _guard(self, context: Any, call: str, work: Callable[[], R | Awaitable[R]]) -> R:
        """What `work` returns; if it refuses or fails, the call ends with a status instead."""
        try:
            result = work()
            return await result if isinstance(result, Awaitable) else result
        except Exception as exc:  # noqa: BLE001 - the server must live on
            failure = of_exception(call, exc, shard=self.shard.index)
        return await failure.abort(context)


@dataclass(slots=True)
class Download:
    descriptor: int
    entry: FileEntry
    offset: int


class Downloads:
    """Those of one service; `files` from `open_files`, if it must not open them again."""

    def __init__(
        self,
        shard: OpenShard,
        config: ServerConfig,
        admission: ShardAdmission,
        metrics: ServerMetrics,
        files: Mapping[int, int] | None = None,
    ) -> None:
        self._shard, self._config = shard, config
        self._admission, self._metrics = admission, metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-download")
        opened = open_files(shard) if files is None else {n: os.dup(f) for n, f in files.items()}
        self.files: dict[int, tuple[int, FileEntry]] = {
            number: (descriptor, shard.manifest.file(KIND_OF_FILE[number]))
            for number, descriptor in opened.items()
        }

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for descriptor, _ in self.files.values():
            os.close(descriptor)
        self.files = {}

    def begin(self, data: bytes) -> Download:
        request = parse(pb.DownloadRequest(), data)
        self._admission.require_ready()
        self._admission.require_same(request.shard_set, request.shard)
        if request.file not in self.files:
            raise Refusal(
                Reason.MALFORMED,
                f"the request names file {request.file}; expected "
                f"{pb.DOWNLOAD_FILE_VOCABULARY} for the vocabulary or "
                f"{pb.DOWNLOAD_FILE_LOW_ORDERS} for the low orders",
            )
        descriptor, entry = self.files[request.file]
        if request.offset > entry.bytes:
            raise Refusal(
                Reason.OFFSET_OUT_OF_RANGE,
                f"offset {request.offset} is beyond the end of {entry.name}, which has "
                f"{entry.bytes} bytes; start again at 0",
            )
        if self._metrics.downloads >= self._config.max_downloads:
            raise Refusal(
                Reason.OVERLOADED,
                f"{self._metrics.downloads} downloads are running, which is the limit. Ask a "
                "replica, or retry later, from the same offset",
            )
        return Download(descriptor, entry, request.offset)

    def next_chunk(self, download: Download) -> Awaitable[bytes]:
        """The next chunk, serialized; raises `Refusal` if the server drains."""
        self._admission.require_ready()
        size = min(codec.CHUNK_BYTES, download.entry.bytes - download.offset)
        offset, download.offset = download.offset, download.offset + size
        loop = asyncio.get_running_loop()
        # By name at each call: a test holds the reading up.
        read: Callable[..., bytes] = self.read_chunk
        return loop.run_in_executor(
            self._thread, read, download.descriptor, download.entry, offset, size
        )

    def read_chunk(self, descriptor: int, entry: FileEntry, offset: int, size: int) -> bytes:
        raw = os.pread(descriptor, size, offset)
        if len(raw) != size:
            raise OSError(f"{entry.name} ends at byte {offset + len(raw)}; it was truncated")
        chunk = codec.encode_chunk(
            raw,
            shard_set=self._shard.manifest.shard_set_bytes,
            shard=self._shard.index,
            offset=offset,
            file_bytes=entry.bytes,
        )
        return bytes(chunk.SerializeToString())


def open_files(shard: OpenShard) -> dict[int, int]:
    """Descriptors, by number on the wire: replacing the folder of a running server has no
    effect."""
    return {
        number: os.open(shard.directory / shard.manifest.file(kind).name, os.O_RDONLY)
        for number, kind in KIND_OF_FILE.items()
    }


M = TypeVar("M", pb.ScoreRequest, pb.DescribeRequest, pb.DownloadRequest, pb.HeartbeatRequest)

# The first bytes of a ScoreRequest or ContextBlockRequest with its fields in order, as all known
# writers have them: field 1, 16 bytes.
_FIRST_FIELD = b"\x0a" + bytes([codec.SHARD_SET_BYTES])
_FIRST_END = len(_FIRST_FIELD) + codec.SHARD_SET_BYTES


class Models:
    """The services of one server process, one per shard set, which may change; ConfigError if one
    is given twice. A call that names none is for the first.

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
