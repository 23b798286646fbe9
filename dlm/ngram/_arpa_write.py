"""The writer of ARPA files; `dlm.ngram.arpa` is where to import it from."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.files import replacing
from dlm.ngram._arpa_rows import MAX_LINE_BYTES, NgramBatch, Section, shown
from dlm.ngram.text import kernels
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, Vocabulary
from dlm.ngram.wordtable import PADDING

_SEPARATOR = re.compile(rb"[ \t\n\r]")
_WRITE_ROWS = 1 << 15
# Threads that make text while it is compressed and written.
_THREADS = 2
_NO_MARKS = np.empty(0, np.uint32)


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
    columns = _writable(vocabulary, sections)
    if not isinstance(path_or_file, (str, os.PathLike)):
        _write_text(path_or_file, vocabulary, columns, comments)
        return
    path = Path(path_or_file)
    with replacing(path) as file:
        _write_compressed(file, path.suffix, vocabulary, columns, comments)


_WritableColumns: TypeAlias = tuple[
    NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32] | None
]


def _writable(vocabulary: Vocabulary, sections: Sequence[Section]) -> list[_WritableColumns]:
    """The arrays of a model; raises where it cannot be said in ARPA, values not looked at."""
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
    if b"" in vocabulary.ids or _SEPARATOR.search(b"\0".join(vocabulary.words)):
        bad = next(word for word in vocabulary.words if not word or _SEPARATOR.search(word))
        raise _unwritable(f"the word {shown(bad)} is empty or holds a space or line end", 1)
    return columns


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
    _write_head(file, columns, comments)
    words = _Words.of(vocabulary)
    with _row_texts(words, columns) as texts:
        for order, sizes in enumerate(map(len, (ids for ids, _, _ in columns)), start=1):
            file.write(b"\n\\%d-grams:\n" % order)
            for _ in range(0, sizes, _WRITE_ROWS):
                file.write(next(texts))
    file.write(b"\n\\end\\\n")


def _write_head(file: Any, columns: Sequence[_WritableColumns], comments: Iterable[str]) -> None:
    for comment in comments:
        for line in comment.split("\n"):
            file.write(b"# " + line.encode("utf-8", "surrogateescape") + b"\n")
    file.write(b"\\data\\\n")
    for order, (ids, _, _) in enumerate(columns, start=1):
        file.write(b"ngram %d=%d\n" % (order, len(ids)))


@dataclass(frozen=True, eq=False)
class _Words:
    """The words of a vocabulary, one after the other.

    Shapes
        begin  (V + 1,)  int64
        text   (...)     uint8  and PADDING
    """

    vocabulary: Vocabulary
    begin: NDArray[np.int64]
    text: NDArray[np.uint8]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> _Words:
        words = vocabulary.words
        begin = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=begin[1:])
        return cls(vocabulary, begin, np.frombuffer(b"".join([*words, PADDING]), np.uint8))


@contextlib.contextmanager
def _row_texts(
    words: _Words, columns: Sequence[_WritableColumns]
) -> Iterator[Iterator[memoryview]]:
    """The lines of all sections, some rows at a time; threads make those to come meanwhile."""
    parts = (
        (order, ids[rows], probs[rows], None if backoffs is None else backoffs[rows])
        for order, (ids, probs, backoffs) in enumerate(columns, start=1)
        for rows in (slice(start, start + _WRITE_ROWS) for start in range(0, len(ids), _WRITE_ROWS))
    )
    with ThreadPoolExecutor(_THREADS, "arpa") as pool:
        ahead: deque[Future[memoryview]] = deque()

        def texts() -> Iterator[memoryview]:
            for part in parts:
                ahead.append(pool.submit(_rows_text, words, *part))
                if len(ahead) > _THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

        try:
            yield texts()
        finally:
            for text in ahead:
                text.cancel()


def _rows_text(
    words: _Words,
    order: int,
    ids: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
) -> memoryview:
    """The lines of some rows, ends included."""
    _check_rows(words.vocabulary, order, ids, probs, backoffs)
    ids, probs = np.ascontiguousarray(ids), np.ascontiguousarray(probs)
    weights = probs[:0] if backoffs is None else np.ascontiguousarray(backoffs)
    most, longest = kernels.rows_room(ids, words.begin, backoffs is not None)
    text = np.empty(int(most), np.uint8)
    _, size = kernels.put_rows(ids, probs, weights, _NO_MARKS, 0, words.begin, words.text, text)
    if longest > MAX_LINE_BYTES:
        ends = np.flatnonzero(text[:size] == ord("\n"))
        if int(np.diff(ends, prepend=-1).max()) > MAX_LINE_BYTES + 1:
            raise _unwritable(f"a row longer than {MAX_LINE_BYTES} bytes", order)
    return text[:size].data


def _check_rows(
    vocabulary: Vocabulary,
    order: int,
    ids: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
) -> None:
    if int(ids.max()) >= len(vocabulary) or (not vocabulary.unk_in_model and not ids.all()):
        raise _unwritable(f"an id that is no word of the vocabulary, among {int(ids.max())}", order)
    if not bool((probs <= 0).all()):  # also false for NaN
        raise _unwritable("a log10 probability that is positive or NaN", order)
    if backoffs is not None and not bool(np.isfinite(backoffs).all()):
        raise _unwritable("a log10 backoff weight that is not finite", order)


def arpa_bytes(
    vocabulary: Vocabulary, sections: Sequence[Section], *, comments: Iterable[str] = ()
) -> int:
    """Bytes that `write_arpa` would write of a model to a plain file."""
    columns = _writable(vocabulary, sections)
    head = io.BytesIO()
    _write_head(head, columns, comments)
    total = len(head.getvalue()) + len(b"\n\\end\\\n")
    words = _Words.of(vocabulary)
    for order, (ids, probs, backoffs) in enumerate(columns, start=1):
        total += len(b"\n\\%d-grams:\n" % order)
        # Numbers and words, and after each one byte: tab, space or newline.
        total += len(ids) * (1 + order + (backoffs is not None))
        for start in range(0, len(ids), _WRITE_ROWS):
            rows = slice(start, start + _WRITE_ROWS)
            total += int(kernels.words_bytes(np.ascontiguousarray(ids[rows]), words.begin))
            total += int(kernels.numbers_bytes(np.ascontiguousarray(probs[rows])))
            if backoffs is not None:
                total += int(kernels.numbers_bytes(np.ascontiguousarray(backoffs[rows])))
    return total
