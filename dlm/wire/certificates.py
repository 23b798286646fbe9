"""Certificates, keys and authorities: PEM files, checked before gRPC gets them.

gRPC ends the process if a certificate or key is empty. It reports other unusable files only when it
connects, as a peer that cannot be reached.
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

# Of the authorities, a key and its certificate, in gRPC's order; None if there is no such file.
Contents = tuple[bytes | None, bytes | None, bytes | None]

_VERSION = 0xA0  # its tag
# Short names of what a subject says; other kinds keep the name that OpenSSL gives them.
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
    """The content of these files, checked.

    Args    context    takes them, too
            ca         the authorities that are trusted
            cert, key  a certificate, first in its file, and its key; both or neither
    Raises  ConfigError  a file is missing or not PEM, the key belongs to another certificate or
                         has a password, or others may read it
    """
    authorities = _read(Path(ca)) if ca else None
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if authorities is not None:
        try:
            # As text it may contain only ASCII, but comments may contain anything.
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{ca} contains no PEM certificate: {_reason(exc)}") from exc
    if not cert:
        return authorities, None, None
    chain, secret = _read(Path(cert)), read_secret(Path(key))
    try:
        # The bytes that were read, not the files again, which may have changed since.
        with _as_file(chain) as cert_file, _as_file(secret) as key_file:
            context.load_cert_chain(cert_file, key_file, password=lambda: b"")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{cert} and {key} are not a PEM certificate and its key without a password: "
            f"{_reason(exc)}"
        ) from exc
    return authorities, secret, chain


def expiry_of(chain: bytes) -> float:
    """Seconds since 1970 at which the first of these PEM certificates to expire does; nan where one
    does not say it as RFC 5280 has it."""
    blocks = re.findall(
        rb"BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END", chain, re.DOTALL
    )
    try:
        return min((_not_after(base64.b64decode(block)) for block in blocks), default=math.inf)
    except (ValueError, IndexError):  # a form of time or length that OpenSSL takes
        return math.nan


def _not_after(der: bytes) -> float:
    """RFC 5280, 4.1: a certificate is a sequence, whose first part is one of a version, which may
    be left out, number, algorithm, issuer and validity, from and until."""
    at = _content(der, _content(der, 0)[0])[0]
    for _ in range(3 + (der[at] == _VERSION)):
        at = _content(der, at)[1]
    begun = _content(der, at)[0]
    at, end = _content(der, _content(der, begun)[1])
    form = "%y%m%d%H%M%S%z" if end - at == len("yymmddHHMMSSZ") else "%Y%m%d%H%M%S%z"
    return datetime.strptime(der[at:end].decode(), form).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    begin, size = at + 2, der[at + 1]
    if size > 127:  # the number of bytes that say it
        begin += size - 128
        size = int.from_bytes(der[at + 2 : begin])
    return begin, begin + size


def subject_of(certificate: Mapping[str, Any] | None) -> str:
    """The subject of a certificate as `ssl` decodes it, in gRPC's form (RFC 2253); "" for none."""
    said = [
        "+".join(
            f"{_SHORT.get(kind, kind)}={_escaped(value)}" for kind, value in reversed(together)
        )
        for together in (certificate or {}).get("subject", ())
    ]
    return ",".join(reversed(said))


def _escaped(value: str) -> str:
    """With a backslash before what has a meaning, and for each byte that is not printable ASCII."""
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
