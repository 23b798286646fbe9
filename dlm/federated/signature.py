"""Signatures of records and of what they speak of: FILE.signature.json, beside the file.

    sign(Path("counts.tsv"), read_private_key(Path("key.pem")), at=now)
    found = look_at(Path("counts.tsv"), read_public_key(Path("key.pub")))
    found.standing, found.text

A digest finds a mistake, and no edit by somebody who computes it anew; a signature finds both. It
is Ed25519 over the SHA-256 of the file, the digest of its record and the time, so that it holds for
any file that has a record: counts, wordpieces, a checkpoint, a report, an ARPA file, a manifest.
`openssl genpkey -algorithm ed25519 -out key.pem` makes a key, `openssl pkey -in key.pem -pubout
-out key.pub` gives the public one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated import checkpoint
from dlm.federated.provenance import LINE_PREFIX, Provenance, content_digest, digest_of, file_digest
from dlm.federated.recorded import read_beside, sidecar
from dlm.files import write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FORMAT_NAME = "dlm privacy signature"
FORMAT_VERSION = 1
SUFFIX = ".signature.json"
HEADER_BYTES = 16 << 20  # of an ARPA file, in which its record is looked for
Standing = Literal["verified", "unverified", "wrong"]


@dataclass(frozen=True)
class Verdict:
    """What a file's record is worth.

    Fields
        standing  "verified": by the trusted key; "unverified": by no key that is trusted;
                  "wrong": the file, its record or its signature was changed
        record    of the file; None where it is wrong
        text      why, in a sentence
    """

    standing: Standing
    record: Provenance | None
    text: str


def signature_of(path: Path) -> Path:
    """Where the signature of a file stands."""
    return Path(str(path) + SUFFIX)


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """An Ed25519 key without a passphrase, in PEM.

    Raises
        ConfigError  there is none
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as exc:
        raise ConfigError(f"the key {path} cannot be read: {exc}; {_MAKE}") from exc
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"the key {path} is a {type(found).__name__}, not Ed25519; {_MAKE}")
    return found


def read_public_key(path: Path) -> Ed25519PublicKey:
    """An Ed25519 public key, in PEM.

    Raises
        ConfigError  there is none
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        found = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the public key {path} cannot be read: {exc}; {_PUBLISH}") from exc
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigError(f"the public key {path} is a {type(found).__name__}, not Ed25519")
    return found


_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"
_PUBLISH = "take it from the key with: openssl pkey -in key.pem -pubout -out key.pub"


def read_any_record(path: Path) -> Provenance:
    """The record that a file has: beside it, in a checkpoint, a report or a manifest, or in the
    header of an ARPA file.

    Raises
        FormatError   it has none
        PrivacyError  the record is of another file, or was changed
    """
    if sidecar(path).exists():
        return read_beside(path)
    with path.open("rb") as file:
        begin = file.read(len(checkpoint.MAGIC))
    if begin == checkpoint.MAGIC:
        return checkpoint.record_in(checkpoint.read(path))
    if path.suffix == ".json":
        return _in_json(path)
    return _in_header(path)


def _in_json(path: Path) -> Provenance:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        found = body["provenance"]
    except (ValueError, KeyError, TypeError) as exc:
        raise FormatError(f"{path} has no privacy record: {exc!r}") from exc
    if isinstance(found, dict) and "comments" in found:  # of a shard set
        for line in found["comments"]:
            if str(line).startswith(LINE_PREFIX):
                return Provenance.from_json(str(line), str(path))
        raise FormatError(f"{path}: the model that was sharded had no privacy record")
    if body.get("format") == "dlm privacy report":
        claimed = body.pop("digest", None)
        if claimed != digest_of(body):
            raise PrivacyError(f"{path} was changed after it was written: its digest does not fit")
    return Provenance.from_dict(found, str(path))


def _in_header(path: Path) -> Provenance:
    """The record in the comments before an ARPA file's counts, decompressed where its name says
    so."""
    import pyarrow as pa

    kind = {".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    with pa.input_stream(str(path), compression=kind) as stream:
        head = stream.read(HEADER_BYTES)
    for line in head.splitlines():
        if line.startswith(b"\\"):
            break
        text = line.lstrip(b"# ")
        if text.startswith(LINE_PREFIX.encode()):
            return Provenance.from_json(text, str(path))
    raise FormatError(f"{path} has no privacy record, beside it or in it")


def sign(path: Path, key: Ed25519PrivateKey, *, at: datetime) -> Path:
    """Signs a file with its record; returns where the signature stands.

    Raises
        FormatError   it has no record
        PrivacyError  the record is of another file, or was changed
    """
    body = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "content": file_digest(path),
        "record": read_any_record(path).digest,
        "signed": at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "public_key": key.public_key().public_bytes_raw().hex(),
    }
    seal = {"algorithm": "ed25519", "signature": key.sign(_message(body)).hex()}
    target = signature_of(path)
    write_whole(target, (json.dumps({**body, **seal}, indent=1) + "\n").encode())
    return target


def look_at(path: Path, trusted: Ed25519PublicKey | None) -> Verdict:
    """What a file's record is worth, by its digests, its signature and the key that is trusted.

    Raises
        FormatError  the file has no record, and nobody signed it
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        record = read_any_record(path)
    except PrivacyError as exc:
        return Verdict("wrong", None, str(exc))
    except FormatError as exc:
        if not signature_of(path).exists():
            raise
        return Verdict("wrong", None, str(exc))  # it had a record when it was signed
    place = signature_of(path)
    if not place.exists():
        return Verdict("unverified", record, f"{path} is not signed: there is no {place.name}")
    try:
        body = dict(json.loads(place.read_text(encoding="utf-8")))
        kind = (body.pop("algorithm"), body["format"], body["version"])
        if kind != ("ed25519", FORMAT_NAME, FORMAT_VERSION):
            return Verdict("wrong", None, f"{place} is not a signature of this version")
        signature = bytes.fromhex(body.pop("signature"))
        named = Ed25519PublicKey.from_public_bytes(bytes.fromhex(body["public_key"]))
        content, signed_record, at = body["content"], body["record"], body["signed"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        return Verdict("wrong", None, f"{place} is no signature: {exc!r}")
    if content != file_digest(path):
        return Verdict("wrong", None, f"{place.name} is the signature of another file than {path}")
    if signed_record != record.digest:
        return Verdict("wrong", None, f"{place.name} is the signature of another record of {path}")
    try:
        named.verify(signature, _message(body))
    except InvalidSignature:
        return Verdict("wrong", None, f"{place} was changed: its signature does not fit")
    who = f"signed on {at} by the key {fingerprint(named)}"
    if trusted is None:
        return Verdict("unverified", record, f"{path} is {who}, and no key was given to trust")
    if trusted.public_bytes_raw() != named.public_bytes_raw():
        mine = fingerprint(trusted)
        return Verdict("unverified", record, f"{path} is {who}, not by the trusted one, {mine}")
    return Verdict("verified", record.verified(fingerprint(named)), f"{path} is {who}")


def require_signed(path: Path, public_key: Path) -> Provenance:
    """The record of a file that the key in a PEM file has signed.

    Raises
        ConfigError   no key
        FormatError   the file has no record
        PrivacyError  it is wrong or unverified
    """
    found = look_at(path, read_public_key(public_key))
    if found.standing != "verified" or found.record is None:
        raise PrivacyError(f"{found.standing}: {found.text}")
    return found.record


def fingerprint(key: Ed25519PublicKey) -> str:
    """What a public key is called by: the first digits of its SHA-256."""
    return content_digest(key.public_bytes_raw())[:16]


def _message(body: dict[str, Any]) -> bytes:
    """What is signed: no other format of ours begins like this."""
    return b"dlm privacy signature 1\n" + json.dumps(body, sort_keys=True).encode()
