"""Models whose contexts sum to 1, for tests of what mixes and filters them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlm.estimate.columns import ModelColumns
from dlm.ngram.backoff import DictModel
from models import PlainModel

Ngram = tuple[str, ...]
MARKS = ("<s>", "</s>", "<unk>")


def normalised_model(
    seed: int,
    words: Sequence[str],
    *,
    order: int = 3,
    contexts: float = 0.6,
    missing_suffixes: bool = True,
    unk: bool = True,
) -> PlainModel:
    """A random model that sums to 1 in every context, as far as float32 can say it.

    Args
        words             besides <s>, </s> and <unk>
        contexts          share of the n-grams that are extended
        missing_suffixes  n-grams may lack their suffix, as in pruned models
    """
    rng = random.Random(seed)
    predicted = [*words, "</s>", *(["<unk>"] if unk else [])]
    mass = {w: rng.random() ** 3 + 1e-4 for w in predicted}
    total = math.fsum(mass.values())
    probs: dict[Ngram, float] = {(w,): p / total for w, p in mass.items()}
    weights: dict[Ngram, float] = {}

    def prob(context: Ngram, word: str) -> float:
        if (*context, word) in probs:
            return probs[*context, word]
        return weights.get(context, 1.0) * prob(context[1:], word)

    shorter: list[Ngram] = [(w,) for w in ["<s>", *words, *(["<unk>"] if unk else [])]]
    for _ in range(1, order):
        longer: list[Ngram] = []
        for context in shorter:
            if rng.random() > contexts:
                continue
            listed = rng.sample(predicted, rng.randint(1, max(1, len(predicted) // 2)))
            if not missing_suffixes and len(context) > 1:
                listed = [w for w in listed if (*context[1:], w) in probs]
            if not listed:
                continue
            share = rng.uniform(0.2, 0.95)
            parts = [rng.random() ** 2 + 1e-3 for _ in listed]
            for w, part in zip(listed, parts, strict=True):
                probs[*context, w] = share * part / math.fsum(parts)
            room = math.fsum(prob(context[1:], w) for w in predicted if w not in listed)
            weights[context] = (1 - share) / room
            longer += [(*context, w) for w in listed if w != "</s>"]
        shorter = longer
    ngrams: dict[Ngram, tuple[float, float | None]] = {("<s>",): (-99.0, None)}
    for ngram in probs:
        ngrams[ngram] = (_log10(probs[ngram]), None)
    for context, weight in weights.items():
        ngrams[context] = (ngrams[context][0], _log10(weight))
    return PlainModel(order, ngrams)


def read(model: PlainModel, path: Path) -> tuple[ModelColumns, DictModel]:
    """The model as arrays and as a dictionary, both from its file."""
    model.write(path)
    return ModelColumns.read(path), DictModel.from_arpa(path)


def worst_sum(model: DictModel) -> float:
    """How far from 1 the probabilities after any context of the model are, <s> left out."""
    values = {n: (float(p), float(b)) for n, (p, b) in model.ngrams.items()}
    words = [n[0] for n in values if len(n) == 1 and n[0] != model.vocabulary.begin_id]

    def log10_prob(context: tuple[int, ...], word: int) -> float:
        found = values.get((*context, word))
        if found is not None:
            return found[0]
        return values.get(context, (0.0, 0.0))[1] + log10_prob(context[1:], word)

    worst = 0.0
    for context in [(), *(n for n in values if len(n) < model.order)]:
        total = math.fsum(10.0 ** log10_prob(context, word) for word in words)
        worst = max(worst, abs(total - 1))
    return worst


def _log10(value: float) -> float:
    return float(np.float32(math.log10(value)))
