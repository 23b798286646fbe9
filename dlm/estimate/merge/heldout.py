"""Scores the words of a text with each model of a union."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.columns import lay_out, log10_probs
from dlm.estimate.merge.union import Union
from dlm.ngram.vocab import UNK_ID
from dlm.ngram.wordtable import WordTable
from dlm.units import LN_10, perplexity

U32, F64 = np.uint32, np.float64


@dataclass(frozen=True, eq=False)
class Fit:
    oovs: int
    perplexity: float
    perplexity_without_oovs: float


@dataclass(frozen=True, eq=False)
class Heldout:
    """The tokens of a text, including sentence ends, and their probability in each model.

    Shapes, m models, t tokens
        prob      (m, t)  float64  by each model's own backoff; a word that the model lacks has
                                   the probability of <unk> if no model has the word, otherwise 0
        as_unk    (m, t)  float64  like `prob`, but every word that the model lacks counts as <unk>
        known     (m, t)  bool     whether the model has the word
        in_any    (t,)    bool     whether any model has the word
    """

    sentences: int
    prob: NDArray[np.float64]
    as_unk: NDArray[np.float64]
    known: NDArray[np.bool_]
    in_any: NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        return len(self.in_any)

    def of_model(self, model: int) -> Fit:
        return _fit(self.as_unk[model], self.known[model])

    def of_mixture(self, weights: Sequence[float]) -> Fit:
        """Measures how well a dynamic mixture of the models, word by word, predicts the text."""
        return _fit(np.array(weights, F64) @ self.prob, self.in_any)


def read_heldout(union: Union, blocks: Iterable[bytes]) -> Heldout:
    """Scores text with each model of a union; a block has lines, one sentence each, with line feeds
    between them. Takes 17 bytes per token and model, and 8 more per token and order.
    EstimationError if the text has no word."""
    table = WordTable.from_vocabulary(union.vocabulary)
    parts = []
    sentences = words = 0
    for block in blocks:
        ids, begin = table.ids_of_text(block)
        sentences += len(begin) - 1
        words += len(ids)
        parts.append(_score(union, ids, begin))
    if not words:
        raise EstimationError(
            "the held-out text is empty; give text of the kind that the mixture is for, one "
            "sentence per line"
        )
    prob, as_unk, known, in_any = (np.concatenate(p, axis=-1) for p in zip(*parts, strict=True))
    return Heldout(sentences, prob, as_unk, known, in_any)


def _score(
    union: Union, ids: NDArray[np.uint32], begin: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    tokens, first = lay_out(union.vocabulary, ids, begin)
    size = len(tokens)
    scored = ~first
    in_any = tokens != UNK_ID
    prob = np.empty((len(union.models), size), F64)
    as_unk = np.empty((len(union.models), size), F64)
    known = np.empty((len(union.models), size), np.bool_)
    for i, model in enumerate(union.models):
        known[i] = (union.known[i][tokens] != 0) & in_any
        own = np.where(union.known[i][tokens], tokens, U32(UNK_ID)).astype(U32)
        as_unk[i] = np.exp(log10_probs(model, own, first) * LN_10)
        prob[i] = np.where(known[i] | ~in_any, as_unk[i], 0.0)
    return prob[:, scored], as_unk[:, scored], known[:, scored], in_any[scored]


def _fit(prob: NDArray[np.float64], known: NDArray[np.bool_]) -> Fit:
    with np.errstate(divide="ignore"):
        log10_prob = np.log10(prob)
    tokens = len(known)
    of_known = int(known.sum())
    return Fit(
        tokens - of_known,
        perplexity(float(log10_prob.sum()), tokens),
        perplexity(float(log10_prob[known].sum()), of_known),
    )
