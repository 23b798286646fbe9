"""Turns an ARPA file, which Spark cuts at any place, into parts: finds its sections and rows.

A piece of the file does not say in which section it begins. So a first read finds the lines that
begin sections (`marks`), the driver puts them in order (`Sections`), and a second read writes the
rows of each section to files of their own (`rows`). Nothing here depends on Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlm.errors import ArpaError, ConfigError
from dlm.estimate.text import lines_of
from dlm.files import scratch_folder
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.arpa.header import AT_END, order_begun

MARKS_SCHEMA = "start bigint, mark binary, rows bigint, head binary"
ROWS_SCHEMA = "order int, value binary"

_BLANK = pa.array([b"", b"\r"], pa.binary())


def _runs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bytes | None, Any]]:
    """Yields (start of a piece, mark, the lines after it); a mark is a line that begins with a
    backslash, or None. Batches have lines (`value`) and their piece's byte offset (`start`)."""
    for batch in batches:
        values, starts = batch.column("value"), batch.column("start").to_numpy()
        marked = np.flatnonzero(pc.starts_with(values, b"\\").to_numpy(zero_copy_only=False))
        cuts = {0, *marked.tolist(), *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)}
        for begin, end in pairwise(sorted(cuts)):
            own = values.slice(begin, end - begin)
            is_marked = own[0].as_py().startswith(b"\\")
            lines = own.slice(1) if is_marked else own
            lines = lines.filter(pc.invert(pc.is_in(lines, _BLANK)))
            yield int(starts[begin]), own[0].as_py() if is_marked else None, lines


def marks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Finds the lines that begin with a backslash, in order within a piece, and how many lines
    follow each of them. `head` has the following lines, up to the first section of the file."""
    before = -1
    is_head = False
    for start, mark, lines in _runs(batches):
        is_head = start == 0 and (before != 0 or is_head)
        is_head &= mark is None or not order_begun(mark)
        before = start
        head = lines_of(lines) if is_head else b""
        row = {"start": [start], "mark": pa.array([mark], pa.binary()), "rows": [len(lines)]}
        yield pa.record_batch({**row, "head": pa.array([head], pa.binary())})


class Sections:
    """Finds the sections of a file from its marks; ArpaError if the file is not complete.

    Attributes  counts, comments  of the header
                begins            by the start of a piece: the order of the section it begins in
    """

    def __init__(self, found: pa.Table, path: str) -> None:
        if np.any(np.diff(found.column("start").to_numpy()) < 0):
            raise ConfigError(f"Spark read the parts of {path} out of order; use --engine local")
        self.begins: dict[int, int] = {}
        counted: dict[int, int] = {}
        head = b""
        at = 0
        for row in found.to_pylist():
            self.begins.setdefault(row["start"], at)
            if row["mark"] is not None:
                after = order_begun(row["mark"])
                if at == AT_END or (at > 0 and after <= at and after != AT_END):
                    raise ArpaError(
                        f"the line {row['mark'][:80]!r} is out of place; expected the sections in "
                        "order, and then the end marker",
                        path=path,
                        advice="Rebuild the file",
                    )
                if after == 0:
                    head += row["mark"] + b"\n"
                at = after
            counted[at] = counted.get(at, 0) + row["rows"]
            head += row["head"]
        with scratch_folder(None, "dlm-spark-head") as folder:
            alone = folder / Path(path).name
            alone.write_bytes(head)
            try:
                with ArpaReader(alone) as reader:
                    self.counts, self.comments = list(reader.counts), reader.comments
            except ArpaError as exc:
                raise ArpaError(str(exc).replace(str(alone), path)) from exc
        if at != AT_END:
            raise ArpaError(
                "the file ends without its end marker",
                path=path,
                advice="The file is truncated; copy it again, or rebuild it",
            )
        for order in sorted({*range(1, len(self.counts) + 1), *counted} - {0}):
            promised = self.counts[order - 1] if 0 < order <= len(self.counts) else 0
            if (lines := counted.get(order, 0)) != promised:
                place = "after the end marker" if order == AT_END else f"among the {order}-grams"
                raise ArpaError(
                    f"found {lines:,} rows {place}; the header promises {promised:,}",
                    path=path,
                    advice="The file is incomplete, or its header is from another model; rebuild "
                    "the file",
                )


def rows(batches: Iterable[pa.RecordBatch], begins: dict[int, int]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of sections: the order, and the text without its last line end."""
    at, before = 0, -1
    for start, mark, lines in _runs(batches):
        at = begins[start] if start != before else at
        before = start
        if mark is not None:
            at = order_begun(mark)
        if at > 0 and len(lines):
            text = pa.array([lines_of(lines)[:-1]], pa.binary())
            yield pa.record_batch({"order": pa.array([at], pa.int32()), "value": text})
