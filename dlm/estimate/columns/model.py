"""A whole model as sorted arrays: what pruning, merging and filtering work on.

model = ModelColumns.read("model.arpa.zst", memory_bytes=4 << 30)
trigrams = model.orders[2]
trigrams.ids, trigrams.log10_prob, trigrams.log10_backoff
model.orders[1].ids[trigrams.prefix]     # their contexts
model.write("out.arpa", comments=[*model.comments, "what was done"])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ArpaError, ConfigError
from dlm.estimate.columns import kernels
from dlm.ngram.arpa import ArpaReader, NgramBatch, write_arpa
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, Vocabulary

_Number = TypeVar("_Number", bound=np.generic)

U32, I64, F32 = np.uint32, np.int64, np.float32

# The row of a suffix that the model lacks.
MISSING = kernels.NO_ROW
# Of one order: a row is a uint32, and one value is `MISSING`.
MOST_NGRAMS = (1 << 32) - 2

Raw = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]

_WORD_BYTES = 300  # a word in the vocabulary, as an object and in its dictionary
_PARSER_BYTES = 64 << 20  # text and arrays of ArpaReader
_LINK_BYTES = 12  # prefix, suffix, first_child


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


@dataclass(frozen=True, eq=False)
class ModelColumns:
    """A whole model; `orders[k - 1]` holds order k, `comments` what stood before it in its file."""

    vocabulary: Vocabulary
    orders: list[OrderColumns]
    comments: list[str] = field(default_factory=list)

    @property
    def order(self) -> int:
        """N."""
        return len(self.orders)

    @property
    def counts(self) -> tuple[int, ...]:
        """N-grams by order, as a header tells them: without word 0 where the model lacks it."""
        first = len(self.orders[0]) - (not self.vocabulary.unk_in_model)
        return (first, *(len(columns) for columns in self.orders[1:]))

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, memory_bytes: int | None = None) -> ModelColumns:
        """The model in an ARPA file, compressed or not.

        Args
            memory_bytes  limit; what `memory_bytes(counts)` says of the header's counts must fit
        Raises
            ConfigError  the limit is too low; nothing was read but the header
            ArpaError    malformed; an n-gram that stands twice, or whose prefix is missing
            OSError      the file cannot be read
        Cost
            time: n-grams of one order are sorted while those of the next are read
            memory: 4k + 20 bytes for an n-gram of order k, and while it is read 4k + 16 more for
            each of the largest order, 300 for a word and 64 MiB: `memory_bytes` has the sum
        """
        with ArpaReader(path) as reader:
            needed = memory_bytes_of(reader.counts)
            if memory_bytes is not None and needed > memory_bytes:
                raise ConfigError(
                    f"{reader.path} holds {sum(reader.counts):,} n-grams, which take {needed:,} "
                    f"bytes, and the limit is {memory_bytes:,}; raise --memory"
                )
            parts: list[NgramBatch] = []
            at = 1
            with _Builder() as builder:
                for batch in reader.batches():
                    while batch.order > at:
                        builder.add(at, parts, len(reader.vocabulary))
                        parts, at = [], at + 1
                    parts.append(batch)
                while at <= reader.order:
                    builder.add(at, parts, len(reader.vocabulary))
                    parts, at = [], at + 1
                try:
                    orders = builder.finish()
                except _Fault as fault:
                    raise _located(reader, fault) from fault
            return cls(reader.vocabulary, orders, list(reader.comments))

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, sections: Sequence[Raw], *, comments: Iterable[str] = ()
    ) -> ModelColumns:
        """A model of n-grams in any order.

        Args
            sections  (ids, log10_prob, log10_backoff) of order 1, 2, ...; not changed
        Raises
            ArpaError   an n-gram stands twice, or its prefix is missing
            ValueError  an id that is no word of the vocabulary
        """
        for ids, _, _ in sections:
            if len(ids) and int(ids.max()) >= len(vocabulary):
                raise ValueError(f"id {int(ids.max())} is none of {len(vocabulary)} words")
        with _Builder() as builder:
            for order, (ids, prob, backoff) in enumerate(sections, 1):
                builder.add(order, [NgramBatch(order, 0, ids, prob, backoff)], len(vocabulary))
            try:
                orders = builder.finish()
            except _Fault as fault:
                ngram = _spelled(vocabulary, fault.ngram)
                raise ArpaError(f"{ngram} {fault.what}", order=len(fault.ngram)) from fault
        return cls(vocabulary, orders, list(comments))

    def rows_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The row of each n-gram, `MISSING` where the model lacks it.

        Shapes
            ids      (n, k)  uint32
        Returns      (n,)    uint32
        Cost         a search in the children of each of its prefixes
        """
        rows = np.where(ids[:, 0] < len(self.orders[0]), ids[:, 0], MISSING).astype(U32)
        for k in range(2, ids.shape[1] + 1):
            found = np.empty(len(ids), U32)
            kernels.find_children(
                rows, ids[:, k - 1], self.orders[k - 2].first_child, self.orders[k - 1].ids, found
            )
            rows = found
        return rows

    def select(self, keep: Sequence[NDArray[np.bool_] | None]) -> ModelColumns:
        """The model of the n-grams that are kept, with the values they have here.

        Args
            keep        by order: (n,) bool, or None for all; of order 1 all are always kept
        Raises
            ValueError  an n-gram is kept whose prefix is not, or not every word is
        """
        orders: list[OrderColumns] = []
        above: NDArray[np.int64] | None = None  # kept rows of the order below before each row
        for k, (columns, kept) in enumerate(zip(self.orders, keep, strict=True), 1):
            before = np.zeros(len(columns) + 1, I64)
            if kept is None:
                before[:] = np.arange(len(columns) + 1)
                kept = np.ones(len(columns), np.bool_)
            else:
                np.cumsum(kept, out=before[1:])
            if k == 1:
                if not kept.all():
                    raise ValueError("every word is kept")
                orders.append(replace(columns))
            else:
                assert above is not None
                prefix, suffix = columns.prefix[kept], columns.suffix[kept]
                there = np.append(np.diff(above), 0).astype(np.bool_)
                if not there[prefix].all():
                    raise ValueError(f"a {k}-gram is kept without its prefix")
                suffix = np.minimum(suffix, len(above) - 1)
                orders.append(
                    OrderColumns(
                        columns.ids[kept],
                        columns.log10_prob[kept],
                        columns.log10_backoff[kept],
                        above[prefix].astype(U32),
                        np.where(there[suffix], above[suffix], MISSING).astype(U32),
                        columns.first_child,
                    )
                )
                orders[k - 2] = replace(
                    orders[k - 2], first_child=_first_children(orders[k - 1].prefix, orders[k - 2])
                )
            above = before
        top = orders[-1]
        orders[-1] = replace(top, first_child=np.zeros(len(top) + 1, U32))
        return ModelColumns(self.vocabulary, orders, self.comments)

    def write(self, path: str | os.PathLike[str], *, comments: Iterable[str] | None = None) -> None:
        """Writes the model as an ARPA file, whole or not at all.

        Args
            path      compressed by its suffix: .gz, .zst, .xz, else plain
            comments  lines before the model; its own if not given
        """
        sections = [(c.ids, c.log10_prob, c.log10_backoff) for c in self.orders[:-1]]
        top = self.orders[-1]
        write_arpa(
            path,
            self.vocabulary,
            [*sections, (top.ids, top.log10_prob, None)],
            comments=self.comments if comments is None else comments,
        )


def memory_bytes(counts: Sequence[int]) -> int:
    """Bytes that a model with these counts takes at most while it is read, its words included."""
    rest = sum((4 * k + 8 + _LINK_BYTES) * count for k, count in enumerate(counts, 1))
    sorting = max((4 * k + 16) * count for k, count in enumerate(counts, 1))
    return rest + sorting + _WORD_BYTES * counts[0] + _PARSER_BYTES


# The name stands for a parameter too.
memory_bytes_of = memory_bytes


class _Fault(Exception):
    """What is wrong with an n-gram, by its place among those given."""

    def __init__(self, ngram: NDArray[np.uint32], row: int, what: str) -> None:
        super().__init__(what)
        self.ngram = ngram
        self.row = row
        self.what = what


class _Builder:
    """Sorts and links orders one after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "columns")
        self._orders: list[OrderColumns] = []
        self._steps: list[Future[None]] = []

    def __enter__(self) -> _Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, order: int, parts: list[NgramBatch], words: int) -> None:
        """Takes the n-grams of the next order; `parts` is emptied."""
        self._steps.append(self._pool.submit(self._add, order, parts, words))

    def finish(self) -> list[OrderColumns]:
        """All orders; raises `_Fault` for the first that is wrong."""
        for step in self._steps:
            step.result()
        return self._orders

    def _add(self, order: int, parts: list[NgramBatch], words: int) -> None:
        if order > len(self._orders) + 1:
            return  # one before it was wrong
        ids = _joined([p.ids for p in parts], np.zeros((0, order), U32))
        prob = _joined([p.log10_prob for p in parts], np.zeros(0, F32))
        backoff = _joined([p.log10_backoff for p in parts], np.zeros(0, F32))
        parts.clear()
        if len(ids) > MOST_NGRAMS:
            raise ConfigError(f"{len(ids)} {order}-grams; {MOST_NGRAMS} is the most")
        if order == 1:
            self._orders.append(_unigrams(ids, prob, backoff, words))
            return
        columns, place = _sorted(ids, prob, backoff, words)
        del ids, prob, backoff
        below = self._orders[-1]
        linked = int(
            kernels.link_prefixes(below.ids, columns.ids, columns.prefix, below.first_child)
        )
        if linked < len(columns):
            row = linked if place is None else int(place[linked])
            raise _Fault(columns.ids[linked], row, "has no prefix among the n-grams one shorter")
        if order == 2:
            np.copyto(columns.suffix, columns.ids[:, 1])
        else:
            kernels.link_suffixes(
                columns.ids,
                below.first_child,
                below.suffix,
                below.ids,
                self._orders[-2].first_child,
                columns.suffix,
                0,
                len(below),
            )
        self._orders.append(columns)


def _joined(parts: list[NDArray[_Number]], empty: NDArray[_Number]) -> NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])


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
    """The n-grams in prefix order, without links, and the places where they were before.

    Raises
        _Fault  an n-gram stands twice
    """
    n, order = ids.shape
    row, twice = kernels.first_unsorted(ids)
    place = None
    if row < n and not twice:
        place = np.arange(n, dtype=U32)
        other = np.empty(n, U32)
        begin = np.empty(words + 1, I64)
        for column in range(order - 1, -1, -1):
            kernels.count_words(ids, column, begin)
            kernels.scatter(ids, column, begin, place, other)
            place, other = other, place
        del other
        ids, prob, backoff = ids[place], prob[place], backoff[place]
        row, twice = kernels.first_unsorted(ids)
    if twice:
        raise _Fault(ids[row], int(row if place is None else place[row]), "stands twice")
    links = np.zeros(n, U32), np.zeros(n, U32), np.zeros(n + 1, U32)
    return OrderColumns(ids, prob, backoff, *links), place


def _first_children(prefix: NDArray[np.uint32], parents: OrderColumns) -> NDArray[np.uint32]:
    """first_child of an order, from the prefixes of the order above it."""
    first = np.zeros(len(parents) + 1, U32)
    np.cumsum(np.bincount(prefix, minlength=len(parents)), out=first[1:], dtype=U32)
    return first


def _spelled(vocabulary: Vocabulary, ngram: NDArray[np.uint32]) -> str:
    text = b" ".join(vocabulary.words[i] for i in ngram).decode("utf-8", "backslashreplace")
    return f"the {len(ngram)}-gram {text!r}"


def _located(reader: ArpaReader, fault: _Fault) -> ArpaError:
    order = len(fault.ngram)
    advice = (
        "Remove one of the two lines"
        if "twice" in fault.what
        else "A model must hold the prefix of each of its n-grams; estimate it again"
    )
    return reader.error_at(
        f"{_spelled(reader.vocabulary, fault.ngram)} {fault.what}",
        order=order,
        row=fault.row,
        advice=advice,
    )
