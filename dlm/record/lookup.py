"""Finds a file's one record: beside it; in a checkpoint, a report or a manifest; or in the header
of an ARPA file. All places are checked: two records that disagree are an error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm import checkpoint
from dlm.checkpoint import Checkpoint
from dlm.errors import FormatError, PrivacyError
from dlm.record.provenance import Provenance, content_digest, is_record_line, take_digest
from dlm.record.sidecar import read_beside, sidecar

# Names, in a checkpoint's record, of the digests of its parameters and its vocabulary.
STATE_DIGEST, VOCABULARY_DIGEST = "state_sha256", "vocabulary_sha256"
REPORT_FORMAT = "dlm privacy report"
SHARD_SET = "dlm shard set"  # `format` of a manifest
_STEP = 1 << 20


@dataclass(frozen=True)
class FileSnapshot:
    """A file as it was read once, so that all checks see the same bytes. `content` is None for a
    file that may exceed memory, whose record is in its `head`."""

    path: Path
    head: bytes
    content: bytes | None
    sha256: str

    @classmethod
    def read(cls, path: Path, content: bytes | None = None) -> FileSnapshot:
        from dlm.ngram.arpa.header import HEAD_BYTES  # a slow import (0.5 s) that few callers need

        if content is not None:
            return cls(path, content[:HEAD_BYTES], content, content_digest(content))
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if head.startswith(checkpoint.MAGIC) or path.suffix == ".json":
                content = head + file.read()
                return cls(path, head, content, content_digest(content))
            digest = hashlib.sha256(head)
            while step := file.read(_STEP):
                digest.update(step)
        return cls(path, head, None, digest.hexdigest())


def record_of_file(snapshot: FileSnapshot) -> Provenance:
    """Returns a file's record. Raises FormatError if there is none; PrivacyError if there are two,
    or one that belongs to another file, was changed, or differs from the record beside the file."""
    path = snapshot.path
    inside = _inside(snapshot)
    if len(inside) > 1:
        places = " and ".join(place for place, _ in inside)
        raise PrivacyError(
            f"{path} has {len(inside)} privacy records, in {places}; expected one. Nothing "
            "shows which record is valid, so rebuild the file from its inputs"
        )
    if not sidecar(path).exists():
        if not inside:
            raise FormatError(
                f"{path} has no privacy record, neither beside it nor inside; copy its "
                f"{sidecar(path).name} beside it, or give another file"
            )
        return inside[0][1]
    beside = read_beside(path, snapshot.sha256)
    if inside and inside[0][1].digest != beside.digest:
        place, found = inside[0]
        raise PrivacyError(
            f"{path} has two privacy records that do not agree: {place} says {found.statement()} "
            f"{sidecar(path).name} beside it says {beside.statement()} Remove the record that "
            "belongs to another file, or copy both files again from their origin"
        )
    return beside


def record_in(found: Checkpoint) -> Provenance:
    """Returns the record in a run's checkpoint; without a record, there is no guarantee. Raises
    FormatError, and PrivacyError if the record belongs to other parameters or another vocabulary,
    or was changed."""
    body = found.facts.get("record")
    if body is None:
        return Provenance.none("the checkpoint carries no privacy record")
    record = Provenance.from_dict(body, f"the record in {found.path}")
    content = {STATE_DIGEST: checkpoint.digest(found.arrays)}
    if "vocabulary" in found.attachments:
        content[VOCABULARY_DIGEST] = content_digest(found.attachments["vocabulary"])
    elif VOCABULARY_DIGEST in record.content:
        content[VOCABULARY_DIGEST] = "none is there"
    if record.guarantee is not None and not record.speaks_of(**content):
        raise PrivacyError(
            f"the record in {found.path} belongs to other parameters or another vocabulary, so it "
            "guarantees nothing for this checkpoint. Copy the checkpoint from the run again"
        )
    return record


def shard_files(snapshot: FileSnapshot) -> tuple[str, ...] | None:
    """Returns the file names in a shard set's manifest; None for other files. Raises FormatError
    for a manifest without file names, or with a file in another folder."""
    body = _json(snapshot) if snapshot.path.suffix == ".json" else {}
    if body.get("format") != SHARD_SET:
        return None
    try:
        names = tuple(str(entry["name"]) for entry in body["files"])
    except (KeyError, TypeError) as exc:
        raise FormatError(
            f"{snapshot.path} does not list the files of its set: {exc!r}. Copy the set again"
        ) from exc
    for name in names:
        if name != Path(name).name or name in ("", ".", ".."):
            raise FormatError(
                f"{snapshot.path} names the file {name!r}; expected a file in the same folder. "
                "Copy the set again"
            )
    return names


def _inside(snapshot: FileSnapshot) -> list[tuple[str, Provenance]]:
    path = snapshot.path
    if snapshot.head.startswith(checkpoint.MAGIC):
        found = checkpoint.parse(snapshot.content or b"", path)
        return [("the checkpoint", record_in(found))]
    if path.suffix == ".json":
        return _in_json(snapshot)
    return [
        (f"line {number}", Provenance.from_json(text, f"line {number} of {path}"))
        for number, text in _header_lines(snapshot)
    ]


def _json(snapshot: FileSnapshot) -> dict[str, Any]:
    try:
        found = json.loads(snapshot.content or b"", object_pairs_hook=_each_once)
    except ValueError as exc:
        raise FormatError(f"{snapshot.path} is not JSON: {exc}. Copy the file again") from exc
    return found if isinstance(found, dict) else {}


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object; ValueError for a duplicate key, on which JSON readers disagree."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise ValueError(f"duplicate key {twice!r} in a JSON object")
    return found


def _in_json(snapshot: FileSnapshot) -> list[tuple[str, Provenance]]:
    path, body = snapshot.path, _json(snapshot)
    found = body.get("provenance")
    if body.get("format") == SHARD_SET:
        lines = found.get("comments", []) if isinstance(found, dict) else []
        return [
            (f"comment {number}", Provenance.from_json(str(line), f"comment {number} of {path}"))
            for number, line in enumerate(lines, 1)
            if is_record_line(str(line))
        ]
    if found is None:
        return []
    if body.get("format") == REPORT_FORMAT:
        take_digest(body, path)
    return [("the report", Provenance.from_dict(found, str(path)))]


def _header_lines(snapshot: FileSnapshot) -> list[tuple[int, str]]:
    """Returns (number, text) of each record in an ARPA file's comments; [] for other files."""
    from dlm.ngram.arpa.header import comments_at_head

    lines = comments_at_head(str(snapshot.path), snapshot.head)
    return [(number, text) for number, text in lines if is_record_line(text)]
