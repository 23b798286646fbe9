"""Sorts rows in memory; `sorter` says how.

numpy sorts the packed numbers because its sort uses the vector unit, works in place and releases
the GIL: 5 million numbers took 0.06 s; with a radix sort in a kernel and a second array, 0.14 s.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from dlm.spill import kernels
from dlm.spill.arrays import row_pages

Rows = NDArray[np.uint32]
Packed = NDArray[np.uint64]

PARALLEL_ROWS = 1 << 16  # below this, a second thread costs more than it saves
REFINE_PARTS = 16  # parts per thread; many, as equal rows crowd at small ids (frequent words)


def sort_order(rows: Rows, key: int, packed: Packed, threads: int) -> int:
    """Sorts rows (n, W), n >= 1, without moving them; stable.

    Shapes   packed (n,)  filled: its low bits are the places of the rows in order
    Returns  the number of low bits
    Cost     one 64-bit number per row is sorted; rows that are equal so far are sorted again, for
             each 64 - log2 n bits of key
    """
    total = len(rows)
    parts = threads if total >= PARALLEL_ROWS else 1
    cuts = [total * i // parts for i in range(parts + 1)]
    place_bits = max(1, (total - 1).bit_length())
    with ThreadPoolExecutor(parts) if parts > 1 else contextlib.nullcontext() as pool:
        each = map if pool is None else pool.map
        low, high = np.empty((parts, key), np.uint32), np.empty((parts, key), np.uint32)
        spans = list(itertools.pairwise(cuts))

        def measure(i: int) -> None:
            kernels.column_range(rows[cuts[i] : cuts[i + 1]], low[i], high[i])

        list(each(measure, range(parts)))
        level_begin, segments = cut_key(low.min(axis=0), high.max(axis=0), 64 - place_bits)

        def pack(span: tuple[int, int]) -> bool:
            return bool(
                kernels.pack(rows, packed, *span, True, 0, level_begin, segments, place_bits)
            )

        ascending = all(list(each(pack, spans)))
        if not ascending or any(packed[c - 1] > packed[c] for c in cuts[1:-1]):
            if parts > 1:
                packed.partition(cuts[1:-1])
            list(each(lambda span: packed[span[0] : span[1]].sort(), spans))
        if len(level_begin) > 2:
            pieces = parts * REFINE_PARTS if parts > 1 else 1
            cuts = [total * i // pieces for i in range(pieces + 1)]
            # A group of rows that are equal so far must not be cut.
            cuts[1:-1] = [int(kernels.group_end(packed, c, place_bits)) for c in cuts[1:-1]]

            def refine(span: tuple[int, int]) -> None:
                frames = np.zeros((len(level_begin) - 1, 2), np.int64)
                frames[0] = span
                depth = 0
                while True:
                    begin, end, depth = kernels.refine(
                        rows, packed, frames, depth, level_begin, segments, place_bits
                    )
                    if begin < 0:
                        return
                    packed[begin:end].sort()

            list(each(refine, itertools.pairwise(cuts)))
    return place_bits


def cut_key(
    low: NDArray[np.uint32], high: NDArray[np.uint32], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts a key into levels of at most `room` bits, without bits in which no two rows differ.

    Args     low, high  (K,)  smallest and largest value of each column
    Returns  level_begin (L + 1,) and segments (S, 4), as kernels.pack takes them; L >= 1
    """
    level_begin = [0]
    segments: list[tuple[int, int, int, int]] = []
    left = room
    for column in range(len(low)):
        base = int(low[column])
        bits = (int(high[column]) - base).bit_length()
        while bits:
            if left == 0:
                level_begin.append(len(segments))
                left = room
            keep = min(bits, left)
            segments.append((column, base, bits - keep, keep))
            bits -= keep
            left -= keep
    level_begin.append(len(segments))
    return np.array(level_begin, np.int64), np.array(segments, np.int64).reshape(-1, 4)


def gathered(
    rows: Rows, packed: Packed, place_bits: int, chunk_rows: int
) -> Generator[Rows, None, None]:
    """Yields sorted rows a chunk at a time; each is valid until the next but one is begun."""
    size = min(chunk_rows, len(rows))
    outs = [row_pages(size, rows.shape[1]) for _ in range(2)]
    for turn, begin in enumerate(range(0, len(rows), size)):
        part = packed[begin : begin + size]
        out = outs[turn % 2][: len(part)]
        kernels.gather(rows, part, place_bits, out)
        yield out
