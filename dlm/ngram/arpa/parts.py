"""An ARPA file in parts: a folder whose index says which files make up each section.

    FOLDER/model.json    the index, written after all parts: without it the folder is incomplete
    FOLDER/...           parts: rows of one section each, plain, gzip, zstd or xz

The index is one JSON object: `format` ("dlm-arpa-parts") and `version` (1), `comments` (lines
before the model, without `#`), `counts` (n-grams by order) and `parts` (by order, the parts of its
section in their order: `name` below the folder and size in `bytes`). The text of the model is the
header, each section's head and the text of its parts, and the end: what one file would hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dlm.errors import ArpaError
from dlm.ngram.arpa.source import DamagedStream, TextSource
from dlm.ngram.arpa.writer import END, header, section_head

INDEX = "model.json"
FORMAT = "dlm-arpa-parts"
VERSION = 1

_UNFINISHED = "Writing or copying it did not finish: copy it or make it again"


def is_parts_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder with the index of an ARPA file in parts."""
    return (Path(path) / INDEX).is_file()


def index_text(
    comments: Sequence[str], counts: Sequence[int], parts: Sequence[Sequence[tuple[str, int]]]
) -> bytes:
    """The index of a folder; `parts`: by order, name and size in bytes of each, in their order."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "comments": list(comments),
        "counts": list(counts),
        "parts": [[{"name": name, "bytes": size} for name, size in own] for own in parts],
    }
    return json.dumps(about, indent=1).encode() + b"\n"


class PartsSource:
    """The text of an ARPA file in parts, as TextSource reads that of a file.

    Raises  ArpaError  the index is damaged, or a part is missing or has another size
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        about = _index(self._folder)
        self._part: TextSource | None = None
        self._name = ""
        self.compression = "plain"
        for own in about["parts"]:
            for part in own:
                self._check(part)
        self._pieces = self._text(about)
        self._rest = b""

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]
        if self._part is not None:
            self._part.close()
            self._part = None

    def _text(self, about: dict[str, Any]) -> Iterator[bytes]:
        yield header(about["comments"], about["counts"])
        for n, own in enumerate(about["parts"], 1):
            yield section_head(n)
            for part in own:
                yield from self._rows(part["name"])
        yield END

    def _rows(self, name: str) -> Iterator[bytes]:
        """The text of one part, which ends with a line end."""
        self._part = TextSource(str(self._folder / name))
        self.compression = self._part.compression
        last = b"\n"
        try:
            while piece := self._part.read(1 << 20):
                last = piece[-1:]
                yield piece
        except DamagedStream as exc:
            raise DamagedStream(f"part {name}: {exc}") from exc
        if last != b"\n":
            raise DamagedStream(f"part {name} ends within a row")
        self._part.close()
        self._part = None

    def _check(self, part: dict[str, Any]) -> None:
        path = self._folder / part["name"]
        try:
            size = path.stat().st_size
        except FileNotFoundError as exc:
            raise ArpaError(
                f"the part {part['name']} of the model is missing",
                path=str(self._folder),
                advice=_UNFINISHED,
            ) from exc
        if size != part["bytes"]:
            raise ArpaError(
                f"the part {part['name']} of the model has {size:,} bytes; its index says "
                f"{part['bytes']:,}",
                path=str(self._folder),
                advice=_UNFINISHED,
            )


def _index(folder: Path) -> dict[str, Any]:
    """The index of a folder, checked; raises ArpaError."""
    path = folder / INDEX
    fault = None
    try:
        about = json.loads(path.read_bytes())
    except ValueError as exc:
        raise ArpaError(
            f"the index of an ARPA file in parts is not JSON: {exc}",
            path=str(path),
            advice=_UNFINISHED,
        ) from exc
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        fault = f"expected the format {FORMAT!r}"
    elif about.get("version") != VERSION:
        fault = f"version {about.get('version')!r} of its format; {VERSION} is read here"
    elif not _is_list(about.get("comments"), str) or not _is_list(about.get("counts"), int):
        fault = "expected lists `comments` and `counts`"
    elif not _is_list(about.get("parts"), list) or len(about["parts"]) != len(about["counts"]):
        fault = "expected in `parts` one list for each of `counts`"
    elif not all(_is_part(part) for own in about["parts"] for part in own):
        fault = "expected for each part its `name`, below the folder, and `bytes`"
    if fault is not None:
        raise ArpaError(
            f"the index of an ARPA file in parts is not valid: {fault}",
            path=str(path),
            advice="It was written by another version, or changed: make the model again",
        )
    return dict(about)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, kind) and not isinstance(entry, bool) for entry in value
    )


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    name, size = part.get("name"), part.get("bytes")
    if not isinstance(name, str) or not isinstance(size, int) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
