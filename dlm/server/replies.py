"""The replies of one stream, written one after the other, each within a time.

A task of the stream's own writes, so that the next message is read and answered meanwhile: gRPC
says that a reply is written by a thread that wakes the loop, and waiting for that costs a stream
more than the search of a message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Seconds that a reply may wait for its client to read. What waits counts as in flight, and gRPC
# lets a stream that is not read stand for as long as its connection lives: without an end, two
# clients that read nothing would close the server to all. 10: far above any deadline.
WRITE_S = 10.0
# Replies of one stream that may wait. Whoever does not read them is not read either. 8: twice what
# a client has in flight on all its streams by default.
MAX_WAITING = 8

Written = Callable[[float], None]  # gets the seconds that it took


class Unread(Exception):
    """A client reads nothing: its stream is to end. Never leaves the handler of the stream."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"a reply waited {waited_s:g} s for its client to read; read what comes")


class Replies:
    """What is written to one stream, in the order in which it was put.

    Guarantees
        whatever happens, the function given with a reply is called once: when it is gRPC's, or
        when it never will be; after one that was not read in time nothing more is written
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._waiting: deque[tuple[bytes, float, Written]] = deque()
        self._changed = asyncio.Event()  # something waits
        self._room = asyncio.Event()  # less waits than may
        self._room.set()
        self._writer: asyncio.Task[None] | None = None
        self._unread = False
        self._gone = False  # the client: what is put goes nowhere

    def check(self) -> None:
        """Raises `Unread` where a reply was not read."""
        if self._unread:
            raise Unread(WRITE_S)

    async def put(self, reply: bytes, written: Written) -> None:
        """Returns once few enough wait; raises `Unread` where the client takes none."""
        self._waiting.append((reply, time.perf_counter(), written))
        if self._unread or self._gone:
            self._drop()
        elif self._writer is None:
            self._writer = asyncio.create_task(self._write())
        else:
            self._changed.set()
        if len(self._waiting) >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        self.check()

    async def write(self, reply: bytes) -> float:
        """Returns the seconds it took to be written; raises `Unread`."""
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def written(write_s: float) -> None:
            if not done.done():
                done.set_result(write_s)

        await self.put(reply, written)
        write_s = await done
        self.check()
        return write_s

    async def flush(self) -> None:
        """Returns once nothing waits; raises `Unread`."""
        while self._waiting:
            self._room.clear()
            await self._room.wait()
        self.check()

    def close(self) -> None:
        """Writes nothing more."""
        self._gone = True
        if self._writer is not None:
            self._writer.cancel()
        self._drop()

    def _drop(self) -> None:
        while self._waiting:
            _, began, written = self._waiting.popleft()
            written(time.perf_counter() - began)
        self._room.set()

    async def _write(self) -> None:
        try:
            while True:
                while self._waiting:
                    reply, began, written = self._waiting[0]
                    async with asyncio.timeout(WRITE_S):
                        await self._context.write(reply)
                    self._waiting.popleft()
                    written(time.perf_counter() - began)
                    if len(self._waiting) < MAX_WAITING:
                        self._room.set()
                self._changed.clear()
                await self._changed.wait()
        except TimeoutError:
            self._unread = True
        except Exception as exc:  # noqa: BLE001 - the client went away; reading says so next
            self._gone = True
            logger.info("server.reply.undelivered", extra={"error": type(exc).__name__})
        finally:
            self._drop()
