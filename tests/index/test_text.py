"""Text scores word by word as separate queries do, across blocks of words and in any sentence."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from dlm.index.search.local import LocalModel
from dlm.index.search.text.kernels import TOKENS
from dlm.index.search.text.score import score_lines
from dlm.ngram.backoff import DictModel
from models import HAND_MADE, PlainModel, assert_equals_oracle, build, random_model

MODELS = {
    **HAND_MADE,
    **{f"order-{n}": random_model(n, order=n, words=9, per_order=60) for n in range(1, 8)},
    "closed": random_model(11, order=4, words=12, per_order=300, missing_suffixes=False),
    "wide": random_model(12, order=3, words=60, per_order=1500),
    "no-unk": random_model(13, order=5, unk=False),
}


def text_of(model: PlainModel, tokens: int) -> bytes:
    """Lines of n-grams of the model and of words at random, some lines without words."""
    rng = random.Random(tokens)
    ngrams = sorted(model.ngrams)
    words = [ngram[0] for ngram in ngrams if len(ngram) == 1]
    parts: list[str] = []
    while len(parts) < tokens:
        parts += rng.choice(ngrams) if rng.random() < 0.7 else [rng.choice([*words, "never"])]
        if rng.random() < 0.1:
            parts += ["\n"] * rng.choice([1, 1, 2])
    return " ".join(parts).encode()


@pytest.mark.parametrize(("encoding", "shards"), [("exact", 1), ("compact", 1), ("exact", 3)])
@pytest.mark.parametrize("name", MODELS)
def test_text_scores_as_each_word_alone(
    name: str, encoding: str, shards: int, tmp_path: Path
) -> None:
    """Every column, with marks of sentences and without, for a few words and for many blocks."""
    local = LocalModel.open(build(MODELS[name], tmp_path, shards, encoding=encoding))
    oracle = DictModel.from_arpa(tmp_path / "model.arpa")
    width = local.order - 1
    for tokens, bos, eos in [(0, True, True), (1, False, False), (3, True, False)] + [
        (5 * TOKENS, marks, marks) for marks in (True, False)
    ]:
        text = text_of(MODELS[name], tokens) if tokens else b""
        lines = score_lines(local, text, bos=bos, eos=eos)
        answers, begin, totals = lines.answers, lines.begin, lines.totals
        words: list[int] = []
        reach: list[int] = []
        sums: list[float] = []
        for line in text.split(b"\n"):
            ids = local.vocabulary.ids_of(line.split()).tolist()
            ids = [local.vocabulary.begin_id] * bos + ids + [local.vocabulary.end_id] * eos
            first = len(words)
            words += ids
            reach += [min(i, width) for i in range(len(ids))]
            scores = answers.log10_prob[first + bos : len(words)]
            sums.append(sum(map(float, scores)))
        asked, reached = np.array(words, np.uint32), np.array(reach, np.uint8)
        contexts = np.zeros((len(words), width), np.uint32)
        for back in range(1, width + 1):
            rows = np.flatnonzero(reached >= back)
            contexts[rows, width - back] = asked[rows - back]
        alone = local.score(contexts, reached, asked)
        for column in ("log10_prob", "matched_order", "ngram_length", "state_length"):
            assert getattr(answers, column).tobytes() == getattr(alone, column).tobytes(), column
        assert totals.tolist() == sums
        assert len(begin) == len(sums) + 1
        if encoding == "exact":
            assert_equals_oracle(answers, oracle, contexts, reached, asked)
