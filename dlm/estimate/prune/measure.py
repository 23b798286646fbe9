"""Measures the loss from pruning: scores a text with the model before and after pruning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dlm.errors import EstimationError
from dlm.estimate.columns import ModelColumns, lay_out, log10_probs
from dlm.ngram.vocab import UNK_ID
from dlm.ngram.wordtable import WordTable
from dlm.units import perplexity


@dataclass(frozen=True)
class PerplexityChange:
    """A text's perplexities (before, after) pruning, with and without the words that the model
    lacks; `tokens` are words and sentence ends."""

    tokens: int
    oovs: int
    with_oovs: tuple[float, float]
    without_oovs: tuple[float, float]


def measure(before: ModelColumns, after: ModelColumns, blocks: Iterable[bytes]) -> PerplexityChange:
    """Scores text by both models, which have the same words, as `dlm perplexity` does. `blocks`
    have one sentence per line, joined by line feeds; EstimationError if there is no sentence."""
    table = WordTable.from_vocabulary(before.vocabulary)
    tokens = oovs = 0
    totals = np.zeros((2, 2))  # totals by model: of all tokens, and of known ones
    for block in blocks:
        laid_out, first = lay_out(before.vocabulary, *table.ids_of_text(block))
        known = laid_out[~first] != UNK_ID
        tokens += len(known)
        oovs += int(len(known) - known.sum())
        for i, model in enumerate((before, after)):
            found = log10_probs(model, laid_out, first)[~first]
            totals[i] += found.sum(), found[known].sum()
    if not tokens:
        raise EstimationError(
            "the text to measure the loss on is empty; give text like the model's real input"
        )
    with_oovs, without_oovs = (
        (perplexity(float(old), count), perplexity(float(new), count))
        for (old, new), count in zip(totals.T, (tokens, tokens - oovs), strict=True)
    )
    return PerplexityChange(tokens, oovs, with_oovs, without_oovs)
