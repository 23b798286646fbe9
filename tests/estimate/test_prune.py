"""Pruning: the criterion is the change in relative entropy, and what is left is a model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.prune import Goal, ln_histories, own_scores, prune, raised_scores
from dlm.spill.arrays import Storage
from models import HAND_MADE, Ngram, PlainModel, random_model
from normalised import (
    contexts_of,
    divergence,
    ln_history,
    normalised_model,
    read_plain,
    sum_over_words,
)

KINDS = {
    "trigrams": {"order": 3},
    "bigrams": {"order": 2, "words": 12},
    "five": {"order": 5, "words": 3, "share": 0.6},
    "closed": {"order": 4, "words": 4, "missing_suffixes": False},
    "no unk": {"order": 3, "unk": False},
    "dense": {"order": 3, "words": 5, "share": 0.85},
    "sparse": {"order": 4, "words": 8, "share": 0.3},
}
CASES = [(kind, seed) for kind in KINDS for seed in range(2)]


def made(kind: str, seed: int, tmp_path: Path) -> tuple[PlainModel, ModelColumns]:
    """A random model, plainly and in columns."""
    plain = normalised_model(seed, **KINDS[kind])  # type: ignore[arg-type]
    return plain, ModelColumns.read(plain.write(tmp_path / "m.arpa"))


def spelled(model: ModelColumns, order: int) -> list[Ngram]:
    """The n-grams of one order, as words."""
    words = [w.decode() for w in model.vocabulary.words]
    return [tuple(words[i] for i in row) for row in model.orders[order - 1].ids.tolist()]


def all_scores(model: ModelColumns, history: ModelColumns | None = None) -> list[np.ndarray]:
    """Own scores of orders 2 to N."""
    histories = ln_histories(model, history)
    return [own_scores(model, k, next(histories)) for k in range(2, model.order + 1)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_score_is_the_change_of_relative_entropy(kind: str, seed: int, tmp_path: Path) -> None:
    """Summed over the vocabulary, before and after."""
    plain, model = made(kind, seed, tmp_path)
    for k, scores in enumerate(all_scores(model), 2):
        for ngram, score in zip(spelled(model, k), scores.tolist(), strict=True):
            want = divergence(plain, ngram)
            assert score == pytest.approx(want, rel=2e-6, abs=1e-13), ngram


@pytest.mark.parametrize("seed", range(3))
def test_histories_may_come_from_another_model(seed: int, tmp_path: Path) -> None:
    """Of another order, other words and other n-grams."""
    plain, model = made("five", seed, tmp_path)
    other = normalised_model(seed + 100, order=2 + seed % 3, words=2 + seed % 4)
    history = ModelColumns.read(other.write(tmp_path / "history.arpa"))
    known = {n[0] for n in other.ngrams if len(n) == 1}

    def heard(ngram: Ngram) -> Ngram:
        return tuple(w if w in known else "<unk>" for w in ngram)

    for k, found in enumerate(ln_histories(model, history), 1):
        for ngram, value in zip(spelled(model, k), found.tolist(), strict=True):
            assert value == pytest.approx(ln_history(other, heard(ngram)), rel=1e-9), ngram
    before, after = all_scores(model), all_scores(model, history)
    for k, (own, theirs) in enumerate(zip(before, after, strict=True), 2):
        for ngram, a, b in zip(spelled(model, k), own.tolist(), theirs.tolist(), strict=True):
            ratio = math.exp(ln_history(other, heard(ngram[:-1])) - ln_history(plain, ngram[:-1]))
            assert b == pytest.approx(a * ratio, rel=1e-5, abs=1e-13)


def pruned_plainly(plain: PlainModel, threshold: float, keep_suffixes: bool) -> set[Ngram]:
    """What stays, order by order from the longest down, an n-gram and a sum at a time."""
    kept = {n for n in plain.ngrams if len(n) == 1}
    for k in range(plain.order, 1, -1):
        needed = {n[:-1] for n in kept if len(n) == k + 1}
        if keep_suffixes:
            needed |= {n[1:] for n in kept if len(n) == k + 1}
        kept |= {
            n
            for n in plain.ngrams
            if len(n) == k and (n in needed or divergence(plain, n) >= math.log1p(threshold))
        }
    return kept


@pytest.mark.parametrize("keep_suffixes", [False, True])
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_threshold_keeps_what_brute_force_keeps(
    kind: str, seed: int, keep_suffixes: bool, tmp_path: Path
) -> None:
    """At thresholds between the scores that occur."""
    plain, model = made(kind, seed, tmp_path)
    found = np.unique(np.concatenate(all_scores(model)))
    for share in (0.2, 0.5, 0.9):
        at = int(share * (len(found) - 1))
        threshold = math.expm1(math.sqrt(max(float(found[at]), 1e-15) * float(found[at + 1])))
        result = prune(model, Goal(threshold=threshold), keep_suffixes=keep_suffixes)
        kept = {n for k in range(1, result.model.order + 1) for n in spelled(result.model, k)}
        kept -= set() if ("<unk>",) in plain.ngrams else {("<unk>",)}
        assert kept == pruned_plainly(plain, threshold, keep_suffixes)


@pytest.mark.promise("prune")
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_every_context_of_a_pruned_model_sums_to_one(kind: str, seed: int, tmp_path: Path) -> None:
    """Read back from its file; prefixes are there, and probabilities are those of before."""
    plain, model = made(kind, seed, tmp_path)
    total = sum(model.counts)
    for goal in (
        Goal(threshold=1e-4),
        Goal(threshold=1e-2),
        Goal(ngrams=(total + model.counts[0]) // 2),
        Goal(ngrams=model.counts[0] + 3),
    ):
        result = prune(model, goal)
        result.model.write(tmp_path / "p.arpa")
        after = read_plain(tmp_path / "p.arpa")
        for context in contexts_of(after):
            assert sum_over_words(after, context) == pytest.approx(1, abs=1e-6), context
        for ngram, (prob, _) in after.ngrams.items():
            assert np.float32(prob) == np.float32(plain.ngrams[ngram][0])
            assert len(ngram) == 1 or ngram[:-1] in after.ngrams
        words = {n for n in plain.ngrams if len(n) == 1}
        assert words <= set(after.ngrams)


@pytest.mark.parametrize("name", ["random", "normalised", *HAND_MADE])
def test_a_threshold_of_nothing_keeps_the_model_to_the_bit(name: str, tmp_path: Path) -> None:
    """Also where it does not sum to 1."""
    plain = {"random": random_model(3), "normalised": normalised_model(4), **HAND_MADE}[name]
    model = ModelColumns.read(plain.write(tmp_path / "m.arpa"))
    result = prune(model, Goal(threshold=0))
    assert result.counts == result.counts_before == model.counts
    assert result.ln_divergence == 0
    for before, after in zip(model.orders, result.model.orders, strict=True):
        for column in ("ids", "log10_prob", "log10_backoff", "prefix", "suffix"):
            assert getattr(before, column).tobytes() == getattr(after, column).tobytes()


@pytest.mark.promise("prune")
@pytest.mark.parametrize("keep_suffixes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_asked_for_is_met_exactly(kind: str, keep_suffixes: bool, tmp_path: Path) -> None:
    """Every number there is, and each holds the one before it."""
    _, model = made(kind, 1, tmp_path)
    before: set[Ngram] = set()
    for number in range(model.counts[0], sum(model.counts) + 1):
        result = prune(model, Goal(ngrams=number), keep_suffixes=keep_suffixes)
        assert sum(result.counts) == number
        kept = {n for k in range(2, result.model.order + 1) for n in spelled(result.model, k)}
        assert before < kept or number == model.counts[0]
        before = kept


def test_a_number_is_met_where_most_ngrams_cost_nothing(tmp_path: Path) -> None:
    """As in a distilled model of a network that says the same after every word."""
    words, share = [f"w{n}" for n in range(6)], math.log10(1 / 8)
    unigrams = [f"{share}\t{word}\t0" for word in (*words, "</s>", "<unk>")] + ["-99\t<s>\t0"]
    bigrams = [f"{share}\t{first} {second}" for first in words for second in words]
    file = tmp_path / "same.arpa"
    file.write_text(
        f"\\data\\\nngram 1={len(unigrams)}\nngram 2={len(bigrams)}\n\n"
        + "\\1-grams:\n"
        + "\n".join(unigrams)
        + "\n\n\\2-grams:\n"
        + "\n".join(bigrams)
        + "\n\n\\end\\\n"
    )
    model = ModelColumns.read(file)
    (scores,) = all_scores(model)
    assert not np.signbit(scores).any()
    for number in (9, 12, 30, 44):
        assert sum(prune(model, Goal(ngrams=number)).counts) == number


def test_numbers_by_order_are_met_where_prefixes_allow(tmp_path: Path) -> None:
    """Exactly, unless fewer n-grams have their prefix left."""
    _, model = made("closed", 2, tmp_path)
    words, two, three, four = model.counts
    result = prune(model, Goal(by_order=(None, two // 2, three // 3, None)))
    assert result.counts[:3] == (words, two // 2, three // 3)
    assert result.counts[3] <= four
    scores = raised_scores(model, all_scores(model))
    kept = set(spelled(result.model, 2))
    ranked = sorted(zip(scores[0].tolist(), spelled(model, 2), strict=True), reverse=True)
    assert {n for score, n in ranked[: two // 2]} == kept
    with pytest.raises(ConfigError, match=r"3 orders.* 4"):
        prune(model, Goal(by_order=(None, 1, 1)))


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_size_asked_for_is_not_passed(share: float, tmp_path: Path) -> None:
    """And met within a thousandth, or one n-gram."""
    model = ModelColumns.read(
        normalised_model(5, order=3, words=40, share=0.4).write(tmp_path / "m.arpa")
    )
    least = prune(model, Goal(ngrams=model.counts[0])).model
    least.write(tmp_path / "least.arpa")
    model.write(tmp_path / "most.arpa")
    low, high = ((tmp_path / f"{n}.arpa").stat().st_size for n in ("least", "most"))
    asked = int(low + share * (high - low))
    result = prune(model, Goal(text_bytes=asked))
    result.model.write(tmp_path / "p.arpa")
    size = (tmp_path / "p.arpa").stat().st_size
    assert asked - max(asked // 1000, 60) <= size <= asked
    with pytest.raises(ConfigError, match=f"{low:,} .*{low - 1:,}"):
        prune(model, Goal(text_bytes=low - 1))


def test_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces so small that there are many."""
    model = ModelColumns.read(
        normalised_model(6, order=4, words=12, share=0.4).write(tmp_path / "m.arpa")
    )
    one = prune(model, Goal(threshold=1e-4), threads=1)
    monkeypatch.setattr("dlm.estimate.prune.criterion._ROWS_AT_ONCE", 50)
    two = prune(model, Goal(threshold=1e-4), threads=3)
    assert one.counts == two.counts
    assert one.ln_divergence == two.ln_divergence
    for a, b in zip(one.model.orders, two.model.orders, strict=True):
        assert a.log10_backoff.tobytes() == b.log10_backoff.tobytes()


def test_an_order_without_ngrams_is_left_out(tmp_path: Path) -> None:
    """Or no tool would read the model."""
    _, model = made("five", 0, tmp_path)
    result = prune(model, Goal(threshold=1e9))
    assert result.model.order == 1
    assert result.counts == (model.counts[0], 0, 0, 0, 0)
    result.model.write(tmp_path / "p.arpa")
    assert ModelColumns.read(tmp_path / "p.arpa").counts == (model.counts[0],)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({}, "--ngrams"),
        ({"threshold": 1e-8, "ngrams": 5}, "--ngrams"),
        ({"threshold": -1.0}, "expected 0 or more"),
        ({"threshold": math.nan}, "expected 0 or more"),
        ({"ngrams": 0}, "prune.ngrams is 0"),
        ({"by_order": (None, -1)}, "-1;"),
    ],
)
def test_a_goal_that_is_none_is_refused(goal: dict[str, float], message: str) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=message):
        Goal(**goal)  # type: ignore[arg-type]


def test_fewer_ngrams_than_words_are_refused(tmp_path: Path) -> None:
    """Words are what a vocabulary is."""
    _, model = made("trigrams", 0, tmp_path)
    with pytest.raises(ConfigError, match=f"{model.counts[0] - 1:,} .*{model.counts[0]:,} words"):
        prune(model, Goal(ngrams=model.counts[0] - 1))


@pytest.mark.parametrize("kind", ["five", "no unk", "sparse"])
def test_arrays_in_files_change_nothing(kind: str, tmp_path: Path) -> None:
    """The same model to the byte, and no file is left."""
    _, model = made(kind, 3, tmp_path)
    other = normalised_model(7, order=2).write(tmp_path / "history.arpa")
    folder = tmp_path / "spill"
    folder.mkdir()
    stored = ModelColumns.read(tmp_path / "m.arpa", storage=Storage(folder))
    for before, after in zip(model.orders, stored.orders, strict=True):
        for column in ("ids", "log10_prob", "log10_backoff", "prefix", "suffix", "first_child"):
            assert np.array_equal(getattr(before, column), getattr(after, column)), column
    number = (sum(model.counts) + model.counts[0]) // 2
    for goal in (Goal(threshold=1e-3), Goal(ngrams=number), Goal(text_bytes=1500)):
        for history in (None, ModelColumns.read(other)):
            for i, one in enumerate((model, stored)):
                result = prune(one, goal, history=history)
                result.model.write(tmp_path / f"{i}.arpa")
            assert (tmp_path / "0.arpa").read_bytes() == (tmp_path / "1.arpa").read_bytes()
    assert list(folder.iterdir()) == []
