"""Queries and answers as arrays: the shape in which they pass from client to kernel and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Queries grouped by context.

    Shapes
        context_lengths  (C,)                    uint8   words of each context
        context_words    (sum(context_lengths),) uint32  word ids, most recent last
        word_counts      (C,)                    uint32  words asked of each context, >= 1
        words            (Q,)                    uint32  Q = sum(word_counts)
    """

    context_lengths: NDArray[np.uint8]
    context_words: NDArray[np.uint32]
    word_counts: NDArray[np.uint32]
    words: NDArray[np.uint32]


# Where an answer comes from: values of `source`. DO NOT CHANGE: callers store them.
FULL, BIGRAM_FALLBACK, LOCAL_FALLBACK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to Q queries, in their order.

    Shapes
        log10_prob     (Q,)  float32
        matched_order  (Q,)  uint8  order of the longest n-gram found
        ngram_length   (Q,)  uint8  the same, counting blanks
        state_length   (Q,)  uint8  words of (context, word) that matter to the right
        source         (Q,)  uint8  FULL, or BIGRAM_FALLBACK where no shard answered; None: all are
                       FULL.
                             All LOCAL_FALLBACK, where the local fallback replaces the servers
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
        """Room for `queries` answers, not filled."""
        return cls(
            np.empty(queries, np.float32),
            np.empty(queries, np.uint8),
            np.empty(queries, np.uint8),
            np.empty(queries, np.uint8),
        )


@dataclass(frozen=True, slots=True)
class StoredWords:
    """What is stored after each of C contexts of two words or more, or a part of that.

    Shapes
        totals          (C,) uint32   words stored after the last two words of each context
        counts          (C,) uint32   of these, how many are here
        log10_backoffs  (sum(context_lengths - 2),) float32  of each context, the weights of its
                        last three words, four, ..., all
        words           (sum(counts),) uint32  rising in each context
        answers         to these, each after its whole context
    """

    totals: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    log10_backoffs: NDArray[np.float32]
    words: NDArray[np.uint32]
    answers: Answers
