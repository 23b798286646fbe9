"""Signatures of records and of their files: FILE.signature.json, beside the file.

A signature is Ed25519 over the SHA-256 of the file (for a manifest, also of every file of its shard
set), the digest of its record and the time. If files are signed together, each signature names
those that its file was made from: the signer saw their records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.files import write_whole
from dlm.record.lookup import FileSnapshot, record_of_file, shard_files
from dlm.record.provenance import Provenance, check_format, content_digest, file_digest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FORMAT_NAME = "dlm privacy signature"
FORMAT_VERSION = 2
SUFFIX = ".signature.json"
Standing = Literal["verified", "unverified", "wrong"]


@dataclass(frozen=True)
class Verdict:
    """Whether a file's record can be trusted, with the reason in `text`. `standing` is "verified"
    by the trusted key, "unverified", or "wrong" if the file, its record or its signature was
    changed; `record` is then None."""

    standing: Standing
    record: Provenance | None
    text: str


def signature_of(path: Path) -> Path:
    return Path(str(path) + SUFFIX)


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Reads an Ed25519 private key, in PEM without a passphrase; ConfigError for anything else."""
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
    """Reads an Ed25519 public key, in PEM; ConfigError for anything else."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        found = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the public key {path} cannot be read: {exc}; {_PUBLISH}") from exc
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigError(f"the public key {path} is a {type(found).__name__}; expected Ed25519")
    return found


_MAKE = "make a key with: openssl genpkey -algorithm ed25519 -out key.pem"
_PUBLISH = "derive it from the private key with: openssl pkey -in key.pem -pubout -out key.pub"


@dataclass(frozen=True)
class Claim:
    """What a signature states about a file and its record.

    Fields
        files   for a shard set, the SHA-256 of each file, by name; the manifest itself only has
                checksums, which detect damage but not forgery
        inputs  files that this file was made from and that are signed with it, by record digest
    """

    path: Path
    sha256: str
    record: Provenance
    files: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Claim] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Claim:
        """Makes the claim for a file; raises what `record_of_file` raises, and FormatError if a
        shard set lacks a file."""
        snapshot = FileSnapshot.read(path)
        record = record_of_file(snapshot)
        found = _digests(path.parent, shard_files(snapshot) or ())
        if missing := [name for name, digest in found.items() if digest is None]:
            raise FormatError(
                f"{path} lists {', '.join(missing)}, which cannot be read in the same folder. Copy "
                "the whole set, then sign it"
            )
        return cls(path, snapshot.sha256, record, {name: str(d) for name, d in found.items()})

    def lines(self) -> list[str]:
        return [
            f"{self.path}: SHA-256 {self.sha256}",
            *(f"{self.path.parent / name}: SHA-256 {d}" for name, d in self.files.items()),
            f"record: SHA-256 {self.record.digest}",
            *(
                f"made of {one}: {self.inputs[one.record].path}"
                for one in self.record.unverified
                if one.record in self.inputs
            ),
            self.record.statement(with_standing=False),
        ]


def claims_of(paths: Iterable[Path]) -> list[Claim]:
    """Makes the claims for files that are signed together; raises what `Claim.of` raises."""
    claims = [Claim.of(path) for path in paths]
    seen = {claim.record.digest: claim for claim in claims}
    return [
        replace(
            claim,
            inputs={
                one.record: seen[one.record]
                for one in claim.record.unverified
                if one.record in seen
            },
        )
        for claim in claims
    ]


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = file_digest(folder / name)
        except OSError:
            found[name] = None
    return found


def sign(claim: Claim, key: Ed25519PrivateKey, *, at: datetime) -> Path:
    body = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "content": claim.sha256,
        "files": dict(claim.files),
        "record": claim.record.digest,
        "inputs": {record: one.sha256 for record, one in claim.inputs.items()},
        "signed": at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "public_key": key.public_key().public_bytes_raw().hex(),
    }
    seal = {"algorithm": "ed25519", "signature": key.sign(_message(body)).hex()}
    target = signature_of(claim.path)
    write_whole(target, (json.dumps({**body, **seal}, indent=1) + "\n").encode())
    return target


def look_at(
    path: Path,
    trusted: Ed25519PublicKey | None,
    content: bytes | None = None,
    *,
    partly: bool = False,
) -> Verdict:
    """Checks a file, or its `content` if already read, against digests, signature and trusted key;
    for a shard set, checks all files or, if `partly`, those that exist. Raises FormatError if the
    file has neither a record nor a signature."""
    snapshot = FileSnapshot.read(path, content)
    try:
        record = record_of_file(snapshot)
        names = shard_files(snapshot)
    except PrivacyError as exc:
        return Verdict("wrong", None, str(exc))
    except FormatError as exc:
        if not signature_of(path).exists():
            raise
        return Verdict("wrong", None, str(exc))  # the file had a record when it was signed
    place = signature_of(path)
    if not place.exists():
        return Verdict("unverified", record, f"{path} is not signed: there is no {place.name}")
    try:
        seal = _Seal.read(place)
        if fault := seal.fault(snapshot, record):
            return Verdict("wrong", None, fault)
    except FormatError as exc:
        return Verdict("wrong", None, str(exc))
    who = f"signed on {seal.body['signed']} by the key {fingerprint(seal.key)}"
    changed = seal.other_files(path.parent, names or ())
    if changed := [one for one in changed if not partly or (path.parent / one).exists()]:
        return Verdict(
            "wrong", None,
            f"{', '.join(changed)} in {path.parent}: not the file that {place.name} signs",
        )  # fmt: skip
    if trusted is None:
        return Verdict("unverified", record, f"{path} is {who}, and no trusted key was given")
    if trusted.public_bytes_raw() != seal.key.public_bytes_raw():
        mine = fingerprint(trusted)
        return Verdict("unverified", record, f"{path} is {who}, not by the trusted one, {mine}")
    record = record.verified(fingerprint(seal.key), seal.body["inputs"])
    return Verdict("verified", record, f"{path} is {who}")


@dataclass(frozen=True)
class _Seal:
    place: Path
    body: dict[str, Any]
    signature: bytes
    key: Ed25519PublicKey

    @classmethod
    def read(cls, place: Path) -> _Seal:
        """Reads a signature; `FormatError` for anything else."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            body = dict(json.loads(place.read_text(encoding="utf-8")))
            check_format(body, FORMAT_NAME, FORMAT_VERSION, place)
            if (algorithm := body.pop("algorithm")) != "ed25519":
                raise FormatError(f"{place} is signed with {algorithm!r}; expected 'ed25519'")
            signature = bytes.fromhex(body.pop("signature"))
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(body["public_key"]))
            for name in ("content", "record", "signed"):
                str(body[name])
            dict(body["files"]), dict(body["inputs"])
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise FormatError(
                f"{place} is not a signature: {exc!r}. Get the signature again from the signer"
            ) from exc
        return cls(place, body, signature, key)

    def fault(self, snapshot: FileSnapshot, record: Provenance) -> str | None:
        """Says why this signature does not fit the file and its record; None if it fits."""
        from cryptography.exceptions import InvalidSignature

        name, path = self.place.name, snapshot.path
        if self.body["content"] != snapshot.sha256:
            return f"{name} is the signature of another file, not {path}; ask the signer for both"
        if self.body["record"] != record.digest:
            return (
                f"{name} signs a different record of {path}; ask the signer for the "
                "file, its record and its signature"
            )
        try:
            self.key.verify(self.signature, _message(self.body))
        except InvalidSignature:
            return (
                f"{self.place} was changed: the signature in it does not match; ask the signer for "
                "the file again"
            )
        return None

    def other_files(self, folder: Path, names: Iterable[str]) -> list[str]:
        """Lists the files of a shard set that differ from the signed files."""
        signed = self.body["files"]
        found = _digests(folder, names)
        return sorted(n for n in found.keys() | signed.keys() if found.get(n) != signed.get(n, ""))


def require_signed(
    path: Path, public_key: Path, content: bytes | None = None, *, partly: bool = False
) -> Provenance:
    """Returns the record of a file signed by the key in a PEM file; arguments as for `look_at`.
    Raises ConfigError without a key, FormatError without a record, PrivacyError unless verified."""
    found = look_at(path, read_public_key(public_key), content, partly=partly)
    if found.standing != "verified" or found.record is None:
        raise PrivacyError(f"{found.standing}: {found.text}")
    return found.record


def fingerprint(key: Ed25519PublicKey) -> str:
    """A public key's short name: the first digits of its SHA-256."""
    return content_digest(key.public_bytes_raw())[:16]


def _message(body: dict[str, Any]) -> bytes:
    """Returns the bytes to sign, whose beginning no other format of dlm shares."""
    return (
        b"dlm privacy signature %d\n" % body["version"] + json.dumps(body, sort_keys=True).encode()
    )
