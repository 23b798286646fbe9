"""The replies of one stream, written one after the other, each within a time."""

from __future__ import annotations

import asyncio
from typing import Any

# Seconds that a reply may wait for its client to read. What waits counts as in flight, and gRPC
# lets a stream that is not read stand for as long as its connection lives: without an end, two
# clients that read nothing would close the server to all. 10: far above any deadline.
WRITE_S = 10.0


class Unread(Exception):
    """A client reads nothing: its stream is to end. Never leaves the handler of the stream."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"a reply waited {waited_s:g} s for its client to read; read what comes")


class Replies:
    """Writes to one stream, from several tasks.

    Guarantees
        replies do not overlap; after one that was not read in time nothing more is written
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._writing = asyncio.Lock()
        self._unread = False

    def check(self) -> None:
        """Raises `Unread` where a reply was not read."""
        if self._unread:
            raise Unread(WRITE_S)

    async def write(self, reply: bytes) -> None:
        """Returns once the reply is gRPC's; raises `Unread` where the client takes none."""
        async with self._writing:
            self.check()
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._context.write(reply)
            except TimeoutError:
                self._unread = True
                raise Unread(WRITE_S) from None
