"""Merges models by their counts: finds the nearest model to a mixture in which each sentence as a
whole comes from model k with probability `weights[k]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlm.distill.counts.count import NgramCounts
from dlm.distill.fitting.fit import FitResult, fit
from dlm.distill.fitting.topology import closed, restricted, united
from dlm.distill.sources.backoff import BackoffSource, exact_counts
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge import check_weights, unite


def mixed_counts(
    counts: Sequence[NgramCounts], weights: Sequence[float], sentences: Sequence[float] = ()
) -> NgramCounts:
    """Computes a mixture's expected counts per sentence from the counts of each source on the same
    topology. The counts of source i cover `sentences[i]` samples, by default 1. ConfigError if a
    weight is below 0, or the weights do not sum to 1."""
    shares = check_weights(weights, len(counts)).tolist()
    said = list(sentences) or [1.0] * len(counts)
    if len(said) != len(counts) or not all(number > 0 for number in said):
        raise ConfigError(
            f"sentences={said}; expected a number above 0 for each of the {len(counts)} sources"
        )
    first, *rest = (
        each.scaled(share / number)
        for each, share, number in zip(counts, shares, said, strict=True)
    )
    return sum(rest, first)


def merge_by_counts(
    models: Sequence[ModelColumns],
    weights: Sequence[float],
    *,
    topology: ModelColumns | None = None,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> FitResult:
    """Finds the nearest model to a mixture of whole sentences, on the n-grams of all models or of
    `topology`: no model with these n-grams is nearer, by relative entropy. A model gives
    probability 0 to a word that it lacks.

    Raises
        ConfigError  invalid weights; errors of `topology.restricted`
        DlmError     the sentences of a model do not end
    """
    check_weights(weights, len(models))
    tell = progress or (lambda _: None)
    alike = unite(models)
    whole = united(alike.models, threads)
    target = whole
    if topology is not None:
        target = closed(restricted(topology, alike.vocabulary).model, threads)
        whole = united([*alike.models, target], threads)
    counts = []
    for place, model in enumerate(alike.models, 1):
        tell(f"computing the expected counts of model {place} of {len(models)}")
        known = exact_counts(BackoffSource.of(model, whole))
        counts.append(known.of(whole, target))
    return fit(target, mixed_counts(counts, weights), threads=threads, progress=progress)
