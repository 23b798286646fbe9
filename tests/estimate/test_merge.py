"""Static interpolation: against plain dictionaries, itself, and the dynamic mixture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge import MergedModel, merge_models, unite
from dlm.estimate.merge.mixture import needed_bytes
from dlm.ngram.backoff import DictModel
from estimate.merge_models import normalised_model, read, worst_sum
from estimate.merge_oracle import merge_plain
from models import HAND_MADE, PlainModel, random_model

WORDS = [f"w{i}" for i in range(9)]

# Pairs and triples of models that differ in all that models differ in.
CASES: dict[str, list[PlainModel]] = {
    "one vocabulary": [normalised_model(s, WORDS) for s in (1, 2)],
    "words of their own": [normalised_model(3, WORDS[:6]), normalised_model(4, WORDS[3:])],
    "orders of their own": [
        normalised_model(5, WORDS, order=2),
        normalised_model(6, WORDS[2:], order=4),
        normalised_model(7, WORDS[:3], order=1),
    ],
    "no unknown word in one": [
        normalised_model(8, WORDS[:5], unk=False),
        normalised_model(9, WORDS[4:]),
    ],
    "no unknown word in any": [normalised_model(s, WORDS, unk=False) for s in (10, 11)],
    "every suffix is there": [
        normalised_model(s, WORDS, order=4, missing_suffixes=False) for s in (12, 13)
    ],
    "nothing in common": [normalised_model(14, WORDS[:4]), normalised_model(15, WORDS[4:])],
    "four models": [normalised_model(s, WORDS[s % 4 :], order=3) for s in range(16, 20)],
}
WEIGHTS = {1: [1.0], 2: [0.3, 0.7], 3: [0.5, 0.2, 0.3], 4: [0.1, 0.2, 0.3, 0.4]}


def merged_file(merged: MergedModel, path: Path) -> DictModel:
    """The mixture, written and read again."""
    merged.write(path)
    return DictModel.from_arpa(path)


def spelled(model: DictModel, ngram: tuple[int, ...]) -> tuple[bytes, ...]:
    return tuple(model.vocabulary.words[i] for i in ngram)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_is_that_of_the_dictionaries(case: str, threads: int, tmp_path: Path) -> None:
    """The union of the n-grams, each probability and weight, and the sum of every context."""
    both = [read(model, tmp_path / f"{i}.arpa") for i, model in enumerate(CASES[case])]
    weights = WEIGHTS[len(both)]
    merged = merge_models(unite([columns for columns, _ in both]), weights, threads=threads)
    found = merged_file(merged, tmp_path / "merged.arpa")
    expected = merge_plain([oracle for _, oracle in both], weights)
    values = {spelled(found, n): value for n, value in found.ngrams.items()}
    assert set(values) == set(expected)
    assert merged.counts == tuple(
        sum(len(n) == k for n in expected) for k in range(1, found.order + 1)
    )
    for ngram, (log10_prob, log10_backoff) in values.items():
        prob, backoff = expected[ngram]
        if ngram != (b"<s>",):
            assert math.isclose(10.0 ** float(log10_prob), prob, rel_tol=2e-6), ngram
        assert math.isclose(10.0 ** float(log10_backoff), backoff, rel_tol=1e-4), ngram
    assert worst_sum(found) < 1e-6
    assert merged.scaled == 0
    assert abs(merged.word_sum - 1) < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_models_that_do_not_sum_to_one_are_made_to(seed: int, tmp_path: Path) -> None:
    """Random numbers as probabilities: the mixture sums to 1 all the same, and says what it did."""
    models = [random_model(seed + 100 * i, order=3, words=5, unk=i == 0) for i in range(2)]
    both = [read(model, tmp_path / f"{i}.arpa")[0] for i, model in enumerate(models)]
    merged = merge_models(unite(both), [0.5, 0.5])
    assert merged.word_sum != 1
    assert merged.lacking + merged.scaled > 0
    assert worst_sum(merged_file(merged, tmp_path / "merged.arpa")) < 1e-6


def test_a_context_that_lists_every_word_is_left_as_it_is(tmp_path: Path) -> None:
    """Nothing is left to back off: the weight is 1, not a ratio of two rounding errors."""
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {("<s>",): (-99.0, None)}
    for w in ("a", "b", "</s>", "<unk>"):
        ngrams[(w,)] = (math.log10(0.25), None)
    shares = {"a": 0.1, "b": 0.2, "</s>": 0.3, "<unk>": 0.4}
    for w, share in shares.items():
        ngrams["a", w] = (math.log10(share), None)
    columns, _ = read(PlainModel(2, ngrams), tmp_path / "a.arpa")
    found = merged_file(merge_models(unite([columns]), [1.0]), tmp_path / "merged.arpa")
    word = found.vocabulary.id_of("a")
    assert found.ngrams[(word,)][1] == 0
    assert worst_sum(found) < 1e-6


def test_blanks_are_not_written_and_hand_made_models_pass(tmp_path: Path) -> None:
    """Suffixes two deep that no model lists: in the union they are there, in the file not."""
    models = [HAND_MADE[n] for n in ("missing_suffixes", "five_grams_deep_suffixes_missing")]
    both = [read(model, tmp_path / f"{i}.arpa") for i, model in enumerate(models)]
    union = unite([columns for columns, _ in both])
    assert union.blanks is not None
    found = merged_file(merge_models(union, [0.5, 0.5]), tmp_path / "merged.arpa")
    expected = {spelled(o, n) for _, o in both for n in o.ngrams}
    assert {spelled(found, n) for n in found.ngrams} == expected


def test_weights_and_threads_that_are_none_are_refused(tmp_path: Path) -> None:
    """With what would do."""
    columns, _ = read(CASES["one vocabulary"][0], tmp_path / "a.arpa")
    union = unite([columns, columns])
    for weights, message in (
        ([1.0], "1 .*2 models"),
        ([0.5, 0.6], r"1\.1; .*0\.454545,0\.545455"),
        ([1.5, -0.5], r"weight -0\.5"),
        ([math.nan, 1.0], "weight nan"),
        ([0.0, 0.0], "sum to 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_models(union, weights)
    with pytest.raises(ConfigError, match="threads"):
        merge_models(union, [0.5, 0.5], threads=0)
    with pytest.raises(ConfigError, match="no model"):
        unite([])


def test_one_model_is_the_mixture_of_itself(tmp_path: Path) -> None:
    """Up to its last digits; and what it takes is told beforehand."""
    columns, oracle = read(CASES["one vocabulary"][1], tmp_path / "a.arpa")
    merged = merge_models(unite([columns]), [1.0])
    assert isinstance(merged.columns(), ModelColumns)
    found = merged_file(merged, tmp_path / "merged.arpa")
    assert set(found.ngrams) == set(oracle.ngrams)
    assert needed_bytes([columns.counts]) > 0
