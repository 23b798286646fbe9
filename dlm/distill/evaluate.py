"""Evaluates n-gram models, and the networks that they came from, on the same text (FNG 7). A word
counts as known only if every model knows it, so that figures are comparable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.distill.sources.next_words import NextWords
from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.federated.pieces.inventory import UNKNOWN
from dlm.federated.training import metrics
from dlm.federated.training.metrics import Metrics
from dlm.federated.training.trained import load_model
from dlm.federated.words import WordList
from dlm.units import LN_10

SENTENCES = 2048  # number of sentences evaluated together
_HISTORIES = 16  # histories per step; each needs the probability of every word

Sentence = list[str]


class Judge(Protocol):
    name: str
    predicts_words: bool  # whether the model can name the most likely next word

    def knows(self, word: str) -> bool:
        """Whether the word is in the model's vocabulary."""

    def each(
        self, sentences: Sequence[Sentence], known: Sequence[NDArray[np.bool_]]
    ) -> list[Metrics]:
        """Returns the metrics of each sentence; `known` marks the words that count as known."""


class NgramJudge:
    predicts_words = True

    def __init__(self, name: str, model: ModelColumns) -> None:
        self.name, self._model = name, model
        self._next = NextWords(model)

    def knows(self, word: str) -> bool:
        return word in self._model.vocabulary

    def each(
        self, sentences: Sequence[Sentence], known: Sequence[NDArray[np.bool_]]
    ) -> list[Metrics]:
        vocabulary, order = self._model.vocabulary, self._model.order
        before = [MISSING] * (order - 2) + [vocabulary.begin_id] if order > 1 else []
        tables = []
        for words in sentences:
            row = np.array([*before, *vocabulary.ids_of(words), vocabulary.end_id], np.uint32)
            tables.append(np.lib.stride_tricks.sliding_window_view(row, order))
        asked = np.concatenate(tables)
        ln_prob = self._model.log10_probs(asked) * LN_10
        right = self._first(asked[:, :-1]) == asked[:, -1]
        found, end = [], 0
        for words, there in zip(sentences, known, strict=True):
            begin, end = end, end + len(words) + 1
            ln, first = ln_prob[begin : end - 1], right[begin : end - 1]
            found.append(
                Metrics(
                    1, len(words), int(there.sum()), int((first & there).sum()), float(ln.sum()),
                    float(ln[there].sum()), float(ln_prob[end - 1]),
                )
            )  # fmt: skip
        return found

    def _first(self, histories: NDArray[np.uint32]) -> NDArray[np.int64]:
        length = histories.shape[1]
        states = histories.copy()
        found = np.zeros(len(states), np.bool_)
        for k in range(length, 0, -1):
            rows = self._model.rows_of(np.ascontiguousarray(histories[:, length - k :]))
            longest = ~found & (rows != MISSING)
            states[longest, : length - k] = MISSING
            found |= longest
        states[~found] = MISSING
        some, place = np.unique(states, axis=0, return_inverse=True)
        first = np.empty(len(some), np.int64)
        begin_id = self._model.vocabulary.begin_id
        for begin in range(0, len(some), _HISTORIES):
            given = self._next.after(some[begin : begin + _HISTORIES])
            if begin_id:
                given[:, begin_id] = -1.0
            first[begin : begin + _HISTORIES] = given.argmax(axis=1)
        out: NDArray[np.int64] = first[place.reshape(-1)]
        return out


class NetworkJudge:
    """The network of a `dlm federate` run; raises the errors of `training.trained.load_model`. For
    wordpieces, the most likely next word is not computed: it takes hundreds of steps (FNG 7.1)."""

    def __init__(self, name: str, run: Path) -> None:
        self.name = name
        model = load_model(run)
        if model.vocabulary is None:
            raise ConfigError(
                f"{run} has no vocabulary that turns ids into words; train with a vocabulary"
            )
        self._network, self._params = model.network, model.params
        words = model.vocabulary.words
        self._encode = model.vocabulary.encoder()
        if isinstance(words, WordList):
            known = frozenset(words.words)
            self._knows: Callable[[str], bool] = known.__contains__
            self._pieces: Callable[[str], list[int]] | None = None
        else:
            inventory = words
            self._knows = lambda word: UNKNOWN not in inventory.encode_word(word)
            self._pieces = inventory.encode_word
        self.predicts_words = self._pieces is None

    def knows(self, word: str) -> bool:
        return self._knows(word)

    def each(
        self, sentences: Sequence[Sentence], known: Sequence[NDArray[np.bool_]]
    ) -> list[Metrics]:
        ids = [np.asarray(self._encode(words), np.int32) for words in sentences]
        unknown = [~there for there in known]
        if self._pieces is not None:
            unknown = [
                np.repeat(mark, [len(self._pieces(word)) for word in words])
                for words, mark in zip(sentences, unknown, strict=True)
            ]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        found = metrics.each(
            self._params,
            self._network,
            [ids[i] for i in order],
            oov=[unknown[i] for i in order],
            says_begin=False,
        )
        out = [metrics.NOTHING] * len(ids)
        for i, figures in zip(order, found, strict=True):
            out[i] = figures
            if self._pieces is not None:
                out[i] = dataclasses.replace(
                    figures, words=len(sentences[i]), known=int(known[i].sum()), correct=0
                )
        return out


# The figures reported for a model.
FIGURES: dict[str, Callable[[Metrics], float]] = {
    "perplexity": lambda found: found.perplexity,
    "perplexity_without_oovs": lambda found: found.perplexity_excluding_oov,
    "sll_without_oovs": lambda found: found.sll_excluding_oov,
    "top1": lambda found: found.top1_in_vocabulary,
}
_FIELDS = [field.name for field in dataclasses.fields(Metrics)]


@dataclass(frozen=True)
class Figure:
    """A model's figure; `low` and `high` bound its interval over resampled users, if computed."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The models' metrics on a text. `sums` (m, u, 7), float64, has the fields of `Metrics` for m
    models and u users; u is 1 if users are not known."""

    judges: Sequence[Judge]
    sums: NDArray[np.float64]

    def total(self, model: int) -> Metrics:
        return _metrics(self.sums[model].sum(axis=0))

    def figures(self, draws: int, seed: int = 0) -> list[dict[str, Figure]]:
        """Returns each model's figures by name ("perplexity" and so on) and, for all models but the
        first, the differences from the first ("perplexity_difference"). Intervals come from `draws`
        resamples of the users, which are the same for all models.

        Paper  Efron and Tibshirani 1993, section 13.3 (percentile intervals, here of 95 %)
        """
        values = self._values(self.sums.sum(axis=1))
        users = self.sums.shape[1]
        drawn = np.full((0, *values.shape), np.nan)
        if draws and users > 1:
            random = np.random.Generator(np.random.PCG64(seed))
            drawn = np.stack([self._values(self._again(random)) for _ in range(draws)])
        out: list[dict[str, Figure]] = []
        for model in range(len(self.judges)):
            told: dict[str, Figure] = {}
            for place, name in enumerate(FIGURES):
                told[name] = _figure(values[model, place], drawn[:, model, place])
                if model:
                    told[f"{name}_difference"] = _figure(
                        values[model, place] - values[0, place],
                        drawn[:, model, place] - drawn[:, 0, place],
                    )
            out.append(told)
        return out

    def _again(self, random: np.random.Generator) -> NDArray[np.float64]:
        users = self.sums.shape[1]
        times = np.bincount(random.integers(users, size=users), minlength=users)
        out: NDArray[np.float64] = np.einsum("u,muf->mf", times.astype(np.float64), self.sums)
        return out

    def _values(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(
            [
                [
                    math.nan
                    if name == "top1" and not judge.predicts_words
                    else figure(_metrics(row))
                    for name, figure in FIGURES.items()
                ]
                for judge, row in zip(self.judges, sums, strict=True)
            ]
        )


def evaluate(judges: Sequence[Judge], users: Iterable[Iterable[Sentence]]) -> Evaluation:
    """Evaluates each model on the sentences of each user; if users are not known, `users` is one
    entry with all sentences. ConfigError if no sentence has a word."""
    rows: list[NDArray[np.float64]] = []
    known_words: dict[str, bool] = {}

    def known(words: Sentence) -> NDArray[np.bool_]:
        for word in words:
            if word not in known_words:
                known_words[word] = all(judge.knows(word) for judge in judges)
        return np.array([known_words[word] for word in words], np.bool_)

    for block in _blocks(users):
        owners = [user for user, _ in block]
        rows += [np.zeros((len(judges), len(_FIELDS))) for _ in range(owners[-1] + 1 - len(rows))]
        sentences = [words for _, words in block]
        there = [known(words) for words in sentences]
        for place, judge in enumerate(judges):
            for user, found in zip(owners, judge.each(sentences, there), strict=True):
                rows[user][place] += dataclasses.astuple(found)
    if not rows:
        raise ConfigError("the text has no words to evaluate models on; give a text with words")
    return Evaluation(judges, np.stack(rows, axis=1))


def _blocks(users: Iterable[Iterable[Sentence]]) -> Iterator[list[tuple[int, Sentence]]]:
    block: list[tuple[int, Sentence]] = []
    user = 0
    for sentences in users:
        said = False
        for words in sentences:
            if not words:
                continue
            said = True
            block.append((user, words))
            if len(block) == SENTENCES:
                yield block
                block = []
        user += said
    if block:
        yield block


def _metrics(row: NDArray[np.float64]) -> Metrics:
    return Metrics(**dict(zip(_FIELDS, row.tolist(), strict=True)))


def _figure(value: float, drawn: NDArray[np.float64]) -> Figure:
    if math.isnan(value):
        return Figure(None)
    if not len(drawn):
        return Figure(float(value))
    low, high = np.nanpercentile(drawn, [2.5, 97.5]).tolist()
    return Figure(float(value), low, high)
