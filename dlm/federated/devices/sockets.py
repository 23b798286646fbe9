"""A device as a long-lived process behind a local socket: its keys, its clock and its compiled
steps outlive whatever carries messages to it.

A message is its length (8 bytes, little-endian), then its bytes; each is answered by one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dlm.errors import ProtocolError

LONGEST = 1 << 30
_LENGTH = 8


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(len(data).to_bytes(_LENGTH, "little"))
    line.sendall(data)


def _receive(line: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(line, _LENGTH), "little")
    if size > LONGEST:
        raise ProtocolError(f"a message of {size:,} bytes; expected at most {LONGEST:,}")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (some := line.recv(min(size - len(found), 1 << 20))):
            raise EOFError
        found += some
    return bytes(found)


class DeviceSocket:
    """Serves one device at a path, which its owner alone may use; one message at a time."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        self._answer, self._lock = answer, threading.Lock()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()

    def serve(self) -> None:
        """Until `close`."""
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_one, args=(line,), daemon=True).start()

    def _serve_one(self, line: socket.socket) -> None:
        with line, suppress(EOFError, OSError, ProtocolError):
            while True:
                data = _receive(line)
                with self._lock:
                    said = self._answer(data)
                _send(line, said)

    def close(self) -> None:
        # Closing alone does not wake a thread that accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def ask_device(path: Path, data: bytes, timeout_s: float) -> bytes:
    """The answer of the device at this path; OSError or EOFError if there is none in time."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(timeout_s)
        line.connect(str(path))
        _send(line, data)
        return _receive(line)
