"""Scores sentences with a `ModelColumns`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.columns import kernels
from dlm.estimate.columns.model import ModelColumns
from dlm.estimate.columns.orders import MISSING
from dlm.ngram.vocab import Vocabulary


def lay_out(
    vocabulary: Vocabulary, ids: NDArray[np.uint32], begin: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Joins sentences, with their marks; takes the arrays that `WordTable.ids_of_text` returns.

    Returns
        tokens  (t,) uint32  with <s> before each sentence and </s> after it
        first   (t,) bool    whether a token begins a sentence, so that its score means nothing
    """
    sentences = len(begin) - 1
    starts = begin[:-1] + 2 * np.arange(sentences)
    ends = begin[1:] + 2 * np.arange(sentences) + 1
    tokens = np.empty(len(ids) + 2 * sentences, np.uint32)
    is_word = np.ones(len(tokens), np.bool_)
    is_word[starts] = is_word[ends] = False
    tokens[starts], tokens[ends], tokens[is_word] = vocabulary.begin_id, vocabulary.end_id, ids
    first = np.zeros(len(tokens), np.bool_)
    first[starts] = True
    return tokens, first


def log10_probs(
    model: ModelColumns, tokens: NDArray[np.uint32], first: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Returns log10 P of each token after the earlier tokens of its sentence; see `lay_out`."""
    rows = tokens  # row of the n-gram of order k that ends in each token
    total = model.orders[0].log10_prob[rows].astype(np.float64)
    for k in range(1, model.order):
        shorter, longer = model.orders[k - 1], model.orders[k]
        context = np.full(len(tokens), MISSING, np.uint32)
        context[1:] = rows[:-1]
        context[first] = MISSING
        rows = np.empty(len(tokens), np.uint32)
        kernels.find_children(context, tokens, shorter.first_child, longer.ids, rows)
        found = context != MISSING
        total[found] += shorter.log10_backoff[context[found]]
        found = rows != MISSING
        total[found] = longer.log10_prob[rows[found]]
    return total
