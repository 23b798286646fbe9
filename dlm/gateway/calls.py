"""Handles each call from its message to its reply or `Refusal`: admission, time limit, counts and
trace. `RpcDoor` (the gRPC service dlm.v1.LanguageModel) and `http` pass bytes to `Dispatcher`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any, Protocol

from dlm import __version__
from dlm.client import AsyncClient
from dlm.errors import (
    DeadlineExceeded,
    ModelSwitched,
    Overloaded,
    QueryError,
    StaleShardSet,
    UnavailableError,
)
from dlm.gateway.answers import DEFAULT_COUNT, SERVICE, LanguageModel, Left, T, queries_of
from dlm.gateway.config import GatewayConfig
from dlm.gateway.metrics import ABANDONED, OK, GatewayMetrics
from dlm.logs import EventLog
from dlm.server.admission import WORK_AT_ONCE, Admission, TurnLane, Turns
from dlm.server.poller import grpc
from dlm.server.refusals import Refusal, of_exception, parse
from dlm.tracing import Tracer
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason

logger = EventLog(__name__)


DOOR = "grpc"
# Costs, in queries of Extend: a sentence and each of its words; NextWords and each word returned.
SENTENCE_WORK, WORD_WORK = 128, 4
VOCABULARY_WORK, NEXT_WORK = 2048, 12

# Name of a call -> its request, its reply, and the method of `LanguageModel` that answers it.
CALLS: dict[str, tuple[Any, Any, str]] = {
    "Score": (pb.SentencesRequest, pb.SentencesReply, "score"),
    "Extend": (pb.ExtendRequest, pb.ExtendReply, "extend"),
    "NextWords": (pb.NextWordsRequest, pb.NextWordsReply, "next_words"),
    "Rescore": (pb.RescoreRequest, pb.RescoreReply, "rescore"),
    "Models": (pb.ModelsRequest, pb.ModelsReply, "models"),
}


# Reading a call with more bytes than this may take more than a few milliseconds.
LARGE = 8 << 10
QUERY_BYTES = 4  # bytes per query, to estimate a call's queries before it is read
# A call with up to this many queries is small, and takes a millisecond. The client splits larger
# calls into parts; if many larger calls ran at once, a small call would wait for a part of each.
SMALL_QUERIES = LARGE
LARGE_AT_ONCE = 2


class GatewayTurns(Turns):
    """Gives the calls of one gateway their turns on the event loop."""

    def __init__(self) -> None:
        # A round of this much work takes two milliseconds.
        super().__init__(SMALL_QUERIES, LARGE_AT_ONCE, in_a_round=WORK_AT_ONCE // 2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-gateway")
        self._aside = TurnLane(1, inf)

    async def aside(self, work: Callable[[], T], size: int, left_s: float) -> T:
        """Runs `work` in a thread that does one job at a time, and returns the result. Raises
        TimeoutError after `left_s`. `size` is the number of bytes that `work` reads or writes."""
        async with asyncio.timeout(left_s):
            await self._turn(self._aside, size)
            release = self._end_of(self._aside)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            finally:
                release()


def countdown(left_s: float) -> Left:
    """Returns a function that returns how many of `left_s` seconds are left, and raises `Refusal`
    once all have passed."""
    until = time.monotonic() + left_s

    def left() -> float:
        found = until - time.monotonic()
        if found <= 0.0:
            raise _others_took_it()
        return found

    return left


def _others_took_it() -> Refusal:
    return Refusal(
        Reason.LATE,
        "the deadline passed while this call was waiting or being read; allow more time, or ask "
        "another gateway",
    )


class Form(Protocol):
    """Converts messages for a protocol that does not use protobuf bytes."""

    async def read(self, kind: Any, data: bytes, left: Left) -> Any:
        """Decodes a message of this kind; raises `Refusal` if `data` is not such a message."""

    async def write(self, kind: Any, reply: bytes, left: Left) -> bytes:
        """Converts the protobuf bytes of a message of this kind to the protocol's own form."""


class Dispatcher:
    """Answers calls on the event loop, once `open` has given it a connected client."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self.config = config
        self.turns = GatewayTurns()
        self.admission = Admission(config, metrics, self.turns, time.monotonic)
        self._metrics = metrics
        self._answers: LanguageModel | None = None
        self._tracer = Tracer(__version__) if config.trace else None

    def open(self, client: AsyncClient) -> None:
        self._answers = LanguageModel(client, self.config, self._metrics, self.turns.aside)

    async def answer(
        self,
        call: str,
        data: bytes,
        form: Form | None,
        *,
        door: str,
        left_s: float | None = None,
        metadata: Iterable[tuple[str, Any]] = (),
        held: ExitStack | None = None,
        streamed: bool = False,
    ) -> bytes:
        """Answers a message of `CALLS[call]`; message and reply are bytes in the given `form`.

        Args    left_s    seconds that the caller waits; None if the caller gave no limit
                held      a stack, closed once the reply is written: until then, the call counts as
                          in flight
                streamed  whether the message is streamed, and so in flight only from its turn on
        Raises  Refusal
        """
        began, result, queries = time.monotonic(), ABANDONED, 0
        span = None
        if self._tracer is not None:
            span = self._tracer.proceed("dlm.gateway", metadata, call=call, door=door)
        try:
            reply, queries = await self._answer(call, data, form, left_s, held, streamed)
            result = OK
            return reply
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            refusal = refusal_of(call, exc)
            result = refusal.reason.value
            raise refusal from exc
        finally:
            self._metrics.ended(call, door, result, time.monotonic() - began)
            self._metrics.queries += queries
            if span is not None:
                span.end(result, queries=queries)

    async def _answer(
        self,
        call: str,
        data: bytes,
        form: Form | None,
        left_s: float | None,
        held: ExitStack | None,
        streamed: bool,
    ) -> tuple[bytes, int]:
        self.admission.require_ready()
        most_s = self.config.deadline_s
        left = countdown(most_s if left_s is None else min(left_s, most_s))
        request_of, reply_of, method = CALLS[call]
        with ExitStack() as answered:
            held = held or answered
            if not streamed:
                self._enter(held)
            work = 0
            try:
                request = await self._read(request_of, data, form, left)
                work = work_of(call, request)
            finally:  # a refused call waits its turn, too
                answered.callback(await self.turns.take(work, left()))
            if streamed:
                self._enter(held)
            reply, queries = await getattr(self._answers, method)(request, left, held)
            if form is not None:
                reply = await form.write(reply_of, reply, left)
            return reply, queries

    async def _read(self, kind: Any, data: bytes, form: Form | None, left: Left) -> Any:
        work = len(data) // QUERY_BYTES
        with ExitStack() as read:
            if work > SMALL_QUERIES:  # reading a large call takes much work, too
                read.callback(await self.turns.take(work, left()))
            return parse(kind(), data) if form is None else await form.read(kind, data, left)

    def _enter(self, held: ExitStack) -> None:
        self.admission.enter()
        held.callback(self.admission.leave)


def work_of(call: str, request: Any) -> int:
    """Estimates the work of answering a request, in queries of Extend."""
    if call == "Extend":
        return queries_of(request)
    if call == "NextWords":
        return int(VOCABULARY_WORK + NEXT_WORK * (request.count or DEFAULT_COUNT))
    if call == "Models":
        return 0
    texts = request.sentences if call == "Score" else [one.text for one in request.hypotheses]
    ids = request.ids if call == "Score" else []
    words = sum(one.count(" ") for one in texts) + sum(len(one.ids) for one in ids)
    return int(SENTENCE_WORK * (len(texts) + len(ids)) + WORD_WORK * words)


def refusal_of(call: str, exc: Exception) -> Refusal:
    """Returns what a caller may learn about an error: no address, and no other caller's words."""
    if isinstance(exc, TimeoutError):
        return _others_took_it()
    if isinstance(exc, QueryError):
        return Refusal(Reason.MALFORMED, str(exc))
    if isinstance(exc, DeadlineExceeded):
        return Refusal(
            Reason.LATE, "no answer came in time; allow more time, or make smaller calls"
        )
    if isinstance(exc, Overloaded):
        return Refusal(Reason.OVERLOADED, "the model's servers are busy; retry later")
    if isinstance(exc, StaleShardSet | ModelSwitched):
        return Refusal(Reason.WRONG_SHARD_SET, "the model was replaced; begin the sentence again")
    if isinstance(exc, UnavailableError):
        return Refusal(Reason.NOT_READY, "no server answers for a shard of the model; retry later")
    return of_exception(call.lower(), exc, part="gateway")


class RpcDoor:
    """The gRPC handlers, which take bytes, so that invalid messages are refused with a reason."""

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
        """Answers a stream until its caller ends it; each message has the time limit of a call."""
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
            call, data, None, door=DOOR, left_s=left_s, metadata=metadata, streamed=streamed
        )
