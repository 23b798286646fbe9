"""The server's certificate, its key and its clients' authority, reloaded while it runs."""

from __future__ import annotations

from typing import Any

from dlm.server.poller import grpc
from dlm.wire.certificates import read_certificates


class Certificates:
    """What a handshake uses: read and checked once, then again whenever `reload` is called.

    A connection keeps what it began with; each new handshake uses what was read last.
    """

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        self._files = {"ca": client_ca, "cert": cert, "key": key}
        self._content = read_certificates(**self._files)
        self._fresh = False

    def reload(self) -> None:
        """Reads the files again; keeps what was read before, if it raises ConfigError."""
        self._content = read_certificates(**self._files)
        self._fresh = True

    def credentials(self) -> Any:
        """The credentials to bind a gRPC port with; handshakes follow every `reload`."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._newer,
            require_client_authentication=bool(self._files["ca"]),
        )

    def _newer(self) -> Any:
        """gRPC calls this at each handshake, on its own threads; None means no change."""
        if not self._fresh:
            return None
        self._fresh = False
        return self._configuration()

    def _configuration(self) -> Any:
        """Made only when used, so that a process that will fork does not start gRPC."""
        client_ca, key, cert = self._content
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
