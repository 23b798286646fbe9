"""Writes the replies of one stream one after another in a separate task, each within a time limit.

gRPC reports a written reply through a thread that wakes the event loop: waiting for the report
costs a stream more than a message's search does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from dlm.logs import EventLog

logger = EventLog(__name__)

# Seconds that a ready reply may wait for its client to read it, and to read the replies before it.
# A waiting reply counts as in flight, and gRPC keeps an unread stream open as long as its
# connection lives: without this limit, two clients that read nothing, or a reply now and then,
# would block the whole server. 10 is far above any deadline.
WRITE_S = 10.0
# How many replies of one stream may wait. If a client does not read them, its messages are not read
# either. 8 is twice what a client has in flight on all its streams by default.
MAX_WAITING = 8

Written = Callable[[float], None]  # gets the seconds that the write took


class Unread(Exception):
    """A client does not read its replies; `security.Guard` ends its stream."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"a reply waited {waited_s:g} s for its client to read it; read replies as they arrive"
        )


class Replies:
    """The replies to one stream, written in the order in which they were put.

    Used as a context manager around everything a handler does. If a reply is not read in time, the
    handler is cancelled and the context raises `Unread`. If the client disconnects, the context
    ends as if the handler had been cancelled.

    Guarantees
        the function given with a reply is always called once: when gRPC has the reply, or when it
        is dropped; after a reply that was not read in time, nothing more is written; after the
        context, no write is in progress, so that gRPC accepts a status
    Cost
        one task and one timer per stream, none per reply
    """

    def __init__(self, context: Any, client: str = "") -> None:
        self._context, self._client = context, client
        self._waiting: deque[tuple[bytes, float, Written]] = deque()  # the first is being written
        self._changed = asyncio.Event()  # set while something waits
        self._room = asyncio.Event()  # set while more replies may wait
        self._room.set()
        self._writer: asyncio.Task[None] | None = None
        self._writing = False  # gRPC has begun to write
        self._timer: asyncio.TimerHandle | None = None  # only while something waits
        self._unread = False
        self._ended = False  # further replies are dropped
        self._gone = False  # gRPC could not write
        self._handler: asyncio.Task[Any] | None = None
        self._cancellations = 0  # cancellations of the handler before `__aenter__`

    async def __aenter__(self) -> Self:
        self._handler = asyncio.current_task()
        assert self._handler is not None
        self._cancellations = self._handler.cancelling()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
        if self._unread and self._handler is not None:
            others = self._handler.uncancel() > self._cancellations
            if kind is asyncio.CancelledError and not others and not self._gone:
                raise Unread(WRITE_S) from None
        if self._gone and kind is None:
            # gRPC is about to end the handler. If the handler ended by itself first, it would send
            # a status, and would resend the metadata of the first write, which failed.
            raise asyncio.CancelledError

    @property
    def is_idle(self) -> bool:
        """Whether replies were put, and gRPC has all of them."""
        return self._writer is not None and not self._waiting and not self._ended

    def check(self) -> None:
        if self._unread:
            raise Unread(WRITE_S)

    async def put(self, reply: bytes, written: Written) -> None:
        """Adds a reply; blocks while too many wait. Raises `Unread` if the client reads none."""
        self._waiting.append((reply, time.perf_counter(), written))
        if self._ended:
            self._drop()
        else:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._look)
            if self._writer is None:
                self._writer = asyncio.create_task(self._write())
            else:
                self._changed.set()
        if len(self._waiting) >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        self.check()

    async def write(self, reply: bytes) -> float:
        """Writes a reply, and returns the seconds that it took; raises `Unread`."""
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def written(write_s: float) -> None:
            if not done.done():
                done.set_result(write_s)

        await self.put(reply, written)
        write_s = await done
        self.check()
        return write_s

    async def flush(self) -> None:
        while self._waiting:
            self._room.clear()
            await self._room.wait()
        self.check()

    async def close(self) -> None:
        """Writes nothing more; returns once gRPC has finished the write in progress.

        That write cannot be withdrawn, and gRPC accepts no status until it ends, when the client
        reads it or disconnects.
        """
        self._end()
        if self._writer is not None:
            if self._writing:
                await asyncio.wait([self._writer])
            else:
                self._writer.cancel()

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop()

    def _drop(self) -> None:
        while self._waiting:
            _, began, written = self._waiting.popleft()
            written(time.perf_counter() - began)
        self._room.set()

    def _look(self) -> None:
        """Ends the stream if its oldest reply has waited too long. Otherwise looks again when its
        time is up or, if no reply waits, WRITE_S after the next one comes."""
        self._timer = None
        if not self._waiting:
            return
        left_s = self._waiting[0][1] + WRITE_S - time.perf_counter()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        self._unread = True
        logger.warning("server.stream.unread", extra={"client": self._client})
        self._end()
        if self._handler is not None:  # the handler may be waiting for the next message
            self._handler.cancel()

    async def _write(self) -> None:
        try:
            while not self._ended:
                while self._waiting:
                    reply, began, written = self._waiting[0]
                    self._writing = True
                    await self._context.write(reply)
                    self._writing = False
                    if self._ended:
                        return  # the handler already knows
                    self._waiting.popleft()
                    written(time.perf_counter() - began)
                    if len(self._waiting) < MAX_WAITING:
                        self._room.set()
                reply, written = b"", _ignore  # an idle stream must not hold its last model
                self._changed.clear()
                await self._changed.wait()
        except Exception as exc:  # noqa: BLE001 - the client went away; the next read says so
            self._writing = False
            self._gone = True
            logger.info("server.reply.undelivered", extra={"error": type(exc).__name__})
            self._end()


def _ignore(write_s: float) -> None:
    """Stands in for a function that counts a reply."""
