"""ARPA files: a streaming reader that refuses what is not one, and a writer it agrees with.

An ARPA file is text in bytes. `\\data\\` opens it, with a line `ngram K=COUNT` for each order; a
section `\\K-grams:` for each order follows, and `\\end\\` closes it. A row of a section holds a
log10 probability, K words, and, below the highest order, a log10 backoff weight that may be left
out. Space and tab separate the fields and nothing else does.

The file is longer than most modules here because it reads rows twice over: in bulk where a whole
block is regular, and one at a time where it is not, to find and name the faulty line.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import secrets
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.ngram import _arpa_open
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_SPELLINGS, Vocabulary, is_unk_spelling

# The longest line that is read or written; a row of real models is some hundred bytes.
MAX_LINE_BYTES = 1 << 20
# The most text there may be before the first section.
MAX_HEADER_BYTES = 16 << 20
# The largest count the header may promise for an order.
MAX_COUNT = 1 << 40
# The same for order 1: ids are uint32, and id 0 may have no row.
MAX_WORDS = (1 << 32) - 2

# Text is read in steps of `_CHUNK_BYTES`, and rows wait for their batch up to `_BUFFER_BYTES`.
_CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 8 << 20
_WRITE_ROWS = 1 << 17

_COUNT_LINE = re.compile(rb"ngram[ \t]+(-?\d+)[ \t]*=[ \t]*(-?\d+)\Z")
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z")
_NUMBER_BYTES = b"0123456789+-.eE"
_INFINITIES = frozenset((b"inf", b"+inf", b"-inf"))

_MIN_NORMAL_FLOAT32 = 2.0**-126
# Halfway between the largest float32 and the next power of two: from here on a number overflows.
_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103


class ArpaWarning(UserWarning):
    """An ARPA file is read, but is not quite as it should be."""


@dataclass(frozen=True, slots=True)
class NgramBatch:
    """Consecutive n-grams of one section, as arrays.

    Shapes
        ids            (n, order)  uint32   word ids, oldest word first, as written
        log10_prob     (n,)        float32  log10, <= 0, -inf is possible
        log10_backoff  (n,)        float32  log10, finite; 0 where the column is missing
    Guarantees
        `first_row` is the index of the first n-gram inside its section; no value is -0.0
    """

    order: int
    first_row: int
    ids: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.log10_prob)


Section: TypeAlias = (
    NgramBatch | tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32] | None]
)
_Columns: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]


class _Line(NamedTuple):
    text: bytes  # without the line end, and without spaces and tabs at its end
    number: int  # 1-based
    offset: int  # of its first byte in the decompressed text


class _RowFault(Exception):
    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


def _shown(text: bytes) -> str:
    """`text` for an error message: short, on one line, and every byte told apart."""
    cut = text if len(text) <= 60 else text[:57] + b"..."
    return '"' + cut.decode("utf-8", "backslashreplace").encode("unicode_escape").decode() + '"'


# ---------------------------------------------------------------------------------- numbers


def _nearest_float32(doubles: NDArray[np.float64], texts: Sequence[bytes]) -> NDArray[np.float32]:
    """The float32 nearest to each decimal `texts[i]`, given the double nearest to it.

    Guarantees
        ties go to even, as in one single rounding. Rounding the double again errs only where the
        double lies exactly between two float32; there the decimal itself is compared with it
    """
    with np.errstate(over="ignore", under="ignore"):
        singles = doubles.astype(np.float32)
    size = np.abs(doubles)
    between = (doubles.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    tiny = size < _MIN_NORMAL_FLOAT32
    if tiny.any():
        # Below the normal range float32 are 2**-149 apart, so their midpoints are odd * 2**-150.
        between[tiny] = np.fmod(size[tiny] * 2.0**150, 2.0) == 1.0
    between &= size <= _FLOAT32_OVERFLOW
    for i in np.flatnonzero(between).tolist():
        midpoint = float(doubles[i])
        # Comparing decimals is exact at any length, and linear in it.
        text, exact = Decimal(texts[i].decode("ascii")), Decimal(midpoint)
        single = singles[i]
        if text > exact and float(single) < midpoint:
            singles[i] = np.nextafter(single, np.float32(np.inf))
        elif text < exact and float(single) > midpoint:
            singles[i] = np.nextafter(single, np.float32(-np.inf))
    return singles + np.float32(0.0)  # -0.0 becomes 0.0


def _float32_column(texts: Sequence[bytes]) -> NDArray[np.float32] | None:
    """`texts` as float32; None where one is no number, or a finite one that overflows."""
    infinities = 0
    if b"".join(texts).translate(None, _NUMBER_BYTES):
        for text in texts:
            if text.translate(None, _NUMBER_BYTES):
                if text.lower() not in _INFINITIES:
                    return None
                infinities += 1
    try:
        doubles = np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))
    except ValueError:
        return None
    singles = _nearest_float32(doubles, texts)
    if np.count_nonzero(np.isinf(singles)) != infinities:
        return None
    return singles


def _float32_of(text: bytes, what: str) -> float:
    """`text` as the value of a float32; what is wrong with it as a `_RowFault`."""
    if text.lower() in _INFINITIES:
        return float(text)
    if text.lower().lstrip(b"+-") == b"nan":
        raise _RowFault(f"the {what} is not a number (NaN)", "Estimate the model again")
    if not _NUMBER.match(text):
        raise _RowFault(f"expected a {what} in decimal digits, found {_shown(text)}")
    double = float(text)
    if double == 0.0:
        return 0.0
    if _MIN_NORMAL_FLOAT32 <= abs(double) < _FLOAT32_OVERFLOW:
        (bits,) = struct.unpack("<Q", struct.pack("<d", double))
        if bits & 0x1FFFFFFF != 0x10000000:
            return float(struct.unpack("<f", struct.pack("<f", double))[0])
    single = float(_nearest_float32(np.array([double]), [text])[0])
    if single in (np.inf, -np.inf):
        raise _RowFault(f"the {what} {_shown(text)} is outside the range of a 32-bit float")
    return single


# ------------------------------------------------------------------------------------ rows


def _split_row(line: bytes, order: int, top: bool) -> tuple[float, list[bytes], float]:
    """Probability, words and backoff weight of one row; anything wrong as a `_RowFault`."""
    if line.endswith(b"\r"):
        line = line[:-1]
    if b"\r" in line:
        raise _RowFault(
            "a carriage return inside a line",
            "Remove it (`tr -d '\\r'`); lines end in \\n or \\r\\n, and others split words at it",
        )
    fields = [field for field in line.replace(b"\t", b" ").split(b" ") if field]
    prob = _float32_of(fields[0], "log10 probability")
    if prob > 0:
        raise _RowFault(
            f"the log10 probability {_shown(fields[0])} is positive",
            "A probability cannot exceed 1: estimate the model again (some IRSTLM versions "
            "write such files)",
        )
    found = len(fields) - 1
    if found not in (order, order + 1):
        raise _RowFault(
            f"an n-gram of another order in the {order}-gram section: expected {order} "
            f"{'word' if order == 1 else 'words'} and at most a backoff weight after the "
            f"probability, found {found} {'field' if found == 1 else 'fields'}",
            "Words are separated by spaces and tabs; a word cannot hold one",
        )
    backoff = 0.0
    if found == order + 1:
        try:
            backoff = _float32_of(fields[-1], "log10 backoff weight")
        except _RowFault as fault:
            fault.advice = fault.advice or (
                f"If that field is a word, this is a {order + 1}-gram in the {order}-gram section"
            )
            raise
        if backoff in (np.inf, -np.inf):
            raise _RowFault(f"the log10 backoff weight {_shown(fields[-1])} is not finite")
        if top and backoff != 0.0:
            raise _RowFault(
                f"the backoff weight {_shown(fields[-1])} on an n-gram of the highest order",
                "Nothing backs off from the highest order; remove the column, or add the "
                "missing higher order to the header",
            )
    return prob, fields[1 : order + 1], backoff


def _split_rows(
    block: bytes, newlines: NDArray[np.int64], order: int, top: bool
) -> tuple[list[list[bytes]], NDArray[np.float32], NDArray[np.float32]] | None:
    """All rows of `block` at once, or None where any is irregular or wrong.

    Shapes
        newlines   (n,)  offsets of the line ends in `block`; the last is its last byte
    Returns
        (words by position in the n-gram, probabilities, backoff weights)
    Guarantees
        what is returned equals what `_split_row` makes of each line
    """
    if int(np.diff(newlines, prepend=-1).max()) > MAX_LINE_BYTES + 1:
        return None
    # bytes.split() takes these for spaces; here they are word characters, or refused.
    if b"\v" in block or b"\f" in block:
        return None
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
        if b"\r" in block:
            return None
        newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    chars = np.frombuffer(block, np.uint8)
    between = (chars == 32) | (chars == 9) | (chars == 10)
    opens_field = ~between
    opens_field[1:] &= between[:-1]
    field_starts = np.flatnonzero(opens_field)
    line_starts = np.concatenate((np.zeros(1, np.int64), newlines[:-1] + 1))
    first_field = np.searchsorted(field_starts, line_starts)
    fields_of_line = np.diff(first_field, append=len(field_starts))
    has_backoff = fields_of_line == order + 2
    if not (has_backoff | (fields_of_line == order + 1)).all():
        return None
    fields = block.split()
    if has_backoff.all() or not has_backoff.any():
        stride = int(fields_of_line[0])
        prob_texts = fields[0::stride]
        words = [fields[i::stride] for i in range(1, order + 1)]
        backoff_texts = fields[order + 1 :: stride] if stride == order + 2 else []
    else:
        firsts = first_field.tolist()
        prob_texts = [fields[f] for f in firsts]
        words = [[fields[f + i] for f in firsts] for i in range(1, order + 1)]
        backoff_texts = [fields[f + order + 1] for f in first_field[has_backoff].tolist()]
    probs = _float32_column(prob_texts)
    if probs is None or bool((probs > 0).any()):
        return None
    backoffs = np.zeros(len(newlines), np.float32)
    if backoff_texts:
        column = _float32_column(backoff_texts)
        if column is None or not bool(np.isfinite(column).all()) or (top and bool(column.any())):
            return None
        backoffs[has_backoff] = column
    return words, probs, backoffs


# ---------------------------------------------------------------------------------- reader


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
                    f"expected \\data\\ as the first line, found {_shown(line.text)}",
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
                    f"expected a line ngram {len(counts) + 1}=COUNT, found {_shown(line.text)}",
                    line,
                    None,
                )
            if len(match[1]) > 9 or int(match[1]) != len(counts) + 1:
                self._fail(
                    f"expected the count of order {len(counts) + 1}, found {_shown(line.text)}",
                    line,
                    None,
                    "Counts are listed once for each order, from 1 up",
                )
            most = MAX_COUNT if counts else MAX_WORDS
            if match[2].startswith(b"-") or len(match[2]) > 19 or int(match[2]) > most:
                self._fail(
                    f"the count of order {len(counts) + 1} is not credible: {_shown(line.text)}",
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
                    f"expected {header.decode()}, found {_shown(marker.text)}",
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
            self._fail(f"expected \\end\\, found {_shown(marker.text)}", marker, None)
        else:
            while (line := self._next_line(None)) is not None:
                if line.text:
                    self._fail(
                        f"text after \\end\\: {_shown(line.text)}",
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
                        f"expected the header of a section or \\end\\, found {_shown(line.text)}",
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
    ) -> _Columns | None:
        """The rows of a regular block; None where it needs a look at each line."""
        rows = _split_rows(block, newlines, order, order == self.order)
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

    def _one_by_one(self, block: bytes, order: int, first_row: int) -> _Columns:
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
                probs[i], words, backoffs[i] = _split_row(line, order, order == self.order)
                if order == 1:
                    ids[i, 0] = self._new_word(words[0], first_row + i)
                else:
                    ids[i] = [self._known_word(word) for word in words]
            except _RowFault as fault:
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
                raise _RowFault(
                    f"a duplicate word: {_shown(word)}; {_shown(spelling)}{both} stands on "
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
            raise _RowFault(
                f"a duplicate word: {_shown(word)} stands on line "
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
            raise _RowFault(
                f"an unknown word: {_shown(word)} is not among the 1-grams",
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


# ---------------------------------------------------------------------------------- writer


def write_arpa(
    path_or_file: str | os.PathLike[str] | IO[bytes],
    vocabulary: Vocabulary,
    sections: Sequence[Section],
    *,
    comments: Iterable[str] = (),
) -> None:
    """Write a model as an ARPA file.

    Args
        path_or_file  a path, compressed by its suffix (.gz, .zst, .xz, else plain), or an open
                      binary file, which gets plain text and stays open
        vocabulary    the words of the ids
        sections      the n-grams of order 1, 2, ..., as (ids, log10_prob, log10_backoff) or as
                      NgramBatch; a backoff of None leaves the column out, and so does the
                      highest order. Memory-mapped arrays are read a slice at a time
        comments      lines to put before the model, as in ArpaReader.comments
    Shapes
        ids            (n, order)  uint32   oldest word first
        log10_prob     (n,)        float32
        log10_backoff  (n,)        float32
    Raises
        ArpaError   the model cannot be said in ARPA: a word with a space in it, a positive log
                    probability, a weight that is not finite, no `<s>`
        ValueError  arrays of the wrong shape or type
        OSError     the disk failed
    Guarantees
        ArpaReader reads back the same words, bits and order, -0.0 becoming 0.0; a number has
        the fewest digits that do so. A path has either its old content or all of the new one,
        on disk: the text is written beside it, synced, and renamed
    Edge cases
        the row of id 0 is left out of order 1 where the vocabulary has no unknown word
    Trusts
        no n-gram stands twice, and order 1 has every word once, in the order of the ids
    """
    columns = [_checked_section(section, i + 1) for i, section in enumerate(sections)]
    if not columns:
        raise ValueError("a model has at least the section of order 1")
    if columns[-1][2] is not None:
        if bool(columns[-1][2].any()):
            raise _unwritable("a backoff weight other than 0 at the highest order", len(columns))
        columns[-1] = (*columns[-1][:2], None)
    if not vocabulary.unk_in_model:
        ids, probs, backoffs = columns[0]
        keep = ids[:, 0] != 0
        columns[0] = ids[keep], probs[keep], None if backoffs is None else backoffs[keep]
    for word in (BEGIN_SENTENCE, END_SENTENCE):
        if vocabulary.ids.get(word, 0) == 0:
            raise _unwritable(f"the vocabulary lacks {word.decode()}", 1)
    for word in vocabulary.words:
        if not word or any(separator in word for separator in (b" ", b"\t", b"\n", b"\r")):
            raise _unwritable(f"the word {_shown(word)} is empty or holds a space or line end", 1)

    if not isinstance(path_or_file, (str, os.PathLike)):
        _write_text(path_or_file, vocabulary, columns, comments)
        return
    path = Path(path_or_file)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:  # a pipe or a device cannot be renamed over
            _write_compressed(file, path.suffix, vocabulary, columns, comments)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.building")
    try:
        with beside.open("xb") as file:
            _write_compressed(file, path.suffix, vocabulary, columns, comments)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


_WritableColumns: TypeAlias = tuple[
    NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32] | None
]


def _unwritable(message: str, order: int) -> ArpaError:
    return ArpaError(f"cannot be written as ARPA: {message}", order=order)


def _checked_section(section: Section, order: int) -> _WritableColumns:
    """The three arrays of a section; ValueError where they do not fit each other."""
    backoffs: NDArray[np.float32] | None
    if isinstance(section, NgramBatch):
        ids, probs, backoffs = section.ids, section.log10_prob, section.log10_backoff
        if section.order != order:
            raise ValueError(f"a batch of order {section.order} in the place of order {order}")
    else:
        ids, probs, backoffs = section
    if ids.dtype != np.uint32 or ids.ndim != 2 or ids.shape[1] != order:
        raise ValueError(
            f"ids of order {order} must be uint32 of shape (n, {order}), "
            f"not {ids.dtype} {ids.shape}"
        )
    floats: list[tuple[str, NDArray[np.float32] | None]]
    floats = [("log10_prob", probs), ("log10_backoff", backoffs)]
    for name, column in floats:
        if column is not None and (column.dtype != np.float32 or column.shape != (len(ids),)):
            raise ValueError(
                f"{name} of order {order} must be float32 of shape ({len(ids)},), "
                f"not {column.dtype} {column.shape}"
            )
    return ids, probs, backoffs


class _KeepOpen:
    """A file that pyarrow may close without closing it for its owner."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True


def _write_compressed(
    file: IO[bytes],
    suffix: str,
    vocabulary: Vocabulary,
    columns: Sequence[_WritableColumns],
    comments: Iterable[str],
) -> None:
    match suffix.lower():
        case ".gz":
            # No name and no time in the header: the same model gives the same bytes.
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                _write_text(packed, vocabulary, columns, comments)
        case ".xz":
            # Higher presets cost two to eight times the time for a tenth of the size.
            with lzma.LZMAFile(file, "wb", preset=0) as packed:
                _write_text(packed, vocabulary, columns, comments)
        case ".zst":
            with pa.CompressedOutputStream(
                pa.PythonFile(_KeepOpen(file), mode="w"), "zstd"
            ) as packed:
                _write_text(packed, vocabulary, columns, comments)
        case _:
            _write_text(file, vocabulary, columns, comments)


def _write_text(
    file: Any,
    vocabulary: Vocabulary,
    columns: Sequence[_WritableColumns],
    comments: Iterable[str],
) -> None:
    for comment in comments:
        for line in comment.split("\n"):
            file.write(b"# " + line.encode("utf-8", "surrogateescape") + b"\n")
    file.write(b"\\data\\\n")
    for order, (ids, _, _) in enumerate(columns, start=1):
        file.write(b"ngram %d=%d\n" % (order, len(ids)))
    words = pa.array(vocabulary.words, pa.large_binary())
    for order, (ids, probs, backoffs) in enumerate(columns, start=1):
        file.write(b"\n\\%d-grams:\n" % order)
        for start in range(0, len(ids), _WRITE_ROWS):
            rows = slice(start, start + _WRITE_ROWS)
            file.write(
                _rows_text(
                    order,
                    vocabulary,
                    words,
                    ids[rows],
                    probs[rows],
                    None if backoffs is None else backoffs[rows],
                )
            )
    file.write(b"\n\\end\\\n")


def _rows_text(
    order: int,
    vocabulary: Vocabulary,
    words: Any,
    ids: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
) -> memoryview:
    """The lines of some rows, ends included."""
    if int(ids.max()) >= len(vocabulary) or (not vocabulary.unk_in_model and not ids.all()):
        raise _unwritable(f"an id that is no word of the vocabulary, among {int(ids.max())}", order)
    if not bool((probs <= 0).all()):  # also false for NaN
        raise _unwritable("a log10 probability that is positive or NaN", order)
    space, tab, newline, empty = (
        pa.scalar(text, pa.large_binary()) for text in (b" ", b"\t", b"\n", b"")
    )
    lines = [words.take(pa.array(ids[:, i])) for i in range(order)]
    fields = [_number_texts(probs), pc.binary_join_element_wise(*lines, space)]
    if backoffs is not None:
        if not bool(np.isfinite(backoffs).all()):
            raise _unwritable("a log10 backoff weight that is not finite", order)
        fields.append(_number_texts(backoffs))
    # The last field is joined with an empty one by the line end, which puts it after the field.
    fields[-1] = pc.binary_join_element_wise(fields[-1], empty, newline)
    text = pc.binary_join_element_wise(*fields, tab)
    ends = np.frombuffer(text.buffers()[1], np.int64)[: len(ids) + 1]
    if int(np.diff(ends).max()) > MAX_LINE_BYTES:
        raise _unwritable(f"a row longer than {MAX_LINE_BYTES} bytes", order)
    return memoryview(text.buffers()[2])[int(ends[0]) : int(ends[-1])]


def _number_texts(numbers: NDArray[np.float32]) -> Any:
    """The shortest decimal text that reads back as each float32 (Arrow's cast gives just that)."""
    texts = pc.cast(pa.array(numbers + np.float32(0.0)), pa.large_string())
    return pc.cast(texts, pa.large_binary())
