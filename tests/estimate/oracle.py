"""Interpolated modified Kneser-Ney over dictionaries, as the definitions read: the oracle.

Nothing here is fast; `dlm.estimate.pipeline` computes the same in bulk. Words are numbers here:
0 `<unk>`, 1 `<s>`, 2 `</s>`, then the words of the text as they first appear.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm.errors import EstimationError
from dlm.estimate.pipeline import Fallback, discounts

UNK, BOS, EOS = 0, 1, 2
NGram = tuple[int, ...]


@dataclass
class PlainEstimate:
    """A model: words by id, and of each n-gram that is kept its probability and backoff weight.

    values[n - 1][ngram] = (probability, backoff weight), oldest word first; not logarithms
    """

    words: list[bytes]
    values: list[dict[NGram, tuple[float, float]]] = field(default_factory=list)

    def probability(self, context: NGram, word: int) -> float:
        """P(word | context), most recent word of the context last."""
        ngram = (*context, word)
        if len(ngram) <= len(self.values) and ngram in self.values[len(ngram) - 1]:
            return self.values[len(ngram) - 1][ngram][0]
        if not context:
            return self.values[0][UNK,][0]
        weight = 1.0
        if len(context) <= len(self.values):
            weight = self.values[len(context) - 1].get(context, (0.0, 1.0))[1]
        return weight * self.probability(context[1:], word)


def estimate(
    lines: Iterable[bytes],
    order: int,
    *,
    prune: Sequence[int] = (),
    vocabulary: Collection[bytes] | None = None,
    fallback: Fallback | None = None,
) -> PlainEstimate:
    """The model of a text, a sentence a line, split at spaces, tabs and carriage returns.

    Args
        prune       n-grams that occur so often or less are left out, by order; the last holds for
                    the orders above
        vocabulary  n-grams with other words are left out
        fallback    discounts of counts 1, 2, 3 or more for orders whose own cannot be had
    Paper           Heafield et al. 2013; Chen and Goodman 1998, interpolated modified Kneser-Ney
    """
    thresholds = [*prune, *[prune[-1] if prune else 0] * (order - len(prune))]
    ids: dict[bytes, int] = {b"<unk>": UNK, b"<s>": BOS, b"</s>": EOS}
    occurrences: Counter[NGram] = Counter()
    for line in lines:
        sentence = [BOS] * (order - 1)
        for word in line.replace(b"\t", b" ").replace(b"\r", b" ").split(b" "):
            if word:
                sentence.append(ids.setdefault(word, len(ids)))
        sentence.append(EOS)
        for end in range(order, len(sentence) + 1):
            occurrences[tuple(sentence[end - order : end])] += 1
    if not occurrences:
        raise EstimationError("the text has no line")
    model = PlainEstimate(list(ids))

    # Adjusted counts: of the highest order, and of n-grams from <s> on, how often they occur; of
    # others, how many words come before them. `actual` is how often, of all.
    actual: list[Counter[NGram]] = [Counter() for _ in range(order)]
    left: list[dict[NGram, set[int]]] = [defaultdict(set) for _ in range(order)]
    for full, count in occurrences.items():
        for n in range(1, order + 1):
            ngram = full[-n:]
            if BOS in ngram[1:]:
                break  # more than one <s>: padding
            actual[n - 1][ngram] += count
            if n < order:
                left[n - 1][ngram].add(full[-n - 1])
    adjusted: list[dict[NGram, int]] = []
    for n in range(1, order + 1):
        whole = n == order
        adjusted.append(
            {
                g: count if whole or g[0] == BOS else len(left[n - 1][g])
                for g, count in actual[n - 1].items()
            }
        )
    adjusted[0] |= {(UNK,): 0, (BOS,): 0}

    known = None if vocabulary is None else {UNK, BOS, EOS, *(ids.get(w, UNK) for w in vocabulary)}

    def kept(ngram: NGram) -> bool:
        if len(ngram) == 1 and ngram[0] in (UNK, BOS, EOS):
            return True
        often = actual[len(ngram) - 1][ngram] > thresholds[len(ngram) - 1]
        return often and (known is None or known.issuperset(ngram))

    # lmplz counts the n-grams that end the last of all, in the order of their reversed words, by
    # how often they occur; so do we, since it moves the discounts of small texts.
    last = max(occurrences, key=lambda ngram: ngram[::-1])
    probability: dict[NGram, float] = {(): 1.0 / (sum(map(kept, adjusted[0])) - 1)}
    for n in range(1, order + 1):
        counts_of_counts = np.zeros(5, np.int64)
        for ngram, count in adjusted[n - 1].items():
            if n < order and ngram == last[-n:]:
                count = actual[n - 1][ngram]
            counts_of_counts[min(count, 5) % 5] += 1
        found, _ = discounts(counts_of_counts[1:], n, fallback)
        d = [float(value) for value in found]

        total: dict[NGram, int] = defaultdict(int)
        spared: dict[NGram, float] = defaultdict(float)
        for ngram, count in adjusted[n - 1].items():
            total[ngram[:-1]] += count
            spared[ngram[:-1]] += d[min(count, 3)] if kept(ngram) else count
        values: dict[NGram, tuple[float, float]] = {}
        for ngram, count in adjusted[n - 1].items():
            if ngram == (BOS,):
                probability[ngram] = 1.0
            elif kept(ngram):
                context = ngram[:-1]
                own = (count - d[min(count, 3)]) / total[context]
                lower = probability[ngram[1:]]
                probability[ngram] = own + spared[context] / total[context] * lower
            else:
                continue
            values[ngram] = (probability[ngram], 1.0)
        model.values.append(values)
        if n > 1:
            below = model.values[n - 2]
            for context in below:
                if total.get(context):
                    below[context] = (below[context][0], spared[context] / total[context])
    return model


def log10(value: float) -> float:
    """The logarithm as ARPA has it: at most 0, and -99 for nothing."""
    return min(math.log10(value), 0.0) if value > 0 else -99.0
