"""Numbered lines of a text file, plain or compressed, and helpers for errors in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from dlm.errors import LatticeError, TextError
from dlm.ngram.arpa.source import TEXT_COMPRESSIONS, DamagedStream, TextSource

T = TypeVar("T")

MAX_LINE_BYTES = 64 << 20
_STEP_BYTES = 1 << 20


def read_lines(path: Path | str) -> Iterator[tuple[int, str]]:
    """Yields a file's lines, plain or compressed, as (number from 1, text without line end); `-`
    is standard input. Bytes that are not UTF-8 become surrogate escapes, as in all words.

    Raises  OSError;  LatticeError  decompression fails, or a line is longer than 64 MiB
    """
    name = str(path)
    number, rest = 0, b""
    try:
        source = TextSource(name, TEXT_COMPRESSIONS)
        try:
            while some := source.read(_STEP_BYTES):
                *whole, rest = (rest + some).split(b"\n")
                for line in whole:
                    number += 1
                    yield number, line.decode("utf-8", "surrogateescape").rstrip("\r")
                if len(rest) > MAX_LINE_BYTES:
                    raise LatticeError(
                        f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; expected text with "
                        "shorter lines",
                        path=name,
                        line=number + 1,
                    )
        finally:
            source.close()
    except DamagedStream as exc:
        raise LatticeError(
            f"the file cannot be decompressed ({exc}); copy it again", path=name, line=number + 1
        ) from exc
    if rest:
        yield number + 1, rest.decode("utf-8", "surrogateescape").rstrip("\r")


def read_utf8(path: Path) -> str:
    """Reads a small text file, without its byte order mark. Raises OSError, or TextError if the
    file is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise TextError(
            f"{path} is not UTF-8 ({exc.reason} at byte {exc.start}); convert it to UTF-8"
        ) from exc


def recovered(read: Callable[[], T], skip: Callable[[LatticeError], None] | None) -> Iterator[T]:
    """Yields what `read` returns, or nothing if the input is bad and `skip` accepts the error."""
    try:
        yield read()
    except LatticeError as error:
        if skip is None:
            raise
        skip(error)


def whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def described(text: str) -> str:
    """Returns a field for a message if it is a number, otherwise "empty" or "not a number":
    other text is not shown, since it could be a word that was said."""
    if not text:
        return "empty"
    try:
        float(text)
    except ValueError:
        return "not a number"
    return text
