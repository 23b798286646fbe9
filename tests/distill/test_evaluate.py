"""Models judged on text: beside each word's distribution, and users drawn by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

from distill.plain import Plain
from dlm.distill import evaluate as judging
from dlm.distill.evaluate import NgramJudge, Sentence, evaluate
from dlm.errors import ConfigError
from dlm.federated.training.metrics import Metrics
from estimate.merge_models import normalised_model, read

WORDS = list("abcdefgh")


def a_judge(seed: int, folder: Path, words: Sequence[str] = WORDS, order: int = 3):  # type: ignore[no-untyped-def]
    """A model for the oracle, and as a judge."""
    plain = normalised_model(seed, words, order=order)
    return Plain(plain), NgramJudge(
        f"model {seed}", read(plain, folder / f"{seed}.arpa")[0]
    )  # fmt: skip


def by_hand(model: Plain, sentences: list[Sentence], known: set[str]) -> Metrics:
    """Word by word, over whole distributions."""
    correct = words = there = 0
    ln_words = ln_known = ln_ends = 0.0
    own = set(model.words)
    for sentence in sentences:
        history: tuple[str, ...] = ("<s>",)
        for word in [*sentence, "</s>"]:
            target = word if word in own else "<unk>"
            given = {w: model.prob(history, w) for w in model.words}
            ln = math.log(given[target])
            if word == "</s>":
                ln_ends += ln
            else:
                words += 1
                ln_words += ln
                if word in known:
                    there += 1
                    ln_known += ln
                    correct += max(given, key=given.__getitem__) == target
            history = (*history, target)
    return Metrics(len(sentences), words, there, correct, ln_words, ln_known, ln_ends)


def some_users(seed: int, words: Sequence[str], users: int = 12) -> list[list[Sentence]]:
    """Users with few and many sentences, one with none, empty ones among them."""
    rng = random.Random(seed)
    return [
        [rng.choices(words, k=rng.randint(0, 6)) for _ in range(rng.randint(0, 8) * (user != 3))]
        for user in range(users)
    ]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 7, 2048])
def test_figures_are_those_of_each_words_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, at_once: int
) -> None:
    """Words that one of two models lacks are known to neither; each is judged by its own <unk>."""
    monkeypatch.setattr(judging, "SENTENCES", at_once)
    one, first = a_judge(1, tmp_path, order=order)
    two, second = a_judge(2, tmp_path, [*WORDS[2:], "x"], order=3)
    users = some_users(1, [*WORDS, "x", "nowhere"])
    found = evaluate([first, second], users)
    said = [words for sentences in users for words in sentences if words]
    known = set(WORDS[2:])
    right = 0
    for place, model in enumerate((one, two)):
        wanted, total = by_hand(model, said, known), found.total(place)
        for name, value in vars(wanted).items():
            assert getattr(total, name) == pytest.approx(value, rel=1e-6), name
        right += wanted.correct
    assert right
    assert found.sums.shape[1] == sum(any(s for s in sentences) for sentences in users)
    figures = found.figures(0)
    wanted = by_hand(two, said, known)
    tokens = wanted.words + wanted.sentences
    assert figures[1]["perplexity"].value == pytest.approx(
        math.exp(-(wanted.ln_words + wanted.ln_ends) / tokens)
    )
    assert figures[1]["sll_without_oovs"].value == pytest.approx(wanted.ln_known / wanted.sentences)
    assert figures[1]["top1"].value == wanted.correct / wanted.known
    assert figures[0]["top1"].low is None
    assert "top1_difference" not in figures[0]
    difference = figures[1]["top1_difference"].value
    assert difference == figures[1]["top1"].value - figures[0]["top1"].value


def test_intervals_are_those_of_users_drawn_again(tmp_path: Path) -> None:
    """By the definition: the text of as many users, drawn with replacement; the same for both
    models, so that a model differs from itself by nothing."""
    _, first = a_judge(1, tmp_path)
    _, second = a_judge(2, tmp_path)
    users = [u for u in some_users(5, WORDS, 30) if any(u)]
    found = evaluate([first, second, first], users)
    figures = found.figures(200, seed=3)
    rng = np.random.Generator(np.random.PCG64(3))
    drawn = []
    for _ in range(200):
        again = [users[i] for i in rng.integers(len(users), size=len(users))]
        both = evaluate([first, second], [[s for sentences in again for s in sentences]])
        drawn.append([both.total(i).perplexity for i in range(2)])
    table = np.array(drawn)
    low, high = np.percentile(table[:, 1], [2.5, 97.5])
    assert figures[1]["perplexity"].low == pytest.approx(low, rel=1e-9)
    assert figures[1]["perplexity"].high == pytest.approx(high, rel=1e-9)
    low, high = np.percentile(table[:, 1] - table[:, 0], [2.5, 97.5])
    assert figures[1]["perplexity_difference"].low == pytest.approx(low, rel=1e-6)
    assert figures[1]["perplexity_difference"].high == pytest.approx(high, rel=1e-6)
    same = figures[2]["sll_without_oovs_difference"]
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_text_without_words_is_refused(tmp_path: Path) -> None:
    """Nothing was said."""
    _, judge = a_judge(1, tmp_path)
    with pytest.raises(ConfigError, match="no words"):
        evaluate([judge], [[[]], []])
