"""Rows (user, line, text) of a file, and the same rows sorted by user without holding them all."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlm.errors import FormatError

Row = tuple[str, int, str]  # user id ("" where it is missing), 1-based line or row, text
MISSING = ("refuse", "count")
COMPRESSIONS = {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}
ROW_BYTES = 200  # of Python objects beside the text of a row
RUN_ROWS = 2048  # rows of a run in memory at once while merging
MAX_FAN_IN = 64  # runs merged at once


def _raw(path: Path) -> Any:
    """The bytes of a file as a stream, decompressed by its suffix."""
    compression = COMPRESSIONS.get(path.suffix)
    stream = pa.OSFile(str(path), "rb")
    return stream if compression is None else pa.CompressedInputStream(stream, compression)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their end; white space inside them, U+2028 and the like, stays."""
    rest: list[bytes] = []  # of a line that goes on: put together once, however long it is
    with _raw(path) as stream:
        while block := stream.read(1 << 20):
            first, *more = block.split(b"\n")
            rest.append(first)
            if more:
                yield b"".join(rest)
                yield from more[:-1]
                rest = [more[-1]]
    if last := b"".join(rest):
        yield last


def tsv_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    """Rows of a tab-separated file with a header."""
    try:
        yield from _tsv_rows(path, user_column, text_column)
    except pa.ArrowException as exc:
        raise FormatError(f"{path} cannot be decompressed: {exc}") from exc
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise FormatError(f"{path} cannot be decompressed: {exc}") from exc


def _tsv_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    lines = _lines(path)
    header = next(lines, b"").rstrip(b"\r").removeprefix(b"\xef\xbb\xbf")
    names = header.decode("utf-8", "replace").split("\t")
    for column in (user_column, text_column):
        if names.count(column) != 1:
            raise FormatError(
                f"{path}: the header has the columns {', '.join(names[:8])!r}, and not once "
                f"{column!r}; name the columns of user and text (--user-column, --text-column)"
            )
    user_at, text_at = names.index(user_column), names.index(text_column)
    for number, raw in enumerate(lines, 2):
        try:
            fields = raw.rstrip(b"\r").decode("utf-8").split("\t")
        except UnicodeDecodeError as exc:
            raise FormatError(f"{path}, line {number}: not UTF-8 at byte {exc.start}") from exc
        if len(fields) != len(names):
            raise FormatError(
                f"{path}, line {number}: {len(fields)} fields where the header has {len(names)}"
            )
        yield fields[user_at].strip(), number, fields[text_at]


def parquet_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    """Rows of a Parquet file, itself perhaps inside .zst, which is unpacked into memory."""
    try:
        if path.suffix in COMPRESSIONS:
            with _raw(path) as stream:
                file = pq.ParquetFile(pa.BufferReader(stream.read()))
        else:
            file = pq.ParquetFile(str(path), memory_map=True)
        names = file.schema_arrow.names
        for column in (user_column, text_column):
            if names.count(column) != 1:
                raise FormatError(
                    f"{path} has the columns {', '.join(names[:8])!r}, and not once {column!r}; "
                    "name the columns of user and text (--user-column, --text-column)"
                )
        number = 0
        for batch in file.iter_batches(8192, columns=[user_column, text_column]):
            ids = batch.column(batch.schema.get_field_index(user_column)).to_pylist()
            texts = batch.column(batch.schema.get_field_index(text_column)).to_pylist()
            for user, text in zip(ids, texts, strict=True):
                number += 1
                if text is not None and not isinstance(text, str):
                    raise FormatError(f"{path}, row {number}: the text is {type(text).__name__}")
                yield _user_id(user, path, number), number, text or ""
    except pa.ArrowException as exc:
        raise FormatError(f"{path} is no Parquet file: {exc}") from exc


def _user_id(value: Any, path: Path, row: int) -> str:
    """An id as text; "" where there is none, as in a column of numbers that was joined (NaN)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise FormatError(f"{path}, row {row}: the user id is not UTF-8") from exc
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise FormatError(
            f"{path}, row {row}: the user id {value!r} is {type(value).__name__}, and neither text "
            "nor a whole number: two users could not be told apart for certain"
        )
    return str(value).strip()


def sorted_rows(
    source: Path, rows: Iterator[Row], folder: Path, memory_bytes: int, missing: str
) -> Iterator[Row]:
    """The rows by user id; those of one user in their order.

    Raises
        FormatError   a row without a user, where `missing` is "refuse"
    Cost         `memory_bytes` of rows; what is more is spilled into `folder` and merged
    """
    held: list[Row] = []
    held_bytes = 0
    runs: list[Path] = []
    by_user = itemgetter(0)
    for row in rows:
        if not row[0] and missing == "refuse":
            raise FormatError(
                f"{source}, line {row[1]}: no user id; text of nobody cannot be protected. Remove "
                'the row, or leave such rows out and counted with missing="count" (--missing '
                "count)"
            )
        held.append(row)
        held_bytes += len(row[0]) + len(row[2]) + ROW_BYTES
        if held_bytes > memory_bytes:
            held.sort(key=by_user)
            runs.append(_write_run(iter(held), folder / f"run{len(runs)}"))
            held, held_bytes = [], 0
    held.sort(key=by_user)
    if not runs:
        yield from held
        return
    runs.append(_write_run(iter(held), folder / f"run{len(runs)}"))
    del held
    merged = 0
    while len(runs) > MAX_FAN_IN:
        # Neighbours are merged, so that the order of one user's rows is kept.
        ahead = []
        for at in range(0, len(runs), MAX_FAN_IN):
            group = runs[at : at + MAX_FAN_IN]
            ahead.append(
                _write_run(
                    heapq.merge(*map(_read_run, group), key=by_user), folder / f"merge{merged}"
                )
            )
            merged += 1
            for path in group:
                os.unlink(path)  # noqa: PTH108
        runs = ahead
    yield from heapq.merge(*map(_read_run, runs), key=by_user)


SCHEMA = pa.schema([("user", pa.string()), ("line", pa.int64()), ("text", pa.string())])


def _write_run(rows: Iterator[Row], path: Path) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        while part := list(islice(rows, RUN_ROWS)):
            users, lines, texts = zip(*part, strict=True)
            writer.write_batch(
                pa.record_batch([pa.array(users), pa.array(lines), pa.array(texts)], schema=SCHEMA)
            )
    return path


def _read_run(path: Path) -> Iterator[Row]:
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
