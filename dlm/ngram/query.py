"""Queries and answers as arrays, as they pass from client to kernel and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Queries grouped by context.

    Shapes  context_lengths  (C,)                     words of each context
            context_words    (sum(context_lengths),)  word ids, most recent last
            word_counts      (C,)                     words queried for each context, >= 1
            words            (Q,)                     Q = sum(word_counts)
            pairs            (C,)  for a shard, which has no low orders: the number of the 2-gram
                of each context's last two words. With `pairs`, `words` has ranks: places among the
                words that follow the last word of the context, or NO_RANK
    """

    context_lengths: NDArray[np.uint8]
    context_words: NDArray[np.uint32]
    word_counts: NDArray[np.uint32]
    words: NDArray[np.uint32]
    pairs: NDArray[np.uint32] | None = None


# The origin of an answer: values of `source`. DO NOT CHANGE: callers store them.
FULL, BIGRAM_FALLBACK, LOCAL_FALLBACK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to Q queries, in their order; each array is (Q,).

    matched_order  order of the longest n-gram found;  ngram_length  the same, but counting blanks
    state_length   words of (context, word) that affect later words
    source         FULL; BIGRAM_FALLBACK where no shard answered; LOCAL_FALLBACK everywhere if the
                   local fallback replaces the servers. None means that all are FULL
    """

    log10_prob: NDArray[np.float32]
    matched_order: NDArray[np.uint8]
    ngram_length: NDArray[np.uint8]
    state_length: NDArray[np.uint8]
    source: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.log10_prob)

    @classmethod
    def empty(cls, queries: int) -> Answers:
        return cls(
            np.empty(queries, np.float32),
            np.empty(queries, np.uint8),
            np.empty(queries, np.uint8),
            np.empty(queries, np.uint8),
        )


@dataclass(frozen=True, slots=True)
class StoredWords:
    """Some or all of the words stored after each of C contexts of two words or more.

    Shapes  totals  (C,)  number of words stored after the last two words of each context
            counts  (C,)  how many of those words are listed
            log10_backoffs  (sum(context_lengths - 1),)  each context's back-off weights: of its
                    last two words, its last three, ..., all its words
            ranks   (sum(counts),)  as in `QueryGroups`, rising in each context; `answers` has
                    these words' scores after the whole context, without the low orders
    """

    totals: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    log10_backoffs: NDArray[np.float32]
    ranks: NDArray[np.uint32]
    answers: Answers
