"""Merging by counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distill.plain import a_source, restricted_values
from dlm.distill.counts.sampling import Sampling
from dlm.distill.fitting.mixture import merge_by_counts, mixed_counts
from dlm.distill.fitting.topology import united
from dlm.distill.sampled import SampledSource, count_source
from dlm.distill.sources.backoff import BackoffSource, exact_counts
from dlm.errors import ConfigError

WEIGHTS = (0.3, 0.7)


def test_the_counts_of_a_mixture_are_those_of_its_sentences(tmp_path: Path) -> None:
    """Three in ten drawn from one model and seven from the other."""
    _, one, _ = a_source(1, tmp_path, missing_suffixes=False)
    _, two, _ = a_source(2, tmp_path, missing_suffixes=False)
    two = restricted_values(two, one)
    whole = united([one, two])
    exact = [exact_counts(BackoffSource.of(model, whole)) for model in (one, two)]
    mixed = mixed_counts(exact, WEIGHTS)
    drawn = [
        count_source(SampledSource(model), whole, Sampling(number, 1))[0]
        for model, number in ((one, 30_000), (two, 70_000))
    ]
    together = (drawn[0] + drawn[1]).scaled(1e-5)
    apart = mixed_counts(drawn, WEIGHTS, (30_000, 70_000))
    for found in (together, apart):
        for a, b in zip(
            [*found.ngrams, *found.contexts], [*mixed.ngrams, *mixed.contexts], strict=True
        ):
            np.testing.assert_allclose(a, b, atol=0.03 * max(1.0, float(b.max())))
    np.testing.assert_allclose(together.ngrams[0], apart.ngrams[0], rtol=1e-12)


def test_models_of_other_words_are_merged_on_the_words_of_both(tmp_path: Path) -> None:
    """A word that a model lacks has only the other's share; one model alone stays what it is."""
    _, one, _ = a_source(1, tmp_path, missing_suffixes=False, words="abcde")
    _, two, _ = a_source(2, tmp_path, missing_suffixes=False, words="defgh")
    merged = merge_by_counts([one, two], WEIGHTS)
    assert set(merged.model.vocabulary.words) == {*one.vocabulary.words, *two.vocabulary.words}
    alone = merge_by_counts([one], [1.0]).model
    for mine, given in zip(alone.orders, one.orders, strict=True):
        np.testing.assert_allclose(mine.log10_prob, given.log10_prob, atol=2e-5)
    counts = [exact_counts(BackoffSource.of(one, united([one])))]
    for weights, sentences, said in (
        ([0.5, 0.4], [], "weights"),
        ([1.0], [0.0], "expected a number above 0"),
        ([1.0], [1.0, 2.0], "expected a number above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            mixed_counts(counts, weights, sentences)
