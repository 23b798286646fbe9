"""Models judged on held-out users, by what `dlm evaluate` does, on the words that all have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.distill.evaluate import Evaluation, Judge, NetworkJudge, NgramJudge, Sentence, evaluate
from dlm.estimate.columns import ModelColumns
from dlm.federated.training import metrics
from dlm.federated.training.metrics import Metrics

DRAWS = 1_000


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


def judged(path: Path, held_out: Path, words: Path) -> dict[str, Any]:
    """A model's sums for each user, from which figures with intervals are made."""
    judge = judge_of(path)
    found = evaluate([judge, ListedWords(words)], users_of(held_out))
    return {"sums": found.sums[0].tolist(), "predicts_words": judge.predicts_words}


class _Done:
    """A judge whose verdict is known."""

    def __init__(self, name: str, predicts_words: bool) -> None:
        self.name, self.predicts_words = name, predicts_words

    def knows(self, word: str) -> bool:
        raise AssertionError("never asked")

    def each(self, *_: object) -> list[Metrics]:
        raise AssertionError("never asked")


def figures(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """A model's figures with intervals over users, and less those of a baseline."""
    judges = [_Done("baseline", True), _Done("model", result["predicts_words"])]
    sums = np.array([baseline["sums"], result["sums"]])
    _, found = Evaluation(judges, sums).figures(DRAWS)
    return {name: [one.value, one.low, one.high] for name, one in found.items()}
