"""Writes ARPA files: this module makes all of dlm's ARPA text.

`write_arpa` writes a model in memory, `ArpaWriter` writes one order after another as its n-grams
are made, and `rows_text` makes the rows of model parts that are written elsewhere.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.files import Replacement, naming
from dlm.ngram.arpa import kernels
from dlm.ngram.arpa.rows import MAX_LINE_BYTES, NgramBatch, Section, SectionColumns, shown
from dlm.ngram.digit_kernels import NUMBER_BYTES
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, Vocabulary
from dlm.ngram.wordtable import PADDING, WordTable
from dlm.resources import in_order

# Bytes written before a sync starts; if the disk keeps up, about as many are unsynced at the end.
SYNC_BYTES = 64 << 20
# Higher presets take two to eight times as long, and save a tenth of the size.
XZ_PRESET = 0

END = b"\n\\end\\\n"

_SEPARATOR = re.compile(rb"[ \t\n\r]")
_WRITE_ROWS = 1 << 15
# Threads that make the next rows of text while earlier rows are compressed and written.
_THREADS = 2
_NO_MARKS = np.empty(0, np.uint32)
_NO_BACKOFF = np.empty(0, np.float32)


class OutputFile:
    """A file of text that is being written.

    Args        target     a path, compressed by its suffix (.gz, .zst, .xz, else plain; a pipe or a
                           device is written to directly), or an open binary file, which gets plain
                           text and stays open
                xz_preset  0 to 9, for an .xz file
    Raises      OSError    no file can be written beside the path
    Guarantees  the same text gives the same bytes. `commit` replaces the path with everything
                written, synced; without `commit`, the path stays as it was. Files that killed
                processes left beside it are removed
    """

    def __init__(self, target: Path | IO[bytes], *, xz_preset: int = XZ_PRESET) -> None:
        self.bytes_written = 0
        self._replacement: Replacement | None = None
        self._unsynced = 0
        self._sync: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None
        self._packer: Any = None
        self._closed = False
        if not isinstance(target, Path):
            self._file = target
            return
        self._replacement = Replacement(target, buffering=0)
        self._file = self._replacement.file
        if not self._replacement.is_direct:
            self._sync = ThreadPoolExecutor(1, thread_name_prefix="dlm-sync")
        try:
            self._packer = self._packer_for(target.suffix.lower(), xz_preset)
        except BaseException:  # the compressor writes its header, which may fail
            self.discard()
            raise

    def _packer_for(self, suffix: str, xz_preset: int) -> Any:
        raw: Any = _Raw(self._write)
        match suffix:
            case ".gz":  # no name and no time in the header
                return gzip.GzipFile("", "wb", 6, raw, mtime=0)
            case ".xz":
                return lzma.LZMAFile(raw, "wb", preset=xz_preset)
            case ".zst":
                return pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), "zstd")
        return None

    def write(self, text: bytes | memoryview) -> None:
        if self._packer is None:
            self._write(text)
        else:
            self._packer.write(text)

    def commit(self) -> None:
        if self._packer is not None:
            self._packer.close()
        if self._replacement is not None:
            self._wait_for_disk()
            self._replacement.commit()
        self._closed = True

    def discard(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._sync is not None:
            self._sync.shutdown()
        if self._replacement is not None:
            self._replacement.discard()

    def _write(self, data: bytes | memoryview) -> None:
        """Adds bytes to the file unchanged; adds nothing to a discarded file."""
        if self._closed:
            return  # a compressor flushes its buffer when it is deleted
        view = memoryview(data).cast("B")
        while len(view):
            with self._naming():
                done = self._file.write(view)
            view = view[done:]
            self.bytes_written += done
            self._unsynced += done
        if self._sync is None or self._unsynced < SYNC_BYTES:
            return
        # The disk works while the rest is computed.
        if self._syncing is None or self._syncing.done():
            self._check_sync()
            self._unsynced = 0
            self._syncing = self._sync.submit(os.fdatasync, self._file.fileno())

    def _wait_for_disk(self) -> None:
        """Waits for the sync, and raises its error, which the system reports only once."""
        if self._sync is not None:
            self._sync.shutdown()
        self._check_sync()

    def _check_sync(self) -> None:
        if self._syncing is not None:
            with self._naming():
                self._syncing.result()

    def _naming(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replacement is None else naming(self._replacement.path)


class _Raw:
    closed = False

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def write(self, data: Any) -> int:
        self._write(data)
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        """Does nothing: nothing is buffered here."""

    def close(self) -> None:
        """Does nothing: the OutputFile closes the file."""


def header(comments: Iterable[str], counts: Iterable[int]) -> bytes:
    lines = [f"# {line}" for comment in comments for line in comment.split("\n")]
    lines.append("\\data\\")
    lines += [f"ngram {order}={count}" for order, count in enumerate(counts, 1)]
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def section_head(order: int) -> bytes:
    return b"\n\\%d-grams:\n" % order


@dataclass(frozen=True, eq=False)
class WordBytes:
    """`text` has the words by id, one after another, then PADDING; `begin` (V + 1,) says where each
    word begins; `longest` is the number of bytes of the longest word."""

    begin: NDArray[np.int64]
    text: NDArray[np.uint8]
    longest: int

    @classmethod
    def of(cls, words: Vocabulary | WordTable) -> WordBytes:
        if isinstance(words, WordTable):
            begin, text = words.word_begin[: len(words) + 1], words.word_bytes
        else:
            lengths = np.fromiter(map(len, words.words), np.int64, len(words))
            begin = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
            text = np.frombuffer(b"".join([*words.words, PADDING]), np.uint8)
        return cls(begin, text, int(np.diff(begin).max()))


class RowColumns(NamedTuple):
    """Consecutive n-grams of one order.

    Shapes  ids (n, order)  oldest word first;  log10_prob (n,)
            log10_backoff (n,)  or None for no such column
            marks (n,)  or None; rows with kernels.LEFT_OUT are skipped
    """

    ids: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32] | None
    marks: NDArray[np.uint32] | None = None


def rows_text(words: WordBytes, rows: RowColumns) -> list[memoryview]:
    """Returns the lines of `rows`, newlines included, in one piece or a few; ArpaError for a row
    longer than MAX_LINE_BYTES. Trusts that ids are below V, and that no number is NaN."""
    ids = np.ascontiguousarray(rows.ids)
    log10_prob = np.ascontiguousarray(rows.log10_prob)
    log10_backoff = _NO_BACKOFF
    if rows.log10_backoff is not None:
        log10_backoff = np.ascontiguousarray(rows.log10_backoff)
    marks = _NO_MARKS if rows.marks is None else rows.marks
    count, order = ids.shape
    room = 24 * count * (1 + order // 2) + (1 << 12)  # enough for usual words
    done, pieces = 0, []
    while done < count:
        text = np.empty(room, np.uint8)
        before = done
        done, size = kernels.put_rows(
            ids, log10_prob, log10_backoff, marks, done, words.begin, words.text, text
        )
        if size:
            _check_lines(text[:size], order, words.longest)
            pieces.append(text.data[:size])
        if done == before:
            room *= 2  # not even one row fitted
    return pieces


def _check_lines(text: NDArray[np.uint8], order: int, longest_word: int) -> None:
    if order * (longest_word + 1) + 2 * NUMBER_BYTES < MAX_LINE_BYTES:
        return
    ends = np.flatnonzero(text == ord("\n"))
    if int(np.diff(ends, prepend=-1).max()) > MAX_LINE_BYTES + 1:
        raise _unwritable(f"a row is longer than {MAX_LINE_BYTES} bytes", order)


class ArpaWriter:
    """Writes a model as ARPA text, one order after another.

        with ArpaWriter(path, words, counts, comments=comments) as writer:
            for blocks in orders:
                writer.section(blocks)

    `target`, `xz_preset`, errors and guarantees are those of OutputFile, which is committed when
    the block ends, and discarded if it raises.

    Args  counts  n-grams by order;  threads  number of threads that make text; one more writes
    """

    def __init__(
        self,
        target: Path | IO[bytes],
        words: WordBytes,
        counts: Sequence[int],
        *,
        comments: Iterable[str] = (),
        threads: int = _THREADS,
        xz_preset: int = XZ_PRESET,
    ) -> None:
        self.text_bytes = 0
        self._words = words
        self._orders = len(counts)
        self._order = 0
        self._is_broken = False
        self._most_waiting = 2 * threads + 4  # about 2 MB of text each
        self._file = OutputFile(target, xz_preset=xz_preset)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dlm-arpa-text")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="dlm-arpa-write")
        try:
            self._write(header(comments, counts))
        except BaseException:
            self._close(commit=False)
            raise

    @property
    def file_bytes(self) -> int:
        return self._file.bytes_written

    def section(self, blocks: Iterable[Callable[[], RowColumns]]) -> None:
        """Writes the next order; all of it is written on return. Each block, which makes some rows,
        is called once, in one of the threads; rows are written in the order of the blocks."""
        self._order += 1
        self._write(section_head(self._order))
        texts = (self._pool.submit(self._text, block) for block in blocks)
        written = (self._behind.submit(self._write_next, text) for text in texts)
        for _ in in_order(written, self._most_waiting):
            pass

    def __enter__(self) -> ArpaWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._order == self._orders, "a section is missing"
                self._write(END)
        except BaseException:
            self._close(commit=False)
            raise
        self._close(commit=kind is None)

    def _close(self, *, commit: bool) -> None:
        self._behind.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        try:
            if commit:
                self._file.commit()
        finally:
            self._file.discard()

    def _text(self, block: Callable[[], RowColumns]) -> list[memoryview]:
        return rows_text(self._words, block())

    def _write_next(self, texts: Future[list[memoryview]]) -> None:
        """Runs in its own thread, which compresses while the caller's thread makes blocks."""
        if self._is_broken:
            return  # the preceding text is missing
        try:
            for text in texts.result():
                self._write(text)
        except BaseException:
            self._is_broken = True
            raise

    def _write(self, text: bytes | memoryview) -> None:
        self._file.write(text)
        self.text_bytes += len(text)


def write_arpa(
    path_or_file: str | os.PathLike[str] | IO[bytes],
    vocabulary: Vocabulary,
    sections: Sequence[Section],
    *,
    comments: Iterable[str] = (),
) -> int:
    """Writes a model as an ARPA file; returns the size of its text in bytes, before compression.

    Args    path_or_file  a path, compressed by its suffix (.gz, .zst, .xz, else plain), or an open
                          binary file, which gets plain text and stays open
            sections      the n-grams of order 1, 2, ..., as (ids, log10_prob, log10_backoff) or as
                          NgramBatch; a backoff of None leaves the column out, and so does the
                          highest order. Memory-mapped arrays are read a slice at a time
            comments      lines to put before the model, as in ArpaReader.comments
    Shapes  ids (n, order) uint32, oldest word first;  log10_prob, log10_backoff (n,) float32
    Raises  ArpaError   ARPA cannot express the model: a word with a space in it, a positive log
                        probability, a weight that is not finite, no `<s>`
            ValueError  arrays of the wrong shape or type;  OSError  the disk failed
    Guarantees
        ArpaReader reads back the same words, order and float bits, but 0.0 for -0.0; numbers have
        the fewest digits that ensure this. A path has its old content, or all of the new, on
        disk. The row of id 0 is left out of order 1 if the vocabulary has no unknown word
    Trusts  no n-gram is repeated, and order 1 has every word once, in the order of the ids
    """
    columns = _writable(vocabulary, sections)
    target = path_or_file
    if isinstance(target, (str, os.PathLike)):
        target = Path(target)
    counts = [len(ids) for ids, _, _ in columns]
    with ArpaWriter(target, WordBytes.of(vocabulary), counts, comments=comments) as writer:
        for section in columns:
            writer.section(_slices(vocabulary, section))
    return writer.text_bytes


def arpa_bytes(
    vocabulary: Vocabulary, sections: Sequence[Section], *, comments: Iterable[str] = ()
) -> int:
    """The number of bytes that `write_arpa` would write to a plain file; writes nothing."""
    return write_arpa(os.devnull, vocabulary, sections, comments=comments)


def _slices(vocabulary: Vocabulary, columns: SectionColumns) -> Iterator[Callable[[], RowColumns]]:
    for begin in range(0, len(columns[0]), _WRITE_ROWS):
        yield partial(_slice, vocabulary, columns, slice(begin, begin + _WRITE_ROWS))


def _slice(vocabulary: Vocabulary, columns: SectionColumns, some: slice) -> RowColumns:
    ids, probs, backoffs = columns
    rows = RowColumns(ids[some], probs[some], None if backoffs is None else backoffs[some])
    order = ids.shape[1]
    most = int(rows.ids.max())
    if most >= len(vocabulary) or (not vocabulary.unk_in_model and not rows.ids.all()):
        raise _unwritable(f"ids go up to {most}, but at least one is not in the vocabulary", order)
    if not bool((rows.log10_prob <= 0).all()):  # also false for NaN
        raise _unwritable("a log10 probability is positive or NaN", order)
    if rows.log10_backoff is not None and not bool(np.isfinite(rows.log10_backoff).all()):
        raise _unwritable("a log10 backoff weight is not finite", order)
    return rows


def _writable(vocabulary: Vocabulary, sections: Sequence[Section]) -> list[SectionColumns]:
    columns = [_checked_section(section, i + 1) for i, section in enumerate(sections)]
    if not columns:
        raise ValueError("the model has no sections; expected at least order 1")
    if columns[-1][2] is not None:
        if bool(columns[-1][2].any()):
            raise _unwritable("the highest order has a backoff weight other than 0", len(columns))
        columns[-1] = (*columns[-1][:2], None)
    if not vocabulary.unk_in_model:
        ids, probs, backoffs = columns[0]
        keep = ids[:, 0] != 0
        columns[0] = ids[keep], probs[keep], None if backoffs is None else backoffs[keep]
    for word in (BEGIN_SENTENCE, END_SENTENCE):
        if vocabulary.ids.get(word, 0) == 0:
            raise _unwritable(f"the vocabulary lacks {word.decode()}", 1)
    if b"" in vocabulary.ids or _SEPARATOR.search(b"\0".join(vocabulary.words)):
        bad = next(word for word in vocabulary.words if not word or _SEPARATOR.search(word))
        raise _unwritable(f"the word {shown(bad)} is empty or contains a space or line end", 1)
    return columns


def _unwritable(message: str, order: int) -> ArpaError:
    return ArpaError(
        f"the model cannot be written as ARPA: {message}",
        order=order,
        advice="Correct the model, and write it again",
    )


def _checked_section(section: Section, order: int) -> SectionColumns:
    backoffs: NDArray[np.float32] | None
    if isinstance(section, NgramBatch):
        ids, probs, backoffs = section.ids, section.log10_prob, section.log10_backoff
        if section.order != order:
            raise ValueError(
                f"expected a batch of order {order}, found one of order {section.order}"
            )
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
