"""The n-grams of an order as text, a block at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.adjust.trie import Trie
from dlm.estimate.interpolate.kernels import as_log10, lengthen
from dlm.estimate.store import Column
from dlm.ngram.text import kernels
from dlm.ngram.wordtable import WordTable

ROWS = 1 << 16


def ngram_blocks(
    trie: Trie, order: int, rows: int = ROWS
) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """The n-grams of an order, from the first to the last.

    Returns
        (rank of the first, ids (n, order) uint32, oldest word first), n <= rows
    """
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


def section_text(
    trie: Trie,
    order: int,
    probs: Column,
    backoffs: Column | None,
    table: WordTable,
    pool: ThreadPoolExecutor,
    threads: int,
    rows: int = ROWS,
) -> Iterator[memoryview]:
    """The rows of an order's section, in order; n-grams that are left out are passed over.

    Shapes   probs, backoffs  float32, not logarithms
    """
    none = np.empty(0, np.float32)

    def text(begin: int, ids: NDArray[np.uint32]) -> list[memoryview]:
        end = begin + len(ids)
        log10_prob = np.empty(len(ids), np.float32)
        as_log10(probs.read(begin, end), log10_prob)
        log10_backoff = none
        if backoffs is not None:
            log10_backoff = np.empty(len(ids), np.float32)
            as_log10(backoffs.read(begin, end), log10_backoff)
        marks = trie.counts[order - 1].read(begin, end)
        done, out = 0, []
        size = 24 * len(ids) * (1 + order // 2) + (1 << 12)
        while done < len(ids):
            room = np.empty(size, np.uint8)
            done_before = done
            done, used = kernels.put_rows(
                ids,
                log10_prob,
                log10_backoff,
                marks,
                done,
                table.word_begin,
                table.word_bytes,
                room,
            )
            if used:
                out.append(room.data[:used])
            if done == done_before:
                size *= 2  # not even one row fitted
        return out

    waiting: deque[Future[list[memoryview]]] = deque()
    for begin, ids in ngram_blocks(trie, order, rows):
        waiting.append(pool.submit(text, begin, ids))
        if len(waiting) > 2 * threads:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()
