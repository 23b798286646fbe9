"""Text in files, compressed files, parquet files or a pipe, as clean blocks of whole lines.

Every command that takes text reads it here. A line is a sentence. A line that cannot be a sentence
(see `LineFault`) raises an error with its place, or is skipped and counted. Other lines are used.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlm.errors import ConfigError, TextError
from dlm.estimate.counts import kernels
from dlm.ngram.arpa.header import holds_header
from dlm.ngram.arpa.source import TEXT_COMPRESSIONS, DamagedStream, TextSource, compression_of
from dlm.ngram.wordtable import PADDING
from dlm.pieces import Pieces
from dlm.units import counted

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
# A row of an ARPA file has up to eight words, and at most 1 MiB.
MAX_WORD_BYTES = 100_000

PARQUET_MAGIC = b"PAR1"

SPACES = b" \t\r"
RESERVED = (b"<s>", b"</s>", b"<unk>", b"<UNK>")

DELIMITERS = np.zeros(256, np.uint8)
DELIMITERS[list(SPACES + b"\n")] = 1


class LineFault(StrEnum):
    NOT_UTF8 = "not UTF-8"
    NUL = "NUL"
    RESERVED = "reserved word"
    LONG_LINE = "line too long"
    LONG_WORD = "word too long"
    NULL_ROW = "null row"


# These are faults only in text to count. In text to score, as in KenLM, words are any bytes and
# `<unk>` is the unknown word; no ARPA file gets its words from such text, so they may be long.
SCORED_ANYWAY = frozenset({LineFault.NOT_UTF8, LineFault.RESERVED, LineFault.LONG_WORD})

_ADVICE = {
    LineFault.NOT_UTF8: "convert the file (iconv -t UTF-8)",
    LineFault.NUL: "check that the file is text, and remove the NUL bytes (tr -d '\\000')",
    LineFault.RESERVED: "remove the sentence marks and the unknown word, which dlm adds itself",
    LineFault.LONG_LINE: "put one sentence on each line",
    LineFault.LONG_WORD: "put spaces between words",
    LineFault.NULL_ROW: "filter such rows out",
}


@dataclass
class Totals:
    """What was read: `bytes` decompressed, `lines` that were counted, `words` without sentence
    marks. `empty` lines are counted as sentences without words, or left out."""

    sources: int = 0
    bytes: int = 0
    lines: int = 0
    empty: int = 0
    words: int = 0
    skipped: dict[LineFault, int] = field(default_factory=dict)

    def summary(self, skip: bool) -> str:
        parts = [counted(self.words, "word"), counted(self.lines, "line")]
        kind = "left out" if skip else "each a sentence without words"
        parts.append(counted(self.empty, "empty line") + (f" ({kind})" if self.empty else ""))
        faulty = sum(self.skipped.values())
        parts.append(f"{counted(faulty, 'faulty line')} left out" + self._why())
        return ", ".join(parts)

    def left_out(self) -> str:
        return f"{sum(self.skipped.values()):,}" + self._why()

    def _why(self) -> str:
        why = ", ".join(f"{fault}: {count:,}" for fault, count in self.skipped.items())
        return f" ({why})" if why else ""


class Block(NamedTuple):
    """`text` has `size` bytes of faultless lines, then PADDING. `left_out` has, for each faulty
    line, the number of faultless lines before it, and its fault. `waits` is true if the next block
    may have to wait for the text's writer."""

    text: bytes
    size: int
    left_out: list[tuple[int, LineFault]]
    waits: bool

    @property
    def lines(self) -> bytes:
        """The lines, joined by newlines; a block without lines has no text (`size` is 0)."""
        return self.text[: self.size - 1]


class Reader:
    """Blocks of text that can be counted or scored.

    Args
        sources  paths, `-` for standard input
        skip     leave faulty lines out and count them, instead of raising
        column   text column of parquet files
        scored   the text is scored and not counted: reserved words, and bytes that are not UTF-8,
                 are ordinary words (unless `skip` leaves such lines out), and blocks of a pipe end
                 where reading would have to wait
        pieces   file of the SentencePiece model that splits each line after its check
    Raises
        ConfigError  a parquet file without the column, or in a pipe; no SentencePiece model
        TextError    a faulty line, a file that is not text, or a damaged compressed file
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        skip: bool = False,
        column: str = "text",
        scored: bool = False,
        pieces: Path | None = None,
        block_bytes: int = BLOCK_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        if not sources:
            raise ConfigError("give at least one text, or - for standard input")
        self.sources = sources
        self._skip = skip
        self._column = column
        self._prompt = scored
        self._cut = bytes if pieces is None else Pieces.read(pieces).cut
        self._accepted = frozenset[LineFault]()
        if scored:
            self._accepted = SCORED_ANYWAY - ({LineFault.NOT_UTF8} if skip else set())
        self._block_bytes = block_bytes
        self._max_line_bytes = max_line_bytes
        self.totals = Totals()
        self._files = [Path(s).stat() for s in sources if s != "-"]
        self._before = 0
        self._open: TextSource | None = None
        self._left_out: list[tuple[int, LineFault]] = []

    def progress(self) -> tuple[int, int]:
        """Returns the bytes read from the files, as stored, and the total, or 0 if not known."""
        total = sum(status.st_size for status in self._files)
        if len(self._files) < len(self.sources):
            total = 0
        try:
            return self._before + (0 if self._open is None else self._open.position()), total
        except (OSError, ValueError):
            return self._before, total

    def blocks(self) -> Generator[tuple[bytes, int], None, None]:
        """Returns (text, its length) of each block that has lines."""
        return ((block.text, block.size) for block in self.read() if block.size)

    def read(self) -> Iterator[Block]:
        for source in self.sources:
            self.totals.sources += 1
            place = _Place(source)
            for block, waits in self._whole_lines(source, place):
                clean = self._cut(self._checked(block, place))
                self.totals.bytes += len(block)
                place.bytes += len(block)
                place.lines += block.count(b"\n")
                left_out, self._left_out = self._left_out, []
                if clean or left_out:
                    yield Block(clean + PADDING, len(clean), left_out, waits)

    # ----------------------------------------------------------------------------- lines

    def _whole_lines(self, source: str, place: _Place) -> Iterator[tuple[bytes, bool]]:
        rest: list[bytes] = []
        held = 0
        dropping = False
        for chunk, waits in self._chunks(source, place):
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
                yield b"".join([*rest, chunk[:end]]), waits
                rest, held = [], 0
            if end < len(chunk):
                rest.append(chunk[end:])
                held += len(chunk) - end
            if held > self._max_line_bytes + 1:
                self._fault(LineFault.LONG_LINE, place, place.lines + 1, place.bytes)
                place.bytes += held
                self.totals.bytes += held
                rest, held, dropping = [], 0, True
        yield b"".join([*rest, b"\n"]) if rest else b"", False

    def _checked(self, block: bytes, place: _Place) -> bytes:
        if not may_have_fault(block, self._max_line_bytes, self._accepted):
            return block
        clean: list[bytes] = []
        at = place.bytes
        for number, line in enumerate(block[:-1].split(b"\n"), place.lines + 1):
            fault = fault_of(line, self._max_line_bytes, self._accepted)
            if fault is None:
                clean.append(line)
            else:
                self._fault(fault, place, number, at, len(clean))
            at += len(line) + 1
        return b"\n".join([*clean, b""])

    def _fault(self, fault: LineFault, place: _Place, line: int, byte: int, after: int = 0) -> None:
        if not self._skip:
            where = f"{place.name}, line {line:,} (from byte {byte:,} on)"
            raise TextError(complaint(fault, where, self._max_line_bytes))
        self.totals.skipped[fault] = self.totals.skipped.get(fault, 0) + 1
        self._left_out.append((after, fault))

    # --------------------------------------------------------------------------- sources

    def _chunks(self, source: str, place: _Place) -> Iterator[tuple[bytes, bool]]:
        opened = self._open = TextSource(source, TEXT_COMPRESSIONS)
        try:
            if opened.head.startswith(PARQUET_MAGIC):
                yield from ((text, False) for text in self._parquet(source, place))
            else:
                yield from self._stream(opened, place)
        finally:
            self._open = None
            opened.close()
        if source != "-":
            self._before += Path(source).stat().st_size

    def _stream(self, opened: TextSource, place: _Place) -> Iterator[tuple[bytes, bool]]:
        held: list[bytes] = []
        size = 0
        begun = False
        try:
            while piece := opened.read(self._block_bytes - size):
                if not begun:
                    _refuse_packed(piece, place, opened.compression)
                    begun = True
                held.append(piece)
                size += len(piece)
                waits = self._prompt and opened.waits()
                if waits or size >= self._block_bytes:
                    yield b"".join(held), waits
                    held, size = [], 0
        except DamagedStream as exc:
            raise TextError(
                f"{place.name} cannot be decompressed: the {opened.compression} stream is cut "
                f"short or damaged ({exc}). Copy the file again"
            ) from exc
        if held:
            yield b"".join(held), False

    def _parquet(self, source: str, place: _Place) -> Iterator[bytes]:
        import pyarrow.parquet as pq

        if source == "-" or not Path(source).is_file():
            raise ConfigError(
                f"{place.name} is a parquet file in a pipe, but parquet files must be read from "
                "their end; give the path of the file"
            )
        try:
            with pq.ParquetFile(source) as file:
                names = file.schema_arrow.names
                if self._column not in names:
                    raise ConfigError(
                        f"{source} has no column {self._column!r}; its columns are "
                        f"{', '.join(names)}; name one with --text-column"
                    )
                kind = file.schema_arrow.field(self._column).type
                if not any(
                    test(kind)
                    for test in (
                        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                        pa.types.is_large_binary,
                    )
                ):  # fmt: skip
                    raise ConfigError(
                        f"{source}: column {self._column!r} is {kind}, not text; name another "
                        "with --text-column"
                    )
                for batch in file.iter_batches(batch_size=1 << 13, columns=[self._column]):
                    column = batch.column(0)
                    begin = 0
                    nulls = np.flatnonzero(column.is_null()) if column.null_count else ()
                    for row in (*nulls, len(column)):
                        if row > begin:
                            yield lines_of(column.slice(begin, row - begin))
                        if row < len(column):
                            self._fault(LineFault.NULL_ROW, place, place.lines + 1, place.bytes)
                            place.lines += 1
                        begin = row + 1
        except (pa.ArrowException, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            raise TextError(
                f"{source} begins like a parquet file but cannot be read as one: {exc}. Copy the "
                "file again"
            ) from exc


def _refuse_packed(head: bytes, place: _Place, compression: str) -> None:
    """Raises `TextError` if text begins like a compressed file, or is an ARPA model."""
    inner = compression_of(head)
    if inner != "plain":
        what = f"compressed twice, with {compression} over {inner}"
        if compression == "plain":
            what = f"compressed with {inner}, which dlm does not read"
        raise TextError(f"{place.name} is {what}: decompress it and give the text")
    if holds_header(head):
        raise TextError(f"{place.name} is an ARPA model; expected text")


@dataclass
class _Place:
    source: str
    bytes: int = 0
    lines: int = 0

    @property
    def name(self) -> str:
        return "standard input" if self.source == "-" else self.source


def lines_of(column: Any) -> bytes:
    """Joins the rows (text or bytes, no nulls) of an Arrow column, with a newline after each."""
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


def may_have_fault(
    block: bytes,
    max_line_bytes: int = MAX_LINE_BYTES,
    accepted: Collection[LineFault] = frozenset(),
) -> bool:
    """Returns whether lines must be checked one by one; if not, all faults are in `accepted`."""
    if {LineFault.RESERVED, LineFault.LONG_WORD} <= set(accepted):
        # Faults that are not accepted are found here without a loop over bytes.
        return (
            b"\0" in block
            or _has_long_line(block, max_line_bytes)
            or (LineFault.NOT_UTF8 not in accepted and not _is_utf8(block))
        )
    facts = np.zeros(kernels.FACTS, np.int64)
    kernels.inspect(np.frombuffer(block, np.uint8), len(block), DELIMITERS, facts)
    found = {
        LineFault.NUL: facts[kernels.NUL] > 0,
        LineFault.LONG_LINE: facts[kernels.LONGEST_LINE] > max_line_bytes,
        LineFault.LONG_WORD: facts[kernels.LONGEST_WORD] > MAX_WORD_BYTES,
        LineFault.NOT_UTF8: facts[kernels.HIGH] > 0 and not _is_utf8(block),
        LineFault.RESERVED: facts[kernels.LESS_THAN] > 0
        and any(word in block for word in RESERVED),
    }
    return any(holds and fault not in accepted for fault, holds in found.items())


def complaint(fault: LineFault, where: str, max_line_bytes: int = MAX_LINE_BYTES) -> str:
    what = {
        LineFault.RESERVED: "one of " + ", ".join(word.decode() for word in RESERVED),
        LineFault.LONG_LINE: f"more than {max_line_bytes:,} bytes",
        LineFault.LONG_WORD: f"a word of more than {MAX_WORD_BYTES:,} bytes",
        LineFault.NULL_ROW: "a null",
        LineFault.NUL: "a NUL byte",
        LineFault.NOT_UTF8: "bytes that are not UTF-8",
    }[fault]
    return f"{where} has {what}; {_ADVICE[fault]}, or pass --skip to skip such lines and count them"


def fault_of(
    line: bytes,
    max_line_bytes: int = MAX_LINE_BYTES,
    accepted: Collection[LineFault] = frozenset(),
) -> LineFault | None:
    """Returns the fault of a line, or None; faults in `accepted` do not count."""
    words = line.replace(b"\t", b" ").replace(b"\r", b" ").split(b" ")
    found = {
        LineFault.LONG_LINE: len(line) > max_line_bytes,
        LineFault.NUL: b"\0" in line,
        LineFault.NOT_UTF8: not _is_utf8(line),
        LineFault.RESERVED: any(word in RESERVED for word in words),
        LineFault.LONG_WORD: max(map(len, words)) > MAX_WORD_BYTES,
    }
    return next((fault for fault, holds in found.items() if holds and fault not in accepted), None)


def _has_long_line(block: bytes, most: int) -> bool:
    at = 0
    while len(block) - at > most + 1:
        end = block.rfind(b"\n", at, at + most + 1)
        if end < 0:
            return True
        at = end + 1
    return False


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
