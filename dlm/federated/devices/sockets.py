"""Runs a device as a long-lived process behind a local socket, so that the device's keys, clock and
compiled steps outlive connections.

On the wire, a message's length (8 bytes, little-endian) precedes the message. A connection carries
one message and the answer to it.
"""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from dlm.errors import ConfigError, ProtocolError
from dlm.files import lock_file, unlock

LONGEST = 1 << 30
MOST_PATH = 100  # maximum bytes of a socket's path; systems allow a few more
LINE_S = 30.0  # seconds to receive a message, and to send its answer
FIRST_S = 5.0  # seconds to receive a message's length
AT_ONCE = 100  # devices that get a request at the same time
_LENGTH = 8


def send(line: socket.socket, data: bytes, end_s: float) -> None:
    _wait_until(line, end_s)
    line.sendall(len(data).to_bytes(_LENGTH, "little"))
    line.sendall(data)


def receive(line: socket.socket, begin_s: float, end_s: float, most: int) -> bytes:
    """Receives a message: the length must arrive by `begin_s`, the content by `end_s`."""
    size = int.from_bytes(_exactly(line, _LENGTH, begin_s), "little")
    if size > most:
        raise ProtocolError(f"a message has {size:,} bytes; expected at most {most:,}")
    return _exactly(line, size, end_s)


def _exactly(line: socket.socket, size: int, end_s: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        _wait_until(line, end_s)
        if not (some := line.recv(min(size - len(found), 1 << 20))):
            raise EOFError
        found += some
    return bytes(found)


def _wait_until(line: socket.socket, end_s: float) -> None:
    """Makes the next call on `line` time out at `end_s`; TimeoutError if `end_s` has passed."""
    remaining = end_s - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    line.settimeout(remaining)


def socket_of(folder: Path, name: str) -> Path:
    path = folder / f"{name}.sock"
    if len(str(path).encode()) > MOST_PATH:
        raise ConfigError(
            f"the path {path} has more than {MOST_PATH} bytes, which is too long for a local "
            "socket; give a folder with a shorter path"
        )
    return path


class DeviceSocket:
    """Serves one device on a socket, one connection at a time. Only the socket's owner may connect
    and, in a setgid folder, also the folder's group: for example, an account that forwards messages
    but must not read the device's text."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        self._path, self._answer = path, answer
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_mode & 0o022:
            raise ConfigError(
                f"other users can write to {path.parent}, so they could impersonate this device; "
                f"run: chmod 700 {path.parent}"
            )
        self._lock_file = path.with_suffix(".lock")
        if (lock := lock_file(self._lock_file)) is None:
            raise ConfigError(f"another process listens on {path}; stop it, or give another --name")
        self._lock = lock
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o660 if path.parent.stat().st_mode & stat.S_ISGID else 0o600)
        self._listener.listen()

    def serve(self) -> None:
        while True:
            line, _ = self._listener.accept()
            with line, suppress(EOFError, OSError, ProtocolError):
                now_s = time.monotonic()
                said = self._answer(receive(line, now_s + FIRST_S, now_s + LINE_S, LONGEST))
                send(line, said, time.monotonic() + LINE_S)

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._lock_file.unlink(missing_ok=True)
        unlock(self._lock)


class LocalSockets:
    """The `Network` of devices that listen on sockets in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(
        self,
        requests: Mapping[str, bytes],
        hear: Callable[[str, bytes], bool],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        end_s, lines = time.monotonic() + timeout_s, _Lines()
        with ThreadPoolExecutor(min(len(requests), AT_ONCE) or 1) as pool:
            asked = {
                pool.submit(
                    ask_one, socket_of(self._folder, name), data, end_s, most_bytes, lines.add
                ): name
                for name, data in requests.items()
            }
            for one in as_completed(asked):
                name = asked.pop(one)  # frees the answer once it is heard
                with suppress(EOFError, OSError, ProtocolError):
                    if hear(name, one.result()):
                        lines.end()


class _Lines:
    """The connections on which threads wait for answers; `end` ends all waits."""

    def __init__(self) -> None:
        self._lines: list[socket.socket] = []
        self._is_over = False

    def add(self, line: socket.socket) -> None:
        self._lines.append(line)
        if self._is_over:  # checked after the append, which `end` may have missed
            raise EOFError

    def end(self) -> None:
        self._is_over = True
        for line in self._lines:
            with suppress(OSError):  # the line may be closed already
                line.shutdown(socket.SHUT_RDWR)


def ask_one(
    path: Path,
    data: bytes,
    end_s: float,
    most_bytes: int,
    waits: Callable[[socket.socket], None] = lambda line: None,
) -> bytes:
    """Returns the answer of the device at `path`; OSError or EOFError if none arrives in time."""
    with socket.socket(socket.AF_UNIX) as line:
        _wait_until(line, end_s)
        line.connect(str(path))
        send(line, data, end_s)
        waits(line)
        return receive(line, end_s, end_s, most_bytes)
