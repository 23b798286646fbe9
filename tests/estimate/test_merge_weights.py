"""Weights of a mixture on held-out text: the maximum, and what each model gives to the text."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import EstimationError
from dlm.estimate.merge import Heldout, read_heldout, tune, unite
from dlm.ngram.backoff import DictModel
from dlm.ngram.vocab import UNK_ID
from estimate.merge_models import normalised_model, read
from estimate.merge_oracle import prob_of

WORDS = [f"w{i}" for i in range(9)]


def heldout_of(prob: np.ndarray) -> Heldout:
    """Tokens that every model knows, with these probabilities."""
    known = np.ones(prob.shape, np.bool_)
    return Heldout(1, prob, prob, known, known.any(axis=0))


def mean_ln(heldout: Heldout, weights: list[float]) -> float:
    return float(np.log(np.array(weights) @ heldout.prob).mean())


@pytest.mark.parametrize("seed", range(5))
def test_two_weights_are_where_bisection_of_the_slope_finds_the_maximum(seed: int) -> None:
    """The likelihood is concave: where its slope is 0, or at an end."""
    rng = np.random.default_rng(seed)
    heldout = heldout_of(rng.random((2, 500)) ** rng.uniform(0.5, 6, (2, 1)))
    difference = heldout.prob[0] - heldout.prob[1]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        slope = (difference / (middle * heldout.prob[0] + (1 - middle) * heldout.prob[1])).sum()
        low, high = (middle, high) if slope > 0 else (low, middle)
    tuned = tune(heldout, gap=1e-10)
    assert abs(tuned.weights[0] - low) < 1e-3
    best = mean_ln(heldout, [low, 1 - low])
    assert best - 1e-9 <= mean_ln(heldout, list(tuned.weights)) <= best + 1e-12


def test_each_token_has_the_probability_that_the_plain_recursion_gives(tmp_path: Path) -> None:
    """Words of one model, of both, of none; contexts with each; missing suffixes."""
    models = [normalised_model(31, WORDS[:6], order=4), normalised_model(32, WORDS[3:], unk=False)]
    both = [read(model, tmp_path / f"{i}.arpa") for i, model in enumerate(models)]
    union = unite([columns for columns, _ in both])
    rng = random.Random(1)
    lines = [" ".join(rng.choices([*WORDS, "never"], k=rng.randrange(8))) for _ in range(200)]
    text = "\n".join(lines).encode()
    heldout = read_heldout(union, [text])
    assert heldout.sentences == 200
    assert heldout.tokens == sum(len(line.split()) + 1 for line in lines)
    for i, (_, oracle) in enumerate(both):
        token = 0
        for line in lines:
            words = line.encode().split()
            for j, word in enumerate([*words, b"</s>"]):
                context = (b"<s>", *words[:j])
                in_any = word != b"never"
                expected = prob_of(oracle, context, word if in_any else b"<unk>")
                assert math.isclose(heldout.prob[i, token], expected, rel_tol=1e-6, abs_tol=1e-99)
                assert heldout.in_any[token] == in_any
                token += 1
        fit = heldout.of_model(i)
        scores = [s for line in lines for s in zip_oov(oracle, line)]
        assert fit.oovs == sum(oov for _, oov in scores)
        every = -sum(p for p, _ in scores) / len(scores)
        known = [p for p, oov in scores if not oov]
        assert math.isclose(math.log10(fit.perplexity), every, rel_tol=1e-6)
        without = math.log10(fit.perplexity_without_oovs)
        assert math.isclose(without, -sum(known) / len(known), rel_tol=1e-6)
    mixture = heldout.of_mixture([0.5, 0.5])
    assert mixture.oovs == sum(line.split().count("never") for line in lines)


def zip_oov(oracle: DictModel, line: str) -> list[tuple[float, bool]]:
    """Score of each token of a sentence, and whether the model lacks it."""
    scores = oracle.score_sentence(line.split())
    oov = [oracle.vocabulary.id_of(w) == UNK_ID for w in line.split()] + [False]
    return [(float(s.log10_prob), o) for s, o in zip(scores, oov, strict=True)]


def test_blocks_of_text_add_up(tmp_path: Path) -> None:
    """The same arrays whether the text comes at once or line by line."""
    both = [read(normalised_model(s, WORDS), tmp_path / f"{s}.arpa")[0] for s in (33, 34)]
    union = unite(both)
    lines = [b"w1 w2", b"", b"w3 zzz w4", b"w5"]
    whole, parts = read_heldout(union, [b"\n".join(lines)]), read_heldout(union, lines)
    assert whole.sentences == parts.sentences == 4
    assert np.array_equal(whole.prob, parts.prob)
    assert np.array_equal(whole.known, parts.known)


def test_text_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """No text, no word, no word that a model knows; sentence ends alone are no reason to mix."""
    columns = read(normalised_model(35, WORDS), tmp_path / "a.arpa")[0]
    union = unite([columns, columns])
    for blocks in ([], [b""], [b"\n\n"]):
        with pytest.raises(EstimationError, match="empty"):
            read_heldout(union, blocks)
    with pytest.raises(EstimationError, match="no word"):
        tune(read_heldout(union, [b"never seen\nnever"]))
