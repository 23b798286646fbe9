"""Text in files, compressed files, parquet files or a pipe, as clean blocks of whole lines.

A line is a sentence. What can be no sentence (see `Fault`) is an error that says where it is, or it
is left out and counted. Nothing else is left out.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from dlm.errors import ConfigError, EstimationError
from dlm.estimate.counts import kernels
from dlm.ngram.wordtable import PADDING

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
# Eight of them stand in a row of ARPA, which has at most 1 MiB.
MAX_WORD_BYTES = 100_000

SPACES = b" \t\r"
RESERVED = (b"<s>", b"</s>", b"<unk>", b"<UNK>")

DELIMITERS = np.zeros(256, np.uint8)
DELIMITERS[list(SPACES + b"\n")] = 1


class Fault(StrEnum):
    """What makes a line one that cannot be counted."""

    NOT_UTF8 = "not UTF-8"
    NUL = "NUL"
    RESERVED = "reserved word"
    LONG_LINE = "line too long"
    LONG_WORD = "word too long"
    NULL_ROW = "null row"


_ADVICE = {
    Fault.NOT_UTF8: "convert the file (iconv -t UTF-8)",
    Fault.NUL: "remove it (tr -d '\\000'); is the file text?",
    Fault.RESERVED: "the sentence marks and the unknown word are added here: remove them",
    Fault.LONG_LINE: "is the text one sentence a line? Split it",
    Fault.LONG_WORD: "is the text split at spaces? Split it",
    Fault.NULL_ROW: "filter such rows out",
}


@dataclass
class Totals:
    """What was read.

    Attributes
        sources  files read
        bytes    of text, decompressed
        lines    that were counted, the empty ones among them
        empty    lines without a word: counted as sentences, or left out
        words    without sentence marks
        skipped  lines left out, by fault
    """

    sources: int = 0
    bytes: int = 0
    lines: int = 0
    empty: int = 0
    words: int = 0
    skipped: dict[Fault, int] = field(default_factory=dict)

    def summary(self, skip: bool) -> str:
        """In one line, for people and for the model's provenance."""
        parts = [f"{self.words:,} words", f"{self.lines:,} lines"]
        kind = "left out" if skip else "each a sentence without words"
        parts.append(f"{self.empty:,} empty lines" + (f" ({kind})" if self.empty else ""))
        parts.append(f"{sum(self.skipped.values()):,} faulty lines left out")
        text = ", ".join(parts)
        if self.skipped:
            detail = ", ".join(f"{fault}: {count:,}" for fault, count in self.skipped.items())
            text += f" ({detail})"
        return text


class Reader:
    """Blocks of text that can be counted.

    Args
        sources  paths, `-` for standard input
        skip     leave faulty lines out and count them, instead of raising
        column   of parquet files
    Raises
        ConfigError      a parquet file without the column
        EstimationError  a faulty line, or a compressed file that is damaged
        OSError
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        skip: bool = False,
        column: str = "text",
        block_bytes: int = BLOCK_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        if not sources:
            raise ConfigError("give at least one text, or - for standard input")
        self._sources = sources
        self._skip = skip
        self._column = column
        self._block_bytes = block_bytes
        self._max_line_bytes = max_line_bytes
        self.totals = Totals()
        self._files = [Path(s).stat() for s in sources if s != "-"]
        self._before = 0
        self._open: BinaryIO | None = None

    def progress(self) -> tuple[int, int]:
        """Bytes read of the files as they are, and of all of them; the second 0 if not known."""
        total = sum(status.st_size for status in self._files)
        if len(self._files) < len(self._sources):
            total = 0
        try:
            return self._before + (0 if self._open is None else self._open.tell()), total
        except (OSError, ValueError):
            return self._before, total

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """(text, its length): whole lines, then PADDING. Lines have no fault."""
        for source in self._sources:
            self.totals.sources += 1
            place = _Place(source)
            for block in self._whole_lines(source, place):
                clean = self._checked(block, place)
                self.totals.bytes += len(block)
                place.bytes += len(block)
                place.lines += block.count(b"\n")
                if clean:
                    yield clean + PADDING, len(clean)

    # ----------------------------------------------------------------------------- lines

    def _whole_lines(self, source: str, place: _Place) -> Iterator[bytes]:
        """Blocks that end with a newline; the last line gets one if it has none."""
        rest: list[bytes] = []
        held = 0
        dropping = False
        for chunk in self._chunks(source, place):
            end = chunk.rfind(b"\n") + 1
            if dropping:
                first = chunk.find(b"\n") + 1
                gone = first or len(chunk)
                place.bytes += gone
                self.totals.bytes += gone
                if first == 0:
                    continue
                place.lines += 1
                dropping = False
                chunk, end = chunk[first:], end - first
            if end:
                yield b"".join([*rest, chunk[:end]])
                rest, held = [], 0
            if end < len(chunk):
                rest.append(chunk[end:])
                held += len(chunk) - end
            if held > self._max_line_bytes + 1:
                self._fault(Fault.LONG_LINE, place, place.lines + 1, place.bytes)
                place.bytes += held
                self.totals.bytes += held
                rest, held, dropping = [], 0, True
        if rest:
            yield b"".join([*rest, b"\n"])

    def _checked(self, block: bytes, place: _Place) -> bytes:
        """The block without the lines that have a fault."""
        if not may_have_fault(block, self._max_line_bytes):
            return block
        clean = []
        at = place.bytes
        for number, line in enumerate(block[:-1].split(b"\n"), place.lines + 1):
            fault = fault_of(line, self._max_line_bytes)
            if fault is None:
                clean.append(line)
            else:
                self._fault(fault, place, number, at)
            at += len(line) + 1
        return b"\n".join([*clean, b""])

    def _fault(self, fault: Fault, place: _Place, line: int, byte: int) -> None:
        if not self._skip:
            where = f"{place.source}, line {line:,} (from byte {byte:,} on)"
            raise EstimationError(complaint(fault, where, self._max_line_bytes))
        self.totals.skipped[fault] = self.totals.skipped.get(fault, 0) + 1

    # --------------------------------------------------------------------------- sources

    def _chunks(self, source: str, place: _Place) -> Iterator[bytes]:
        """The bytes of a source, decompressed."""
        if source == "-":
            yield from self._stream(sys.stdin.buffer, "standard input")
            return
        with Path(source).open("rb") as file:
            self._open = file
            if file.seekable() and file.peek(4)[:4] == b"PAR1":
                yield from self._parquet(source, place)
            else:
                yield from self._stream(file, source)
            self._open = None
        self._before += Path(source).stat().st_size

    def _stream(self, file: Any, name: str) -> Iterator[bytes]:
        head = file.read(8)  # a pipe may give fewer at once to who only peeks
        if file.seekable():
            file.seek(-len(head), io.SEEK_CUR)
        else:
            file = io.BufferedReader(_Headed(head, file), self._block_bytes)
        stream: BinaryIO | Any = file
        if head.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=file, mode="rb")
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
        elif head.startswith(b"\xfd7zXZ\x00"):
            stream = lzma.LZMAFile(file, "rb")  # noqa: SIM115
        elif head.startswith(b"BZh"):
            stream = bz2.BZ2File(file, "rb")
        try:
            while True:
                chunk = stream.read(self._block_bytes)
                if not chunk:
                    return
                yield bytes(chunk)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError) as exc:
            raise EstimationError(
                f"{name} does not decompress: {exc}; it is damaged or cut short"
            ) from exc
        except OSError as exc:
            if stream is file or exc.errno is not None:
                raise
            raise EstimationError(
                f"{name} does not decompress: {exc}; it is damaged or cut short"
            ) from exc

    def _parquet(self, source: str, place: _Place) -> Iterator[bytes]:
        """Each row is one line, or several where it has newlines."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(source) as file:
            names = file.schema_arrow.names
            if self._column not in names:
                raise ConfigError(
                    f"{source} has no column {self._column!r}; it has {', '.join(names)}: "
                    "name one with --column"
                )
            kind = file.schema_arrow.field(self._column).type
            if not any(
                test(kind)
                for test in (
                    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                    pa.types.is_large_binary,
                )
            ):  # fmt: skip
                raise ConfigError(f"{source}: column {self._column!r} is {kind}, not text")
            for batch in file.iter_batches(batch_size=1 << 13, columns=[self._column]):
                column = batch.column(0)
                if column.null_count:
                    for _ in range(column.null_count):
                        self._fault(Fault.NULL_ROW, place, place.lines + 1, place.bytes)
                    column = column.drop_null()
                if not len(column):
                    continue
                yield lines_of(column)


class _Headed(io.RawIOBase):
    """A stream that cannot go back, with the bytes that were read of it before its rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self._head[: len(buffer)] or self._rest.read1(len(buffer))  # type: ignore[attr-defined]
        self._head = self._head[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)


@dataclass
class _Place:
    """How much of a source was handed on."""

    source: str
    bytes: int = 0
    lines: int = 0


def lines_of(column: Any) -> bytes:
    """Text of the rows of an Arrow column of text or bytes without nulls, each with a newline."""
    import pyarrow.compute as pc

    column = pc.cast(column, pa.large_binary())
    empty, newline = (pa.scalar(text, pa.large_binary()) for text in (b"", b"\n"))
    joined = pc.binary_join_element_wise(column, empty, newline)
    if not len(joined):
        return b""
    ends = np.frombuffer(joined.buffers()[1], np.int64)[
        joined.offset : joined.offset + len(joined) + 1
    ]
    return bytes(joined.buffers()[2].slice(int(ends[0]), int(ends[-1] - ends[0])).to_pybytes())


def may_have_fault(block: bytes, max_line_bytes: int = MAX_LINE_BYTES) -> bool:
    """Whether whole lines must be looked at one by one; where not, none has a fault."""
    facts = np.zeros(kernels.FACTS, np.int64)
    kernels.inspect(np.frombuffer(block, np.uint8), len(block), DELIMITERS, facts)
    return bool(
        facts[kernels.NUL] > 0
        or facts[kernels.LONGEST_LINE] > max_line_bytes
        or facts[kernels.LONGEST_WORD] > MAX_WORD_BYTES
        or (facts[kernels.HIGH] > 0 and not _is_utf8(block))
        or (facts[kernels.LESS_THAN] > 0 and any(word in block for word in RESERVED))
    )


def complaint(fault: Fault, where: str, max_line_bytes: int = MAX_LINE_BYTES) -> str:
    """What is wrong with a line, and what to do about it."""
    what = {
        Fault.RESERVED: "one of " + ", ".join(word.decode() for word in RESERVED),
        Fault.LONG_LINE: f"more than {max_line_bytes:,} bytes",
        Fault.LONG_WORD: f"a word of more than {MAX_WORD_BYTES:,} bytes",
        Fault.NULL_ROW: "a null",
        Fault.NUL: "a NUL byte",
        Fault.NOT_UTF8: "bytes that are not UTF-8",
    }[fault]
    return (
        f"{where} has {what}; {_ADVICE[fault]}, or pass --skip to leave such lines out and count "
        "them"
    )


def fault_of(line: bytes, max_line_bytes: int = MAX_LINE_BYTES) -> Fault | None:
    """What is wrong with a line, if anything."""
    if len(line) > max_line_bytes:
        return Fault.LONG_LINE
    if b"\0" in line:
        return Fault.NUL
    if not _is_utf8(line):
        return Fault.NOT_UTF8
    words = line.replace(b"\t", b" ").replace(b"\r", b" ").split(b" ")
    if any(word in RESERVED for word in words):
        return Fault.RESERVED
    if max(map(len, words)) > MAX_WORD_BYTES:
        return Fault.LONG_WORD
    return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
