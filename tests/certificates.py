"""Certificates for tests, good ones and each kind of bad one; keys of mode 600."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; its own is `ca`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(_pem(self._build(self._name, self._key, authority=True)))

    @cached_property
    def server(self) -> Pair:
        """Good for 127.0.0.1 and localhost."""
        return self.issue("server")

    @cached_property
    def client(self) -> Pair:
        """Of a client named decoder."""
        return self.issue("decoder")

    def issue(
        self,
        name: str,
        *,
        subject: str = "",
        host: str = "127.0.0.1",
        expired: bool = False,
        days: int = 20,
        self_signed: bool = False,
    ) -> Pair:
        """A certificate for `host`, signed by this authority unless `self_signed`; `subject`: as
        RFC 4514 writes it, where that is not its name alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        whose = x509.Name.from_rfc4514_string(subject or f"CN={name}")
        certificate = self._build(
            whose, key, host=host, days=-1 if expired else days, signer=key if self_signed else None
        )
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        pair.cert.write_bytes(_pem(certificate))
        pair.key.touch(0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def _build(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        host: str = "127.0.0.1",
        authority: bool = False,
        days: int = 20,
        signer: ec.EllipticCurvePrivateKey | None = None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        try:
            names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(host))]
            names.append(x509.DNSName("localhost"))
        except ValueError:
            names = [x509.DNSName(host)]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if signer else self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(signer or self._key, hashes.SHA256())
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
