"""ARPA files: a streaming reader that refuses what is not one, and a writer it agrees with.

An ARPA file is text in bytes. `\\data\\` opens it, with a line `ngram K=COUNT` for each order; a
section `\\K-grams:` for each order follows, and `\\end\\` closes it. A row of a section holds a
log10 probability, K words, and, below the highest order, a log10 backoff weight that may be left
out. Space and tab separate the fields and nothing else does.

The reader is here, with what it says of faults, which is most of it; rows are taken apart in
`_arpa_rows.py` and, in bulk, in `kernels.py`; streams are opened and other formats recognised in
`_arpa_open.py`, and `_arpa_write.py` is the writer. It stays one file past 500 lines: the place in
the text (line, byte, section) belongs to every fault, and is kept by the same methods that move
through it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash

from dlm.errors import ArpaError
from dlm.ngram import _arpa_open, _arpa_parts
from dlm.ngram._arpa_parts import INDEX as PARTS_INDEX
from dlm.ngram._arpa_parts import index_text as parts_index
from dlm.ngram._arpa_parts import is_parts_folder
from dlm.ngram._arpa_rows import (
    MAX_LINE_BYTES,
    NgramBatch,
    RowBlock,
    RowFault,
    shown,
    split_row,
)
from dlm.ngram._arpa_write import arpa_bytes, write_arpa
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_ID, Vocabulary, is_unk_spelling
from dlm.ngram.wordtable import PADDING, WordTable

__all__ = [
    "PARTS_INDEX",
    "ArpaReader",
    "ArpaWarning",
    "NgramBatch",
    "arpa_bytes",
    "is_parts_folder",
    "is_reopenable",
    "parts_index",
    "write_arpa",
]

# The most text there may be before the first section.
MAX_HEADER_BYTES = 16 << 20
# The largest count the header may promise for an order.
MAX_COUNT = 1 << 40
# The same for order 1: ids are uint32, and id 0 may have no row.
MAX_WORDS = (1 << 32) - 2

# So many words are made room for on the word of the header alone; memory untouched costs nothing.
_BELIEVED_WORDS = 1 << 20

# Text is read in steps of this size; a block of rows is one step, and the line begun before it.
_CHUNK_BYTES = 2 << 20
# Blocks of rows in hand at once: one is handed out, the others are parsed or wait.
_BLOCKS = 4
# Threads: one reads and decompresses, the others parse.
_THREADS = 3

_COUNT_LINE = re.compile(rb"ngram[ \t]+(-?\d+)[ \t]*=[ \t]*(-?\d+)\Z")


class ArpaWarning(UserWarning):
    """An ARPA file is read, but is not quite as it should be."""


class _Line(NamedTuple):
    text: bytes  # without the line end, and without spaces and tabs at its end
    number: int  # 1-based
    offset: int  # of its first byte in the decompressed text


class _Read(NamedTuple):
    pieces: list[bytes]
    ended: bool
    damage: _arpa_open.DamagedStream | None


def _source_of(path: str) -> _arpa_open.TextSource | _arpa_parts.PartsSource:
    """The text of a file, or of a folder of parts."""
    if is_parts_folder(path):
        return _arpa_parts.PartsSource(path)
    return _arpa_open.TextSource(path)


def is_reopenable(path: str | os.PathLike[str]) -> bool:
    """Whether reading it a second time gives the same bytes: false for pipes."""
    path = os.fspath(path)
    return _arpa_open.is_reopenable(path) or is_parts_folder(path)


class ArpaReader:
    """The n-grams of an ARPA file, in batches, in one pass and bounded memory.

    The header is read at once; `batches` reads the rest. Plain, gzip, zstd and xz files are told
    apart by their first bytes. The unknown word has id 0, spelled `<unk>` or `<UNK>`; the other
    unigrams have 1, 2, 3, ... in the order of the file.

    Args
        path          an ARPA file, a pipe, or a folder of parts: see _arpa_parts.py
        batch_ngrams  the most n-grams in a batch; long rows make smaller batches
    Raises
        ArpaError   the file is not ARPA, is truncated or is damaged; with section, line, offset
        OSError     the file cannot be opened or the disk failed
        ValueError  batch_ngrams is not positive
    Guarantees
        every number is the float32 nearest to its decimal text, ties to even, and never -0.0;
        no n-gram of a section counts for more or fewer than the header promised;
        an error is raised no later than the end of `batches`, which reads to the end of the file
    Edge cases
        =============================  ==========================================
        no `<unk>` or `<UNK>`          id 0 has no row; vocabulary.unk_in_model is False
        no `<s>` or `</s>`             refused
        a section of no n-grams        its header may be there or not
        no `\\end\\`                     ArpaWarning if all counts are met, else refused
        no line end after a row        refused: the row may be cut short
        backoff at the highest order   refused, except 0
        carriage return in a line      refused, except before the line end
        =============================  ==========================================
    Cost
        memory: the vocabulary, twice, and at most 64 MiB of text with the arrays read from it; no
        Python object is made for a row, unless it is an unusual one.
        While batches are taken, threads read on and parse; they end with the iterator, or by
        `close`
    """

    def __init__(self, path: str | os.PathLike[str], *, batch_ngrams: int = 65536) -> None:
        if batch_ngrams < 1:
            raise ValueError(f"batch_ngrams must be at least 1, not {batch_ngrams}")
        self.path: str = os.fspath(path)
        self.comments: list[str] = []
        self.section_first_line: dict[int, int] = {}
        self._batch_ngrams = batch_ngrams
        self._vocabulary: Vocabulary | None = None
        self._table = WordTable()
        self._unk_row: int | None = None
        self._hash = xxhash.xxh3_128()
        self._text_bytes = 0
        self._text = RowBlock(PADDING, 0, 0, 0)  # at hand; lines are taken from its position
        self._line = 1  # number of the line there
        self._pending: deque[tuple[RowBlock, Future[None] | None]] = deque()  # after it, in order
        self._returned: deque[RowBlock] = deque()  # text to come before what the source has
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[_Read] | None = None
        self._source_ended = False
        self._damage: _arpa_open.DamagedStream | None = None
        self._finished = False
        self._closed = False
        self._started = False
        try:
            self._source = _source_of(self.path)
        except IsADirectoryError as exc:
            raise ArpaError(
                f"expected an ARPA file, found a directory without {_arpa_parts.INDEX}",
                path=self.path,
                advice="Give the ARPA file itself. If it is a folder of parts, what makes it has "
                "not finished: wait, or make it again",
            ) from exc
        try:
            self.counts, self._marker = self._read_header()
        except BaseException:
            self._source.close()
            raise
        self.order: int = len(self.counts)

    def __enter__(self) -> ArpaReader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._closed = True
        self._stop_threads()
        self._source.close()

    @property
    def compression(self) -> str:
        """`plain`, `gzip`, `zstd` or `xz`."""
        return self._source.compression

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the model.

        Raises
            RuntimeError  the 1-gram section has not been read to its end
        """
        if self._vocabulary is None:
            raise RuntimeError("the vocabulary is known after the batches of order 1")
        return self._vocabulary

    @property
    def text_bytes(self) -> int:
        """Size of the decompressed text.

        Raises
            RuntimeError  the file has not been read to its end
        """
        self._require_finished()
        return self._text_bytes

    @property
    def text_xxh3(self) -> str:
        """XXH3 (128 bits, hexadecimal) of the decompressed text.

        Raises
            RuntimeError  the file has not been read to its end
        """
        self._require_finished()
        return str(self._hash.hexdigest())

    def batches(self) -> Iterator[NgramBatch]:
        """All n-grams, section by section from order 1 up, each section in the order of the file.

        Raises
            ArpaError     the file is not ARPA, is truncated or is damaged
            RuntimeError  called a second time: the file is read once
            ValueError    the reader was closed before the end
        Edge cases
            a section of no n-grams yields no batch; the end of the file is read, and checked,
            when the iterator is exhausted
        """
        if self._started:
            raise RuntimeError("an ArpaReader reads its file once; open another for a second pass")
        self._started = True
        return self._batches()

    def error_at(
        self, message: str, *, order: int, row: int, advice: str | None = None
    ) -> ArpaError:
        """The error for a fault in an n-gram that was read before, with its place in the file.

        Args
            order, row  the n-gram: its section, and its index in the section
        Raises
            ValueError  that section has not been reached
        Edge cases
            a pipe cannot be read again: the error then has no byte offset
        Cost
            reads the file again up to that row
        """
        if order not in self.section_first_line:
            raise ValueError(f"the {order}-gram section has not been read")
        line = self.section_first_line[order] + row
        return ArpaError(
            message,
            path=self.path,
            order=order,
            line=line,
            byte_offset=self._offset_of_line(line),
            advice=advice,
        )

    # ------------------------------------------------------------------ text and lines

    def _require_finished(self) -> None:
        if not self._finished:
            raise RuntimeError("known after the last batch has been read")

    @property
    def _at_end(self) -> bool:
        """Whether nothing follows the text at hand."""
        return self._source_ended and not self._returned

    def _stop_threads(self) -> None:
        """Returns when no thread uses the file or the table."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _read(self) -> _Read:
        """The next step of text from the source; in one thread at a time."""
        pieces: list[bytes] = []
        size = 0
        while size < _CHUNK_BYTES:
            try:
                piece = self._source.read(_CHUNK_BYTES - size)
            except _arpa_open.DamagedStream as exc:
                # What was decompressed before the damage is still looked at first.
                return _Read(pieces, True, exc)
            if not piece:
                return _Read(pieces, True, None)
            self._hash.update(piece)
            self._text_bytes += len(piece)
            size += len(piece)
            pieces.append(piece)
        return _Read(pieces, False, None)

    def _next_pieces(self) -> list[bytes]:
        """What the source has next; the step after it is begun.

        Raises
            OSError  the disk failed; again at each call
        """
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
        """Puts more text behind what is left at hand."""
        left = self._text
        rest = left.text[left.position : left.end]
        if not self._returned:
            pieces = self._next_pieces()
        elif rest:
            more = self._returned.popleft()
            pieces = [more.text[more.begin : more.end]]
        else:
            self._text = self._returned.popleft()
            return
        text = b"".join((rest, *pieces, PADDING))
        self._text = RowBlock(text, 0, len(text) - len(PADDING), left.offset + left.position)

    def _take_block(self) -> RowBlock | None:
        """The whole lines at hand, which are then no more at hand.

        None at all means that the text ends before a line does, or that the line is too long.
        """
        while True:
            here = self._text
            end = here.text.rfind(b"\n", here.position, here.end) + 1
            if end:
                break
            if self._at_end or here.end - here.position > MAX_LINE_BYTES:
                return None
            self._fill()
        rest = here.text[end : here.end] + PADDING
        self._text = RowBlock(rest, 0, here.end - end, here.offset + end)
        return RowBlock(here.text, here.position, end, here.offset)

    def _give_back(self, block: RowBlock, position: int) -> None:
        """Has the text from `position` in `block` on at hand again."""
        self._returned.appendleft(self._text)
        while self._pending:
            # A thread may still be writing to the block, so another stands for its text.
            later, parsed = self._pending.pop()
            if parsed is not None:
                parsed.cancel()
            self._returned.appendleft(RowBlock(later.text, later.begin, later.end, later.offset))
        self._text = RowBlock(block.text, position, block.end, block.offset)

    def _next_line(self, order: int | None) -> _Line | None:
        """The next line, or None at the end; the last one may lack its line end."""
        end = self._text.text.find(b"\n", self._text.position, self._text.end)
        while end < 0 and not self._at_end:
            searched = self._text.end - self._text.position
            if searched > MAX_LINE_BYTES:
                break
            self._fill()
            here = self._text
            end = here.text.find(b"\n", here.position + searched, here.end)
        here = self._text
        following = end + 1
        if end < 0:
            if self._damage is not None and self._at_end:
                self._fail_damaged(order)
            end = following = here.end
            if end == here.position:
                return None
        if end - here.position > MAX_LINE_BYTES:
            self._fail_long_line(order, self._line, here.offset + here.position)
        raw = here.text[here.position : end]
        line = _Line(raw.rstrip(b"\r").rstrip(b" \t"), self._line, here.offset + here.position)
        self._line += following > end
        here.position = following
        return line

    def _offset_of_line(self, line: int) -> int | None:
        if not is_reopenable(self.path):
            return None
        source = _source_of(self.path)
        try:
            before, offset = line - 1, 0
            while before > 0:
                piece = source.read(1 << 20)
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
        except _arpa_open.DamagedStream:
            return None
        finally:
            source.close()

    # -------------------------------------------------------------------------- errors

    def _fail(
        self, message: str, at: _Line | None, order: int | None, advice: str | None = None
    ) -> NoReturn:
        """Raise an ArpaError at the line `at`, or at the present position where it is None."""
        raise ArpaError(
            message,
            path=self.path,
            order=order,
            line=self._line if at is None else at.number,
            byte_offset=self._text.offset + self._text.position if at is None else at.offset,
            advice=advice,
        )

    def _fail_damaged(self, order: int | None) -> NoReturn:
        assert self._damage is not None
        try:
            self._fail(
                f"the {self.compression} stream is cut short or damaged ({self._damage})",
                None,
                order,
                "Copy the folder again from where it was made"
                if is_parts_folder(self.path)
                else _arpa_open.damage_advice(self.path, self.compression),
            )
        except ArpaError as error:
            raise error from self._damage

    def _fail_long_line(self, order: int | None, number: int, offset: int) -> NoReturn:
        self._fail(
            f"a line longer than {MAX_LINE_BYTES} bytes",
            _Line(b"", number, offset),
            order,
            "Lines end in \\n or \\r\\n; is this an ARPA file?",
        )

    def _fail_truncated(self, order: int, found: int) -> NoReturn:
        if self._damage is not None:
            self._fail_damaged(order)
        cut = " in the middle of a row" if self._text.position < self._text.end else ""
        self._fail(
            f"the file ends inside the {order}-gram section{cut}: the header promises "
            f"{self.counts[order - 1]} n-grams, found {found}",
            None,
            order,
            "The file is truncated; copy or build it again",
        )

    # -------------------------------------------------------------------------- header

    def _read_header(self) -> tuple[tuple[int, ...], _Line | None]:
        """The counts, and the first line after them (a section header, or nothing)."""
        self._fill()
        head = self._text.text[: self._text.end]
        if not head:
            if self._damage is not None:
                self._fail_damaged(None)
            raise ArpaError(
                "the file is empty",
                path=self.path,
                advice="Whatever wrote it did not finish; make it again",
            )
        known = _arpa_open.recognise(head, self.path, self.compression)
        if known is not None:
            self._fail(known[0], None, None, known[1])
        while True:
            line = self._header_line()
            if line is None:
                self._fail("no \\data\\ line in the file", None, None, "Is this an ARPA file?")
            if line.text.startswith(b"#"):
                comment = line.text[1:].removeprefix(b" ")
                self.comments.append(comment.decode("utf-8", "surrogateescape"))
            elif line.text == b"\\data\\":
                break
            elif line.text:
                what, advice = _arpa_open.guess(head) or (
                    f"expected \\data\\ as the first line, found {shown(line.text)}",
                    "Lines before \\data\\ must be empty or start with #",
                )
                self._fail(what, line, None, advice)
        counts: list[int] = []
        while True:
            line = self._header_line()
            if line is None or line.text.startswith(b"\\"):
                break
            if not line.text:
                continue
            match = _COUNT_LINE.match(line.text)
            if match is None:
                self._fail(
                    f"expected a line ngram {len(counts) + 1}=COUNT, found {shown(line.text)}",
                    line,
                    None,
                )
            if len(match[1]) > 9 or int(match[1]) != len(counts) + 1:
                self._fail(
                    f"expected the count of order {len(counts) + 1}, found {shown(line.text)}",
                    line,
                    None,
                    "Counts are listed once for each order, from 1 up",
                )
            most = MAX_COUNT if counts else MAX_WORDS
            if match[2].startswith(b"-") or len(match[2]) > 19 or int(match[2]) > most:
                self._fail(
                    f"the count of order {len(counts) + 1} is not credible: {shown(line.text)}",
                    line,
                    len(counts) + 1,
                    f"Expected a number from 0 to {most}",
                )
            counts.append(int(match[2]))
        if not counts:
            self._fail(
                "no count follows \\data\\",
                line,
                None,
                "Expected a line ngram K=COUNT for each order",
            )
        return tuple(counts), line

    def _header_line(self) -> _Line | None:
        line = self._next_line(None)
        if line is not None and line.offset > MAX_HEADER_BYTES:
            self._fail(
                f"no section within the first {MAX_HEADER_BYTES} bytes",
                line,
                None,
                "Is this an ARPA file?",
            )
        return line

    # ------------------------------------------------------------------------ sections

    def _batches(self) -> Iterator[NgramBatch]:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dlm-arpa")
        try:
            yield from self._sections()
        finally:
            self._stop_threads()

    def _sections(self) -> Iterator[NgramBatch]:
        marker = self._marker
        for order, count in enumerate(self.counts, start=1):
            header = b"\\%d-grams:" % order
            if marker is not None and marker.text == header:
                self.section_first_line[order] = self._line
                yield from self._section(order)
                marker = self._next_marker(order)
            elif count == 0:
                if order == 1:
                    self._fail("the model has no 1-grams", marker, 1, "Estimate the model again")
            elif marker is None:
                self._fail(
                    f"the file ends before the {order}-gram section",
                    None,
                    order,
                    "The file is truncated; copy or build it again",
                )
            else:
                self._fail(
                    f"expected {header.decode()}, found {shown(marker.text)}",
                    marker,
                    order,
                    f"The header promises {count} {order}-grams",
                )
        if marker is None:
            warnings.warn(
                ArpaWarning(
                    f"{self.path} does not end in \\end\\; every count of its header is met"
                ),
                stacklevel=3,
            )
        elif marker.text != b"\\end\\":
            self._fail(f"expected \\end\\, found {shown(marker.text)}", marker, None)
        else:
            while (line := self._next_line(None)) is not None:
                if line.text:
                    self._fail(
                        f"text after \\end\\: {shown(line.text)}",
                        line,
                        None,
                        "Nothing may follow the model; were two files joined?",
                    )
        self._finished = True
        self.close()

    def _next_marker(self, order: int) -> _Line | None:
        """The next line with a backslash, after the rows of `order`; blank ones may precede it."""
        blank_before = False
        while (line := self._next_line(order)) is not None:
            if line.text.startswith(b"\\"):
                return line
            if line.text:
                if blank_before:
                    self._fail(
                        f"expected the header of a section or \\end\\, found {shown(line.text)}",
                        line,
                        order,
                        f"The header promises {self.counts[order - 1]} {order}-grams",
                    )
                self._fail_too_many(line, order)
            blank_before = True
        return None

    def _fail_too_many(self, first: _Line, order: int) -> NoReturn:
        found = self.counts[order - 1] + 1
        try:
            while (line := self._next_line(order)) is not None:
                if not line.text or line.text.startswith(b"\\"):
                    break
                found += 1
        except ArpaError:
            pass  # the rows already counted are too many
        self._fail(
            f"too many n-grams: the header promises {self.counts[order - 1]} "
            f"{order}-grams, found {found}",
            first,
            order,
            "Correct the counts in the header, or build the file again",
        )

    def _fail_too_few(self, at: _Line, order: int, found: int) -> NoReturn:
        promised = self.counts[order - 1]
        following: _Line | None = at
        try:
            while following is not None and not following.text:
                following = self._next_line(order)
        except ArpaError:
            following = None
        if following is not None and not following.text.startswith(b"\\"):
            self._fail(
                f"a blank line inside the {order}-gram section, after {found} of {promised} rows",
                at,
                order,
                "Remove it; blank lines stand only between sections",
            )
        self._fail(
            f"too few n-grams: the header promises {promised} {order}-grams, found {found}",
            at,
            order,
            "The file is incomplete, or its header is of another model; build it again",
        )

    def _section(self, order: int) -> Iterator[NgramBatch]:
        count = self.counts[order - 1]
        done = 0
        if order == 1:
            self._table.reserve(min(count, _BELIEVED_WORDS), 0)
        while done < count:
            block = self._next_block(order, count - done)
            if block is None:
                if self._text.end - self._text.position > MAX_LINE_BYTES:
                    place = self._text.offset + self._text.position
                    self._fail_long_line(order, self._line, place)
                self._fail_truncated(order, done)
            self._read_block(block, order, done)
            # Rows of blocks before may not have been counted yet when this one was begun.
            rows = min(block.filled, count - done)
            for first in range(0, rows, self._batch_ngrams):
                piece = slice(first, min(first + self._batch_ngrams, rows))
                yield NgramBatch(
                    order,
                    done + first,
                    block.ids[piece],
                    block.log10_prob[piece],
                    block.log10_backoff[piece],
                )
            done += rows
            self._line += rows
            if done == count:
                self._give_back(block, block.place_of_row(rows))
        if order == 1:
            self._finish_vocabulary()

    def _next_block(self, order: int, most: int) -> RowBlock | None:
        """The next whole lines, parsed where that needs nothing of the lines before.

        None at all means what it means in `_take_block`, after all blocks before it.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        # A word's id depends on the words before it, so 1-grams are read one block at a time.
        while len(self._pending) < (1 if order == 1 else _BLOCKS):
            try:
                block = self._take_block()
            except OSError:
                if not self._pending:
                    raise
                break  # it is raised again after the rows that were read before it
            if block is None:
                break
            parsed = None
            if order > 1 and self._pool is not None:
                parsed = self._pool.submit(self._parse, block, order, most)
            elif order > 1:
                self._parse(block, order, most)
            else:
                block.start(order, most)
            self._pending.append((block, parsed))
        if not self._pending:
            return None
        block, parsed = self._pending.popleft()
        if parsed is not None:
            parsed.result()
        return block

    def _parse(self, block: RowBlock, order: int, most: int) -> None:
        """Reads the rows of a block up to the first that is irregular, in any thread."""
        block.start(order, most)
        self._read_on(block, order, 0)

    def _read_on(self, block: RowBlock, order: int, done: int) -> None:
        top = order == self.order
        if order == 1:
            self._unk_row = block.read_words(self._table, top, done, self._unk_row)
        else:
            block.read_ngrams(self._table, top, self.vocabulary.unk_in_model)

    def _read_block(self, block: RowBlock, order: int, done: int) -> None:
        """Reads a block to its end, or to that of the section; raises at the first wrong row."""
        most = min(block.rows, self.counts[order - 1] - done)
        if order == 1:
            self._read_on(block, order, done)
        while block.filled < most:
            self._one_by_one(block, order, done)
            self._read_on(block, order, done)

    def _one_by_one(self, block: RowBlock, order: int, done: int) -> None:
        """The row of a block at which bulk reading stopped, by itself; raises where it is wrong."""
        line = block.next_line()
        offset = block.offset + block.position
        number = self._line + block.filled
        if len(line) > MAX_LINE_BYTES:
            self._fail_long_line(order, number, offset)
        bare = line.removesuffix(b"\r").rstrip(b" \t")
        if not bare or bare.startswith(b"\\"):
            # What follows is looked at to tell a blank line from a short section.
            self._line = number + 1
            self._give_back(block, block.position + len(line) + 1)
            self._fail_too_few(_Line(bare, number, offset), order, done + block.filled)
        try:
            prob, words, backoff = split_row(line, order, order == self.order)
            if order == 1:
                ids = [self._new_word(words[0], done + block.filled)]
            else:
                ids = [self._known_word(word) for word in words]
        except RowFault as fault:
            self._fail(fault.message, _Line(line, number, offset), order, fault.advice)
        block.put(ids, prob, backoff, len(line) + 1)

    def _new_word(self, word: bytes, row: int) -> int:
        """The id of a word of the 1-gram section, which must not have been there before."""
        if is_unk_spelling(word):
            if self._unk_row is not None:
                first, spelling = self._unk_row, self._table.word(UNK_ID)
                both = "" if spelling == word else ", which is the unknown word too,"
                raise RowFault(
                    f"a duplicate word: {shown(word)}; {shown(spelling)}{both} stands on "
                    f"line {self.section_first_line[1] + first}",
                    "The unknown word is spelled <unk> or <UNK>; keep one of the two rows",
                )
            self._unk_row = row
            self._table.spell_unk(word)
            return UNK_ID
        known = self._table.find(word)
        if known is not None:
            first = known - 1
            if self._unk_row is not None and first >= self._unk_row:
                first += 1
            raise RowFault(
                f"a duplicate word: {shown(word)} stands on line "
                f"{self.section_first_line[1] + first} already",
                "Keep one of the two rows and correct the count, or build the file again",
            )
        return self._table.add(word)

    def _known_word(self, word: bytes) -> int:
        """The id of a word of an n-gram, which must be among the 1-grams."""
        vocabulary = self.vocabulary
        word_id = vocabulary.ids.get(word)
        if word_id is None or (word_id == 0 and not vocabulary.unk_in_model):
            raise RowFault(
                f"an unknown word: {shown(word)} is not among the 1-grams",
                "The 1-gram section lists every word of the model; add it there, or build the "
                "file again",
            )
        return word_id

    def _finish_vocabulary(self) -> None:
        missing = [w for w in (BEGIN_SENTENCE, END_SENTENCE) if self._table.find(w) is None]
        if missing:
            names = " and ".join(word.decode() for word in missing)
            self._fail(
                f"the 1-grams lack {names}",
                None,
                1,
                "A model of sentences has both <s> and </s>: estimate it with sentence "
                f"boundaries, or add a row `-99 {missing[0].decode()}` and correct the count",
            )
        self._vocabulary = Vocabulary(self._table.words(), unk_in_model=self._unk_row is not None)
