"""All that is stored after a context, so that whoever has the low orders can answer any word.

A *block* holds the words after the last two words of a context, which lie in one shard: their
answers after the whole context, and the weights that every other word is scored with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.index.search import block_kernels as kernels
from dlm.index.search.shard import LowOrders, Shard
from dlm.ngram.query import FULL, PARTIAL, Answers, QueryGroups

# What serving blocks runs, and what scoring with them does; see jit.compile_ahead.
SERVING = (kernels.find_blocks, kernels.words_after)
SCORING = (kernels.sum_backoffs, kernels.score_after, kernels.score_all_after)


@dataclass(frozen=True, slots=True)
class StoredWords:
    """What a shard stores after each of C contexts, or a part of that.

    Shapes
        totals          (C,) uint32   words stored after the last two words of each context
        counts          (C,) uint32   of these, how many stand here
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


def stored_words(
    shard: Shard,
    context_lengths: NDArray[np.uint8],
    context_words: NDArray[np.uint32],
    skips: NDArray[np.uint32],
    most: int,
) -> StoredWords:
    """What the shard stores after each context, but the first `skips` words, `most` in all.

    Shapes
        context_lengths (C,) two or more words each; context_words (sum,); skips (C,)
    Trusts  ids below the vocabulary's size, lengths below the order, contexts owned by this shard
    Cost    the words and their search; of a context that does not fit whole, all its words
    """
    lengths = context_lengths.astype(np.int64)
    nodes = np.empty(len(lengths), np.int64)
    totals = np.empty(len(lengths), np.uint32)
    log10_backoffs = np.empty(int(np.maximum(lengths - 2, 0).sum()), np.float32)
    kernels.find_blocks(shard.view, context_lengths, context_words, nodes, totals, log10_backoffs)
    wanted = np.maximum(totals.astype(np.int64) - skips, 0)
    before = np.cumsum(wanted) - wanted
    counts = np.clip(most - before, 0, wanted)
    last = context_words[np.cumsum(lengths) - 1].tolist()
    found = [np.zeros(0, np.uint32)]
    for c in np.flatnonzero(counts).tolist():
        words = np.empty(int(totals[c]), np.uint32)
        kernels.words_after(shard.view, last[c], int(nodes[c]), words)
        words.sort()
        found.append(words[int(skips[c]) : int(skips[c]) + int(counts[c])])
    words = np.concatenate(found)
    counts = counts.astype(np.uint32)
    answers = shard.score(QueryGroups(context_lengths, context_words, counts, words))
    return StoredWords(totals, counts, log10_backoffs, words, answers)


@dataclass(frozen=True, slots=True)
class Block:
    """One context with all that is stored after it: any word's answer without a shard.

    Shapes
        context         (L,) uint32  most recent word last
        log10_backoffs  (max(L - 2, 0),) float32
        words           (n,) uint32  rising
        answers         to these
        source          FULL; PARTIAL where no shard told: the model reduced to order 2 answers
    """

    low: LowOrders
    context: NDArray[np.uint32]
    sums: NDArray[np.float32]
    words: NDArray[np.uint32]
    answers: Answers
    source: int = FULL

    @classmethod
    def make(
        cls,
        low: LowOrders,
        context: NDArray[np.uint32],
        log10_backoffs: NDArray[np.float32],
        words: NDArray[np.uint32],
        answers: Answers,
    ) -> Block:
        """From what a shard stores."""
        sums = np.empty((1, 2), np.float32)
        lengths = np.array([len(context)], np.uint8)
        kernels.sum_backoffs(low.view, lengths, context, log10_backoffs, sums)
        return cls(low, context, sums[0], words, answers)

    @classmethod
    def low_only(cls, low: LowOrders, context: NDArray[np.uint32], source: int = FULL) -> Block:
        """Of a context after which nothing is stored, or (PARTIAL) nothing is known to be."""
        known = context[-1:] if source == PARTIAL else context
        more = np.zeros(max(len(known) - 2, 0), np.float32)
        none = np.zeros(0, np.uint32)
        made = cls.make(low, known, more, none, Answers.empty(0))
        return cls(low, context, made.sums, none, made.answers, source)

    def score(self, asked: NDArray[np.uint32]) -> Answers:
        """Answers to words, whose ids are below the vocabulary's size."""
        out = Answers.empty(len(asked))
        a = self.answers
        kernels.score_after(
            self.low.view, self._last, self.sums, self.words,
            a.log10_prob, a.matched_order, a.ngram_length, a.state_length,
            asked,
            out.log10_prob, out.matched_order, out.ngram_length, out.state_length,
        )  # fmt: skip
        return self._with_source(out)

    def score_all(self) -> Answers:
        """Answers to all words of the vocabulary, by id."""
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
        return int(self.context[-1]) if len(self.context) else -1

    def _with_source(self, out: Answers) -> Answers:
        if self.source == PARTIAL:
            # What matters to the right is not known without the shard.
            reach = min(len(self.context) + 1, self.low.manifest.order - 1)
            out.state_length[:] = reach
        return out
