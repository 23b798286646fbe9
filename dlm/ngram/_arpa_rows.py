"""Rows of an ARPA file: text to numbers and words, in bulk and one at a time.

Rows are read twice over: in bulk where a whole block is regular, and one at a time where it is not,
to find and name the faulty line. Both ways must agree; a test holds them to it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# The longest line that is read or written; a row of real models is some hundred bytes.
MAX_LINE_BYTES = 1 << 20

NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z")
NUMBER_BYTES = b"0123456789+-.eE"
INFINITIES = frozenset((b"inf", b"+inf", b"-inf"))

MIN_NORMAL_FLOAT32 = 2.0**-126
# Halfway between the largest float32 and the next power of two: from here on a number overflows.
FLOAT32_OVERFLOW = 2.0**128 - 2.0**103


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
Columns: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]


class RowFault(Exception):
    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


def shown(text: bytes) -> str:
    """`text` for an error message: short, on one line, and every byte told apart."""
    cut = text if len(text) <= 60 else text[:57] + b"..."
    return '"' + cut.decode("utf-8", "backslashreplace").encode("unicode_escape").decode() + '"'


def nearest_float32(doubles: NDArray[np.float64], texts: Sequence[bytes]) -> NDArray[np.float32]:
    """The float32 nearest to each decimal `texts[i]`, given the double nearest to it.

    Guarantees
        ties go to even, as in one single rounding. Rounding the double again errs only where the
        double lies exactly between two float32; there the decimal itself is compared with it
    """
    with np.errstate(over="ignore", under="ignore"):
        singles = doubles.astype(np.float32)
    size = np.abs(doubles)
    between = (doubles.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    tiny = size < MIN_NORMAL_FLOAT32
    if tiny.any():
        # Below the normal range float32 are 2**-149 apart, so their midpoints are odd * 2**-150.
        between[tiny] = np.fmod(size[tiny] * 2.0**150, 2.0) == 1.0
    between &= size <= FLOAT32_OVERFLOW
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


def float32_column(texts: Sequence[bytes]) -> NDArray[np.float32] | None:
    """`texts` as float32; None where one is no number, or a finite one that overflows."""
    infinities = 0
    if b"".join(texts).translate(None, NUMBER_BYTES):
        for text in texts:
            if text.translate(None, NUMBER_BYTES):
                if text.lower() not in INFINITIES:
                    return None
                infinities += 1
    try:
        doubles = np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))
    except ValueError:
        return None
    singles = nearest_float32(doubles, texts)
    if np.count_nonzero(np.isinf(singles)) != infinities:
        return None
    return singles


def float32_of(text: bytes, what: str) -> float:
    """`text` as the value of a float32; what is wrong with it as a `RowFault`."""
    if text.lower() in INFINITIES:
        return float(text)
    if text.lower().lstrip(b"+-") == b"nan":
        raise RowFault(f"the {what} is not a number (NaN)", "Estimate the model again")
    if not NUMBER.match(text):
        raise RowFault(f"expected a {what} in decimal digits, found {shown(text)}")
    double = float(text)
    if double == 0.0:
        return 0.0
    if MIN_NORMAL_FLOAT32 <= abs(double) < FLOAT32_OVERFLOW:
        (bits,) = struct.unpack("<Q", struct.pack("<d", double))
        if bits & 0x1FFFFFFF != 0x10000000:
            return float(struct.unpack("<f", struct.pack("<f", double))[0])
    single = float(nearest_float32(np.array([double]), [text])[0])
    if single in (np.inf, -np.inf):
        raise RowFault(f"the {what} {shown(text)} is outside the range of a 32-bit float")
    return single


def split_row(line: bytes, order: int, top: bool) -> tuple[float, list[bytes], float]:
    """Probability, words and backoff weight of one row; anything wrong as a `RowFault`."""
    if line.endswith(b"\r"):
        line = line[:-1]
    if b"\r" in line:
        raise RowFault(
            "a carriage return inside a line",
            "Remove it (`tr -d '\\r'`); lines end in \\n or \\r\\n, and others split words at it",
        )
    fields = [field for field in line.replace(b"\t", b" ").split(b" ") if field]
    prob = float32_of(fields[0], "log10 probability")
    if prob > 0:
        raise RowFault(
            f"the log10 probability {shown(fields[0])} is positive",
            "A probability cannot exceed 1: estimate the model again (some IRSTLM versions "
            "write such files)",
        )
    found = len(fields) - 1
    if found not in (order, order + 1):
        raise RowFault(
            f"an n-gram of another order in the {order}-gram section: expected {order} "
            f"{'word' if order == 1 else 'words'} and at most a backoff weight after the "
            f"probability, found {found} {'field' if found == 1 else 'fields'}",
            "Words are separated by spaces and tabs; a word cannot hold one",
        )
    backoff = 0.0
    if found == order + 1:
        try:
            backoff = float32_of(fields[-1], "log10 backoff weight")
        except RowFault as fault:
            fault.advice = fault.advice or (
                f"If that field is a word, this is a {order + 1}-gram in the {order}-gram section"
            )
            raise
        if backoff in (np.inf, -np.inf):
            raise RowFault(f"the log10 backoff weight {shown(fields[-1])} is not finite")
        if top and backoff != 0.0:
            raise RowFault(
                f"the backoff weight {shown(fields[-1])} on an n-gram of the highest order",
                "Nothing backs off from the highest order; remove the column, or add the "
                "missing higher order to the header",
            )
    return prob, fields[1 : order + 1], backoff


def split_rows(
    block: bytes, newlines: NDArray[np.int64], order: int, top: bool
) -> tuple[list[list[bytes]], NDArray[np.float32], NDArray[np.float32]] | None:
    """All rows of `block` at once, or None where any is irregular or wrong.

    Shapes
        newlines   (n,)  offsets of the line ends in `block`; the last is its last byte
    Returns
        (words by position in the n-gram, probabilities, backoff weights)
    Guarantees
        what is returned equals what `split_row` makes of each line
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
    probs = float32_column(prob_texts)
    if probs is None or bool((probs > 0).any()):
        return None
    backoffs = np.zeros(len(newlines), np.float32)
    if backoff_texts:
        column = float32_column(backoff_texts)
        if column is None or not bool(np.isfinite(column).all()) or (top and bool(column.any())):
            return None
        backoffs[has_backoff] = column
    return words, probs, backoffs
