"""A run's state on disk: one file that is either complete or absent, and is read back bit for bit.

::

    dlm checkpoint 1\\n
    length of the header, 8 bytes, little-endian; SHA-256 of the header, 32 bytes
    header: JSON: the run's settings, facts, and a checksum of all that follows the header
    arrays, in order, little-endian, each a multiple of 64 bytes after the first; then attachments
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, FormatError
from dlm.files import write_whole

CHECKPOINT = "checkpoint.dlmfed"  # the file's name in the folder of a run
MAGIC = b"dlm checkpoint 1\n"
ALIGNMENT = 64
Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file, read and checked: the run's settings and other facts, both
    as JSON, its arrays, and its attachments by name."""

    path: Path
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    arrays: tuple[npt.NDArray[Any], ...]
    attachments: Mapping[str, bytes]

    def refuse_other_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises a `ConfigError` with both values of each setting that differs from this file's."""
        found = differences(self.settings, canonical(settings))
        if found:
            raise ConfigError(
                f"{self.path} belongs to a run with other settings: {'; '.join(found)}. Continue "
                "with the old settings, or start a new run in another folder"
            )


def check_shapes(arrays: Arrays, expected: Arrays, place: Path) -> None:
    """Raises `FormatError`, naming `place`, unless arrays match `expected` in types and shapes."""
    if len(expected) != len(arrays):
        raise FormatError(
            f"{place} holds {len(arrays)} arrays, but this run's state has {len(expected)}, so "
            "another version of dlm wrote the file. Use that version, or start the run in a new "
            "folder"
        )
    for array, want in zip(arrays, expected, strict=True):
        if array.shape != want.shape or array.dtype != want.dtype:
            raise FormatError(
                f"{place}: found an array of {array.dtype} {array.shape}; expected {want.dtype} "
                f"{want.shape}. The file was written with other settings or by another version of "
                "dlm; use the old settings and version, or start the run in a new folder"
            )


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(settings, sort_keys=True, default=_jsonable))
    return result


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(
        f"a setting is a {type(value).__name__}; expected a dataclass, a path, or a JSON value"
    )


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            place = f"{name}.{key}" if name else key
            found += differences(old.get(key), new.get(key), place)
        return found
    return [] if old == new else [f"{name} was {old!r} and is {new!r}"]


def _packed(arrays: Arrays) -> tuple[bytearray, list[list[Any]]]:
    body, table = bytearray(), []
    for array in arrays:
        body += bytes(-len(body) % ALIGNMENT)
        little = np.asarray(array).astype(array.dtype.newbyteorder("<"))
        table.append([little.dtype.str, list(array.shape), len(body)])
        body += little.tobytes()
    return body, table


def digest(arrays: Arrays) -> str:
    """Returns the SHA-256 of arrays, types and shapes, which identifies them in a record."""
    body, table = _packed(arrays)
    return hashlib.sha256(json.dumps(table).encode() + body).hexdigest()


def save(
    path: Path,
    arrays: Arrays,
    settings: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    attachments: Mapping[str, bytes] | None = None,
    mode: int = 0o644,
) -> str:
    """Writes arrays, attachments, the settings that a later run must match, and facts that it need
    not match; returns the file's SHA-256."""
    body, table = _packed(arrays)
    places = {}
    for name, content in (attachments or {}).items():
        places[name] = [len(body), len(content)]
        body += content
    header = {
        "settings": canonical(settings),
        "facts": canonical(facts or {}),
        "attachments": places,
        "arrays": table,
        "sha256": hashlib.sha256(body).hexdigest(),
        "bytes": len(body),
    }
    text = json.dumps(header, sort_keys=True).encode()
    seal = len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    whole = MAGIC + seal + text + bytes(body)
    write_whole(path, whole, mode=mode)
    return hashlib.sha256(whole).hexdigest()


def read(path: Path) -> Checkpoint:
    """Reads what `save` wrote; `FormatError` if it is cut off, damaged or of another kind."""
    return parse(path.read_bytes(), path)


def parse(content: bytes, path: Path) -> Checkpoint:
    """Parses the content of a file that `save` wrote; raises the same errors as `read`."""
    start = len(MAGIC) + 8 + 32
    if content[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{path} does not begin with {MAGIC!r}: it is not a checkpoint, or another version of "
            "dlm wrote it; give a file that this version wrote"
        )
    length = int.from_bytes(content[len(MAGIC) : len(MAGIC) + 8], "little")
    text = content[start : start + length]
    if len(content) < start + length:
        raise FormatError(
            f"{path} is cut off: it ends within its header, after {len(content):,} bytes; "
            "copy it again"
        )
    if hashlib.sha256(text).digest() != content[len(MAGIC) + 8 : start]:
        raise FormatError(
            f"{path} is damaged: its header does not match its checksum; copy it again"
        )
    body = content[start + length :]
    try:
        header: dict[str, Any] = json.loads(text)
        expected, sha256 = int(header["bytes"]), header["sha256"]
        settings, facts = dict(header["settings"]), dict(header["facts"])
        table, places = list(header["arrays"]), dict(header["attachments"])
    except (ValueError, KeyError, TypeError) as exc:
        raise FormatError(f"{path}: the header is damaged ({exc}); copy the file again") from exc
    if len(body) != expected:
        raise FormatError(
            f"{path} is cut off: found {len(body):,} bytes of arrays, expected {expected:,}; copy "
            "it again"
        )
    if hashlib.sha256(body).hexdigest() != sha256:
        raise FormatError(
            f"{path} is damaged: its arrays do not match the checksum in its header; copy it again"
        )
    arrays = []
    for kind, shape, at in table:
        little = np.frombuffer(body, kind, int(np.prod(shape, dtype=np.int64)), at).reshape(shape)
        arrays.append(little.astype(little.dtype.newbyteorder("=")))
    return Checkpoint(
        path,
        settings,
        facts,
        tuple(arrays),
        {name: body[at : at + size] for name, (at, size) in places.items()},
    )
