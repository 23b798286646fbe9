"""Writes files of a shard set from columns that do not fit in memory.

Arrow writes placeholders of the right length; the real columns are written in their place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dlm.index.layout import COLUMNS, FORMAT_VERSION
from dlm.spill.column import Column

Part = NDArray[Any] | Column
# Maps a column's name to its dtype and its ordered parts; columns are in the format's order.
Columns = Mapping[str, tuple[Any, Sequence[Part]]]
_STEP_BYTES = 4 << 20


class _Sink:
    def __init__(self, path: Path, columns: dict[int, Iterator[memoryview]]) -> None:
        self._file = path.open("wb", _STEP_BYTES)
        self._columns = columns
        self.digest = xxhash.xxh3_128()
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        address = getattr(data, "address", None)
        column = self._columns.pop(address, None) if address is not None else None
        parts = iter([memoryview(data)]) if column is None else column
        written = 0
        for piece in parts:
            self._file.write(piece)
            self.digest.update(piece)
            written += piece.nbytes
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self.closed = True


def pieces(parts: Sequence[Part]) -> Iterator[memoryview]:
    for part in parts:
        if isinstance(part, Column):
            for chunk in part.chunks(max(_STEP_BYTES // part.row_bytes, 1)):
                yield memoryview(np.ascontiguousarray(chunk).data).cast("B")
        elif len(part):
            yield memoryview(np.ascontiguousarray(part).data).cast("B")


def write_parts(path: Path, kind: str, columns: Columns) -> tuple[int, str]:
    """Writes and syncs one file of a shard set; returns its size in bytes and its XXH3-128.

    Guarantees  the bytes are those that Arrow writes for columns in memory
    """
    if list(columns) != list(COLUMNS[kind]):
        raise ValueError(f"{kind} needs columns {list(COLUMNS[kind])}; found {list(columns)}")
    fields, lists = [], []
    true: dict[int, Iterator[memoryview]] = {}
    for name, (dtype, parts) in columns.items():
        dtype = np.dtype(dtype)
        if dtype not in COLUMNS[kind][name]:
            raise ValueError(f"column {name} of {kind} cannot have type {dtype}")
        length = sum(map(len, parts))
        # Pages that are never touched take no memory.
        empty = pa.py_buffer(mmap.mmap(-1, max(length * dtype.itemsize, 1)))
        if length:
            true[empty.address] = pieces(parts)
        if length:
            values = pa.Array.from_buffers(
                pa.from_numpy_dtype(dtype), length, [None, empty], null_count=0
            )
        else:
            values = pa.array(np.zeros(0, dtype), from_pandas=False)
        offsets = pa.array(np.array([0, length], np.int64))
        lists.append(pa.LargeListArray.from_arrays(offsets, values))
        fields.append(pa.field(name, pa.large_list(values.type), nullable=False))
    schema = pa.schema(
        [f.with_type(a.type) for f, a in zip(fields, lists, strict=True)],
        metadata={"dlm.format_version": str(FORMAT_VERSION), "dlm.kind": kind},
    )
    sink = _Sink(path, true)
    try:
        with pa.ipc.new_file(pa.PythonFile(sink, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(lists, schema=schema))
        if true:
            raise RuntimeError(
                f"Arrow copied {len(true)} columns, so their placeholders stayed in {path.name}. "
                "Report this, with the version of pyarrow"
            )
        sink.sync()
    finally:
        sink.close()
    return sink.size, str(sink.digest.hexdigest())
