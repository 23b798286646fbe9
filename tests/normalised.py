"""Random models that sum to 1 in every context, and what they say, in plain Python.

Nothing here is shared with what it tests: an n-gram is a tuple of words, and a model a dictionary.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np

from models import Ngram, PlainModel

BEGIN, END, UNK = "<s>", "</s>", "<unk>"


def normalised_model(
    seed: int,
    *,
    order: int = 3,
    words: int = 6,
    share: float = 0.5,
    missing_suffixes: bool = True,
    unk: bool = True,
) -> PlainModel:
    """A random model; each context of each n-gram lists some words and backs off for the rest.

    Args
        share  of the words that a context lists, and of the n-grams that are contexts
    """
    rng = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(words)] + [END] + ([UNK] if unk else [])
    ngrams: dict[Ngram, tuple[float, float | None]] = {}
    masses = [rng.expovariate(1) + 0.01 for _ in vocabulary]
    for word, mass in zip(vocabulary, masses, strict=True):
        ngrams[(word,)] = (_f32(math.log10(mass / sum(masses))), 0.0)
    ngrams[(BEGIN,)] = (-99.0, 0.0)
    contexts: list[Ngram] = [n for n in ngrams if n[-1] != END]
    for k in range(2, order + 1):
        model = PlainModel(order, ngrams)
        added: dict[Ngram, tuple[float, float | None]] = {}
        for context in contexts:
            if rng.random() > share and context != (BEGIN,):
                continue
            listed = [w for w in vocabulary if rng.random() < share]
            if not missing_suffixes and k > 2:
                listed = [w for w in listed if (*context[1:], w) in ngrams]
            if not listed or len(listed) == len(vocabulary):
                continue
            # Near what backing off gives, so that some n-grams are worth little.
            lower = {w: 10 ** log10_prob(model, context[1:], w) for w in listed}
            weights = {
                w: lower[w] * math.exp(rng.gauss(0, rng.choice([0.01, 0.3, 2]))) for w in listed
            }
            mass = rng.uniform(0.2, 0.9)
            total = sum(weights.values())
            for w in listed:
                added[(*context, w)] = (_f32(math.log10(mass * weights[w] / total)), 0.0)
            left = 1 - math.fsum(10 ** added[(*context, w)][0] for w in listed)
            others = [w for w in vocabulary if w not in lower]
            backoff = math.log10(
                left / math.fsum(10 ** log10_prob(model, context[1:], w) for w in others)
            )
            ngrams[context] = (ngrams[context][0], _f32(backoff))
        ngrams.update(added)
        contexts = [n for n in added if n[-1] != END]
    rows = list(ngrams.items())
    rng.shuffle(rows)
    return PlainModel(order, dict(rows))


def read_plain(path: Path) -> PlainModel:
    """An ARPA file as a dictionary, line by line."""
    ngrams: dict[Ngram, tuple[float, float | None]] = {}
    order = 0
    for line in path.read_text().splitlines():
        if line.startswith("\\") and line.endswith("-grams:"):
            order = int(line[1:].split("-")[0])
        elif order and "\t" in line:
            prob, text, *backoff = line.split("\t")
            ngrams[tuple(text.split(" "))] = (
                _f32(float(prob)),
                _f32(float(backoff[0])) if backoff else None,
            )
    return PlainModel(order, ngrams)


def log10_prob(model: PlainModel, context: Ngram, word: str) -> float:
    """log10 P(word | context), by backing off."""
    found = model.ngrams.get((*context, word))
    if found is not None:
        return found[0]
    if not context:
        return -100.0
    weight = model.ngrams.get(context, (0.0, 0.0))[1]
    return (weight or 0.0) + log10_prob(model, context[1:], word)


def vocabulary_of(model: PlainModel) -> list[str]:
    """Every word that can be predicted."""
    return [n[0] for n in model.ngrams if len(n) == 1 and n[0] != BEGIN]


def contexts_of(model: PlainModel) -> list[Ngram]:
    """The empty context, and every n-gram that may be one."""
    return [(), *(n for n in model.ngrams if len(n) < model.order and n[-1] != END)]


def sum_over_words(model: PlainModel, context: Ngram) -> float:
    """What the probabilities after a context sum to."""
    return math.fsum(10 ** log10_prob(model, context, w) for w in vocabulary_of(model))


def ln_history(model: PlainModel, context: Ngram) -> float:
    """ln P of a context: of each word after those before it; `<s>` counts as `</s>`."""
    total = 0.0
    for i, word in enumerate(context):
        total += log10_prob(model, context[:i], END if word == BEGIN else word)
    return total * math.log(10)


def divergence(model: PlainModel, ngram: Ngram, history: PlainModel | None = None) -> float:
    """By how much relative entropy grows if one n-gram goes and its context is renormalised.

    By its definition, a sum over all words of what the context says before and after.
    """
    context, word = ngram[:-1], ngram[-1]
    words = vocabulary_of(model)
    lower = {v: 10 ** log10_prob(model, context[1:], v) for v in words}
    listed = {
        v: 10 ** model.ngrams[(*context, v)][0] for v in words if (*context, v) in model.ngrams
    }

    def weight(kept: dict[str, float]) -> float:
        return (1 - math.fsum(kept.values())) / (1 - math.fsum(lower[v] for v in kept))

    after = {v: p for v, p in listed.items() if v != word}
    old, new = weight(listed), weight(after)
    changed = 0.0
    for v in words:
        p = listed.get(v, old * lower[v])
        if p > 0:
            changed += p * math.log(p / after.get(v, new * lower[v]))
    # Values rounded to float32 sum to nearly 1; what they lack or have over is one word more.
    changed += old * (1 - math.fsum(lower.values())) * math.log(old / new)
    return math.exp(ln_history(history or model, context)) * changed


def _f32(value: float) -> float:
    return float(np.float32(value))
