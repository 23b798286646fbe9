"""Rows (user, line, text) of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlm.errors import FormatError

Row = tuple[str, int, str]  # user id ("" where it is missing), 1-based line or row, text
COMPRESSIONS = {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}


def _raw(path: Path) -> Any:
    compression = COMPRESSIONS.get(path.suffix)
    stream = pa.OSFile(str(path), "rb")
    return stream if compression is None else pa.CompressedInputStream(stream, compression)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their end; white space inside them, U+2028 and the like, stays."""
    rest: list[bytes] = []  # of an incomplete line: joined once, however long it is
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
    try:
        yield from _tsv_rows(path, user_column, text_column)
    except pa.ArrowException as exc:
        raise FormatError(f"{path} cannot be decompressed: {exc}. Copy it again") from exc
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise FormatError(f"{path} cannot be decompressed: {exc}. Copy it again") from exc


def _tsv_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    lines = _lines(path)
    header = next(lines, b"").rstrip(b"\r").removeprefix(b"\xef\xbb\xbf")
    names = header.decode("utf-8", "replace").split("\t")
    if header and len(names) == 1:
        raise FormatError(
            f"{path} is not tab-separated: its first line has no tab. CSV and JSONL are not read; "
            f"convert it to Parquet, or to TSV with the header {user_column}<TAB>{text_column}"
        )
    for column in (user_column, text_column):
        if names.count(column) != 1:
            # Not shown: in a file without a header it is a user's.
            raise FormatError(
                f"{path}: the first line has {len(names)} columns; expected a header with "
                f"{column!r} exactly once (--user-column, --text-column)"
            )
    user_at, text_at = names.index(user_column), names.index(text_column)
    for number, raw in enumerate(lines, 2):
        try:
            fields = raw.rstrip(b"\r").decode("utf-8").split("\t")
        except UnicodeDecodeError as exc:
            raise FormatError(
                f"{path}, line {number}: not UTF-8 at byte {exc.start} of the line; "
                "convert the file (iconv -t UTF-8)"
            ) from exc
        if len(fields) != len(names):
            raise FormatError(
                f"{path}, line {number}: {len(fields)} fields, but the header has {len(names)}; "
                "fix the line, or remove it"
            )
        yield fields[user_at].strip(), number, fields[text_at]


def parquet_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    """Rows of a Parquet file, itself perhaps inside .zst, which is unpacked into memory."""
    try:
        if path.suffix in COMPRESSIONS:
            with _raw(path) as stream:
                file = pq.ParquetFile(pa.BufferReader(stream.read_buffer()))
        else:
            file = pq.ParquetFile(str(path), memory_map=True)
        names = file.schema_arrow.names
        for column in (user_column, text_column):
            if names.count(column) != 1:
                raise FormatError(
                    f"{path} has the columns {', '.join(names[:8])}; expected {column!r} exactly "
                    "once (--user-column, --text-column)"
                )
        number = 0
        for batch in file.iter_batches(8192, columns=[user_column, text_column]):
            ids = batch.column(batch.schema.get_field_index(user_column)).to_pylist()
            texts = batch.column(batch.schema.get_field_index(text_column)).to_pylist()
            for user, text in zip(ids, texts, strict=True):
                number += 1
                if text is not None and not isinstance(text, str):
                    raise FormatError(
                        f"{path}, row {number}: the text is {type(text).__name__}; expected a "
                        "column of strings (--text-column)"
                    )
                yield _user_id(user, path, number), number, text or ""
    except pa.ArrowException as exc:
        raise FormatError(
            f"{path} is not a Parquet file, or is damaged: {exc}. Copy it again"
        ) from exc


def _user_id(value: Any, path: Path, row: int) -> str:
    """An id as text; "" if there is none, such as NaN in a column of numbers after a join."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise FormatError(
                f"{path}, row {row}: the user id is not UTF-8; fix the row, or remove it"
            ) from exc
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise FormatError(
            f"{path}, row {row}: the user id {value!r} is {type(value).__name__}; expected text or "
            "a whole number, since other types may not tell users apart"
        )
    return str(value).strip()


def named(source: Path, rows: Iterable[Row], missing: str) -> Iterator[Row]:
    for row in rows:
        if not row[0] and missing == "refuse":
            raise FormatError(
                f"{source}, line {row[1]}: no user id; fix the row, or pass --missing count (in "
                'a configuration: missing = "count") to leave out and count such rows'
            )
        yield row
