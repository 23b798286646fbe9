"""HTTP/1.1 for the pages of a server and the calls of a gateway, with limits on bytes and time.

The rules are stricter than RFC 9112 where HTTP parsers have differed: a request states its length
once, in one way, and ends its lines with CR LF.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from dlm.wire.certificates import subject_of

HEAD_BYTES = 16 << 10
HEAD_S = 5.0  # time limit for a connection's first byte, and then for a request's head
IDLE_S = 75.0  # seconds between two requests of one connection
BODY_S = 20.0  # time limit for a body
WRITE_S = 10.0  # time limit for a client to read its answer
LINGER_S = 2.0  # seconds for a client to read the last answer before the connection closes
LINGER_READS = 256  # maximum number of reads of READ_BYTES to discard within LINGER_S
READ_BYTES = 64 << 10
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
ALWAYS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIRST_LINE = re.compile(rb"(%s) ([!-~\x80-\xff]+) HTTP/1\.([01])" % _TOKEN)
_FIELD = re.compile(rb"(%s):([^\0-\x08\n-\x1f\x7f]*)" % _TOKEN)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\0-\x08\n-\x1f\x7f]*)?\r\n")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


def text(status: int, line: str) -> Response:
    return Response(status, line.encode() + b"\n")


class BadRequest(Exception):
    """The received bytes are not HTTP/1.1, or exceed a limit."""

    def __init__(self, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        self.status = status


class PeerGone(EOFError):
    """The other end disconnected while its request was being answered."""


@dataclass(slots=True)
class HttpRequest:
    """A request whose body is not read yet; the names of headers are in lower case.

    length   unread bytes of the body; None if it comes in chunks
    keeps    whether the client may send another request on its connection
    body     reads the body, None if too large; raises BadRequest if it is cut off, or TimeoutError
    who      the client's certificate subject, or address; `peer` is the address with the port
    """

    method: str
    path: str
    headers: list[tuple[str, str]]
    length: int | None
    keeps: bool
    body: Callable[[], Awaitable[bytes | None]] = field(init=False)
    who: str = ""
    peer: str = ""

    def header(self, name: str) -> str:
        return next((value for known, value in self.headers if known == name), "")


Task: TypeAlias = asyncio.Task[Any]
# Answers a request; the stack is closed once the answer is written.
Answer: TypeAlias = Callable[[HttpRequest, ExitStack], Awaitable[Response]]


class Connections:
    """The connections of the running loop, each of which answers one request at a time.

    Args  refusal  makes the answer to an invalid or failed request, from its status and a text
          most     maximum number of connections; beyond it, the one idle for longest is closed
          keeps    whether a connection may take another request now
          fault    logs that an answer failed
    """

    def __init__(
        self,
        answer: Answer,
        refusal: Callable[[int, str], Response],
        *,
        most: int,
        body_bytes: int = 0,
        keeps: Callable[[], bool] = bool,
        fault: Callable[[Exception], object],
    ) -> None:
        self.answer, self.refusal, self.fault = answer, refusal, fault
        self.body_bytes, self.keeps, self._most = body_bytes, keeps, most
        # Oldest first. `idle` has connections that wait for a request or are being sent an answer.
        self.open: dict[Task, None] = {}
        self.idle: dict[Task, None] = {}

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection, request by request; a client's fault ends only its connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self.open) >= self._most:
            if not self.idle:
                writer.transport.abort()
                return
            oldest = next(iter(self.idle))
            self.idle.pop(oldest)
            oldest.cancel()
        self.open[task] = None
        try:
            await _Connection(self, reader, writer, task).talk()
        except (TimeoutError, OSError, EOFError, asyncio.CancelledError):
            pass  # the client was too slow, disconnected, or had to make room
        except RuntimeError:  # uvloop raises it if the other end is gone
            if not writer.transport.is_closing():
                raise
        finally:
            self.idle.pop(task, None)
            self.open.pop(task, None)
            writer.transport.abort()

    async def close(self) -> None:
        for task in self.open:
            task.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)


class _Connection:
    def __init__(
        self,
        all_: Connections,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: Task,
    ) -> None:
        self._all, self._reader, self._writer, self._task = all_, reader, writer, task
        writer.transport.set_write_buffer_limits(0)  # a drain waits until all is written
        address, port = (writer.get_extra_info("peername") or ("", 0))[:2]
        subject = subject_of(writer.get_extra_info("peercert"))
        self._who, self._peer = subject or str(address), f"{address}:{port}"

    async def talk(self) -> None:
        wait_s, goes_on = HEAD_S, True
        while goes_on:
            unread = True
            self._all.idle[self._task] = None
            try:
                request = await self._request(wait_s)
            except BadRequest as exc:
                said = "this is not an HTTP/1.1 request, or its head is too long"
                await self._write(self._all.refusal(exc.status, said), goes_on=False)
                break
            self._all.idle.pop(self._task, None)
            with ExitStack() as held:
                try:
                    answer = await self._all.answer(request, held)
                except PeerGone:
                    raise
                except Exception as exc:  # noqa: BLE001 - the next request must be answered
                    self._all.fault(exc)
                    said = "the request failed; see the server's log"
                    answer = self._all.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, said)
                unread = request.length != 0
                goes_on = request.keeps and not unread and self._all.keeps()
                await self._write(answer, goes_on=goes_on, with_body=request.method != "HEAD")
            wait_s = IDLE_S
        await self._linger(unread)

    async def _request(self, wait_s: float) -> HttpRequest:
        async with asyncio.timeout(wait_s):
            head = await self._reader.readexactly(1)
        if head <= b" ":
            raise BadRequest
        async with asyncio.timeout(HEAD_S):
            try:
                head += await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError as exc:
                raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from exc
        request = _read_head(head)
        request.who, request.peer = self._who, self._peer
        request.body = lambda: self._body(request)
        return request

    async def _body(self, request: HttpRequest) -> bytes | None:
        if request.length is not None and request.length > self._all.body_bytes:
            return None
        if request.header("expect").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._framing = 0
        async with asyncio.timeout(BODY_S):
            try:
                if request.length is None:
                    body = await self._chunks()
                else:
                    body = await self._reader.readexactly(request.length)
            except (EOFError, asyncio.LimitOverrunError) as exc:
                raise BadRequest from exc
            except OSError as exc:
                raise PeerGone from exc
        if body is not None:
            request.length = 0  # nothing is left unread
        return body

    async def _chunks(self) -> bytes | None:
        body = bytearray()
        while True:
            found = _CHUNK.fullmatch(await self._line(len(body)))
            if found is None:
                raise BadRequest
            size = int(found[1], 16)
            if size == 0:
                break
            if len(body) + size > self._all.body_bytes:
                return None
            body += await self._reader.readexactly(size)
            if await self._reader.readexactly(2) != b"\r\n":
                raise BadRequest
        while (trailer := (await self._line(len(body)))[:-2]) != b"":
            if _FIELD.fullmatch(trailer) is None:
                raise BadRequest
        return bytes(body)

    async def _line(self, body_bytes: int) -> bytes:
        """Reads a line of a chunked body; BadRequest if lines are too long for the body's size.
        Gives other tasks a turn, since data that has already arrived is read without waiting."""
        line = await self._reader.readuntil(b"\n")
        self._framing += len(line) + 2
        if self._framing > HEAD_BYTES + body_bytes // 8 or not line.endswith(b"\r\n"):
            raise BadRequest
        await asyncio.sleep(0)
        return line

    async def _write(self, answer: Response, *, goes_on: bool, with_body: bool = True) -> None:
        headers = (
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            *ALWAYS,
            *answer.headers,
            *(() if goes_on else (("Connection", "close"),)),
        )
        lines = [f"HTTP/1.1 {int(answer.status)} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._all.idle[self._task] = None
        async with asyncio.timeout(WRITE_S):
            self._writer.write(head + answer.body if with_body else head)
            await self._writer.drain()

    async def _linger(self, unread: bool) -> None:
        """Waits for the peer to read the answer: closing on unread bytes resets the connection."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        elif not unread:
            self._writer.close()  # TLS announces the end, and waits until the peer does, too
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_READS):
                if not await self._reader.read(READ_BYTES):
                    return


def _read_head(head: bytes) -> HttpRequest:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    begun = _FIRST_LINE.fullmatch(first)
    fields = [_FIELD.fullmatch(line) for line in lines]
    if begun is None or None in fields:
        raise BadRequest
    headers = [
        (one[1].decode().lower(), one[2].strip(b" \t").decode("latin-1")) for one in fields if one
    ]
    names = [name for name, _ in headers]
    if any(names.count(one) > 1 for one in ("content-length", "host", "transfer-encoding")):
        raise BadRequest
    if begun[3] == b"0":
        headers = [one for one in headers if one[0] != "expect"]  # RFC 9110, 10.1.1
    elif "host" not in names:  # RFC 9112, 3.2
        raise BadRequest
    path = begun[2].split(b"?", 1)[0].decode("latin-1")
    request = HttpRequest(begun[1].decode(), path, headers, 0, begun[3] == b"1")
    request.keeps &= not any(
        "close" in re.split(r"[ ,\t]+", value.lower())
        for name, value in headers
        if name == "connection"
    )
    if "transfer-encoding" in names:
        # A proxy in between might trust content-length, and see a different next request.
        if (
            request.header("transfer-encoding").lower() != "chunked"
            or "content-length" in names
            or begun[3] == b"0"
        ):
            raise BadRequest
        request.length = None
    elif "content-length" in names:
        if not re.fullmatch("[0-9]{1,15}", request.header("content-length")):
            raise BadRequest
        request.length = int(request.header("content-length"))
    return request
