"""A whole model as sorted arrays, used for pruning, merging and filtering."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ArpaError, ConfigError, KenlmFormatError
from dlm.estimate.columns import kernels, orders
from dlm.estimate.columns.orders import MISSING, Builder, InvalidNgram, OrderColumns, new_order
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.reader import NgramReader
from dlm.ngram.arpa import NgramBatch, SectionColumns, by_order, write_arpa
from dlm.ngram.vocab import Vocabulary
from dlm.progress import Tell
from dlm.spill.arrays import IN_MEMORY, Storage

U32 = np.uint32

Raw = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]

_SCORED_AT_ONCE = 1 << 18
# Memory for sorting, if arrays are in files.
SORT_BYTES = 128 << 20


@dataclass(frozen=True, eq=False)
class ModelColumns:
    """A whole model. `orders[k - 1]` is order k, `comments` are the lines before the model in its
    file, and `storage` has the model's arrays and those derived from them."""

    vocabulary: Vocabulary
    orders: list[OrderColumns]
    comments: list[str] = field(default_factory=list)
    storage: Storage = IN_MEMORY

    @property
    def order(self) -> int:
        return len(self.orders)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of n-grams by order, as in a header: without word 0 if the model lacks it."""
        first = len(self.orders[0]) - (not self.vocabulary.unk_in_model)
        return (first, *(len(columns) for columns in self.orders[1:]))

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        memory_bytes: int | None = None,
        needs: Callable[[Sequence[int]], int] | None = None,
        storage: Storage = IN_MEMORY,
        search_bytes: int | None = None,
        progress: Tell = lambda line: None,
    ) -> ModelColumns:
        """Reads a model from an ARPA file, compressed or not, or from a KenLM binary file.

        Args
            memory_bytes  limit for `needs(counts)`, by default the memory that reading takes
            storage       with a folder, n-grams are sorted on disk and their arrays are maps of
                          files there; the system then decides what is in memory
        Raises
            ConfigError   the limit is too low; nothing was read but the header
            ArpaError, KenlmFormatError  malformed; an n-gram that is repeated, or whose prefix is
                          missing
        Cost
            memory: 4k + 20 bytes per n-gram of order k; during reading, 4k + 16 more per
            n-gram of the largest order, 300 per word and 64 MiB: `orders.memory_bytes` adds this up
        """
        with open_ngrams(
            path, memory_bytes=search_bytes, folder=storage.folder, progress=progress
        ) as reader:
            needed = (needs or orders.memory_bytes)(reader.counts)
            if memory_bytes is not None and needed > memory_bytes:
                raise ConfigError(
                    f"{reader.path} has {sum(reader.counts):,} n-grams, which need {needed:,} "
                    f"bytes of memory, but the limit is {memory_bytes:,}; raise --memory"
                )
            try:
                if storage.folder is None:
                    columns = _read(reader)
                else:
                    columns = orders.read_spilled(reader, storage, SORT_BYTES)
            except InvalidNgram as fault:
                raise _located(reader, fault) from fault
            return cls(reader.vocabulary, columns, list(reader.comments), storage)

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, sections: Sequence[Raw], *, comments: Iterable[str] = ()
    ) -> ModelColumns:
        """Makes a model from unsorted sections, (ids, log10_prob, log10_backoff) of order 1, 2, ...
        Raises ArpaError for a repeated n-gram or missing prefix, ValueError for an id outside the
        vocabulary."""
        for ids, _, _ in sections:
            if len(ids) and int(ids.max()) >= len(vocabulary):
                raise ValueError(
                    f"id {int(ids.max())} is outside the vocabulary of {len(vocabulary)} words"
                )
        with Builder() as builder:
            for order, (ids, prob, backoff) in enumerate(sections, 1):
                builder.add(order, [NgramBatch(order, 0, ids, prob, backoff)], len(vocabulary))
            try:
                columns = builder.finish()
            except InvalidNgram as fault:
                ngram = _spelled(vocabulary, fault.ngram)
                raise ArpaError(f"{ngram} {fault.what}", order=len(fault.ngram)) from fault
        return cls(vocabulary, columns, list(comments))

    def rows_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Returns the rows (n,) of the n-grams `ids` (n, k), with `MISSING` for unknown n-grams."""
        rows = np.where(ids[:, 0] < len(self.orders[0]), ids[:, 0], MISSING).astype(U32)
        for k in range(2, ids.shape[1] + 1):
            found = np.empty(len(ids), U32)
            kernels.find_children(
                rows,
                np.ascontiguousarray(ids[:, k - 1]),
                self.orders[k - 2].first_child,
                self.orders[k - 1].ids,
                found,
            )
            rows = found
        return rows

    def log10_probs(
        self,
        ids: NDArray[np.uint32],
        probs: Sequence[NDArray[Any]] | None = None,
        weights: Sequence[NDArray[np.float32]] | None = None,
    ) -> NDArray[np.float64]:
        """Returns log10 P of the last word of each row after the row's other words, by backing off:
        (n,) float64.

        Args        ids      (n, k)  uint32   oldest first; only the last N words matter
                    probs    by order, instead of each log10_prob; orders above k may be missing
                    weights  by order, instead of each log10_backoff
        Guarantees  the scores of `ngram.backoff.score`, but with sums in float64
        """
        probs = [c.log10_prob for c in self.orders] if probs is None else probs
        weights = [c.log10_backoff for c in self.orders] if weights is None else weights
        out = np.empty(len(ids), np.float64)
        for begin in range(0, len(ids), _SCORED_AT_ONCE):
            some = slice(begin, begin + _SCORED_AT_ONCE)
            self._back_off(ids[some, -self.order :], probs, weights, out[some])
        return out

    def _back_off(
        self,
        ids: NDArray[np.uint32],
        probs: Sequence[NDArray[Any]],
        weights: Sequence[NDArray[np.float32]],
        out: NDArray[np.float64],
    ) -> None:
        out[:] = 0
        left = np.arange(len(ids))
        for length in range(ids.shape[1], 0, -1):
            if length == 1:
                out[left] += probs[0][ids[left, -1]]
                return
            tails = ids[left, ids.shape[1] - length :]
            contexts = self.rows_of(tails[:, :-1])
            rows = np.empty(len(left), U32)
            kernels.find_children(
                contexts,
                np.ascontiguousarray(tails[:, -1]),
                self.orders[length - 2].first_child,
                self.orders[length - 1].ids,
                rows,
            )
            found = rows != MISSING
            out[left[found]] += probs[length - 1][rows[found]]
            known = ~found & (contexts != MISSING)
            out[left[known]] += weights[length - 2][contexts[known]]
            left = left[~found]

    def select(self, keep: Sequence[NDArray[np.bool_] | None]) -> ModelColumns:
        """Returns the model of the kept n-grams, with their values. `keep` has (n,) bool for each
        order, or None to keep all n-grams of the order; ValueError if it keeps an n-gram without
        its prefix, or leaves out a word."""
        if keep[0] is not None and not keep[0].all():
            raise ValueError("the argument keep leaves out a word; it must keep every word")
        chosen = [replace(self.orders[0])]
        below: NDArray[np.uint32] | None = None  # kept rows of the next lower order; None for all
        for k, (columns, kept) in enumerate(zip(self.orders[1:], keep[1:], strict=True), 2):
            if kept is None:
                kept = self.storage.empty(len(columns), np.bool_)
                kept[:] = True
            if below is None:
                below = np.arange(len(self.orders[0]) + 1, dtype=U32)
            before = self.storage.empty(len(columns) + 1, U32)
            kernels.places_of(kept, before)
            taken = new_order(int(before[-1]), k, self.storage)
            kernels.take_rows(columns.ids, kept, taken.ids)
            kernels.take_values(columns.log10_prob, kept, taken.log10_prob)
            kernels.take_values(columns.log10_backoff, kept, taken.log10_backoff)
            kernels.take_links(columns.prefix, kept, below, taken.prefix)
            kernels.take_links(columns.suffix, kept, below, taken.suffix)
            if len(taken) and taken.prefix.max() == MISSING:
                raise ValueError(f"the argument keep has a {k}-gram but not its prefix; add it")
            first_child = self.storage.empty(len(chosen[-1]) + 1, U32)
            kernels.count_children(taken.prefix, first_child)
            chosen[-1] = replace(chosen[-1], first_child=first_child)
            chosen.append(taken)
            below = before
        if len(chosen) == 1:
            chosen[0] = replace(chosen[0], first_child=np.zeros(len(chosen[0]) + 1, U32))
        return ModelColumns(self.vocabulary, chosen, self.comments, self.storage)

    def write(self, path: str | os.PathLike[str], *, comments: Iterable[str] | None = None) -> None:
        """Writes an ARPA file, compressed according to its suffix, completely or not at all. The
        comments are the model's if `comments` is None."""
        comments = self.comments if comments is None else comments
        write_arpa(path, self.vocabulary, self.sections(), comments=comments)

    def sections(self) -> list[SectionColumns]:
        *shorter, top = self.orders
        below = [(c.ids, c.log10_prob, c.log10_backoff) for c in shorter]
        return [*below, (top.ids, top.log10_prob, None)]


def _read(reader: NgramReader) -> list[OrderColumns]:
    with Builder() as builder:
        for k, some in enumerate(by_order(reader.batches(), reader.order), 1):
            builder.add(k, list(some), len(reader.vocabulary))
        return builder.finish()


def _spelled(vocabulary: Vocabulary, ngram: NDArray[np.uint32]) -> str:
    text = b" ".join(vocabulary.words[i] for i in ngram).decode("utf-8", "backslashreplace")
    return f"the {len(ngram)}-gram {text!r}"


def _located(reader: NgramReader, fault: InvalidNgram) -> ArpaError | KenlmFormatError:
    order = len(fault.ngram)
    advice = (
        "Remove one of the two lines"
        if "twice" in fault.what
        else "A model must contain the prefix of each of its n-grams; estimate it again"
    )
    if fault.row < 0:
        text = f"{_spelled(reader.vocabulary, fault.ngram)} {fault.what}"
        return ArpaError(text, path=reader.path, order=order, advice=advice)
    return reader.error_at(
        f"{_spelled(reader.vocabulary, fault.ngram)} {fault.what}",
        order=order,
        row=fault.row,
        advice=advice,
    )
