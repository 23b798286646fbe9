"""A CONNECT proxy on loopback that keeps what it is sent."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy")  # that gRPC reads


class ConnectProxy:
    """Opens tunnels as RFC 9110 has it, in threads that end with their connections.

    asked     targets of the CONNECT requests
    received  everything that clients sent, the requests included
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.received = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """For the variables."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                data = client.recv(4096)
                if not data:
                    return
                self.received += data
                head += data
            target = head.split()[1].decode()
            self.asked.append(target)
            host, _, port = target.rpartition(":")
            server = socket.create_connection((host.strip("[]"), int(port)))
            self._open.append(server)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
            self._pump(client, server, keep=True)

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    self.received += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> ConnectProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
