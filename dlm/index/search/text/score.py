"""Scores sentences of text by a whole model in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.index.search.shard import LowOrders
from dlm.index.search.text import kernels, line_kernels
from dlm.kenlm.model import KenlmFile
from dlm.kenlm.score_kernels import sum_sentences as sum_as_kenlm
from dlm.ngram import kernels as reading
from dlm.ngram.digit_kernels import FIXED_LIMIT
from dlm.ngram.query import Answers
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import WordTable


class WholeModel(Protocol):
    @property
    def order(self) -> int:
        """The model's order, N."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's words."""

    @property
    def word_table(self) -> WordTable:
        """The table that finds the ids of many words at once."""

    @property
    def low(self) -> LowOrders:
        """The model's 1- and 2-grams."""

    @property
    def trees(self) -> NDArray[np.int64]:
        """(shards,) addresses of the views of all shards."""

    @property
    def slots(self) -> NDArray[np.uint16]:
        """(4096,) the shard of each slot."""


# The kernels that score text in one process, used after shard.OPENING's; see jit.compile_ahead.
KERNELS = (
    kernels.score_tokens,
    line_kernels.put_totals,
    reading.find_text,
    reading.enter_words,
    reading.find_words,
    line_kernels.sum_sentences,
    line_kernels.count_sentences,
    line_kernels.lay_out,
)


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Counts of the tokens of S sentences.

    tokens      (S,)  what is scored: words and sentence ends
    oovs        (S,)  tokens that the vocabulary lacks
    log10_oovs  (S,)  the sum of log10 P of the OOV tokens alone
    hits        (order + 1,)  tokens of all sentences by the longest n-gram found
    """

    tokens: NDArray[np.int64]
    oovs: NDArray[np.int64]
    log10_oovs: NDArray[np.float64]
    hits: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of text, each scored as a sentence: S sentences of T tokens, including marks.

    words    (T,)  ids; the `<s>` of each sentence comes before its words
    answers  (T,)  the answer for `<s>` means nothing
    begin    (S + 1,)  where the words of each sentence begin, not counting marks
    totals   (S,)  log10 P
    """

    words: NDArray[np.uint32]
    answers: Answers
    begin: NDArray[np.int64]
    totals: NDArray[np.float64]
    order: int
    bos: bool
    eos: bool

    @cached_property
    def counts(self) -> TokenCounts:
        """The counts of tokens, unknown words and matches, computed on first use."""
        sentences = len(self.totals)
        counts = TokenCounts(
            np.diff(self.begin) + int(self.eos), np.empty(sentences, np.int64),
            np.empty(sentences), np.zeros(self.order + 1, np.int64),
        )  # fmt: skip
        line_kernels.count_sentences(
            self.words, self.answers.log10_prob, self.answers.matched_order, self.begin,
            int(self.bos), int(self.eos), counts.oovs, counts.log10_oovs, counts.hits,
        )  # fmt: skip
        return counts

    def rows(self) -> str:
        """A row per sentence: log10 P with six decimals, tokens and OOVs, separated by tabs."""
        counts = self.counts
        if not bool((np.abs(self.totals) < FIXED_LIMIT).all()):  # a probability of zero, say
            columns = (self.totals.tolist(), counts.tokens.tolist(), counts.oovs.tolist())
            return "".join(f"{p:.6f}\t{n}\t{oov}\n" for p, n, oov in zip(*columns, strict=True))
        text = np.empty(line_kernels.ROW_BYTES * len(self.totals), np.uint8)
        end = int(line_kernels.put_totals(self.totals, counts.tokens, counts.oovs, text))
        return text[:end].tobytes().decode("ascii")


def score_lines(
    model: WholeModel | KenlmFile, text: bytes, *, bos: bool = True, eos: bool = True
) -> Lines:
    """Scores each line of `text` as a sentence; the result has the figures that `dlm score` shows.

    With a KenLM file, words are found by their hashes, and totals are sums in float32, as in KenLM.
    """
    is_file = isinstance(model, KenlmFile)
    ids, begin = (model if isinstance(model, KenlmFile) else model.word_table).ids_of_text(text)
    sentences = len(begin) - 1
    size = len(ids) + sentences * (int(bos) + int(eos))
    words, reach = np.empty(size, np.uint32), np.empty(size, np.uint8)
    vocabulary = model.vocabulary
    line_kernels.lay_out(
        ids, begin, vocabulary.begin_id, vocabulary.end_id, int(bos), int(eos), model.order,
        words, reach,
    )  # fmt: skip
    if isinstance(model, KenlmFile):
        answers = model.score_tokens(words, reach, bos=bos)
    else:
        answers = Answers.empty(size)
        kernels.score_tokens(
            model.low.view, model.trees, model.slots, model.order, words, reach,
            answers.log10_prob, answers.matched_order, answers.ngram_length, answers.state_length,
        )  # fmt: skip
    totals = np.empty(sentences)
    add = sum_as_kenlm if is_file else line_kernels.sum_sentences
    add(answers.log10_prob, begin, int(bos), int(eos), totals)
    return Lines(words, answers, begin, totals, model.order, bos, eos)
