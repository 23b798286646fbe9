"""The six calls of dlm.v1.Shard, from the bytes received to the bytes sent (proto/README.md).

Handlers take and give raw bytes: what is no protobuf is refused like any other bad message, and
what goes wrong inside is told apart from it. Handlers run on the event loop; `_answer` runs there
for a small message and in a thread for a large one; `_read_chunk` always runs in a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ProtocolError
from dlm.index.layout import FileEntry, Manifest
from dlm.logs import EventLog
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.server import kernels
from dlm.server import metrics as counting
from dlm.server.config import ServerConfig
from dlm.server.health import ServingState
from dlm.server.lateness import Lateness
from dlm.server.metrics import ServerMetrics
from dlm.server.process import Process
from dlm.server.replies import Replies
from dlm.server.security import caller, replies_to
from dlm.tracing import Tracer
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import CODE_OF, PUSHBACK_KEY, REASON_KEY, Reason

logger = EventLog(__name__)

KIND_OF_FILE: dict[int, str] = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders",
}
# Advice to whoever is refused for load: by then the queue that was full has moved on.
RETRY_AFTER_MS = 50
LOAD_REASONS = frozenset({Reason.OVERLOADED, Reason.CLIENT_LIMIT})
Clock = Callable[[], float]
R = TypeVar("R")
Request: TypeAlias = codec.ScoreRequest | codec.BlockRequest
_NOTHING = np.zeros(0, np.uint32)
# Answers the bytes of a message, given the seconds until its deadline.
Work = Callable[[bytes, float | None], Awaitable[bytes]]


class OpenShard(Protocol):
    """What of `index.shard.Shard` is used here."""

    directory: Path
    index: int
    order: int
    vocabulary_size: int

    @property
    def manifest(self) -> Manifest:
        """Of the shard set."""

    def score(self, groups: QueryGroups) -> Answers:
        """Answers to queries that passed `ShardService.check`."""

    def stored_totals(
        self, context_lengths: NDArray[np.uint8], context_words: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """How many words follow contexts that passed it."""

    def stored_words(
        self,
        context_lengths: NDArray[np.uint8],
        context_words: NDArray[np.uint32],
        skips: NDArray[np.uint32],
        most: int,
    ) -> StoredWords:
        """What follows contexts that passed it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply, and what is counted of it: its queries' orders, and the seconds of each stage."""

    data: bytes
    matched_orders: NDArray[np.uint8]
    begun: float
    search_s: float
    encode_s: float
    blocks: int = 0  # contexts whose stored words it holds


class Refusal(Exception):
    """A call that is refused: the reason and a message for whoever reads the client's log.

    Never leaves this file: the handlers turn it into a status code and trailing metadata.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def _too_late() -> Refusal:
    return Refusal(
        Reason.LATE, "the deadline passed before the work began; allow more time, or ask a replica"
    )


def open_files(shard: OpenShard) -> dict[int, int]:
    """Descriptors of the files that clients download, by their number on the wire.

    Held open from the start: a folder replaced under a running server changes nothing.
    """
    return {
        number: os.open(shard.directory / shard.manifest.file(kind).name, os.O_RDONLY)
        for number, kind in KIND_OF_FILE.items()
    }


def reason_of_fault(error: ProtocolError) -> Reason:
    """The reason that goes with what the codec found wrong."""
    if isinstance(error, codec.DamagedMessage):
        return Reason.CHECKSUM
    if isinstance(error, codec.OversizedMessage):
        return Reason.TOO_MANY_QUERIES
    return Reason.MALFORMED


class ShardService:
    """Answers for one shard.

    Args
        shard    open and verified
        config   limits
        clock    seconds that never go back; what deadlines and the uptime are measured on
        process  what a heartbeat says of the process
        files    what `open_files` gave, for services that must not open them anew
    Guarantees
        a Score is answered whole and right, or refused with a code and a reason; nothing that a
        client sends can end the process
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
        self.shard = shard
        self.config = config
        self.state = ServingState.WARMING
        self.refuses = False  # while DRAINING: no longer takes what comes
        self.metrics = ServerMetrics()
        self.process = process or Process()
        self._tracer = Tracer(__version__) if config.trace else None
        self._clock = clock
        self._started = clock()
        self._asked = float("-inf")  # when the last Score came
        self._shard_set = shard.manifest.shard_set_bytes
        # Of all models on this port; `Models` says so where there are several.
        self.held: tuple[bytes, ...] = (self._shard_set,)
        self.find: Callable[[bytes], ShardService] = lambda shard_set: self
        # Score messages that this process works on, of all its models.
        self.load: Callable[[], int] = lambda: self.metrics.in_flight
        self._slots = shard.manifest.slots
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="dlm-score")
        self._packers = ThreadPoolExecutor(1, thread_name_prefix="dlm-download")
        self._idle = asyncio.Event()
        self._idle.set()
        opened = open_files(shard) if files is None else {n: os.dup(f) for n, f in files.items()}
        self._files: dict[int, tuple[int, FileEntry]] = {
            number: (descriptor, shard.manifest.file(KIND_OF_FILE[number]))
            for number, descriptor in opened.items()
        }

    def close(self) -> None:
        """Gives threads and files back; work that no thread has begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._packers.shutdown(wait=True, cancel_futures=True)
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files = {}

    @property
    def shard_set(self) -> bytes:
        """The 16 bytes that name the shard set."""
        return self._shard_set

    async def idle(self) -> None:
        """Returns once no Score is in flight."""
        await self._idle.wait()

    def asked_within(self, seconds: float) -> bool:
        """Whether a Score came in the last `seconds`."""
        return self._clock() - self._asked < seconds

    # ------------------------------------------------------------------ Score

    async def score(self, data: bytes, context: Any) -> bytes:
        """dlm.v1.Shard/Score."""
        return await self._take("score", data, context, self._read_and_answer)

    async def context_block(self, data: bytes, context: Any) -> bytes:
        """dlm.v1.Shard/ContextBlock."""
        return await self._take("context_block", data, context, self._read_and_list)

    async def _take(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        """What `work` gives for a message, in a span where calls are traced."""
        if self._tracer is not None:
            return await self._take_traced(call, data, context, work, self._tracer)
        return await self._take_counted(call, data, context, work)

    async def _take_counted(self, call: str, data: bytes, context: Any, work: Work) -> bytes:
        metrics = self.metrics
        overload = self._overload()
        if overload is not None:
            metrics.refused(overload.reason)
            return await self._abort(context, overload)
        self._enter()
        try:
            return await work(data, context.time_remaining())
        except Refusal as refusal:
            metrics.refused(refusal.reason)
            failure = refusal
        except asyncio.CancelledError:
            metrics.abandoned += 1
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the next message must be answered
            metrics.refused(Reason.INTERNAL)
            failure = self._internal(call, exc)
        finally:
            self._leave()
        return await self._abort(context, failure)

    async def _take_traced(
        self, call: str, data: bytes, context: Any, work: Work, tracer: Tracer
    ) -> bytes:
        """In a span, where the caller sent the context of one that is sampled."""
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

    async def _read_and_answer(self, data: bytes, remaining_s: float | None) -> bytes:
        self._require_ready()
        late = None if remaining_s is None else self._clock() + remaining_s
        arrived = time.perf_counter()
        message = self._parse(pb.ScoreRequest(), data)
        message.ClearField("context_block")  # Exchange alone carries those
        request = self._decode(message)
        decoded = time.perf_counter()
        if self._is_small(message)[0]:
            answered = self._answer(request, late)
        else:
            answered = await self._answer_in_thread(request, late)
        self._count(answered, arrived, decoded)
        return answered.data

    def _count(
        self, answered: Answered, arrived: float, decoded: float, waited_s: float = 0.0
    ) -> None:
        """Counts a request that was answered, and was read at `arrived` after it had `waited_s`."""
        self.metrics.blocks += answered.blocks
        self.metrics.answered(
            len(answered.matched_orders),
            answered.matched_orders,
            waited_s + answered.begun - decoded,
            decoded - arrived,
            answered.search_s,
            answered.encode_s,
        )

    # ----------------------------------------------------------- ContextBlock

    async def _read_and_list(self, data: bytes, remaining_s: float | None) -> bytes:
        self._require_ready()
        late = None if remaining_s is None else self._clock() + remaining_s
        arrived = time.perf_counter()
        try:
            request = codec.decode_block_request(data, max_queries=self.config.max_queries)
        except ProtocolError as exc:
            raise Refusal(reason_of_fault(exc), str(exc)) from exc
        self._require_same(request.shard_set, request.shard)
        decoded = time.perf_counter()
        if self._stores_little(request):
            answered = self._answer(request, late)
        else:
            answered = await self._answer_in_thread(request, late)
        self._count(answered, arrived, decoded)
        return answered.data

    def _stores_little(self, request: codec.BlockRequest) -> bool:
        """Whether so few words are stored after the contexts of a request that a thread costs more;
        of one that is to be refused, that it is refused here."""
        lengths, words = request.context_lengths, request.context_words
        self.check(QueryGroups(lengths, words, _NOTHING, _NOTHING))
        stored = int(self.shard.stored_totals(lengths, words).sum(dtype=np.int64))
        return stored + len(lengths) <= self.config.inline_queries

    def _is_small(self, message: pb.ScoreRequest) -> tuple[bool, Request | None]:
        """Whether a message is answered before the next of its stream is read; and what it asks,
        where that had to be read for it."""
        if not message.context_block:
            return len(message.words) <= 4 * self.config.inline_queries, None  # four bytes a word
        try:
            decoded = self._decode(message)
            assert isinstance(decoded, codec.BlockRequest)
            return self._stores_little(decoded), decoded
        except Refusal:
            return True, None  # found again, and said in the reply

    def _list(self, request: codec.BlockRequest, begun: float) -> Answered:
        """As `_answer`, of a request that is not late."""
        lengths, words = request.context_lengths, request.context_words
        self.check(QueryGroups(lengths, words, _NOTHING, _NOTHING))
        stored = self.shard.stored_words(lengths, words, request.skips, self.config.max_queries)
        searched = time.perf_counter()
        data = codec.encode_block_reply(request, stored)
        encode_s = time.perf_counter() - searched
        found = stored.answers.matched_order
        return Answered(data, found, begun, searched - begun, encode_s, len(lengths))

    # --------------------------------------------------------------- Exchange

    async def exchange(self, _: Any, context: Any) -> None:
        """dlm.v1.Shard/Exchange: a stream of Scores, of any model on this port.

        Small messages are answered one after the other as they are read; so each stream has its
        turn on the event loop, and a client that sends faster than it is served waits in its own
        stream, behind nobody else. Large ones are answered in threads, out of order.
        """
        async with replies_to(context) as replies:
            await self._exchange_all(context, replies)

    async def _exchange_all(self, context: Any, replies: Replies) -> None:
        lateness = Lateness()
        large: set[asyncio.Task[None]] = set()
        self.metrics.streams += 1
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                arrived = time.perf_counter()
                replies.check()
                try:
                    message = codec.parse(pb.ScoreRequest(), data)
                except ProtocolError as exc:
                    # It has no number, so no reply can name it; and what follows is as doubtful.
                    self.metrics.refused(Reason.MALFORMED)
                    for task in list(large):  # before the client is told that it ended
                        task.cancel()
                    await replies.flush()
                    await self._abort(context, Refusal(Reason.MALFORMED, str(exc)))
                service = self.find(message.shard_set)
                overload = service._overload()
                if overload is not None:
                    # Bounded as any other: who does not read is not read either.
                    reply = service._refusal_reply(message, overload)
                    await replies.put(reply, service.metrics.wrote)
                elif (small := service._is_small(message))[0]:
                    reply = service._exchange(message, lateness, arrived, small[1])
                    await replies.put(reply, service._written)
                else:
                    service._enter()  # here, where it was found to fit; not when the task begins
                    task = asyncio.create_task(
                        service._exchange_large(message, lateness, arrived, replies)
                    )
                    large.add(task)
                    task.add_done_callback(large.discard)
                    task.add_done_callback(service._finished)
            if large:
                await asyncio.gather(*large, return_exceptions=True)
            await replies.flush()
        finally:
            self.metrics.streams -= 1
            for task in list(large):
                task.cancel()

    def _written(self, write_s: float) -> None:
        self.metrics.wrote(write_s)
        self._leave()

    def _exchange(
        self,
        message: pb.ScoreRequest,
        lateness: Lateness,
        arrived: float,
        known: Request | None = None,
    ) -> bytes:
        """The reply to a small message, a refusal included; `_leave` once it is written.

        Args
            known  what it asks, where that was read already
        """
        self._enter()
        try:
            request, late, waited_s = self._admit(message, lateness, known)
            decoded = time.perf_counter()
            answered = self._answer(request, late)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the next message must be answered
            return self._refusal_reply(message, exc)
        self._count(answered, arrived, decoded, waited_s)
        return answered.data

    async def _exchange_large(
        self,
        message: pb.ScoreRequest,
        lateness: Lateness,
        arrived: float,
        replies: Replies,
    ) -> None:
        try:
            request, late, waited_s = self._admit(message, lateness)
            decoded = time.perf_counter()
            answered = await self._answer_in_thread(request, late)
        except asyncio.CancelledError:  # the stream ended, by its client or by bad bytes
            self.metrics.abandoned += 1
            raise
        except Exception as exc:  # noqa: BLE001 - as above
            reply = self._refusal_reply(message, exc)
        else:
            self._count(answered, arrived, decoded, waited_s)
            reply = answered.data
        self.metrics.wrote(await replies.write(reply))

    def _admit(
        self, message: pb.ScoreRequest, lateness: Lateness, known: Request | None = None
    ) -> tuple[Request, float | None, float]:
        """The request, until when its answer is worth having, and how long it has waited, in
        seconds; raises `Refusal`."""
        now = self._clock()
        waited = lateness.of(message.sent_us, now)
        self._require_ready()
        late = None
        if message.timeout_us:
            late = now - waited + message.timeout_us * 1e-6
            if now >= late:
                raise _too_late()
        return known or self._decode(message), late, waited

    def _refusal_reply(self, message: pb.ScoreRequest, exc: Exception) -> bytes:
        refusal = exc if isinstance(exc, Refusal) else self._internal("exchange", exc)
        self.metrics.refused(refusal.reason)
        return codec.encode_refusal(
            message.sequence,
            refusal.reason.value,
            refusal.message,
            RETRY_AFTER_MS if refusal.reason in LOAD_REASONS else 0,
        )

    def _enter(self) -> None:
        self._asked = self._clock()
        self.metrics.in_flight += 1
        if (client := caller()) is not None:
            client.in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.metrics.in_flight -= 1
        if (client := caller()) is not None:
            client.in_flight -= 1
        if not self.metrics.in_flight:
            self._idle.set()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            # Mostly a client that went away before its reply.
            logger.info("server.reply.undelivered", extra={"error": type(error).__name__})

    def _overload(self) -> Refusal | None:
        """Why no message of this caller can be taken now; None where one can."""
        load = self.load()
        if load >= self.config.max_in_flight:
            return Refusal(
                Reason.OVERLOADED,
                f"{load} messages are in flight, {self.config.max_in_flight} at "
                "most are taken; ask a replica, or again later",
            )
        client = caller()
        if client is not None and client.in_flight >= self.config.client_in_flight:
            return Refusal(
                Reason.CLIENT_LIMIT,
                f"{client.in_flight} messages of this client are in flight, as many as one client "
                "may have; send fewer at once, or again later",
            )
        return None

    def _decode(self, message: pb.ScoreRequest) -> Request:
        most = self.config.max_queries
        request: Request
        try:
            if message.context_block:
                request = codec.read_carried_block_request(message, max_queries=most)
            else:
                request = codec.read_score_request(message, max_queries=most)
        except ProtocolError as exc:
            raise Refusal(reason_of_fault(exc), str(exc)) from exc
        self._require_same(request.shard_set, request.shard)
        return request

    async def _answer_in_thread(self, request: Request, late: float | None) -> Answered:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._answer, request, late)

    def _answer(self, request: Request, late: float | None) -> Answered:
        """The reply to `request`, which is not begun after `late`; in any thread."""
        begun = time.perf_counter()
        if late is not None and self._clock() >= late:
            raise _too_late()
        if isinstance(request, codec.BlockRequest):
            return self._list(request, begun)
        if len(request.groups.words):
            self.check(request.groups)
            answers = self.shard.score(request.groups)
        else:
            answers = Answers.empty(0)
        searched = time.perf_counter()
        data = codec.encode_score_reply(request, answers)
        encode_s = time.perf_counter() - searched
        return Answered(data, answers.matched_order, begun, searched - begun, encode_s)

    def check(self, groups: QueryGroups) -> None:
        """Raises `Refusal` unless the shard may trust `groups` and owns every context in it."""
        shard = self.shard
        fault, place = kernels.check(
            groups.context_lengths,
            groups.context_words,
            groups.words,
            shard.order,
            shard.vocabulary_size,
            self._slots,
            shard.index,
        )
        if fault == kernels.FINE:
            return
        if fault == kernels.BAD_CONTEXT_LENGTH:
            longest = shard.order - 1
            allowed = (
                f"2 to {longest} are taken" if longest >= 2 else "it has no partitioned n-gram"
            )
            raise Refusal(
                Reason.CONTEXT_LENGTH,
                f"context {place} has {groups.context_lengths[place]} words; the model has order "
                f"{shard.order}, so {allowed}. Shorter contexts are answered from the low orders",
            )
        if fault == kernels.BAD_SLOT:
            raise Refusal(
                Reason.SLOT_NOT_OWNED,
                f"the slot of context {place} belongs to another shard than {shard.index}; route "
                "by the slot table in the manifest of this shard set",
            )
        name = "context word" if fault == kernels.BAD_CONTEXT_WORD else "word"
        ids = groups.context_words if fault == kernels.BAD_CONTEXT_WORD else groups.words
        raise Refusal(
            Reason.ID_OUT_OF_RANGE,
            f"{name} {place} has id {ids[place]}; ids of this model are below "
            f"{shard.vocabulary_size}. Use the vocabulary of this shard set",
        )

    def warm_up(self, data: bytes) -> None:
        """Runs the request in `data` through all that Score runs, owned by this shard or not.

        Raises  whatever the kernel raises: a server that cannot answer must not become ready
        """
        request = codec.decode_score_request(data, max_queries=len(data))
        try:
            self.check(request.groups)
        except Refusal as refusal:
            if refusal.reason is not Reason.SLOT_NOT_OWNED:
                raise
        groups = request.groups
        answers = self.shard.score(groups)
        codec.encode_score_reply(request, answers)
        skips = np.zeros(len(groups.context_lengths), np.uint32)
        self.shard.stored_words(groups.context_lengths, groups.context_words, skips, 1)
        counting.warm_up(answers.matched_order)

    # ------------------------------------------------- Describe and Heartbeat

    async def describe(self, data: bytes, context: Any) -> bytes:
        """dlm.v1.Shard/Describe."""
        return await self._guard(context, "describe", lambda: self._describe(data))

    def _describe(self, data: bytes) -> bytes:
        request = self._parse(pb.DescribeRequest(), data)
        if request.shard_set:
            self._require_same(request.shard_set)
        reply = pb.DescribeReply(
            manifest=self.shard.manifest.text,
            shard=self.shard.index,
            state=pb.ServerState.Name(self.state),
            max_queries=self.config.max_queries,
            max_message_bytes=self.config.max_message_bytes,
            server_version=__version__,
            shard_set=self._shard_set,
            shard_sets=self.held,
        )
        reply.checksum = codec.describe_checksum(reply)
        return bytes(reply.SerializeToString())

    async def heartbeat(self, data: bytes, context: Any) -> bytes:
        """dlm.v1.Shard/Heartbeat."""
        return await self._guard(context, "heartbeat", lambda: self._heartbeat(data))

    def _heartbeat(self, data: bytes) -> bytes:
        request = self._parse(pb.HeartbeatRequest(), data)
        if request.shard_set:
            self._require_same(request.shard_set, request.shard)
        reply = pb.HeartbeatReply(
            sequence=request.sequence,
            shard_set=self._shard_set,
            shard=self.shard.index,
            state=pb.ServerState.Name(self.state),
            instance=self.process.instance,
            messages=self.metrics.messages,
            queries=self.metrics.queries,
            refused=self.metrics.refused_total,
            in_flight=self.metrics.in_flight,
            uptime_ms=int(1000 * (self._clock() - self._started)),
            worker=self.process.worker,
            workers=self.process.workers,
            cpu_ms=self.process.cpu_ms(),
            memory_bytes=self.process.memory.bytes(),
        )
        reply.checksum = codec.heartbeat_checksum(reply)
        return bytes(reply.SerializeToString())

    # --------------------------------------------------------------- Download

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        """dlm.v1.Shard/Download."""
        descriptor, entry, offset = await self._guard(
            context, "download", lambda: self._open_download(data)
        )
        self.metrics.downloads += 1
        try:
            while offset < entry.bytes:
                size = min(codec.CHUNK_BYTES, entry.bytes - offset)
                yield await self._guard(
                    context, "download", self._pack, descriptor, entry, offset, size
                )
                offset += size
        finally:
            self.metrics.downloads -= 1

    def _open_download(self, data: bytes) -> tuple[int, FileEntry, int]:
        request = self._parse(pb.DownloadRequest(), data)
        self._require_ready()
        self._require_same(request.shard_set, request.shard)
        if request.file not in self._files:
            raise Refusal(
                Reason.MALFORMED,
                f"file {request.file} was asked for; "
                f"{pb.DOWNLOAD_FILE_VOCABULARY} is the vocabulary, "
                f"{pb.DOWNLOAD_FILE_LOW_ORDERS} the low orders",
            )
        descriptor, entry = self._files[request.file]
        if request.offset > entry.bytes:
            raise Refusal(
                Reason.OFFSET_OUT_OF_RANGE,
                f"byte {request.offset} of {entry.name} was asked for, which has {entry.bytes}; "
                "begin again at 0",
            )
        if self.metrics.downloads >= self.config.max_downloads:
            raise Refusal(
                Reason.OVERLOADED,
                f"{self.metrics.downloads} downloads are running, as many as are allowed; "
                "ask a replica, or again later, from the same offset",
            )
        return descriptor, entry, request.offset

    async def _pack(self, descriptor: int, entry: FileEntry, offset: int, size: int) -> bytes:
        """One serialized chunk. A server that drains ends its downloads: they resume elsewhere."""
        self._require_ready()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._packers, self._read_chunk, descriptor, entry, offset, size
        )

    def _read_chunk(self, descriptor: int, entry: FileEntry, offset: int, size: int) -> bytes:
        raw = os.pread(descriptor, size, offset)
        if len(raw) != size:
            raise OSError(f"{entry.name} ends at byte {offset + len(raw)}; it was truncated")
        chunk = codec.encode_chunk(
            raw,
            shard_set=self._shard_set,
            shard=self.shard.index,
            offset=offset,
            file_bytes=entry.bytes,
        )
        return bytes(chunk.SerializeToString())

    # ----------------------------------------------------------------- Common

    def _parse(self, message: codec.M, data: bytes) -> codec.M:
        try:
            return codec.parse(message, data)
        except ProtocolError as exc:
            raise Refusal(Reason.MALFORMED, str(exc)) from exc

    def _require_ready(self) -> None:
        if self.state is ServingState.WARMING:
            raise Refusal(
                Reason.NOT_READY, "this server is still warming up; ask a replica, or again later"
            )
        if self.state is ServingState.DRAINING and self.refuses:
            raise Refusal(Reason.DRAINING, "this server is going away; ask a replica")

    def _require_same(self, shard_set: bytes, shard: int | None = None) -> None:
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
        if shard is not None and shard != self.shard.index:
            raise Refusal(
                Reason.WRONG_SHARD,
                f"shard {shard} was asked, this server holds {self.shard.index}; "
                "look the address up again",
            )

    async def _guard(
        self, context: Any, call: str, work: Callable[..., R | Awaitable[R]], *args: Any
    ) -> R:
        """What `work` gives; where it refuses or fails, the call ends with a status instead."""
        try:
            result = work(*args)
            return await result if isinstance(result, Awaitable) else result
        except Refusal as refusal:
            failure = refusal
        except Exception as exc:  # noqa: BLE001 - the server must live on
            failure = self._internal(call, exc)
        return await self._abort(context, failure)

    async def _abort(self, context: Any, refusal: Refusal) -> NoReturn:
        """Ends the call."""
        metadata: tuple[tuple[str, str], ...] = ((REASON_KEY, refusal.reason.value),)
        if refusal.reason in LOAD_REASONS:
            metadata += ((PUSHBACK_KEY, str(RETRY_AFTER_MS)),)
        await context.abort(CODE_OF[refusal.reason], refusal.message, metadata)
        raise AssertionError("abort returned")

    def _internal(self, call: str, exc: Exception) -> Refusal:
        """Logs a fault of ours: where it happened and its type, but not its message, which may
        hold what was asked."""
        kind = type(exc).__name__
        shown = RuntimeError(f"{kind}; its message is withheld, since it may hold queries")
        logger.error(
            "server.%s.failed",
            call,
            exc_info=(RuntimeError, shown, exc.__traceback__),
            extra={"error": kind, "shard": self.shard.index},
        )
        return Refusal(Reason.INTERNAL, f"the server failed ({kind}); its log says where")
