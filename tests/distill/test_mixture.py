"""Merging by counts, beside the mixtures of probabilities that others make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distill.plain import a_source, restricted_values
from dlm.distill.counts.count import NgramCounts, ln_likelihood, local_counts
from dlm.distill.counts.sampling import Sampling
from dlm.distill.fitting.mixture import merge_by_counts, mixed_counts
from dlm.distill.fitting.topology import united
from dlm.distill.sampled import SampledSource, count_source
from dlm.distill.sources.backoff import BackoffSource, as_log10, distill_backoff, exact_counts
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns

WEIGHTS = (0.3, 0.7)


def cross_entropy(model: ModelColumns, whole: ModelColumns, counts: NgramCounts) -> float:
    """Nats per word of counts on a topology that holds the model's n-grams."""
    known = BackoffSource.of(model, whole)
    local = local_counts(whole, counts)
    likelihood = ln_likelihood(
        local, as_log10(known.prob), as_log10(known.weight[: whole.order - 1])
    )
    return -likelihood / counts.words


def mixed_in_contexts(
    models: list[ModelColumns], whole: ModelColumns, *, bayes: bool
) -> ModelColumns:
    """A mixture of probabilities: with fixed weights, or by how probable each model has the context
    (OpenGrm's model_merge and bayes_model_merge); each n-gram on its own, plainly."""
    sources = [BackoffSource.of(model, whole) for model in models]
    prob: list[np.ndarray] = []
    chance = [[np.ones(1)] for _ in sources]  # of each context, as a word string
    for k, columns in enumerate(whole.orders):
        total = np.zeros(len(columns))
        shares = [
            weight * (seen[k][columns.prefix] if bayes else np.ones(len(columns)))
            for weight, seen in zip(WEIGHTS, chance, strict=True)
        ]
        for share, source in zip(shares, sources, strict=True):
            total += share / sum(shares) * source.prob[k]
        prob.append(total)
        for seen, source in zip(chance, sources, strict=True):
            here = seen[k][columns.prefix] * source.prob[k]
            if k == 0:  # every sentence begins there
                here[whole.vocabulary.begin_id] = 1.0
            seen.append(here)
    weights = []
    for k in range(1, whole.order):
        longer, size = whole.orders[k], len(whole.orders[k - 1])
        left = 1 - np.bincount(longer.prefix, prob[k], size)
        below = 1 - np.bincount(longer.prefix, prob[k - 1][longer.suffix], size)
        weights.append(np.maximum(left, 1e-30) / np.maximum(below, 1e-30))
    sections = [
        (
            columns.ids,
            np.log10(np.maximum(p, 1e-99)).astype(np.float32),
            np.log10(w).astype(np.float32),
        )
        for columns, p, w in zip(
            whole.orders, prob, [*weights, np.ones(len(whole.orders[-1]))], strict=True
        )
    ]
    return ModelColumns.of(whole.vocabulary, sections)


def test_counts_make_a_nearer_model_than_mixtures_of_probabilities(tmp_path: Path) -> None:
    """Models on few n-grams are merged that two large sources were approximated by.

    On each toy the model of their counts is nearest to the mixture of the models themselves, and
    Bayes' weights are nearer than fixed ones. To the mixture of the sources it is so on average,
    and what is made of the sources' own counts, on the same n-grams, is nearer than all.
    """
    far = np.zeros(3)
    for seed in (1, 3, 4, 8):
        _, one, _ = a_source(seed, tmp_path, missing_suffixes=False, contexts=0.9)
        _, two, _ = a_source(seed + 50, tmp_path, missing_suffixes=False, contexts=0.9)
        sources = [one, restricted_values(two, one)]
        small = []
        for i, source in enumerate(sources):
            _, shape, _ = a_source(seed + 100 + i, tmp_path, missing_suffixes=False, contexts=0.4)
            small.append(distill_backoff(source, restricted_values(shape, one)).fit.model)
        union = united(small)
        everything = united([*sources, union])

        def mixture(of: list[ModelColumns], whole: ModelColumns = everything) -> NgramCounts:
            return mixed_counts([exact_counts(BackoffSource.of(m, whole)) for m in of], WEIGHTS)

        nearest = merge_by_counts(sources, WEIGHTS, topology=union).model
        merged = [
            merge_by_counts(small, WEIGHTS).model,
            *(mixed_in_contexts(small, union, bayes=bayes) for bayes in (True, False)),
        ]
        own = [cross_entropy(model, everything, mixture(small)) for model in merged]
        assert own[0] < own[1] < own[2]
        truth = mixture(sources)
        found = np.array([cross_entropy(model, everything, truth) for model in merged])
        assert cross_entropy(nearest, everything, truth) < found.min()
        far += found
    assert far[0] < far[1] < far[2]


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
