"""The cryptography behind secure aggregation, all from the package `cryptography`.

Nobody outside this project has reviewed how this module combines these primitives:

    agreement    X25519 (RFC 7748), then HKDF with SHA-256 (RFC 5869) and a name for each purpose
    masks        ChaCha20 (RFC 8439) with a key of 256 bits; rejects words that would bias numbers
    sealing      ChaCha20-Poly1305
    signatures   Ed25519 (RFC 8032)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dlm.errors import PrivacyError
from dlm.files import write_whole
from dlm.record.signature import read_private_key

SECRET_BYTES = 32
Draw: TypeAlias = Callable[[int], bytes]  # os.urandom, or a test's own source
Vector: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair for key agreement; `repr` leaves out the secret half."""

    secret: bytes = field(repr=False)
    public: bytes

    @classmethod
    def drawn(cls, draw: Draw) -> KeyPair:
        return cls.of(draw(SECRET_BYTES))

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """The key pair with this secret half."""
        public = X25519PrivateKey.from_private_bytes(secret).public_key()
        return cls(secret, public.public_bytes_raw())

    def agree(self, public: bytes, purpose: str, about: bytes = b"") -> bytes:
        """Returns the 32 bytes that only the holders of the two keys can compute, for one purpose
        and `about`. PrivacyError if `public` has the wrong length, or is a point of low order, with
        which anybody could compute the result."""
        try:
            mine = X25519PrivateKey.from_private_bytes(self.secret)
            shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as exc:
            raise PrivacyError(f"a key for key agreement is not usable: {exc}") from exc
        # The salt contains both public keys, in an order that both sides know.
        salt = b"".join(sorted((self.public, public)))
        name = f"dlm secure aggregation 1 {purpose} ".encode() + about
        return HKDF(hashes.SHA256(), SECRET_BYTES, salt=salt, info=name).derive(shared)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypts under a key that is used once per direction; `about` tells the directions apart."""
    return ChaCha20Poly1305(_directed(key, about)).encrypt(bytes(12), content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Decrypts `sealed`; PrivacyError unless `seal` made it with this key and `about`."""
    try:
        return ChaCha20Poly1305(_directed(key, about)).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        raise PrivacyError(
            "an encrypted share cannot be decrypted: it was changed in transit, or is for another "
            "device"
        ) from None


def _directed(key: bytes, about: bytes) -> bytes:
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=b"seal " + about).derive(key)


class MaskStream:
    """A stream of numbers that `seed`, of 32 bytes, determines; to anybody who does not know the
    seed, the numbers look uniform."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SECRET_BYTES:
            raise ValueError(f"the seed has {len(seed)} bytes; expected {SECRET_BYTES}")
        self._cipher = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()

    def take(self, size: int, modulus: int) -> Vector:
        """The next `size` numbers, uniform in 0..modulus-1; modulus at most 2^62."""
        wide = modulus > 1 << 32
        dtype, span = ("<u8", 1 << 64) if wide else ("<u4", 1 << 32)
        limit = span - span % modulus
        out = np.empty(size, np.int64)
        filled = 0
        while filled < size:
            wanted = (size - filled) * (8 if wide else 4)
            words = np.frombuffer(self._cipher.update(bytes(wanted)), dtype).astype(np.uint64)
            kept = words if limit == 1 << 64 else words[words < np.uint64(limit)]
            out[filled : filled + len(kept)] = kept % np.uint64(modulus)
            filled += len(kept)
        return out


@dataclass(frozen=True, slots=True)
class Signer:
    """A device's long-lived key, whose public half the server's operator registered beforehand."""

    secret: bytes = field(repr=False)

    @classmethod
    def drawn(cls, draw: Draw) -> Signer:
        return cls(draw(SECRET_BYTES))

    @classmethod
    def read(cls, path: Path) -> Signer:
        """Reads the key in a PEM file; ConfigError if the file has no readable key."""
        return cls(read_private_key(path).private_bytes_raw())

    def write(self, path: Path) -> None:
        key = Ed25519PrivateKey.from_private_bytes(self.secret)
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_whole(path, content, mode=0o600)

    @property
    def public(self) -> bytes:
        key = Ed25519PrivateKey.from_private_bytes(self.secret)
        return key.public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.secret).sign(content)


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
