"""The files that a client's security settings name: certificates, and the token of each call.

They are read when a client starts, and again whenever they change; if they are unusable by then,
what they last held stays in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from dlm.client.config.security import ClientSecurity
from dlm.errors import ConfigError
from dlm.logs import EventLog
from dlm.wire.certificates import Contents, read_certificates
from dlm.wire.secret import AUTHORIZATION, SCHEME, parse_token_file, read_secret, signature

log = EventLog(__name__)

Metadata = tuple[tuple[str, str], ...]
Token = Callable[[], Metadata]  # the metadata of a call, with the file's current token
Certificates = Callable[[], Contents]  # what a channel's handshakes use
T = TypeVar("T")


def check_files(security: ClientSecurity) -> None:
    """Reads certificates, key and token; raises `ConfigError` if a file is missing or unusable."""
    certificates_of(security)
    read_token(security)


def certificates_of(security: ClientSecurity) -> Certificates | None:
    """A function that returns what each channel's handshakes use; None without TLS. Raises
    ConfigError if a file is missing or unusable."""
    if not security.ca:
        return None
    files = {"ca": security.ca, "cert": security.cert, "key": security.key}
    paths = [Path(name) for name in files.values() if name]
    return _LastUsable("certificates", partial(read_certificates, **files), *paths)


def read_token(security: ClientSecurity) -> Token | None:
    """A function that returns the metadata with the token, for each call; None without a token.
    Raises ConfigError if the file is missing or unusable."""
    if security.token:
        fixed = ((AUTHORIZATION, SCHEME + security.token),)
        return lambda: fixed
    if not security.token_file:
        return None
    path = Path(security.token_file)

    def read() -> Metadata:
        return ((AUTHORIZATION, SCHEME + parse_token_file(read_secret(path), path)),)

    return _LastUsable("token", read, path)


class _LastUsable(Generic[T]):
    """What files held when they were last usable; from any thread."""

    def __init__(self, what: str, read: Callable[[], T], *paths: Path) -> None:
        self._what, self._read, self._paths = what, read, paths
        self._seen = signature(*paths)
        self._found = read()
        self._logged = ""

    def __call__(self) -> T:
        """Their content; logs once why files that have changed are unusable."""
        now = signature(*self._paths)
        if now != self._seen:
            try:
                # Both or none: files that could not be read may be readable next time.
                self._found, self._seen, self._logged = self._read(), now, ""
            except ConfigError as exc:
                if str(exc) != self._logged:
                    self._logged = str(exc)
                    log.error("client.%s.kept", self._what, extra={"error": self._logged})
        return self._found
