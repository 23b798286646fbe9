"""Turns ids into counted n-grams: counts and sorts one block of text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.counts import kernels
from dlm.resources import in_order

# N-grams that a thread sorts at a time, if memory allows.
BUCKET = 1 << 18

_Ids = NDArray[np.uint32]


def bytes_per_token() -> int:
    """Returns a block's bytes per token: 4 for the token, and twice 4 for its place."""
    return 12


def bytes_of_sorting(bucket: int, order: int, threads: int, words: int) -> int:
    """Returns the bytes that counting takes besides the block, whatever the block's size."""
    parts = -(-order // (64 // id_bits(words)))
    one = bucket * (8 * parts + 24) + (8 * 6 << kernels.RADIX_BITS)
    # Some results wait for their turn while one is in use.
    return threads * one + (2 * threads + 1) * bucket * 4 * (order + 1) + 24 * words


def id_bits(words: int) -> int:
    return max((words - 1).bit_length(), 2)


def counted_keys(
    tokens: _Ids, words: int, order: int, pool: ThreadPoolExecutor, threads: int, bucket: int
) -> Iterator[_Ids]:
    """Counts the distinct n-grams of a block, and sorts them by their reversed words.

    Args     tokens  (T,)  uint32  each sentence from `<s>` to `</s>`
             bucket  n-grams that are sorted at a time
    Returns  arrays of shape (n, order + 1) uint32, one after the other: a row has the words of an
             n-gram, most recent first, with `<s>` beyond the start of its sentence, and its count
    Guarantees  counts depend on the block alone: parts of a text can be counted anywhere and merged
    """
    workplaces = local()
    bits = id_bits(words)

    def count(ends: _Ids, alike: bool) -> _Ids:
        if alike:
            row = np.empty((1, order + 1), np.uint32)
            kernels.key_at(tokens, ends[0], order, row[0])
            row[0, order] = len(ends)
            return row
        n = len(ends)
        if not hasattr(workplaces, "packed"):
            parts = -(-order // (64 // bits))
            workplaces.packed = np.empty(bucket * parts, np.uint64)
            workplaces.sorting = np.empty(bucket * 2, np.uint64)
            workplaces.places = np.empty(bucket * 2, np.uint32)
            workplaces.starts = np.empty(6 << kernels.RADIX_BITS, np.int64)
        rows = np.empty((n, order + 1), np.uint32)
        found = kernels.sort_keys(
            tokens, ends, order, bits, workplaces.packed, workplaces.sorting, workplaces.places,
            workplaces.starts, rows,
        )  # fmt: skip
        return rows[:found]

    buckets = _buckets(tokens, None, 0, words, order, bucket)
    return in_order((pool.submit(count, *one) for one in buckets), 2 * threads - 1)


def _buckets(
    tokens: _Ids, ends: _Ids | None, depth: int, words: int, order: int, bucket: int
) -> Iterator[tuple[_Ids, bool]]:
    """Groups n-grams' end positions, in order; a group above `bucket` has only equal n-grams."""
    counts = np.empty(words, np.int64)
    none = np.empty(0, np.uint32)
    kernels.histogram(tokens, none if ends is None else ends, depth, counts)
    # A word that would fill more than half a bucket gets a group of its own.
    many = counts > bucket // 2
    before = np.cumsum(np.where(many, 0, counts)) - np.where(many, 0, counts)
    group = before // max(bucket // 2, 1)
    begins = np.ones(words, np.bool_)
    begins[1:] = (group[1:] != group[:-1]) | many[1:] | many[:-1]
    bucket_of = (np.cumsum(begins) - 1).astype(np.uint32)
    sizes: NDArray[Any] = np.bincount(bucket_of, weights=counts).astype(np.int64)
    end = np.cumsum(sizes)
    out = np.empty(int(end[-1]), np.uint32)
    kernels.distribute(tokens, none if ends is None else ends, depth, end - sizes, bucket_of, out)
    del counts, many, before, group, begins, bucket_of
    for size, stop in zip(sizes.tolist(), end.tolist(), strict=True):
        if size == 0:
            continue
        part = out[stop - size : stop]
        if size <= bucket:
            yield part, False
        elif depth + 1 == order:
            yield part, True
        else:
            yield from _buckets(tokens, part, depth + 1, words, order, bucket)
