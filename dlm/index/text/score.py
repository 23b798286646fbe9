"""Sentences of text scored by a whole model in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlm.index.text import kernels
from dlm.ngram.query import Answers

if TYPE_CHECKING:
    from dlm.index.local import LocalModel


def score_text(
    model: LocalModel, text: bytes, *, bos: bool, eos: bool
) -> tuple[Answers, NDArray[np.int64], NDArray[np.float64]]:
    """Scores each line of `text` as a sentence; see `LocalModel.score_text`.

    Returns
        answers         one for each word and, with `eos`, each sentence end; with `bos`, one more
                        before each sentence, for `<s>`, that means nothing
        sentence_begin  (S + 1,) int64    where the words of each sentence begin, marks not counted
        totals          (S,)     float64  log10
    """
    ids, begin = model.word_table.ids_of_text(text)
    answers, totals = score_sentences(model, ids, begin, bos=bos, eos=eos)
    return answers, begin, totals


def score_sentences(
    model: LocalModel,
    ids: NDArray[np.uint32],
    begin: NDArray[np.int64],
    *,
    bos: bool,
    eos: bool,
) -> tuple[Answers, NDArray[np.float64]]:
    """Scores sentences of ids, as `WordTable.ids_of_text` gives them; see `score_text`.

    Trusts  ids below the vocabulary's size, and `begin` in order from 0 to len(ids)
    """
    sentences = len(begin) - 1
    marks = int(bos) + int(eos)
    size = len(ids) + sentences * marks
    words, reach = np.empty(size, np.uint32), np.empty(size, np.uint8)
    vocabulary = model.vocabulary
    kernels.lay_out(
        ids, begin, vocabulary.begin_id, vocabulary.end_id, int(bos), int(eos), model.order,
        words, reach,
    )  # fmt: skip
    if len(model.shards) == 1:
        answers = Answers.empty(size)
        kernels.score_tokens(
            model.shards[0].view, model.order, words, reach, answers.log10_prob,
            answers.matched_order, answers.ngram_length, answers.state_length,
        )  # fmt: skip
    else:
        answers = _one_by_one(model, words, reach)
    totals = np.empty(sentences, np.float64)
    kernels.sum_sentences(answers.log10_prob, begin, int(bos), int(eos), totals)
    return answers, totals


def _one_by_one(model: LocalModel, words: NDArray[np.uint32], reach: NDArray[np.uint8]) -> Answers:
    """Each word with its context as a query of its own: contexts lie in different shards."""
    width = max(model.order - 1, 0)
    contexts = np.zeros((len(words), width), np.uint32)
    for back in range(1, width + 1):
        rows = np.flatnonzero(reach >= back)
        contexts[rows, width - back] = words[rows - back]
    return model.score(contexts, reach, words)
