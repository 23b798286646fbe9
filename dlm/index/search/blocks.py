"""Holds all that is stored after a context; with the low orders, a client can then score any word.

A *block* holds the words after the last two words of a context, all from one shard: their answers
after the whole context, and the weights for scoring every other word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ProtocolError
from dlm.index.search import block_kernels as kernels
from dlm.index.search.shard import LowOrders
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, Answers

# The kernels that score with blocks; see jit.compile_ahead.
KERNELS = (
    kernels.sum_backoffs,
    kernels.complete_after,
    kernels.find_stored,
    kernels.words_of_ranks,
    kernels.score_after,
    kernels.score_one_after,
    kernels.score_all_after,
)


@dataclass(frozen=True, slots=True)
class ContextBlock:
    """One context with everything stored after it: enough to score any word without a shard.

    context         (L,)  most recent word last
    sums            (2,)  see `block_kernels.sum_backoffs`
    words           (n,)  ascending, and the `answers` to them
    source          FULL; BIGRAM_FALLBACK if the model reduced to order 2 answered, not a shard
    """

    low: LowOrders
    context: NDArray[np.uint32]
    sums: NDArray[np.float32]
    words: NDArray[np.uint32]
    answers: Answers
    source: int = FULL
    words_before: tuple[int, ...] = field(init=False)  # the context's ids as Python ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "words_before", tuple(self.context.tolist()))

    @classmethod
    def make(
        cls,
        low: LowOrders,
        context: NDArray[np.uint32],
        log10_backoffs: NDArray[np.float32],
        ranks: NDArray[np.uint32],
        answers: Answers,
    ) -> ContextBlock:
        """Makes the block of one context; the last three arguments are as in `StoredWords`.
        Raises ProtocolError if a rank belongs to no word, or the ranks do not ascend.
        """
        last = int(context[-1]) if len(context) else -1
        words = np.empty(len(ranks), np.uint32)
        if last >= 0 and not kernels.words_of_ranks(low.view, last, ranks, words):
            raise ProtocolError(
                f"a server sent {len(ranks)} ranks for the words after word id {last}; expected "
                "ascending ranks, less than the number of those words. Restart the server with "
                "the files of its manifest"
            )
        place = np.argsort(words)
        words, a = words[place], answers
        columns = (a.log10_prob, a.matched_order, a.ngram_length, a.state_length)
        made = Answers(*(column[place] for column in columns))  # type: ignore[arg-type]
        sums = np.empty((1, 2), np.float32)
        lengths = np.array([len(context)], np.uint8)
        kernels.sum_backoffs(low.view, lengths, context, log10_backoffs, sums)
        kernels.complete_after(
            low.view, last, sums[0], words,
            made.log10_prob, made.matched_order, made.ngram_length, made.state_length,
        )  # fmt: skip
        return cls(low, context, sums[0], words, made)

    @classmethod
    def low_only(
        cls, low: LowOrders, context: NDArray[np.uint32], source: int = FULL
    ) -> ContextBlock:
        """Makes a block without stored words: none exist or (BIGRAM_FALLBACK) no shard answered."""
        known = context[-1:] if source == BIGRAM_FALLBACK else context
        more = np.zeros(max(len(known) - 1, 0), np.float32)
        none = np.zeros(0, np.uint32)
        made = cls.make(low, known, more, none, Answers.empty(0))
        return cls(low, context, made.sums, none, made.answers, source)

    def score(self, asked: NDArray[np.uint32]) -> Answers:
        """Returns the answers to words; trusts that ids are below the vocabulary's size."""
        out = Answers.empty(len(asked))
        a = self.answers
        kernels.score_after(
            self.low.view, self._last, self.sums, self.words,
            a.log10_prob, a.matched_order, a.ngram_length, a.state_length,
            asked,
            out.log10_prob, out.matched_order, out.ngram_length, out.state_length,
        )  # fmt: skip
        return self._with_source(out)

    def score_word(self, word: int) -> tuple[float, int]:
        a = self.answers
        log10_prob, length = kernels.score_one_after(
            self.low.view, self._last, self.sums, self.words, a.log10_prob, a.state_length, word
        )
        return float(log10_prob), length if self.source != BIGRAM_FALLBACK else self._reach

    def score_all(self) -> Answers:
        out = Answers.empty(self.low.manifest.vocabulary_size)
        a = self.answers
        kernels.score_all_after(
            self.low.view, self._last, self.sums, self.words,
            a.log10_prob, a.matched_order, a.ngram_length, a.state_length,
            out.log10_prob, out.matched_order, out.ngram_length, out.state_length,
        )  # fmt: skip
        return self._with_source(out)

    @property
    def _last(self) -> int:
        return self.words_before[-1] if self.words_before else -1

    def _with_source(self, out: Answers) -> Answers:
        if self.source == BIGRAM_FALLBACK:
            out.state_length[:] = self._reach
        return out

    @property
    def _reach(self) -> int:
        """The state length if the shard, which knows what later words need, gave no answer."""
        return min(len(self.context) + 1, self.low.manifest.order - 1)
