"""Reads the text of an ARPA file by lines and by blocks of whole lines. Each line's number, byte
offset and section are known, for error messages.

A model may also be a folder of parts, whose index says which files make up each section.


    FOLDER/model.json    the index, written after all parts: without it the folder is incomplete
    FOLDER/...           parts: rows of one section each, plain, gzip, zstd or xz

The index is one JSON object: `format` ("dlm-arpa-parts") and `version` (1), `comments` (lines
before the model, without `#`), `counts` (n-grams by order) and `parts` (by order, the parts of its
section in their order: `name` below the folder and size in `bytes`). The text of the model is the
header, each section's head and the text of its parts, and the end, as in a single file.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from dlm.errors import ArpaError
from dlm.ngram.arpa import source
from dlm.ngram.arpa.rows import MAX_LINE_BYTES, RowBlock
from dlm.ngram.arpa.source import DamagedStream, TextSource
from dlm.ngram.arpa.writer import END, header, section_head
from dlm.ngram.wordtable import PADDING

# Text is read in steps of this size; a block of rows is one step plus the line begun before it.
CHUNK_BYTES = 2 << 20

# File name of the index of a multi-part model, and the index's format and version.
INDEX = "model.json"
FORMAT = "dlm-arpa-parts"
VERSION = 1

_UNFINISHED = "Writing or copying the model did not finish: copy it again, or rebuild it"


class Line(NamedTuple):
    text: bytes  # the line without its end, and without trailing spaces and tabs
    number: int  # 1-based
    offset: int  # offset of its first byte in the decompressed text


class _Step(NamedTuple):
    pieces: list[bytes]
    ended: bool
    damage: DamagedStream | None


def is_reopenable(path: str | os.PathLike[str]) -> bool:
    """Whether a second read gives the same bytes: false for pipes."""
    path = os.fspath(path)
    return source.is_reopenable(path) or is_parts_folder(path)


def _open(path: str) -> TextSource | PartsSource:
    if is_parts_folder(path):
        return PartsSource(path)
    try:
        return TextSource(path)
    except IsADirectoryError as exc:
        is_set = (Path(path) / "manifest.json").exists()
        raise ArpaError(
            "expected an ARPA file, found a shard set"
            if is_set
            else f"expected an ARPA file, found a directory without {INDEX}",
            path=path,
            advice=f"Run `dlm export {path} --output model.arpa` and give that file"
            if is_set
            else "Give the ARPA file itself. If this is a folder of parts, the program that writes "
            "it has not finished",
        ) from exc


class LineReader:
    """Moves through the text of an ARPA file once, by lines or by blocks of whole lines.

    Guarantees  `line` is the number of the next line if every block taken was given back or
                counted; memory is bounded by the blocks taken
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 1
        self.text_bytes = 0
        self._source = _open(path)
        self._hash = xxhash.xxh3_128()
        self._here = RowBlock(PADDING, 0, 0, 0)  # the text at hand; lines are taken from `position`
        self._returned: deque[RowBlock] = deque()  # text that comes before the source's next text
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[_Step] | None = None
        self._source_ended = False
        self._damage: DamagedStream | None = None

    def close(self) -> None:
        """Closes the file. No thread may be reading ahead."""
        self._source.close()

    @property
    def compression(self) -> str:
        return self._source.compression

    @property
    def text_xxh3(self) -> str:
        return str(self._hash.hexdigest())

    @property
    def at_hand_bytes(self) -> int:
        return self._here.end - self._here.position

    @property
    def at_end(self) -> bool:
        return self._source_ended and not self._returned

    def head(self) -> bytes:
        """Returns the first step of the text, which stays available; must be the first call."""
        self._fill()
        return self._here.text[: self._here.end]

    def read_ahead(self, pool: ThreadPoolExecutor | None) -> None:
        """Makes a thread of the pool read the step after the current one; with None, nothing is
        read ahead."""
        self._pool = pool

    def take_block(self) -> RowBlock | None:
        """Takes the complete lines that were read; `line` does not count them. Returns None
        if the text ends before another line does, or that line is too long."""
        while True:
            here = self._here
            end = here.text.rfind(b"\n", here.position, here.end) + 1
            if end:
                break
            if self.at_end or self.at_hand_bytes > MAX_LINE_BYTES:
                return None
            self._fill()
        rest = here.text[end : here.end] + PADDING
        self._here = RowBlock(rest, 0, here.end - end, here.offset + end)
        return RowBlock(here.text, here.position, end, here.offset)

    def give_back(self, block: RowBlock, position: int, later: Sequence[RowBlock]) -> None:
        """Puts back the text of `block` from `position` on, and `later` blocks, in order."""
        self._returned.appendleft(self._here)
        for one in reversed(later):
            # A thread may still be writing to the block, so a new block takes its text.
            self._returned.appendleft(RowBlock(one.text, one.begin, one.end, one.offset))
        self._here = RowBlock(block.text, position, block.end, block.offset)

    def next_line(self, order: int | None) -> Line | None:
        """The next line, or None at the end; the last one may lack its line end."""
        end = self._here.text.find(b"\n", self._here.position, self._here.end)
        while end < 0 and not self.at_end:
            searched = self.at_hand_bytes
            if searched > MAX_LINE_BYTES:
                break
            self._fill()
            here = self._here
            end = here.text.find(b"\n", here.position + searched, here.end)
        here = self._here
        following = end + 1
        if end < 0:
            if self._damage is not None and self.at_end:
                self.fail_damaged(order)
            end = following = here.end
            if end == here.position:
                return None
        if end - here.position > MAX_LINE_BYTES:
            self.fail_long_line(order, self.line, here.offset + here.position)
        raw = here.text[here.position : end]
        line = Line(raw.rstrip(b"\r").rstrip(b" \t"), self.line, here.offset + here.position)
        self.line += following > end
        here.position = following
        return line

    def offset_of_line(self, line: int) -> int | None:
        """Finds the byte offset of a line by reading the file again; None for a pipe."""
        if not is_reopenable(self.path):
            return None
        again = _open(self.path)
        try:
            before, offset = line - 1, 0
            while before > 0:
                piece = again.read(1 << 20)
                if not piece:
                    return None
                here = piece.count(b"\n")
                if here < before:
                    before -= here
                    offset += len(piece)
                    continue
                ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == 10)
                return offset + int(ends[before - 1]) + 1
            return 0
        except DamagedStream:
            return None
        finally:
            again.close()

    # -------------------------------------------------------------------------- errors

    def fail(
        self, message: str, at: Line | None, order: int | None, advice: str | None = None
    ) -> NoReturn:
        """Raises an ArpaError at the line `at`, or at the current position if it is None."""
        raise ArpaError(
            message,
            path=self.path,
            order=order,
            line=self.line if at is None else at.number,
            byte_offset=self._here.offset + self._here.position if at is None else at.offset,
            advice=advice,
        )

    def fail_if_damaged(self, order: int | None) -> None:
        if self._damage is not None:
            self.fail_damaged(order)

    def fail_damaged(self, order: int | None) -> NoReturn:
        assert self._damage is not None
        try:
            self.fail(
                f"the {self.compression} stream is cut short or damaged ({self._damage})",
                None,
                order,
                "Copy the folder again from its origin"
                if is_parts_folder(self.path)
                else source.damage_advice(self.path, self.compression),
            )
        except ArpaError as error:
            raise error from self._damage

    def fail_long_line(
        self, order: int | None, number: int | None = None, offset: int | None = None
    ) -> NoReturn:
        at = None
        if number is not None and offset is not None:
            at = Line(b"", number, offset)
        self.fail(
            f"a line is longer than {MAX_LINE_BYTES} bytes",
            at,
            order,
            "Lines end in \\n or \\r\\n; is this an ARPA file?",
        )

    # -------------------------------------------------------------------------- source

    def _read(self) -> _Step:
        pieces: list[bytes] = []
        size = 0
        while size < CHUNK_BYTES:
            try:
                piece = self._source.read(CHUNK_BYTES - size)
            except DamagedStream as exc:
                # The text before the damage is still examined first.
                return _Step(pieces, True, exc)
            if not piece:
                return _Step(pieces, True, None)
            self._hash.update(piece)
            self.text_bytes += len(piece)
            size += len(piece)
            pieces.append(piece)
        return _Step(pieces, False, None)

    def _next_pieces(self) -> list[bytes]:
        """Returns the next pieces; reads ahead, except in pipes. Calls after an OSError fail."""
        if self._source_ended:
            return []
        step = self._read() if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._source_ended, self._damage = step.ended, step.damage
        # A pipe is not read ahead: a thread that waits for one cannot be told to stop.
        if self._pool is not None and not step.ended and is_reopenable(self.path):
            self._ahead = self._pool.submit(self._read)
        return step.pieces

    def _fill(self) -> None:
        left = self._here
        rest = left.text[left.position : left.end]
        if not self._returned:
            pieces = self._next_pieces()
        elif rest:
            more = self._returned.popleft()
            pieces = [more.text[more.begin : more.end]]
        else:
            self._here = self._returned.popleft()
            return
        text = b"".join((rest, *pieces, PADDING))
        self._here = RowBlock(text, 0, len(text) - len(PADDING), left.offset + left.position)


# -------------------------------------------------------------------------- multi-part models


def is_parts_folder(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / INDEX).is_file()


def index_text(
    comments: Sequence[str], counts: Sequence[int], parts: Sequence[Sequence[tuple[str, int]]]
) -> bytes:
    """The index of a folder; `parts` has, by order, the name and the size in bytes of each part."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "comments": list(comments),
        "counts": list(counts),
        "parts": [[{"name": name, "bytes": size} for name, size in own] for own in parts],
    }
    return json.dumps(about, indent=1).encode() + b"\n"


class PartsSource:
    """Reads the text of a multi-part ARPA file as TextSource reads a single file; ArpaError if the
    index is damaged, a part is missing, or its size is not the one in the index."""

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
                f"the part {part['name']} of the model has {size:,} bytes, but the index says "
                f"{part['bytes']:,}",
                path=str(self._folder),
                advice=_UNFINISHED,
            )


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    fault = None
    try:
        about = json.loads(path.read_bytes())
    except ValueError as exc:
        raise ArpaError(
            f"the index of a multi-part ARPA file is not JSON: {exc}",
            path=str(path),
            advice=_UNFINISHED,
        ) from exc
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        fault = f"expected the format {FORMAT!r}"
    elif about.get("version") != VERSION:
        fault = f"its format has version {about.get('version')!r}; this dlm reads version {VERSION}"
    elif not _is_list(about.get("comments"), str) or not _is_list(about.get("counts"), int):
        fault = "expected lists `comments` and `counts`"
    elif not _is_list(about.get("parts"), list) or len(about["parts"]) != len(about["counts"]):
        fault = "`parts` must have one list for each of `counts`"
    elif not all(_is_part(part) for own in about["parts"] for part in own):
        fault = "expected each part to have `bytes`, and a path below the folder as `name`"
    if fault is not None:
        raise ArpaError(
            f"the index of a multi-part ARPA file is invalid: {fault}",
            path=str(path),
            advice="Another version of dlm wrote it, or it was changed: rebuild the model",
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
