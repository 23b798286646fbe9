"""Writes and reads a file together with its privacy record beside it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from dlm.errors import FormatError, PrivacyError
from dlm.files import Replacement, naming
from dlm.record.provenance import Provenance, content_digest

PIECES_DIGEST = "model_sha256"  # name of the digest in a record of wordpieces
SIDECAR_SUFFIX = ".provenance.json"


def sidecar(path: str | Path) -> Path:
    return Path(str(path) + SIDECAR_SUFFIX)


def write_recorded(
    path: str | Path, content: bytes, provenance: Provenance, *, digest_name: str
) -> None:
    """Writes a file and its record, which holds the file's digest as `digest_name`.

    Raises      PrivacyError  the record belongs to another file of this kind
    Guarantees  if the disk is full, the previous file and its record stay; a stop at any moment
                leaves a file with its own record, or with no record and no guarantee
    """
    target, side = Path(path), sidecar(path)
    digest = content_digest(content)
    if digest_name in provenance.content and not provenance.speaks_of(**{digest_name: digest}):
        raise PrivacyError(
            f"{target} cannot be written with this record, whose {digest_name} is that of another "
            "file. A file made from that one needs a record of its own (Provenance.derive)"
        )
    own = provenance.about(**{digest_name: digest})
    record = {digest_name: digest, "provenance": own.to_dict()}
    contents = content, (json.dumps(record, indent=1) + "\n").encode()
    with contextlib.ExitStack() as stack:
        written = []
        # Write the file and its record before touching the existing ones.
        for place, whole in zip((target, side), contents, strict=True):
            replacement = Replacement(place)
            stack.callback(replacement.discard)
            with naming(place):
                replacement.file.write(whole)
            replacement.sync()
            written.append(replacement)
        side.unlink(missing_ok=True)
        for replacement in written:
            replacement.commit()


def read_beside(path: Path, sha256: str) -> Provenance:
    """Reads the record beside a file with this digest; raises what `read_record` raises."""
    side = sidecar(path)
    try:
        record = json.loads(side.read_text(encoding="utf-8"))
        (digest_name,) = set(record) - {"provenance"}
    except (ValueError, TypeError) as exc:
        raise FormatError(
            f"{side} is not a privacy record: {exc!r}. Copy the record and its file again"
        ) from exc
    return _bound(path, sha256, record, digest_name=digest_name, kind="file")


def read_record(path: str | Path, content: bytes, *, digest_name: str, kind: str) -> Provenance:
    """Reads the record beside a file with this content; without one, `Provenance.none`. Raises
    FormatError, and PrivacyError if the record was changed or is for another file."""
    side = sidecar(path)
    if not side.exists():
        return Provenance.none(f"no provenance record stood beside the {kind}")
    try:
        record = json.loads(side.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise FormatError(
            f"{side} is not a record of {kind}: {exc!r}. Copy the record and its file again"
        ) from exc
    return _bound(path, content_digest(content), record, digest_name=digest_name, kind=kind)


def _bound(
    path: str | Path, sha256: str, record: Any, *, digest_name: str, kind: str
) -> Provenance:
    """Returns a sidecar's record; PrivacyError unless it belongs to the file with this digest."""
    side = sidecar(path)
    try:
        digest, body = record[digest_name], record["provenance"]
    except (KeyError, TypeError) as exc:
        raise FormatError(
            f"{side} is not a record of {kind}: {exc!r}. Copy the record and its file again"
        ) from exc
    provenance = Provenance.from_dict(body, str(side))
    # Check both copies of the file's digest: the record's own digest covers only the one inside it.
    if digest != sha256 or not provenance.speaks_of(**{digest_name: sha256}):
        raise PrivacyError(
            f"{side.name} is the record of another file, so {path} has no guarantee. Rebuild "
            f"{path}, or remove the record to continue without a guarantee"
        )
    return provenance
