"""The n-grams of an order with their values, a block at a time, for the writer of ARPA files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.adjust.trie import Trie
from dlm.estimate.interpolate.kernels import as_log10, lengthen
from dlm.ngram.arpa.writer import RowColumns
from dlm.spill.column import Column

ROWS = 1 << 16


def ngram_blocks(
    trie: Trie, order: int, rows: int = ROWS
) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    words = trie.words[order - 1]
    if order == 1:
        for begin in range(0, len(words), rows):
            ids = words.read(begin, min(begin + rows, len(words)))
            yield begin, ids.reshape(len(ids), 1)
        return
    for parent, parents in ngram_blocks(trie, order - 1, rows):
        children = trie.children[order - 2].read(parent, parent + len(parents) + 1)
        last = int(children[-1])
        for begin in range(int(children[0]), last, rows):
            end = min(begin + rows, last)
            out = np.empty((end - begin, order), np.uint32)
            lengthen(parents, children, begin, words.read(begin, end), out)
            yield begin, out


def section_rows(
    trie: Trie, order: int, probs: Column, backoffs: Column | None, rows: int = ROWS
) -> Iterator[Callable[[], RowColumns]]:
    """Yields functions that each read a block of an order's rows; `marks` show which rows to
    leave out. `probs` and `backoffs` are not logarithms."""

    def read(begin: int, ids: NDArray[np.uint32]) -> RowColumns:
        end = begin + len(ids)
        return log10_rows(
            ids,
            probs.read(begin, end),
            None if backoffs is None else backoffs.read(begin, end),
            trie.counts[order - 1].read(begin, end),
        )

    for begin, ids in ngram_blocks(trie, order, rows):
        yield partial(read, begin, ids)


def log10_rows(
    ids: NDArray[np.uint32],
    probs: NDArray[np.float32],
    backoffs: NDArray[np.float32] | None,
    marks: NDArray[np.uint32] | None = None,
) -> RowColumns:
    log10_prob = np.empty(len(ids), np.float32)
    as_log10(probs, log10_prob)
    log10_backoff = None
    if backoffs is not None:
        log10_backoff = np.empty(len(ids), np.float32)
        as_log10(backoffs, log10_backoff)
    return RowColumns(ids, log10_prob, log10_backoff, marks)
