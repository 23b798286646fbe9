"""An n-gram model as hash tables: the baseline for the suffix tree in the DLM paper (4.2.3).

One table holds probabilities, another back-off weights, both with the whole n-gram as the key;
1-grams are arrays by word id. A back-off searches the tables again for every suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.errors import FormatError
from dlm.files import replacing
from dlm.index.check.decode import decode
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB
from loadtest.baselines import kernels as kernels

FULLNESS = 1.5  # places in a table per n-gram

Order = tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Ngrams:
    """A model's n-grams.

    orders  by order: rows (n, order), oldest word first; log10 probability and log10 weight (n,),
            where weight 0 means none
    """

    vocabulary_size: int
    orders: Sequence[Order]

    @classmethod
    def of(cls, shard_set: Path) -> Ngrams:
        found = decode(shard_set)
        return cls(found.manifest.vocabulary_size, found.orders)

    def write(self, path: Path) -> None:
        named = {
            f"{name}{n}": array
            for n, order in enumerate(self.orders, 1)
            for name, array in zip(("rows", "probs", "weights"), order, strict=True)
        }
        with replacing(path) as out:
            np.savez(out, vocabulary_size=self.vocabulary_size, **named)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> Ngrams:
        with np.load(path) as file:
            count = sum(name.startswith("rows") for name in file.files)
            orders = [
                (file[f"rows{n}"], file[f"probs{n}"], file[f"weights{n}"])
                for n in range(1, count + 1)
            ]
            return cls(int(file["vocabulary_size"]), orders)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(rows) for rows, _, _ in self.orders)

    def upto(self, order: int) -> Ngrams:
        return Ngrams(self.vocabulary_size, self.orders[:order])

    def stored_pairs(self) -> NDArray[np.uint32]:
        """The pairs (n, 2) after which longer n-grams are stored; clients mark them (DLM 3.1)."""
        found = [np.empty((0, 2), np.uint32), *(r[w != 0] for r, _, w in self.orders[1:2])]
        for rows, _, weights in self.orders[2:]:
            found += [rows[:, -3:-1], rows[weights != 0][:, -2:]]
        pairs = np.ascontiguousarray(np.concatenate(found))
        return np.unique(pairs.view(np.uint64)).view(np.uint32).reshape(-1, 2)


class HashIndex:
    """Hash tables of all n-grams, or of those that `probs` and `weights` select in each order."""

    def __init__(
        self,
        ngrams: Ngrams,
        probs: Sequence[NDArray[np.bool_]] | None = None,
        weights: Sequence[NDArray[np.bool_]] | None = None,
    ) -> None:
        self.order = len(ngrams.orders)
        size = ngrams.vocabulary_size
        unigrams = np.full(size, MISSING_UNK_LOG10_PROB, np.float32)
        unigram_weights = np.zeros(size, np.float32)
        rows, values, backoffs = ngrams.orders[0]
        unigrams[rows[:, 0]], unigram_weights[rows[:, 0]] = values, backoffs
        of_probs, of_weights = [], []
        for n, (rows, values, backoffs) in enumerate(ngrams.orders[1:], 1):
            kept = np.ones(len(rows), np.bool_) if probs is None else probs[n]
            of_probs.append((rows[kept], values[kept]))
            kept = backoffs != 0 if weights is None else weights[n] & (backoffs != 0)
            of_weights.append((rows[kept], backoffs[kept]))
        self.tables = (*_table(of_probs), *_table(of_weights), unigrams, unigram_weights)

    @property
    def bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def records(self) -> tuple[int, int]:
        """The number of probabilities and weights in the tables, without 1-grams."""
        return int(np.count_nonzero(self.tables[0])), int(np.count_nonzero(self.tables[2]))

    def answer(self, mode: int, groups: QueryGroups) -> tuple[Answers, int]:
        found = Answers.empty(len(groups.words))
        found.ngram_length[:] = 0
        found.state_length[:] = 0
        searches = kernels.answer(
            mode,
            *self.tables,
            groups.context_lengths,
            groups.context_words,
            groups.word_counts,
            groups.words,
            found.log10_prob,
            found.matched_order,
        )
        return found, int(searches)

    def score(
        self,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        words: NDArray[np.uint32],
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8], int]:
        """Runs Algorithm 1 for each context (Q, width), with its length (Q,) and word (Q,); returns
        log10 P, matched orders and the total number of searches."""
        out, orders = np.empty(len(words), np.float32), np.empty(len(words), np.uint8)
        searches = kernels.score(*self.tables, contexts, lengths, words, out, orders)
        return out, orders, int(searches)


def pair_table(pairs: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Returns the keys of pairs; never empty, so that "no pair" differs from "pairs unknown"."""
    return _table([(pairs, np.zeros(len(pairs), np.float32))])[0]


def _table(
    parts: Sequence[tuple[NDArray[np.uint32], NDArray[np.float32]]],
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    size = int(FULLNESS * sum(len(rows) for rows, _ in parts)) + 2
    keys, values = np.zeros(size, np.uint64), np.zeros(size, np.float32)
    for rows, given in parts:
        if not kernels.fill(keys, values, np.ascontiguousarray(rows), np.ascontiguousarray(given)):
            raise FormatError(
                "two n-grams of this model have the same 64-bit key; use another model"
            )
    return keys, values
