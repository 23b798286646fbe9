"""Implements the six calls of dlm.v1.Shard for one model, from the bytes received to the bytes sent
(proto/README.md).

The calls run on the event loop; large messages are answered in a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from dlm import __version__
from dlm.index.layout import FileEntry
from dlm.index.search.shard import Shard
from dlm.server.admission import Clock, ShardAdmission, Turns
from dlm.server.answers import Answered, Answerer
from dlm.server.config import ServerConfig
from dlm.server.health import ServingState
from dlm.server.metrics import ServerMetrics
from dlm.server.process import Process
from dlm.server.refusals import Refusal, of_exception, parse
from dlm.server.security import models_named
from dlm.tracing import Tracer
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import REASON_KEY, Reason

DESCRIPTIONS_KEPT = 8  # maximum of cached Describe replies; tokens for the same models share one
R = TypeVar("R")
# Answers the bytes of a message, but does not start after the given time.
Work = Callable[[bytes, float | None], Awaitable[bytes]]


KIND_OF_FILE: dict[int, str] = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders",
}


def _description(
    shard: Shard,
    config: ServerConfig,
    state: ServingState,
    held: tuple[bytes, ...],
    named: tuple[str, ...],
) -> bytes:
    reply = pb.DescribeReply(
        manifest=shard.manifest.text,
        shard=shard.index,
        state=pb.ServerState.Name(state),
        max_queries=config.max_queries,
        max_message_bytes=config.max_message_bytes,
        server_version=__version__,
        shard_set=shard.manifest.shard_set_bytes,
        shard_sets=held,
        token_models=named,
    )
    reply.checksum = codec.describe_checksum(reply)
    return bytes(reply.SerializeToString())


class ShardService:
    """Answers calls for one shard.

    Args        clock  monotonic seconds, for deadlines and the uptime
    Guarantees  a Score is answered in full and correctly, or refused with a code and a reason;
                nothing that a client sends can end the process
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        *,
        clock: Clock = time.monotonic,
        process: Process | None = None,
    ) -> None:
        self.shard, self.config, self.clock = shard, config, clock
        self.shard_set = shard.manifest.shard_set_bytes
        self.metrics = ServerMetrics()
        self.process = process or Process()
        # More large messages than threads may be at work, so no thread waits for the event loop.
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
        self.downloads = Downloads(shard, config, self.admission, self.metrics)
        self._tracer = Tracer(__version__) if config.trace else None
        self._started = clock()
        described = partial(_description, shard, config)  # a cycle with `self` would be freed late
        self._described = lru_cache(DESCRIPTIONS_KEPT)(described)
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="dlm-score")

    def close(self) -> None:
        """Ends the threads and closes the files; work that no thread has begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.downloads.close()

    @property
    def state(self) -> ServingState:
        return self.admission.phase.state

    # ---------------------------------------------------- Score and ContextBlock

    async def score(self, data: bytes, context: Any) -> bytes:
        return await self._take("score", data, context, self._read_and_answer)

    async def context_block(self, data: bytes, context: Any) -> bytes:
        return await self._take("context_block", data, context, self._read_and_list)

    async def _take(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        span = None
        if self._tracer is not None:
            metadata = context.invocation_metadata() or ()
            span = self._tracer.proceed(f"dlm.{call}", metadata, shard=self.shard.index)
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

    async def _take_counted(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        metrics = self.metrics
        try:
            self.admission.enter()
        except Refusal as overload:
            metrics.refusals[overload.reason] += 1
            return await overload.abort(context)
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

    async def _read_and_answer(self, data: bytes, late: float | None) -> bytes:
        arrived = time.perf_counter()
        message = parse(pb.ScoreRequest(), data)
        message.ClearField("context_block")  # only Exchange carries context blocks
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
        whose = contextvars.copy_context()  # a refusal names only sets that the caller may use
        return await loop.run_in_executor(self._threads, whose.run, work, asked, late)

    def count(
        self,
        answered: Answered,
        arrived: float,
        waited_s: float = 0.0,
        posted: float | None = None,
    ) -> None:
        """Counts a request that was answered.

        Args  arrived  when reading of the request began, after it had waited `waited_s`
              posted   when enough of the request was read to hand it to a thread
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
        self.metrics.refusals[refusal.reason] += 1
        return refusal

    def written(self, write_s: float) -> None:
        """Counts the reply to an accepted message, and releases the message."""
        self.metrics.write_s.add(write_s)
        self.admission.leave()

    # ------------------------------------------------- Describe and Heartbeat

    async def describe(self, data: bytes, context: Any) -> bytes:
        return await self._guard(context, "describe", lambda: self._describe(data))

    def _describe(self, data: bytes) -> bytes:
        request = parse(pb.DescribeRequest(), data)
        self.admission.require_open()
        if request.shard_set:
            self.admission.require_same(request.shard_set)
        return self._described(self.state, self.admission.held(), models_named())

    async def heartbeat(self, data: bytes, context: Any) -> bytes:
        return await self._guard(context, "heartbeat", lambda: self._heartbeat(data))

    def _heartbeat(self, data: bytes) -> bytes:
        request = parse(pb.HeartbeatRequest(), data)
        self.admission.require_open()
        if request.shard_set:
            self.admission.require_same(request.shard_set, request.shard)
        mates = self.process.mates
        processes, alike = mates.count() if mates else (1, 1)
        uptime_s = self.clock() - self._started
        reply = pb.HeartbeatReply(
            sequence=request.sequence,
            shard_set=self.shard_set,
            shard=self.shard.index,
            state=pb.ServerState.Name(self.state),
            instance=self.process.instance,
            messages=self.metrics.messages,
            queries=self.metrics.queries,
            refused=self.metrics.refusals.total(),
            in_flight=self.metrics.in_flight,
            uptime_ms=int(1000 * uptime_s),
            cpu_ms=time.process_time_ns() // 1_000_000,
            idle_ms=int(1000 * min(self.admission.idle_s, uptime_s)),
            processes=processes,
            alike=alike,
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
    """The downloads of one service. Descriptors stay open, so replacing the folder of a running
    server has no effect."""

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        admission: ShardAdmission,
        metrics: ServerMetrics,
    ) -> None:
        self._shard, self._config = shard, config
        self._admission, self._metrics = admission, metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-download")
        self.files: dict[int, tuple[int, FileEntry]] = {}
        for number, kind in KIND_OF_FILE.items():
            entry = shard.manifest.file(kind)
            self.files[number] = os.open(shard.directory / entry.name, os.O_RDONLY), entry

    def close(self) -> None:
        """Closes the files; on the event loop, if there is one. A read in progress is completed."""
        for descriptor, _ in self.files.values():
            self._thread.submit(os.close, descriptor)
        self.files = {}
        self._thread.shutdown(wait=False)

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
        """Next chunk, serialized; `Refusal` if the server is draining or has unloaded the shard."""
        self._admission.require_ready()
        if not self.files:
            raise Refusal(
                Reason.DRAINING,
                f"this server has unloaded shard set {self._shard.manifest.shard_set}; ask a "
                "replica, or call Describe again",
            )
        size = min(codec.CHUNK_BYTES, download.entry.bytes - download.offset)
        offset, download.offset = download.offset, download.offset + size
        loop = asyncio.get_running_loop()
        # Look the method up at each call: a test replaces it, to delay the reading.
        read: Callable[..., bytes] = self.read_chunk
        return loop.run_in_executor(
            self._thread, read, download.descriptor, download.entry, offset, size
        )

    def read_chunk(self, descriptor: int, entry: FileEntry, offset: int, size: int) -> bytes:
        raw = os.pread(descriptor, size, offset)
        if len(raw) != size:
            raise OSError(
                f"{entry.name} has {offset + len(raw)} bytes; expected {entry.bytes}: it was "
                "truncated while being served. Fetch it again, or build the shards again"
            )
        chunk = codec.encode_chunk(
            raw,
            shard_set=self._shard.manifest.shard_set_bytes,
            shard=self._shard.index,
            offset=offset,
            file_bytes=entry.bytes,
        )
        return bytes(chunk.SerializeToString())
