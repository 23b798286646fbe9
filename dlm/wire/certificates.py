"""Reads PEM files of certificates, keys and authorities, and checks them before gRPC uses them.

gRPC ends the process if a certificate or key is empty. It reports other unusable files only when it
connects, as an unreachable peer.
"""

from __future__ import annotations

import base64
import math
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from dlm.errors import ConfigError
from dlm.wire.secret import read_secret, require_file

# Contents of three files (authorities, key, certificate), in gRPC's order; None for no file.
Contents = tuple[bytes | None, bytes | None, bytes | None]

_VERSION = 0xA0  # the DER tag of a certificate's version
# Short names of a subject's attributes; others keep the name that OpenSSL gives them.
_SHORT = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "givenName": "GN",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "street",
    "surname": "SN",
    "userId": "UID",
}


def read_certificates(
    context: ssl.SSLContext | None = None, /, *, ca: str = "", cert: str = "", key: str = ""
) -> Contents:
    """Checks these files, and returns their contents.

    Args    context    an SSL context to load the files into
            ca         the authorities that are trusted
            cert, key  a certificate, first in its file, and its key; both or neither
    Raises  ConfigError  a file is missing or not PEM, the key belongs to another certificate or
                         has a password, or other users can read it
    """
    authorities = _read(Path(ca)) if ca else None
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if authorities is not None:
        try:
            # As text, `cadata` may contain only ASCII, but comments may contain anything.
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{ca} contains no PEM certificate: {_reason(exc)}") from exc
    if not cert:
        return authorities, None, None
    chain, secret = _read(Path(cert)), read_secret(Path(key))
    try:
        # Loads the bytes that were read, since the files may have changed.
        with _as_file(chain) as cert_file, _as_file(secret) as key_file:
            context.load_cert_chain(cert_file, key_file, password=lambda: b"")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{cert} and {key} are not a PEM certificate and its unencrypted key: {_reason(exc)}"
        ) from exc
    return authorities, secret, chain


def expiry_of(chain: bytes) -> float:
    """Returns when the first of these PEM certificates expires, in seconds since 1970; nan if a
    certificate does not follow RFC 5280."""
    blocks = re.findall(
        rb"BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END", chain, re.DOTALL
    )
    try:
        return min((_not_after(base64.b64decode(block)) for block in blocks), default=math.inf)
    except (ValueError, IndexError):  # a form of time or length that only OpenSSL accepts
        return math.nan


def _not_after(der: bytes) -> float:
    """Returns the expiry. By RFC 5280, 4.1, a certificate begins with a sequence: a version (which
    is optional), a serial number, an algorithm, the issuer, and the validity: its start and end."""
    at = _content(der, _content(der, 0)[0])[0]
    for _ in range(3 + (der[at] == _VERSION)):
        at = _content(der, at)[1]
    begun = _content(der, at)[0]
    at, end = _content(der, _content(der, begun)[1])
    form = "%y%m%d%H%M%S%z" if end - at == len("yymmddHHMMSSZ") else "%Y%m%d%H%M%S%z"
    return datetime.strptime(der[at:end].decode(), form).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    begin, size = at + 2, der[at + 1]
    if size > 127:  # the lower bits say how many bytes the length has
        begin += size - 128
        size = int.from_bytes(der[at + 2 : begin])
    return begin, begin + size


def subject_of(certificate: Mapping[str, Any] | None) -> str:
    """Returns a certificate's subject, from `ssl`'s form to gRPC's (RFC 2253); "" for None."""
    said = [
        "+".join(
            f"{_SHORT.get(kind, kind)}={_escaped(value)}" for kind, value in reversed(together)
        )
        for together in (certificate or {}).get("subject", ())
    ]
    return ",".join(reversed(said))


def _escaped(value: str) -> str:
    """Escapes special characters, and bytes beyond printable ASCII, in the text."""
    marked = re.sub(r'[,+"\\<>;]|^[# ]| \Z', r"\\\g<0>", value).encode()
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\{byte:02X}" for byte in marked)


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or getattr(exc, "strerror", None) or str(exc)


def _read(path: Path) -> bytes:
    require_file(path)
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("dlm-tls")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
