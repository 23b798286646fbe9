"""Random models as sources: for the oracle, in columns, and as a user's own Python object."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from distill import oracle
from distill.oracle import Ngram
from dlm.distill.counts.count import NgramCounts, Visit, VisitCounter, WordMass
from dlm.estimate.columns import ModelColumns
from dlm.ngram.backoff import DictModel
from estimate.merge_models import normalised_model, read
from models import PlainModel

WORDS = tuple("abcdefgh")


class Plain:
    """A model that sums to 1, as the oracle takes it."""

    def __init__(self, model: PlainModel) -> None:
        self.order = model.order
        self.ngrams = model.ngrams
        self.words = [n[0] for n in model.ngrams if len(n) == 1 and n[0] != "<s>"]

    def prob(self, context: Ngram, word: str) -> float:
        """P(word | context), by backing off."""
        context = context[-(self.order - 1) :] if self.order > 1 else ()
        if (*context, word) in self.ngrams:
            return 10.0 ** np.float64(np.float32(self.ngrams[*context, word][0]))
        weight = self.ngrams.get(context, (0.0, None))[1] or 0.0
        return 10.0 ** np.float64(np.float32(weight)) * self.prob(context[1:], word)

    def after(self, context: Ngram) -> Mapping[str, float]:
        """What each word has after a context; sums to 1."""
        given = {word: self.prob(context, word) for word in self.words}
        total = math.fsum(given.values())
        return {word: value / total for word, value in given.items()}


def ngrams_of(columns: ModelColumns) -> list[list[Ngram]]:
    """The n-grams of each order as words."""
    words = [word.decode() for word in columns.vocabulary.words]
    return [[tuple(words[i] for i in row) for row in order.ids] for order in columns.orders]


def by_definition(source: Plain, topology: ModelColumns, histories: dict[Ngram, float]):  # type: ignore[no-untyped-def]
    """The oracle's counts, and ours, of visits to histories."""
    names = ngrams_of(topology)
    shape = {ngram for order in names for ngram in order}
    counts = oracle.Counts(shape, topology.order)
    ngrams = [np.zeros(len(order)) for order in names]
    contexts = [np.zeros(1), *(np.zeros(len(order)) for order in names[:-1])]
    places = [{ngram: i for i, ngram in enumerate(order)} for order in names]
    for history, weight in histories.items():
        given = source.after(history)
        counts.add(history, given, weight)
        state = counts.state(history)
        for k in range(len(state) + 1):
            context = state[len(state) - k :]
            contexts[k][places[k - 1][context] if k else 0] += weight
            for word, prob in given.items():
                if (*context, word) in shape:
                    ngrams[k][places[k][*context, word]] += weight * prob
    return counts, NgramCounts(ngrams, contexts)


def sampled_counts(topology: ModelColumns, visits: Iterable[Visit | WordMass]) -> NgramCounts:
    """The counts of visits, all in one go."""
    counter = VisitCounter(topology)
    for visit in visits:
        counter.add(visit)
    return counter.counts


def sampled(source: Plain, sentences: int, seed: int) -> dict[Ngram, float]:
    """The histories that sampled sentences visit."""
    rng = random.Random(seed)
    visits: dict[Ngram, float] = {}
    for _ in range(sentences):
        history: Ngram = ("<s>",)
        while len(history) < 40:
            visits[history] = visits.get(history, 0) + 1
            given = source.after(history)
            word = rng.choices(list(given), list(given.values()))[0]
            if word == "</s>":
                break
            history = (*history, word)
    return visits


def a_source(seed: int, path: Path, **options: object) -> tuple[Plain, ModelColumns, DictModel]:
    """A random model: for the oracle, in columns, and as a dictionary."""
    words = options.pop("words", WORDS)
    model = normalised_model(seed, words, **options)  # type: ignore[arg-type]
    columns, plain = read(model, path / f"{seed}.arpa")
    return Plain(model), columns, plain


def restricted_values(model: ModelColumns, columns: ModelColumns) -> ModelColumns:
    """The model with the other's ids; both have the same words."""
    ids = columns.vocabulary.ids_of(model.vocabulary.words)
    sections = [(ids[o.ids], o.log10_prob, o.log10_backoff) for o in model.orders]
    return ModelColumns.of(columns.vocabulary, sections)


def sentences_of(said: np.ndarray, end: int) -> Iterator[np.ndarray]:
    """The words of each sentence, from words with `</s>` after each sentence."""
    begin = 0
    for stop in np.flatnonzero(said == end).tolist():
        yield said[begin:stop]
        begin = stop + 1


class PlainSource:
    """A source of the protocol that says what a model says after the last words of a prefix.

    Its ids are its own: the end of a sentence, `<unk>`, the words backwards, and its begin.
    """

    def __init__(self, plain: Plain) -> None:
        words = [word for word in plain.words if word not in ("</s>", "<unk>")]
        self.vocabulary = ["</s>", "<unk>", *reversed(words), "<s>"]
        self._plain = plain
        self._known: dict[Ngram, np.ndarray] = {}

    def log_probs(self, prefixes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """As `Source` has it."""
        rows = []
        for prefix, length in zip(prefixes.tolist(), lengths.tolist(), strict=True):
            history = tuple(self.vocabulary[i] for i in prefix[:length])[-self._plain.order :]
            if history not in self._known:
                given = self._plain.after(history)
                with np.errstate(divide="ignore"):
                    self._known[history] = np.log([given.get(w, 0.0) for w in self.vocabulary])
            rows.append(self._known[history])
        return np.array(rows)
