"""ARPA files: a streaming reader that refuses what is not one, and a writer it agrees with.

An ARPA file is text in bytes. `\\data\\` opens it, with a line `ngram K=COUNT` for each order; a
section `\\K-grams:` for each order follows, and `\\end\\` closes it. A row of a section holds a
log10 probability, K words, and, below the highest order, a log10 backoff weight that may be left
out. Space and tab separate the fields and nothing else does.

The reader is here, with what it says of faults, which is most of it; rows are taken apart in
`_arpa_rows.py`, streams opened and other formats recognised in `_arpa_open.py`, and
`_arpa_write.py` is the writer. It stays one file past 500 lines: the place in the text (line, byte,
section) belongs to every fault, and is kept by the same methods that move through it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.ngram import _arpa_open
from dlm.ngram._arpa_rows import (
    MAX_LINE_BYTES,
    Columns,
    NgramBatch,
    RowFault,
    shown,
    split_row,
    split_rows,
)
from dlm.ngram._arpa_write import write_arpa
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_SPELLINGS, Vocabulary, is_unk_spelling

__all__ = ["ArpaReader", "ArpaWarning", "NgramBatch", "write_arpa"]

# The most text there may be before the first section.
MAX_HEADER_BYTES = 16 << 20
# The largest count the header may promise for an order.
MAX_COUNT = 1 << 40
# The same for order 1: ids are uint32, and id 0 may have no row.
MAX_WORDS = (1 << 32) - 2

# Text is read in steps of `_CHUNK_BYTES`, and rows wait for their batch up to `_BUFFER_BYTES`.
_CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 8 << 20

_COUNT_LINE = re.compile(rb"ngram[ \t]+(-?\d+)[ \t]*=[ \t]*(-?\d+)\Z")


class ArpaWarning(UserWarning):
    """An ARPA file is read, but is not quite as it should be."""


class _Line(NamedTuple):
    text: bytes  # without the line end, and without spaces and tabs at its end
    number: int  # 1-based
    offset: int  # of its first byte in the decompressed text


class ArpaReader:
    """The n-grams of an ARPA file, in batches, in one pass and bounded memory.

    The header is read at once; `batches` reads the rest. Plain, gzip, zstd and xz files are told
    apart by their first bytes. The unknown word has id 0, spelled `<unk>` or `<UNK>`; the other
    unigrams have 1, 2, 3, ... in the order of the file.

    Args
        path          an ARPA file, or a pipe
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
        memory: the vocabulary, about 20 MiB of text and the arrays of one batch
    """

    def __init__(self, path: str | os.PathLike[str], *, batch_ngrams: int = 65536) -> None:
        if batch_ngrams < 1:
            raise ValueError(f"batch_ngrams must be at least 1, not {batch_ngrams}")
        self.path: str = os.fspath(path)
        self.comments: list[str] = []
        self.section_first_line: dict[int, int] = {}
        self._batch_ngrams = batch_ngrams
        self._vocabulary: Vocabulary | None = None
        self._words: list[bytes] = [b"<unk>"]
        self._new_ids: dict[bytes, int] = {}
        self._unk_row: int | None = None
        self._hash = xxhash.xxh3_128()
        self._text_bytes = 0
        self._buffer = b""
        self._position = 0  # in the buffer
        self._offset = 0  # of the buffer in the text
        self._line = 1  # number of the line at the position
        self._newlines = np.zeros(0, np.int64)  # in the buffer, all of them
        self._next_newline = 0  # index in _newlines of the first one at or after the position
        self._at_end = False
        self._damage: _arpa_open.DamagedStream | None = None
        self._finished = False
        self._started = False
        try:
            self._source = _arpa_open.TextSource(self.path)
        except IsADirectoryError as exc:
            raise ArpaError(
                "expected an ARPA file, found a directory",
                path=self.path,
                advice="Give the ARPA file itself",
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

    def _fill(self) -> None:
        """Drop what was consumed and read some more; sets `_at_end` where there is no more."""
        pieces = [self._buffer[self._position :]]
        size = 0
        while size < _CHUNK_BYTES and not self._at_end:
            try:
                piece = self._source.read(_CHUNK_BYTES - size)
            except _arpa_open.DamagedStream as exc:
                # What was decompressed before the damage is still looked at first.
                self._damage = exc
                piece = b""
            self._at_end = not piece
            self._hash.update(piece)
            self._text_bytes += len(piece)
            size += len(piece)
            pieces.append(piece)
        self._offset += self._position
        self._position = 0
        self._buffer = b"".join(pieces)
        self._newlines = np.flatnonzero(np.frombuffer(self._buffer, np.uint8) == 10)
        self._next_newline = 0

    def _next_line(self, order: int | None) -> _Line | None:
        """The next line, or None at the end; the last one may lack its line end."""
        while self._next_newline == len(self._newlines) and not self._at_end:
            if len(self._buffer) - self._position > MAX_LINE_BYTES:
                break
            self._fill()
        if self._next_newline < len(self._newlines):
            end = int(self._newlines[self._next_newline])
        else:
            if self._damage is not None:
                self._fail_damaged(order)
            end = len(self._buffer)
            if end == self._position:
                return None
        if end - self._position > MAX_LINE_BYTES:
            self._fail_long_line(order, self._line, self._offset + self._position)
        raw = self._buffer[self._position : end]
        line = _Line(raw.rstrip(b"\r").rstrip(b" \t"), self._line, self._offset + self._position)
        if end < len(self._buffer):
            self._next_newline += 1
            self._line += 1
            end += 1
        self._position = end
        return line

    def _offset_of_line(self, line: int) -> int | None:
        if not _arpa_open.is_reopenable(self.path):
            return None
        source = _arpa_open.TextSource(self.path)
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
            byte_offset=self._offset + self._position if at is None else at.offset,
            advice=advice,
        )

    def _fail_damaged(self, order: int | None) -> NoReturn:
        assert self._damage is not None
        try:
            self._fail(
                f"the {self.compression} stream is cut short or damaged ({self._damage})",
                None,
                order,
                _arpa_open.damage_advice(self.path, self.compression),
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
        cut = " in the middle of a row" if self._position < len(self._buffer) else ""
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
        head = self._buffer
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
                stacklevel=2,
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
        while done < count:
            block, newlines = self._take_rows(min(self._batch_ngrams, count - done))
            if not len(newlines):
                if len(self._buffer) - self._position > MAX_LINE_BYTES:
                    self._fail_long_line(order, self._line, self._offset + self._position)
                self._fail_truncated(order, done)
            columns = self._bulk(block, newlines, order, done)
            if columns is None:
                columns = self._one_by_one(block, order, done)
            self._position += len(block)
            self._next_newline += len(newlines)
            self._line += len(newlines)
            yield NgramBatch(order, done, *columns)
            done += len(newlines)
        if order == 1:
            self._finish_vocabulary()

    def _take_rows(self, most: int) -> tuple[bytes, NDArray[np.int64]]:
        """Up to `most` whole lines at the position, not consumed, and where each one ends.

        None at all means that the text ends before a line does, or that the line is too long.
        """
        while not self._at_end:
            lines = len(self._newlines) - self._next_newline
            if lines >= most:
                break
            if len(self._buffer) - self._position > (_BUFFER_BYTES if lines else MAX_LINE_BYTES):
                break
            self._fill()
        newlines = self._newlines[self._next_newline : self._next_newline + most] - self._position
        end = int(newlines[-1]) + 1 if len(newlines) else 0
        return self._buffer[self._position : self._position + end], newlines

    def _bulk(
        self, block: bytes, newlines: NDArray[np.int64], order: int, first_row: int
    ) -> Columns | None:
        """The rows of a regular block; None where it needs a look at each line."""
        rows = split_rows(block, newlines, order, order == self.order)
        if rows is None:
            return None
        words, probs, backoffs = rows
        if order == 1:
            new = self._new_words(words[0], first_row)
            return None if new is None else (new, probs, backoffs)
        vocabulary = self.vocabulary
        ids = np.empty((len(newlines), order), np.uint32)
        try:
            for column, texts in enumerate(words):
                ids[:, column] = np.fromiter(
                    map(vocabulary.ids.__getitem__, texts), dtype=np.uint32, count=len(texts)
                )
        except KeyError:
            return None
        if not vocabulary.unk_in_model and not ids.all():
            return None
        return ids, probs, backoffs

    def _new_words(self, words: list[bytes], first_row: int) -> NDArray[np.uint32] | None:
        """Ids for words none of which was there before; None, and no change, if one was."""
        distinct = set(words)
        unks = distinct.intersection(UNK_SPELLINGS)
        if (
            len(distinct) != len(words)
            or len(unks) + (self._unk_row is not None) > 1
            or not self._new_ids.keys().isdisjoint(distinct)
        ):
            return None
        unk_at = words.index(next(iter(unks))) if unks else None
        if unk_at is not None:
            self._unk_row = first_row + unk_at
            self._words[0] = words[unk_at]
            words = words[:unk_at] + words[unk_at + 1 :]
        first = len(self._words)
        self._words.extend(words)
        self._new_ids.update(zip(words, range(first, first + len(words)), strict=True))
        ids = np.arange(first, first + len(words), dtype=np.uint32)
        if unk_at is not None:
            ids = np.insert(ids, unk_at, 0)
        return ids[:, np.newaxis]

    def _one_by_one(self, block: bytes, order: int, first_row: int) -> Columns:
        """The rows of a block, one at a time; raises at the first that is wrong."""
        lines = block.split(b"\n")[:-1]
        ids = np.empty((len(lines), order), np.uint32)
        probs = np.empty(len(lines), np.float32)
        backoffs = np.empty(len(lines), np.float32)
        offset = self._offset + self._position
        for i, line in enumerate(lines):
            if len(line) > MAX_LINE_BYTES:
                self._fail_long_line(order, self._line + i, offset)
            bare = line.removesuffix(b"\r").rstrip(b" \t")
            if not bare or bare.startswith(b"\\"):
                at = _Line(bare, self._line + i, offset)
                # What follows is looked at to tell a blank line from a short section.
                self._position = offset - self._offset + len(line) + 1
                self._next_newline += i + 1
                self._line += i + 1
                self._fail_too_few(at, order, first_row + i)
            try:
                probs[i], words, backoffs[i] = split_row(line, order, order == self.order)
                if order == 1:
                    ids[i, 0] = self._new_word(words[0], first_row + i)
                else:
                    ids[i] = [self._known_word(word) for word in words]
            except RowFault as fault:
                at = _Line(line, self._line + i, offset)
                self._fail(fault.message, at, order, fault.advice)
            offset += len(line) + 1
        return ids, probs, backoffs

    def _new_word(self, word: bytes, row: int) -> int:
        """The id of a word of the 1-gram section, which must not have been there before."""
        if is_unk_spelling(word):
            if self._unk_row is not None:
                first, spelling = self._unk_row, self._words[0]
                both = "" if spelling == word else ", which is the unknown word too,"
                raise RowFault(
                    f"a duplicate word: {shown(word)}; {shown(spelling)}{both} stands on "
                    f"line {self.section_first_line[1] + first}",
                    "The unknown word is spelled <unk> or <UNK>; keep one of the two rows",
                )
            self._unk_row = row
            self._words[0] = word
            return 0
        word_id = self._new_ids.setdefault(word, len(self._words))
        if word_id != len(self._words):
            first = word_id - 1
            if self._unk_row is not None and first >= self._unk_row:
                first += 1
            raise RowFault(
                f"a duplicate word: {shown(word)} stands on line "
                f"{self.section_first_line[1] + first} already",
                "Keep one of the two rows and correct the count, or build the file again",
            )
        self._words.append(word)
        return word_id

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
        missing = [w for w in (BEGIN_SENTENCE, END_SENTENCE) if w not in self._new_ids]
        if missing:
            names = " and ".join(word.decode() for word in missing)
            self._fail(
                f"the 1-grams lack {names}",
                None,
                1,
                "A model of sentences has both <s> and </s>: estimate it with sentence "
                f"boundaries, or add a row `-99 {missing[0].decode()}` and correct the count",
            )
        self._new_ids = {}
        self._vocabulary = Vocabulary(self._words, unk_in_model=self._unk_row is not None)
        self._words = []
