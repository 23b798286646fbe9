"""The server's certificate, its key and its clients' authority, reloaded while it runs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError
from dlm.server.poller import grpc
from dlm.wire.secret import read_secret, require_file


class Certificates:
    """What a handshake uses: read and checked once, then again whenever `reload` is called.

    A connection keeps what it began with; each new handshake uses what was read last.

    Raises
        ConfigError  a file is missing or not PEM, the key belongs to another certificate or has a
                     password, or others may read it
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self.paths = tuple(p for p in (cert, key, client_ca) if p is not None)
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._content = self._read()
        self._fresh = False

    def reload(self) -> None:
        """Reads the files again; if they are unusable, what was read before stays.

        Raises  ConfigError
        """
        self._content = self._read()
        self._fresh = True

    def credentials(self) -> Any:
        """The credentials to bind a gRPC port with; handshakes follow every `reload`."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._newer,
            require_client_authentication=self._client_ca is not None,
        )

    def _newer(self) -> Any:
        """gRPC calls this at each handshake, on its own threads; None means no change."""
        if not self._fresh:
            return None
        self._fresh = False
        return self._configuration()

    def _configuration(self) -> Any:
        """Made only when used, so that a process that will fork does not start gRPC."""
        key, cert, client_ca = self._content
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        cert, key = _read(self._cert), read_secret(self._key)
        client_ca = None if self._client_ca is None else _read(self._client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The bytes that were read, not the files again, which may have changed since.
        with _as_file(cert) as cert_file, _as_file(key) as key_file:
            try:
                context.load_cert_chain(cert_file, key_file, password=lambda: b"")
            except (OSError, ValueError) as exc:
                raise ConfigError(
                    f"{self._cert} and {self._key} are not a PEM certificate and its key without a "
                    f"password: {getattr(exc, 'reason', None) or exc}"
                ) from exc
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii"))
            except (OSError, ValueError) as exc:
                raise ConfigError(
                    f"{self._client_ca} contains no PEM certificate: "
                    f"{getattr(exc, 'reason', None) or exc}"
                ) from exc
        return key, cert, client_ca


def _read(path: Path) -> bytes:
    require_file(path)
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A file name for bytes in memory: the ssl module takes certificates only from files."""
    descriptor = os.memfd_create("dlm-tls")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
