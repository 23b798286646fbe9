"""Reads rows of an ARPA file into numbers and words, in bulk and one at a time.

Kernels stop at an irregular row, which is then read separately, and either understood or reported
as faulty. Both ways must agree; a test checks that.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.ngram.arpa import kernels
from dlm.ngram.kernels import NEWLINE, count_newlines
from dlm.ngram.wordtable import WordTable

# The kernels that read an ARPA file; see jit.compile_ahead.
KERNELS = (kernels.read_ngrams, kernels.read_words, count_newlines)

# The longest line that is read or written; rows of real models have about a hundred bytes.
MAX_LINE_BYTES = 1 << 20

NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z")
INFINITIES = frozenset((b"inf", b"+inf", b"-inf"))

MIN_NORMAL_FLOAT32 = 2.0**-126
# Halfway between the largest float32 and the next power of two: from here on a number overflows.
FLOAT32_OVERFLOW = 2.0**128 - 2.0**103


@dataclass(frozen=True, slots=True)
class NgramBatch:
    """Consecutive n-grams of one section, as arrays; `first_row` is the index in the section.

    Shapes  ids            (n, order)  word ids, oldest word first, as written
            log10_prob     (n,)        log10, <= 0, -inf is possible, never -0.0
            log10_backoff  (n,)        log10, finite; 0 where the column is missing
    """

    order: int
    first_row: int
    ids: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.log10_prob)


# ids, log10_prob and log10_backoff of one order, as in NgramBatch; None means no such column.
SectionColumns: TypeAlias = tuple[
    NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32] | None
]
Section: TypeAlias = NgramBatch | SectionColumns


def by_order(batches: Iterable[NgramBatch], order: int) -> Iterator[Iterator[NgramBatch]]:
    """Yields the batches (maybe none) of each order up to `order`; use them before going on."""
    groups = itertools.groupby(batches, lambda batch: batch.order)
    found, some = next(groups, (0, iter(())))
    for k in range(1, order + 1):
        yield some if found == k else iter(())
        if found == k:
            found, some = next(groups, (0, iter(())))


def joined(
    parts: list[NgramBatch], order: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    """The columns of all n-grams of one order."""
    none = np.zeros((0, order), np.uint32), np.zeros(0, np.float32), np.zeros(0, np.float32)
    rows = [(part.ids, part.log10_prob, part.log10_backoff) for part in parts] or [none]
    ids, probs, backoffs = (
        one[0] if len(one) == 1 else np.concatenate(one) for one in zip(*rows, strict=True)
    )
    return ids, probs, backoffs


class RowBlock:
    """Whole lines of text in a section; the first `filled` rows have been read, and the next line
    begins at `position`. text[end - 1] is a newline, `PADDING` follows the text, `offset` is the
    place of text[0] in the whole text, and the arrays have room for `most` rows."""

    __slots__ = (
        "begin", "end", "filled", "ids", "log10_backoff", "log10_prob", "offset", "position", "text"
    )  # fmt: skip

    def __init__(self, text: bytes, begin: int, end: int, offset: int) -> None:
        self.text = text
        self.begin = self.position = begin
        self.end = end
        self.offset = offset

    def start(self, order: int, most: int) -> None:
        lines = int(count_newlines(self._chars(), self.begin, self.end))
        rows = min(lines, most)
        self.position = self.begin
        self.filled = 0
        self.ids = np.empty((rows, order), np.uint32)
        self.log10_prob = np.empty(rows, np.float32)
        self.log10_backoff = np.empty(rows, np.float32)

    @property
    def rows(self) -> int:
        return len(self.log10_prob)

    def put(
        self, ids: Sequence[int], log10_prob: float, log10_backoff: float, line_bytes: int
    ) -> None:
        self.ids[self.filled] = ids
        self.log10_prob[self.filled] = log10_prob
        self.log10_backoff[self.filled] = log10_backoff
        self.filled += 1
        self.position += line_bytes

    def read_ngrams(self, table: WordTable, top: bool, unk_in_model: bool) -> RowBlock:
        """Continues to read an order above 1, after `start`, up to the first irregular row."""
        self.filled, self.position = kernels.read_ngrams(
            self._chars(),
            self.position,
            self.end,
            MAX_LINE_BYTES,
            top,
            unk_in_model,
            table.slots,
            table.word_begin,
            table.word_bytes,
            self.ids,
            self.log10_prob,
            self.log10_backoff,
            self.filled,
        )
        return self

    def read_words(
        self, table: WordTable, top: bool, first_row: int, unk_row: int | None
    ) -> int | None:
        """Continues to read order 1 after `start`, and enters the words into the table; returns the
        row of the unknown word, None if it has not come yet. The block begins with row `first_row`
        of the section."""
        table.reserve(self.rows - self.filled, self.end - self.position)
        state = table.state(unk_row)
        self.filled, self.position = kernels.read_words(
            self._chars(),
            self.position,
            self.end,
            MAX_LINE_BYTES,
            top,
            first_row,
            state,
            table.slots,
            table.word_begin,
            table.word_bytes,
            self.ids,
            self.log10_prob,
            self.log10_backoff,
            self.filled,
        )
        return table.settle(state)

    def place_of_row(self, row: int) -> int:
        """Returns where a row's line begins; `row` may be the one after the last row read."""
        if row == self.filled:
            return self.position
        ends = np.flatnonzero(self._chars()[self.begin : self.position] == NEWLINE)
        return self.begin + (int(ends[row - 1]) + 1 if row else 0)

    def next_line(self) -> bytes:
        return self.text[self.position : self.text.index(b"\n", self.position)]

    def _chars(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.text, np.uint8)


class RowFault(Exception):
    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


def shown(text: bytes) -> str:
    """`text` for an error message: short, on one line, with every byte distinguishable."""
    cut = text if len(text) <= 60 else text[:57] + b"..."
    return '"' + cut.decode("utf-8", "backslashreplace").encode("unicode_escape").decode() + '"'


def nearest_float32(double: float, text: bytes) -> float:
    """The value of the float32 nearest to a decimal `text`, given the double nearest to it.

    Ties go to even, as in a single rounding. Rounding the double again errs only where it lies
    exactly between two float32 values; there the decimal is compared with the double.
    """
    size = abs(double)
    if size > FLOAT32_OVERFLOW:
        return math.copysign(math.inf, double)
    if size < MIN_NORMAL_FLOAT32:
        # Below the normal range, float32 values are 2**-149 apart; midpoints are odd * 2**-150.
        between = math.fmod(size * 2.0**150, 2.0) == 1.0
    else:
        (bits,) = struct.unpack("<Q", struct.pack("<d", double))
        between = bits & 0x1FFFFFFF == 0x10000000
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(double)
    if between:
        # Comparing decimals is exact at any length, in time linear in the length.
        decimal, midpoint = Decimal(text.decode("ascii")), Decimal(double)
        if decimal > midpoint and float(single) < double:
            single = np.nextafter(single, np.float32(np.inf))
        elif decimal < midpoint and float(single) > double:
            single = np.nextafter(single, np.float32(-np.inf))
    return float(single) + 0.0  # -0.0 becomes 0.0


def float32_of(text: bytes, what: str) -> float:
    """`text` as the value of a float32; raises a `RowFault` if it is not one."""
    if text.lower() in INFINITIES:
        return float(text)
    if text.lower().lstrip(b"+-") == b"nan":
        raise RowFault(f"the {what} is not a number (NaN)", "Estimate the model again")
    if not NUMBER.match(text):
        raise RowFault(f"expected a {what} in decimal digits, found {shown(text)}")
    single = nearest_float32(float(text), text)
    if math.isinf(single):
        raise RowFault(f"the {what} {shown(text)} is outside the range of a 32-bit float")
    return single


def split_row(line: bytes, order: int, top: bool) -> tuple[float, list[bytes], float]:
    """The probability, words and backoff weight of one row; raises a `RowFault` for any fault."""
    if line.endswith(b"\r"):
        line = line[:-1]
    if b"\r" in line:
        raise RowFault(
            "a carriage return inside a line",
            "Remove it (`tr -d '\\r'`); lines end in \\n or \\r\\n, and other programs split words "
            "at it",
        )
    fields = [field for field in line.replace(b"\t", b" ").split(b" ") if field]
    try:
        prob = float32_of(fields[0], "log10 probability")
    except RowFault as fault:
        fault.advice = fault.advice or (
            "A row is a log10 probability, the words, and optionally a backoff weight, separated "
            "by spaces or tabs; if this file was edited or damaged, rebuild it"
        )
        raise
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
            "Words are separated by spaces and tabs; a word contains neither",
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
                f"an n-gram of the highest order has the backoff weight {shown(fields[-1])}",
                "The highest order has no backoff weights; remove the column, or add the "
                "missing higher order to the header",
            )
    return prob, fields[1 : order + 1], backoff
