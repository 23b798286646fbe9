"""Sorts and links the n-grams of each order, in memory or through sorted runs on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import kernels
from dlm.files import scratch_folder
from dlm.kenlm.reader import NgramReader
from dlm.ngram.arpa import NgramBatch, by_order, joined
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB
from dlm.spill.arrays import Storage
from dlm.spill.sorter import Sorter

U32, I64, F32 = np.uint32, np.int64, np.float32

# The row of a suffix that the model lacks.
MISSING = kernels.NO_ROW
# Maximum n-grams of an order: a row is a uint32, and one value is `MISSING`.
MOST_NGRAMS = (1 << 32) - 2

WORD_BYTES = 300  # bytes per word of the vocabulary, as an object and in a dictionary
PARSER_BYTES = 64 << 20  # bytes for text and arrays in ArpaReader
_LINK_BYTES = 12  # bytes of prefix, suffix and first_child
_SPILLED_ROWS = 1 << 16
_LINK_THREADS = 2
_LINK_PARTS = 16


@dataclass(frozen=True, eq=False)
class OrderColumns:
    """The n-grams of one order, in prefix order: by the oldest word, then the next, and so on.

    Row i of order 1 is word i, whether the model has an n-gram for word 0 or not.

    Shapes, k the order, n rows, m rows of order k - 1
        ids            (n, k)    uint32   word ids, oldest first
        log10_prob     (n,)      float32  <= 0, -inf is possible
        log10_backoff  (n,)      float32  finite; 0 at the highest order
        prefix         (n,)      uint32   row of all but the last word, in order k - 1; rising.
                                          0 at order 1
        suffix         (n,)      uint32   row of all but the first word, in order k - 1; `MISSING`
                                          where the model lacks it. 0 at order 1
        first_child    (n + 1,)  uint32   rows of order k + 1 that extend row i are
                                          first_child[i]:first_child[i + 1], their last words rising
    """

    ids: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]
    prefix: NDArray[np.uint32]
    suffix: NDArray[np.uint32]
    first_child: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.ids)


def memory_bytes(counts: Sequence[int]) -> int:
    """Returns the peak memory for reading a model with `counts`, including its words."""
    rest = sum((4 * k + 8 + _LINK_BYTES) * count for k, count in enumerate(counts, 1))
    sorting = max((4 * k + 16) * count for k, count in enumerate(counts, 1))
    return rest + sorting + WORD_BYTES * counts[0] + PARSER_BYTES


class InvalidNgram(Exception):
    """Names a faulty n-gram, and its row among the n-grams that were given."""

    def __init__(self, ngram: NDArray[np.uint32], row: int, what: str) -> None:
        super().__init__(what)
        self.ngram = ngram
        self.row = row
        self.what = what


class Builder:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "columns")
        self._orders: list[OrderColumns] = []
        self._steps: list[Future[None]] = []

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, order: int, parts: list[NgramBatch], words: int) -> None:
        """Adds the n-grams of the next order; `parts` is emptied."""
        self._steps.append(self._pool.submit(self._add, order, parts, words))

    def finish(self) -> list[OrderColumns]:
        """Returns all orders; raises `InvalidNgram` for the first faulty n-gram."""
        for step in self._steps:
            step.result()
        return self._orders

    def _add(self, order: int, parts: list[NgramBatch], words: int) -> None:
        if order > len(self._orders) + 1:
            return  # an earlier n-gram has a fault
        ids, prob, backoff = joined(parts, order)
        parts.clear()
        if len(ids) > MOST_NGRAMS:
            raise ConfigError(
                f"the model has {len(ids)} {order}-grams; expected at most {MOST_NGRAMS}. Give a "
                "smaller model"
            )
        if order == 1:
            self._orders.append(_unigrams(ids, prob, backoff, words))
            return
        columns, place = _sorted(ids, prob, backoff, words)
        del ids, prob, backoff
        link(self._orders, columns, place)
        self._orders.append(columns)


def link(
    shorter: Sequence[OrderColumns], columns: OrderColumns, place: NDArray[np.uint32] | None = None
) -> None:
    """Fills in the links of `columns` to the orders below, and first_child of the order just below;
    InvalidNgram if a prefix is missing."""
    below = shorter[-1]
    linked = int(kernels.link_prefixes(below.ids, columns.ids, columns.prefix, below.first_child))
    if linked < len(columns):
        row = linked if place is None else int(place[linked])
        raise InvalidNgram(
            columns.ids[linked], row, "has no prefix among the n-grams of the next lower order"
        )
    if len(shorter) == 1:
        np.copyto(columns.suffix, columns.ids[:, 1])
        return
    # `marks` has the type of the searched array, which would otherwise be copied.
    marks = np.linspace(0, len(columns), _LINK_PARTS + 1)[1:-1].astype(U32)
    bounds = [0, *np.searchsorted(below.first_child, marks).tolist(), len(below)]

    def run(begin: int, end: int) -> None:
        kernels.link_suffixes(
            columns.ids,
            below.first_child,
            below.suffix,
            below.ids,
            shorter[-2].first_child,
            columns.suffix,
            begin,
            end,
        )

    with ThreadPoolExecutor(_LINK_THREADS, "links") as pool:
        list(pool.map(run, bounds[:-1], bounds[1:]))


def read_spilled(reader: NgramReader, storage: Storage, sort_bytes: int) -> list[OrderColumns]:
    """Reads all orders of a file and sorts them on disk; their arrays are maps of files. Raises
    InvalidNgram as `Builder.finish` does, but with row -1, since sorting has lost the row."""
    orders: list[OrderColumns] = []
    with scratch_folder(storage.folder, "dlm-sort") as folder:
        for k, some in enumerate(by_order(reader.batches(), reader.order), 1):
            if k == 1:
                orders.append(_unigrams(*joined(list(some), 1), len(reader.vocabulary)))
                continue
            with Sorter(folder, k + 2, k, sort_bytes, name=f"order_{k}") as sorter:
                orders.append(_sorted_on_disk(orders, some, sorter, storage))
    return orders


def _sorted_on_disk(
    orders: Sequence[OrderColumns],
    batches: Iterable[NgramBatch],
    sorter: Sorter,
    storage: Storage,
) -> OrderColumns:
    k = len(orders) + 1
    for batch in batches:
        values = batch.log10_prob.view(U32), batch.log10_backoff.view(U32)
        sorter.add(np.column_stack([batch.ids, *values]))
    runs = sorter.finish()
    if runs.rows > MOST_NGRAMS:
        raise ConfigError(
            f"the model has {runs.rows} {k}-grams; expected at most {MOST_NGRAMS}. Give a smaller "
            "model"
        )
    columns = new_order(runs.rows, k, storage)
    at = 0
    with runs:
        for block in runs.blocks(_SPILLED_ROWS):
            here = slice(at, at + len(block))
            columns.ids[here] = block[:, :k]
            columns.log10_prob[here] = block[:, k].copy().view(F32)
            columns.log10_backoff[here] = block[:, k + 1].copy().view(F32)
            at += len(block)
    runs.remove()
    row, twice = kernels.first_unsorted(columns.ids)
    if twice:
        raise InvalidNgram(columns.ids[row], -1, "is listed twice")
    link(orders, columns)
    return columns


def new_order(rows: int, order: int, storage: Storage) -> OrderColumns:
    """Makes arrays for `rows` n-grams; only first_child is set: all 0, as no row has children."""
    first_child = storage.empty(rows + 1, U32)
    first_child[:] = 0
    return OrderColumns(
        storage.empty((rows, order), U32),
        storage.empty(rows, F32),
        storage.empty(rows, F32),
        storage.empty(rows, U32),
        storage.empty(rows, U32),
        first_child,
    )


def _unigrams(
    ids: NDArray[np.uint32],
    prob: NDArray[np.float32],
    backoff: NDArray[np.float32],
    words: int,
) -> OrderColumns:
    word = ids[:, 0]
    log10_prob, log10_backoff = np.full(words, MISSING_UNK_LOG10_PROB, F32), np.zeros(words, F32)
    log10_prob[word], log10_backoff[word] = prob, backoff
    return OrderColumns(
        np.arange(words, dtype=U32)[:, None],
        log10_prob,
        log10_backoff,
        np.zeros(words, U32),
        np.zeros(words, U32),
        np.zeros(words + 1, U32),
    )


def _sorted(
    ids: NDArray[np.uint32],
    prob: NDArray[np.float32],
    backoff: NDArray[np.float32],
    words: int,
) -> tuple[OrderColumns, NDArray[np.uint32] | None]:
    """Returns the n-grams in prefix order, without links, and the rows that they had in the input;
    InvalidNgram for a repeated n-gram."""
    n, order = ids.shape
    row, twice = kernels.first_unsorted(ids)
    place = None
    if row < n and not twice:
        place = np.arange(n, dtype=U32)
        other = np.empty(n, U32)
        begin = np.empty(words + 1, I64)
        for column in range(order - 1, -1, -1):
            rising = kernels.count_words(ids, column, begin)
            if rising and column == order - 1:
                continue  # most files sort n-grams by the last word first
            kernels.scatter(ids, column, begin, place, other)
            place, other = other, place
        del other
        moved = np.empty_like(ids), np.empty_like(prob), np.empty_like(backoff)
        kernels.permute(place, ids, prob, backoff, *moved)
        ids, prob, backoff = moved
        row, twice = kernels.first_unsorted(ids)
    if twice:
        raise InvalidNgram(ids[row], int(row if place is None else place[row]), "is listed twice")
    links = np.zeros(n, U32), np.zeros(n, U32), np.zeros(n + 1, U32)
    return OrderColumns(ids, prob, backoff, *links), place
