"""A TCP proxy that makes a network fail: for `chaos`, and for tests of how clients react.

It stands in front of servers, with a port for each, and forwards bytes unchanged. Faults can be set
and healed for each server while connections are open. One event loop runs in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dlm.resources import Closeable

T = TypeVar("T")

CHUNK_BYTES = 65536
MAX_HELD = 64  # chunks in transit in one direction; more wait at the sender


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults between clients and a server; none by default.

    delay_s    delay of every byte, each way; bytes keep their order
    stall      probability that a chunk, and so all after it, is held for `stall_s`, like after a
               lost packet; 0.2 s is TCP's shortest wait before it sends again
    drop       probability that a connection is reset instead of forwarding a chunk; from 1 on, open
               connections are reset at once, and new ones on arrival
    corrupt    probability that one bit of a chunk from the server is flipped; in HTTP/2, only in
               the payloads of DATA frames, since some damaged frames make gRPC abort its process
    partition  nothing passes either way; data sent meanwhile arrives when the partition ends
    blackhole  everything sent is lost; new connections are accepted, and stay silent. Connections
               that lost bytes are reset when the blackhole ends
    """

    delay_s: float = 0.0
    stall: float = 0.0
    stall_s: float = 0.2
    drop: float = 0.0
    corrupt: float = 0.0
    partition: bool = False
    blackhole: bool = False


class _Frames:
    """Finds the DATA payloads in what a server sends (RFC 9113, 4.1 and 6.1)."""

    HEAD_BYTES, DATA = 9, 0

    def __init__(self) -> None:
        self._head = b""
        self._frame_left = 0
        self._is_data = False

    def places(self, chunk: bytes) -> list[int]:
        at, out = 0, list[int]()
        while at < len(chunk):
            if self._frame_left == 0:
                more = chunk[at : at + self.HEAD_BYTES - len(self._head)]
                self._head += more
                at += len(more)
                if len(self._head) == self.HEAD_BYTES:
                    self._frame_left = int.from_bytes(self._head[:3], "big")
                    self._is_data = self._head[3] == self.DATA
                    self._head = b""
                continue
            size = min(self._frame_left, len(chunk) - at)
            if self._is_data:
                out += range(at, at + size)
            at += size
            self._frame_left -= size
        return out


class _Link:
    """A client's connection to the proxy, and the proxy's own connection to the server."""

    def __init__(self, way: _Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.way = way
        self.lost = False  # bytes were lost, so the link can never continue
        self._frames: _Frames | None = None  # for replies, if both sides use HTTP/2 without TLS
        self._from_client = reader
        self._writers = [writer]

    async def run(self) -> None:
        try:
            if self.way.faults.drop >= 1:
                return
            if self.way.faults.blackhole:
                self.lost = True
                while await self._from_client.read(CHUNK_BYTES):
                    pass
                return
            from_server, to_server = await asyncio.open_connection(*self.way.target)
            self._writers.append(to_server)
            ways = (
                self._pass(self._from_client, to_server, reply=False),
                self._pass(from_server, self._writers[0], reply=True),
            )
            tasks = [asyncio.ensure_future(one) for one in ways]
            try:
                # The end of one side is passed on, and the other may still send data; but if one
                # side fails, so does the other.
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        except OSError:
            pass  # the server is gone, or a peer reset the connection
        finally:
            self.reset()

    def reset(self) -> None:
        """Ends both connections at once, with an RST unless they have already ended."""
        for writer in self._writers:
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reply: bool
    ) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_HELD)
        sender = asyncio.ensure_future(self._send(held, writer))
        try:
            due, data, first = 0.0, b"?", True
            while data:
                data = await reader.read(CHUNK_BYTES)
                faults, chance = self.way.faults, self.way.chance
                if data and (self.lost or faults.blackhole):
                    self.lost = True
                    continue
                if data and chance() < faults.drop:
                    self.reset()
                    return
                if not reply and first and data.startswith(b"PRI * HTTP/2.0"):
                    self._frames = _Frames()
                first = False
                if reply and data:
                    places = range(len(data)) if not self._frames else self._frames.places(data)
                    if places and chance() < faults.corrupt:
                        data = _flipped(data, places, chance())
                due = max(due, time.monotonic() + faults.delay_s)
                if data and chance() < faults.stall:
                    due += faults.stall_s
                if sender.done():
                    break
                await held.put((due, data))
            await sender
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _send(
        self, held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        data = b"?"
        while data:
            due, data = await held.get()
            if (left_s := due - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            await self.way.passable.wait()
            if self.lost:
                continue
            if data:
                writer.write(data)
                await writer.drain()
            elif writer.can_write_eof():
                writer.write_eof()


def _flipped(data: bytes, places: Sequence[int], chance: float) -> bytes:
    """`data` with one bit flipped, at one of `places`."""
    bit = int(chance * 8 * len(places))
    changed = bytearray(data)
    changed[places[bit // 8]] ^= 1 << bit % 8
    return bytes(changed)


def _place(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


class _Way:
    """A port, the server behind it, and the faults between them."""

    def __init__(self, target: str, seed: str) -> None:
        self.target = _place(target)
        self.faults = Faults()
        self.chance = random.Random(seed).random
        self.passable = asyncio.Event()
        self.passable.set()
        self.port = 0
        self._links: dict[_Link, asyncio.Task[None] | None] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        self._links[link] = asyncio.current_task()
        try:
            await link.run()
        except asyncio.CancelledError:
            pass  # raised by `close`; the stream's own callback would log this error
        finally:
            del self._links[link]

    async def set(self, changes: dict[str, Any]) -> Faults:
        before, self.faults = self.faults, replace(self.faults, **changes)
        (self.passable.clear if self.faults.partition else self.passable.set)()
        for link in list(self._links):
            if self.faults.drop >= 1 or (
                link.lost and before.blackhole and not self.faults.blackhole
            ):
                link.reset()
        return self.faults

    async def half_open(self) -> int:
        for link in self._links:
            link.lost = True
        return len(self._links)

    async def redirect(self, target: str) -> None:
        before, self.target = self.target, _place(target)
        if before == self.target:
            return
        for link in list(self._links):
            link.reset()

    async def heal(self) -> None:
        await self.set({name: getattr(Faults(), name) for name in Faults.__slots__})
        for link in list(self._links):
            if link.lost:
                link.reset()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for task in self._links.values() if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Proxies(Closeable):
    """A proxy in front of each server; methods take the server's index, and any thread may call.

    Args        targets  host:port of each server
                seed     seed of all random choices; their effect also depends on how the system
                         cuts the stream of bytes
    Guarantees  without faults every byte passes, in order, and ends of streams and resets are
                forwarded; but a connection to a missing server is reset, not refused
    """

    def __init__(self, targets: Sequence[str], seed: int = 0) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="dlm-proxy", daemon=True)
        self._thread.start()
        self._ways = [_Way(target, f"{seed}/{at}") for at, target in enumerate(targets)]
        try:
            for way in self._ways:
                self._do(way.open())
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{way.port}" for way in self._ways]

    def faults(self, at: int) -> Faults:
        return self._ways[at].faults

    def set(self, at: int, **changes: Any) -> Faults:
        """Changes some of the `Faults` of a server; returns all of them."""
        return self._do(self._ways[at].set(changes))

    def half_open(self, at: int) -> int:
        """Silences the open connections permanently, like a firewall that forgot them; new ones
        work. Returns the number of silenced connections, which `heal` resets."""
        return self._do(self._ways[at].half_open())

    def redirect(self, at: int, target: str) -> None:
        """Puts another server behind a port; connections to the old server are reset."""
        self._do(self._ways[at].redirect(target))

    def heal(self, at: int) -> None:
        """Heals every fault; connections that lost bytes are reset."""
        self._do(self._ways[at].heal())

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for way in getattr(self, "_ways", ()):
            self._do(way.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
