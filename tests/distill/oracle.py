"""Distillation by its definitions: dictionaries, one history at a time (Suresh et al. 2021).

A source is a function from a history (words, oldest first, from <s> on) to what it gives to each
word; a topology is a set of n-grams that is closed under prefixes and suffixes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

Ngram = tuple[str, ...]
Next = Callable[[Ngram], Mapping[str, float]]
BEGIN, END = "<s>", "</s>"


class Counts:
    """C(w, h) and C(phi, h), by the definition: each history alone."""

    def __init__(self, topology: set[Ngram], order: int) -> None:
        self.topology, self.order = topology, order
        self.found: dict[Ngram, float] = defaultdict(float)
        self.backed: dict[Ngram, float] = defaultdict(float)

    def state(self, history: Ngram) -> Ngram:
        """The longest end of a history that is a context."""
        for length in range(min(len(history), self.order - 1), 0, -1):
            if history[-length:] in self.topology:
                return history[-length:]
        return ()

    def add(self, history: Ngram, given: Mapping[str, float], weight: float = 1.0) -> None:
        """What is given after a history that was visited `weight` times."""
        state = self.state(history)
        for word, prob in given.items():
            context = state
            while context and (*context, word) not in self.topology:
                self.backed[context] += weight * prob
                context = context[1:]
            self.found[*context, word] += weight * prob


def expected_visits(next_words: Next, states: Iterable[Ngram], order: int) -> dict[Ngram, float]:
    """How often a sentence of a backoff source visits each of its states: a linear system."""
    rows = list(states)
    place = {state: i for i, state in enumerate(rows)}
    moves = np.zeros((len(rows), len(rows)))
    for state in rows:
        for word, prob in next_words(state).items():
            if word != END:
                after = (*state, word)[-(order - 1) :] if order > 1 else ()
                while after not in place:
                    after = after[1:]
                moves[place[state], place[after]] += prob
    start = np.zeros(len(rows))
    start[place[(BEGIN,) if order > 1 else ()]] = 1
    visits = np.linalg.solve(np.eye(len(rows)) - moves.T, start)
    return dict(zip(rows, visits.tolist(), strict=True))


def difference_of_convex(counts: Counts, words: Iterable[str]) -> tuple[
    dict[Ngram, float], dict[Ngram, float]
]:  # fmt: skip
    """(P of each n-gram, what each context gives to others), as section 4.2 of the paper has it:
    the concave part is linearised, and the multiplier found by bisection."""
    topology = counts.topology
    contexts = {ngram[:-1] for ngram in topology} | {n for n in topology if len(n) < counts.order}
    listed = {h: [w for w in words if (*h, w) in topology] for h in contexts}
    prob: dict[Ngram, float] = {}
    left: dict[Ngram, float] = {}
    for context in contexts:
        labels = listed[context]
        wanted = np.array([counts.found[*context, w] for w in labels] + [counts.backed[context]])
        children = [
            [labels.index(w) for w in listed[c]] + [counts.backed[c]]
            for c in contexts
            if len(c) == len(context) + 1 and c[1:] == context and counts.backed[c] > 0
        ]
        total = wanted.sum()
        if not total > 0:
            continue
        y = wanted / total
        for _ in range(20_000):
            slope = np.zeros(len(y))
            for *taken, backed in children:
                rest = 1 - y[taken].sum()
                slope[taken] += backed / rest
            after = _balanced(wanted, slope)
            moved = float(np.abs(after - y).max())
            y = after
            if moved < 1e-13:
                break
        for word, value in zip(labels, y, strict=False):
            prob[*context, word] = float(value)
        left[context] = float(y[-1])
    return prob, left


def _balanced(wanted: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """wanted / (m - slope) with the m for which it sums to 1."""
    there = wanted > 0
    low = float((slope[there] + wanted[there]).max())
    high = float(slope[there].max() + wanted.sum())
    for _ in range(200):
        middle = (low + high) / 2
        if float((wanted[there] / (middle - slope[there])).sum()) > 1:
            low = middle
        else:
            high = middle
    out = np.zeros(len(wanted))
    out[there] = wanted[there] / (high - slope[there])
    return out / out.sum()


def cross_entropy(counts: Counts, log_prob: Callable[[Ngram, str], float]) -> float:
    """Nats per counted word of a model, whose ln P after a context is `log_prob`."""
    total = lost = 0.0
    for ngram, count in counts.found.items():
        if count > 0:
            total += count
            lost -= count * log_prob(ngram[:-1], ngram[-1])
    return lost / total if total else math.nan
