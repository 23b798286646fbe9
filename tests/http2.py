"""A peer that speaks just enough HTTP/2 to open calls and leave them idle, from any address."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
WINDOW_UPDATE = 8
INITIAL_WINDOW_SIZE = 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def _literal(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


class Peer:
    """A connection that opens calls and does no more than it is told.

    Args
        window  bytes of a reply that it takes, each call
    """

    def __init__(
        self,
        address: str,
        *,
        source: str = "127.0.0.1",
        timeout_s: float = 60.0,
        window: int = 65_535,
    ) -> None:
        host, port = address.rsplit(":", 1)
        self._address = address
        self.socket = socket.create_connection((host, int(port)), timeout_s, (source, 0))
        # The acknowledgement of settings may come before what it acknowledges.
        settings = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window.to_bytes(4, "big")
        self.socket.sendall(PREFACE + frame(SETTINGS, payload=settings) + frame(SETTINGS, ACK))
        self._next = 1
        self._read = b""
        self.ended: set[int] = set()
        self.windows: list[int] = []  # that the server gave a stream, and changed it to
        self.pings = 0

    def open_calls(self, method: str, count: int, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Begins `count` calls: their headers, no message, and no end."""
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)
        frames = bytearray()
        for _ in range(count):
            frames += frame(HEADERS, END_HEADERS, self._next, block)
            self._next += 2
        self.socket.sendall(frames)

    def ask(
        self,
        method: str,
        message: bytes,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        end: bool = True,
    ) -> None:
        """A call with one message, of less than a frame; it is the last where `end` says so."""
        self.open_calls(method, 1, metadata)
        self.ask_more(message, end=end)

    def ask_more(self, message: bytes, *, end: bool = False) -> None:
        """Another message in the last call, of less than a frame."""
        payload = b"\0" + len(message).to_bytes(4, "big") + message
        self.socket.sendall(frame(DATA, END_STREAM * end, self._next - 2, payload))

    def let_come(self, size: int) -> None:
        """Takes so many bytes more of the last call's reply."""
        self.socket.sendall(frame(WINDOW_UPDATE, 0, self._next - 2, size.to_bytes(4, "big")))

    def read(self) -> None:
        """Waits for bytes of the server, and notes the calls that it has ended."""
        more = self.socket.recv(1 << 16)
        assert more, "the server closed the connection"
        self._read += more
        while len(self._read) >= 9:
            end = 9 + int.from_bytes(self._read[:3], "big")
            if len(self._read) < end:
                return
            kind, flags, stream = self._read[3], self._read[4], self._read[5:9]
            payload = self._read[9:end]
            self.pings += kind == PING and not flags & ACK
            for at in range(0, len(payload), 6) if kind == SETTINGS else ():
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                    self.windows.append(int.from_bytes(payload[at + 2 : at + 6], "big"))
            if kind == RESET or (kind == HEADERS and flags & END_STREAM):
                self.ended.add(int.from_bytes(stream, "big"))
            self._read = self._read[end:]

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()


def wait_ended(peers: Sequence[Peer], count: int) -> None:
    """Returns once the server has ended `count` calls of all peers together."""
    by_file = {peer.socket.fileno(): peer for peer in peers}
    waiting = select.poll()  # not select(), which takes descriptors below 1,024 only
    for file in by_file:
        waiting.register(file, select.POLLIN)
    while sum(len(peer.ended) for peer in peers) < count:
        ready = waiting.poll(60_000)
        assert ready, "the server ends no more calls"
        for file, _ in ready:
            by_file[file].read()
