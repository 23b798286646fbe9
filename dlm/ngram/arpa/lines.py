"""The text of an ARPA file: its lines, blocks of whole lines, and the place (line, byte,
section) of each for every fault."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash

from dlm.errors import ArpaError
from dlm.ngram.arpa import source
from dlm.ngram.arpa.parts import INDEX, PartsSource, is_parts_folder
from dlm.ngram.arpa.rows import MAX_LINE_BYTES, RowBlock
from dlm.ngram.arpa.source import DamagedStream, TextSource
from dlm.ngram.wordtable import PADDING

# Text is read in steps of this size; a block of rows is one step, and the line begun before it.
CHUNK_BYTES = 2 << 20


class Line(NamedTuple):
    text: bytes  # without the line end, and without spaces and tabs at its end
    number: int  # 1-based
    offset: int  # of its first byte in the decompressed text


class _Step(NamedTuple):
    pieces: list[bytes]
    ended: bool
    damage: DamagedStream | None


def is_reopenable(path: str | os.PathLike[str]) -> bool:
    """Whether reading it a second time gives the same bytes: false for pipes."""
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
            else "Give the ARPA file itself. If it is a folder of parts, the program that writes "
            "it has not finished",
        ) from exc


class LineReader:
    """Moves through the text of an ARPA file once, by lines or by blocks of whole lines.

    Guarantees  `line` is the number of the line that comes next, once a block that was taken is
                given back or counted; memory is bounded by what is taken
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 1
        self.text_bytes = 0
        self._source = _open(path)
        self._hash = xxhash.xxh3_128()
        self._here = RowBlock(PADDING, 0, 0, 0)  # at hand; lines are taken from its position
        self._returned: deque[RowBlock] = deque()  # text to come before what the source has
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[_Step] | None = None
        self._source_ended = False
        self._damage: DamagedStream | None = None

    def close(self) -> None:
        """Closes the file. No thread may be reading ahead."""
        self._source.close()

    @property
    def compression(self) -> str:
        """`plain`, `gzip`, `zstd` or `xz`."""
        return self._source.compression

    @property
    def text_xxh3(self) -> str:
        """XXH3 (128 bits, hexadecimal) of what was read, decompressed."""
        return str(self._hash.hexdigest())

    @property
    def at_hand_bytes(self) -> int:
        return self._here.end - self._here.position

    @property
    def at_end(self) -> bool:
        return self._source_ended and not self._returned

    def head(self) -> bytes:
        """The first step of the text, which stays at hand; to be called first."""
        self._fill()
        return self._here.text[: self._here.end]

    def read_ahead(self, pool: ThreadPoolExecutor | None) -> None:
        """Has a thread of the pool read the step after the one that is taken; None: no more."""
        self._pool = pool

    def take_block(self) -> RowBlock | None:
        """Takes the whole lines at hand; `line` does not count them.

        None means that the text ends before a line does, or that the line is too long.
        """
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
            # A thread may still be writing to the block, so another stands for its text.
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
        """Where a line begins, by reading the file again; None for a pipe."""
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
        """Raises an ArpaError at the line `at`, or at the present position where it is None."""
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
                "Copy the folder again from where it was made"
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
            f"a line longer than {MAX_LINE_BYTES} bytes",
            at,
            order,
            "Lines end in \\n or \\r\\n; is this an ARPA file?",
        )

    # -------------------------------------------------------------------------- source

    def _read(self) -> _Step:
        """The next step of text from the source; in one thread at a time."""
        pieces: list[bytes] = []
        size = 0
        while size < CHUNK_BYTES:
            try:
                piece = self._source.read(CHUNK_BYTES - size)
            except DamagedStream as exc:
                # What was decompressed before the damage is still looked at first.
                return _Step(pieces, True, exc)
            if not piece:
                return _Step(pieces, True, None)
            self._hash.update(piece)
            self.text_bytes += len(piece)
            size += len(piece)
            pieces.append(piece)
        return _Step(pieces, False, None)

    def _next_pieces(self) -> list[bytes]:
        """What the source has next, beginning the step after it; an OSError is raised at each
        call."""
        if self._source_ended:
            return []
        step = self._read() if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._source_ended, self._damage = step.ended, step.damage
        # Nothing else is read ahead: a thread that waits for a pipe cannot be told to stop.
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
