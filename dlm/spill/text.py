"""Sorts rows of text by their keys, in memory and, beyond a limit, in an Arrow file."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

Row = tuple[str, int, str]  # key, number, text

SCHEMA = pa.schema([("key", pa.string()), ("number", pa.int64()), ("text", pa.string())])
ROW_BYTES = 200  # bytes of Python objects per row, besides its text
BATCH_ROWS = 512  # rows of a run in memory at a time while runs are merged


def sorted_rows(rows: Iterable[Row], folder: Path, memory_bytes: int) -> Iterator[Row]:
    """Sorts rows by their keys, compared as strings; rows with the same key keep their order.

    Rows beyond `memory_bytes` are written to `folder` in sorted runs. All runs are merged at once,
    which takes memory for BATCH_ROWS rows of each run besides `memory_bytes`.
    """
    by_key = itemgetter(0)
    file = folder / "rows.arrow"
    held: list[Row] = []
    held_bytes = 0
    ends = [0]  # ends of the runs, in record batches
    with contextlib.ExitStack() as stack:
        writer: pa.RecordBatchFileWriter | None = None
        for row in rows:
            held.append(row)
            held_bytes += len(row[0]) + len(row[2]) + ROW_BYTES
            if held_bytes > memory_bytes:
                if writer is None:
                    sink = stack.enter_context(pa.OSFile(str(file), "wb"))
                    writer = stack.enter_context(pa.ipc.new_file(sink, SCHEMA))
                held.sort(key=by_key)
                begins = range(0, len(held), BATCH_ROWS)
                for begin in begins:
                    part = zip(*held[begin : begin + BATCH_ROWS], strict=True)
                    columns = [pa.array(column) for column in part]
                    writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
                ends.append(ends[-1] + len(begins))
                held, held_bytes = [], 0
    held.sort(key=by_key)
    with contextlib.ExitStack() as stack:
        runs: list[Iterable[Row]] = []
        if len(ends) > 1:
            reader = pa.ipc.open_file(stack.enter_context(pa.OSFile(str(file), "rb")))
            runs = [_read(reader, range(*span)) for span in pairwise(ends)]
        yield from heapq.merge(*runs, held, key=by_key)


def _read(reader: pa.RecordBatchFileReader, batches: range) -> Iterator[Row]:
    for place in batches:
        columns = reader.get_batch(place).columns
        yield from zip(*(column.to_pylist() for column in columns), strict=True)
