"""Models judged on held-out users, by what `dlm evaluate` does, on the words that all have."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.fng_data import LanguageFiles
from dlm.distill.evaluate import Evaluation, Judge, NetworkJudge, NgramJudge, Sentence, evaluate
from dlm.estimate.columns import ModelColumns
from dlm.federated.tokens import FIRST_WORD_ID, PAD, sequence
from dlm.federated.training import metrics, rnn
from dlm.federated.training.metrics import Metrics
from dlm.federated.training.trained import load_model
from dlm.federated.users import UserDataset

DRAWS = 1_000
HEADS = (10, 50, 100)  # of the most frequent words
ROWS = 64  # utterances looked at together


class ListedWords:
    """Judges nothing: beside a model it says which words count as known."""

    predicts_words = False
    name = "listed words"

    def __init__(self, file: Path) -> None:
        self._words = frozenset(file.read_text(encoding="utf-8").split())

    def knows(self, word: str) -> bool:
        """As `Judge` has it."""
        return word in self._words

    def each(
        self, sentences: Sequence[Sentence], known: Sequence[NDArray[np.bool_]]
    ) -> list[Metrics]:
        """Nothing of each."""
        return [metrics.NOTHING] * len(sentences)


def users_of(file: Path) -> list[list[Sentence]]:
    """What each user of a file said; the users stand one after the other."""
    found: dict[str, list[Sentence]] = {}
    with file.open(encoding="utf-8") as rows:
        next(rows)
        for row in rows:
            user, text = row.rstrip("\n").split("\t")
            found.setdefault(user, []).append(text.split())
    return list(found.values())


def judge_of(path: Path) -> Judge:
    """An ARPA file, or the network of a run or of a checkpoint."""
    if path.suffix == ".arpa":
        return NgramJudge(path.stem, ModelColumns.read(path))
    return NetworkJudge(path.stem, path)


def sums_of(path: Path, files: LanguageFiles) -> NDArray[np.float64]:
    """A model's sums for each held-out user: (users, 7), the fields of `Metrics`."""
    listed = ListedWords(files.words)
    return evaluate([judge_of(path), listed], users_of(files.held_out)).sums[0]


def judged(path: Path, files: LanguageFiles) -> dict[str, Any]:
    """A model's figures; top-1 accuracy and log-likelihood per sentence less those of the model of
    the users' text, whose sums are in `files.baseline`, with intervals over users."""
    sums = sums_of(path, files)
    judges = [_Done("baseline", True), _Done("model", judge_of(path).predicts_words)]
    baseline = np.array(json.loads(files.baseline.read_text(encoding="utf-8")))
    evaluation = Evaluation(judges, np.stack([baseline, sums]))
    total, figures = evaluation.total(1), evaluation.figures(DRAWS)[1]
    less = {name: figures[f"{name}_difference"] for name in ("top1", "sll_without_oovs")}
    return {
        "top1": figures["top1"].value,
        "sll": total.sll_excluding_oov,
        "sll_with_ends": (total.ln_known + total.ln_ends) / total.sentences,
        "perplexity": total.perplexity_excluding_oov,
        "less": {name: [one.value, one.low, one.high] for name, one in less.items()},
    }


class _Done:
    """A judge whose verdict is known."""

    def __init__(self, name: str, predicts_words: bool) -> None:
        self.name, self.predicts_words = name, predicts_words

    def knows(self, word: str) -> bool:
        raise AssertionError("never asked")

    def each(self, *_: object) -> list[Metrics]:
        raise AssertionError("never asked")


@partial(jax.jit, static_argnums=1)
def _seen(params: rnn.Params, network: rnn.RnnConfig, rows: Any) -> tuple[Any, Any]:
    """At each place: ln P of what follows, and the ten likeliest words, from 0 on."""
    logits = rnn.apply(params, network, jnp.maximum(rows[:, :-1], 0))
    target = jnp.maximum(rows[:, 1:], 0)[..., None]
    ln_prob = jnp.take_along_axis(rnn.ln_probabilities(logits), target, axis=-1)[..., 0]
    return ln_prob, jax.lax.top_k(logits[..., FIRST_WORD_ID:], 10)[1]


def seen(run: Path, users: UserDataset, words: int) -> dict[str, Any]:
    """How a network predicts the first so many words of each user.

    Returns
        top1        share of the known words that it ranks first among all words: it may not answer
                    that a word is unknown, which is what it expects most often
        perplexity  of known words
        heads       by n, for the ten likeliest words: how often 0 to 10 of them are among the n
                    most frequent words (DPF Table 3); the vocabulary lists frequent words first
    """
    model = load_model(run)
    assert model.vocabulary is not None
    encode = model.vocabulary.encoder()
    of_user = (users.tokens(user, encode, cap=words) for user in range(len(users)))
    said = sorted((sequence(ids) for utterances in of_user for ids in utterances), key=len)
    heads = {str(n): np.zeros(11, np.int64) for n in HEADS}
    right, ln = 0, list[float]()
    for begin in range(0, len(said), ROWS):
        some = said[begin : begin + ROWS]
        rows = np.full((ROWS, 1 + -(-len(some[-1]) // 32) * 32), PAD, np.int32)
        for row, ids in zip(rows, some, strict=False):
            row[: len(ids)] = ids
        known = rows[:, 1:] >= FIRST_WORD_ID
        ln_prob, top = (np.asarray(one)[known] for one in _seen(model.params, model.network, rows))
        right += int((top[:, 0] == rows[:, 1:][known] - FIRST_WORD_ID).sum())
        ln += ln_prob.tolist()
        for n, counts in heads.items():
            counts += np.bincount((top < int(n)).sum(axis=1), minlength=11)
    return {
        "top1": right / len(ln),
        "perplexity": math.exp(-math.fsum(ln) / len(ln)),
        "heads": {n: counts.tolist() for n, counts in heads.items()},
    }
