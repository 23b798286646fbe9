"""The proxy: every byte in order without faults, and each fault as it says."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from cluster import WAIT_S
from loadtest.run.proxy import Faults, Proxies, _Frames

MEGABYTE = 1 << 20


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it gets, on every connection, until its side is ended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.echo)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def echo(connection: socket.socket, *_: object) -> None:
        """One connection."""
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                connection.sendall(data)

    def end(self) -> None:
        """Listens no more."""
        self.shutdown()
        self.server_close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    """A server behind the proxy."""
    server = Echo()
    yield server
    server.end()


@pytest.fixture
def proxies(echo: Echo) -> Iterator[Proxies]:
    """A proxy before it."""
    with Proxies([echo.address], seed=5) as made:
        yield made


def dial(proxies: Proxies) -> socket.socket:
    """A connection through the proxy."""
    host, port = proxies.addresses[0].split(":")
    connection = socket.create_connection((host, int(port)), WAIT_S)
    connection.settimeout(WAIT_S)
    return connection


def said(connection: socket.socket, data: bytes) -> bytes:
    """What comes back for `data`."""
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    back = bytearray()
    while len(back) < len(data):
        part = connection.recv(65536)
        assert part, "the connection ended"
        back += part
    sender.join()
    return bytes(back)


def assert_reset(proxies: Proxies) -> None:
    """A new connection is reset, as soon as it is made or a little later."""
    with pytest.raises(ConnectionResetError), dial(proxies) as connection:
        connection.recv(1)


def silent(connection: socket.socket, seconds: float = 0.3) -> bool:
    """Whether nothing comes for a while."""
    return not select.select([connection], [], [], seconds)[0]


@pytest.mark.parametrize("faults", [{}, {"delay_s": 0.02}, {"stall": 0.1, "stall_s": 0.02}])
def test_every_byte_passes_in_order(proxies: Proxies, faults: dict[str, float]) -> None:
    """Megabytes, on several connections at once, whatever is only late; and so does the end."""
    proxies.set(0, **faults)
    data = random.Random(3).randbytes(2 * MEGABYTE)
    connections = [dial(proxies) for _ in range(4)]
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda c=c: found.append(said(c, data))) for c in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [data] * 4
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
        connection.close()


def test_a_delay_is_added_each_way_and_taken_back(proxies: Proxies) -> None:
    """A round trip is longer by twice of it; once it is taken back, no longer than without."""
    with dial(proxies) as connection:
        assert said(connection, b"a") == b"a"
        proxies.set(0, delay_s=0.15)
        begun = time.monotonic()
        assert said(connection, b"b") == b"b"
        assert time.monotonic() - begun >= 0.3
        proxies.set(0, delay_s=2 * WAIT_S)
        proxies.heal(0)
        assert proxies.faults(0) == Faults()
        assert said(connection, b"c") == b"c"


def test_a_stall_holds_what_follows_too(proxies: Proxies) -> None:
    """Every chunk stalls: two that are sent at once come back after two stalls each way."""
    proxies.set(0, stall=1.0, stall_s=0.1)
    with dial(proxies) as connection:
        begun = time.monotonic()
        assert said(connection, b"a") == b"a"
        assert time.monotonic() - begun >= 0.2


def test_a_partition_loses_nothing(proxies: Proxies) -> None:
    """What was sent meanwhile arrives when it is over, on the same connection."""
    with dial(proxies) as connection:
        assert said(connection, b"a") == b"a"
        proxies.set(0, partition=True)
        connection.sendall(b"bc")
        assert silent(connection)
        proxies.heal(0)
        assert connection.recv(1) + connection.recv(1) == b"bc"


def test_a_blackhole_swallows_and_what_lost_bytes_is_reset_after_it(proxies: Proxies) -> None:
    """Connections that come meanwhile are taken; later ones work."""
    with dial(proxies) as old:
        assert said(old, b"a") == b"a"
        proxies.set(0, blackhole=True)
        with dial(proxies) as new:
            old.sendall(b"b")
            new.sendall(b"b")
            assert silent(old)
            assert silent(new)
            proxies.set(0, blackhole=False)
            for connection in (old, new):
                with pytest.raises(ConnectionResetError):
                    connection.recv(1)
        with dial(proxies) as later:
            assert said(later, b"c") == b"c"


def test_half_open_connections_are_silent_while_new_ones_work(proxies: Proxies) -> None:
    """Until they are reset by `heal`."""
    with dial(proxies) as old:
        assert said(old, b"a") == b"a"
        assert proxies.half_open(0) == 1
        with dial(proxies) as new:
            old.sendall(b"b")
            assert said(new, b"b") == b"b"
            assert silent(old)
            proxies.heal(0)
            with pytest.raises(ConnectionResetError):
                old.recv(1)
            assert said(new, b"c") == b"c"


def test_dropped_connections_are_reset_old_and_new(proxies: Proxies) -> None:
    """With probability 1 at once; below it, as chunks come."""
    with dial(proxies) as old:
        assert said(old, b"a") == b"a"
        proxies.set(0, drop=1.0)
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        assert_reset(proxies)
    proxies.set(0, drop=0.3)
    resets = 0
    for _ in range(20):
        with dial(proxies) as connection:
            try:
                for _ in range(3):
                    said(connection, b"a")
            except (ConnectionResetError, BrokenPipeError):
                resets += 1
    assert 5 < resets <= 20
    proxies.heal(0)
    with dial(proxies) as connection:
        assert said(connection, b"a") == b"a"


def test_corruption_flips_one_bit_of_a_reply(proxies: Proxies) -> None:
    """And nothing of what goes to the server, or two would be seen here."""
    proxies.set(0, corrupt=1.0)
    with dial(proxies) as connection:
        for _ in range(20):
            back = said(connection, b"\0" * 64)
            assert sum(byte.bit_count() for byte in back) == 1


def frame(kind: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind]) + b"\0" * 5 + payload


def test_the_payloads_of_data_frames_are_found_however_the_stream_is_cut() -> None:
    """And nothing else: not heads, not other frames."""
    rng = random.Random(4)
    parts = [(0, b"x" * 300), (4, b"y" * 20), (0, b""), (7, b""), (0, b"x"), (1, b"y" * 90)] * 3
    stream = b"".join(frame(kind, payload) for kind, payload in parts)
    expected = [at for at, byte in enumerate(stream) if byte == ord("x")]
    for most in (1, 7, 50, len(stream)):
        frames, found, at = _Frames(), [], 0
        while at < len(stream):
            chunk = stream[at : at + rng.randint(1, most)]
            found += [at + place for place in frames.places(chunk)]
            at += len(chunk)
        assert found == expected


def test_corruption_spares_the_frames_of_http2(proxies: Proxies) -> None:
    """After its preface, one bit of a payload is another and every head is as it was sent."""
    proxies.set(0, corrupt=1.0)
    preface = b"PRI * HTTP/2.0"  # comes back as the head of a frame, and more
    size = int.from_bytes(preface[:3], "big")
    with dial(proxies) as connection:
        said(connection, preface + b"\0" * (size - (len(preface) - 9)))
        sent = frame(4, b"\0" * 9) + frame(0, b"\0" * 5)
        for _ in range(20):
            back = said(connection, sent)
            assert back[:-5] == sent[:-5]
            assert sum(byte.bit_count() for byte in back[-5:]) <= 1


def test_a_server_that_is_not_there_shows_as_a_reset(echo: Echo, proxies: Proxies) -> None:
    """And the proxy serves on."""
    echo.end()
    for _ in range(2):
        assert_reset(proxies)


def test_another_server_takes_the_place_of_the_first(echo: Echo, proxies: Proxies) -> None:
    """Connections to the old one are reset; new ones reach the new one."""
    second = Echo()
    with dial(proxies) as old:
        assert said(old, b"a") == b"a"
        proxies.redirect(0, second.address)
        with pytest.raises(ConnectionResetError):
            old.recv(1)
    echo.end()
    with dial(proxies) as new:
        assert said(new, b"b") == b"b"
    second.end()


def test_closing_ends_every_connection_and_frees_the_port(echo: Echo) -> None:
    """Twice does no harm."""
    proxies = Proxies([echo.address])
    host, port = proxies.addresses[0].split(":")
    with dial(proxies) as connection:
        assert said(connection, b"a") == b"a"
        proxies.close()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    proxies.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
