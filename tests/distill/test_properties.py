"""What must hold of every distilled model, in float64, beside independent ways to the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill import oracle
from distill.plain import (
    Plain,
    a_source,
    by_definition,
    ngrams_of,
    sampled,
)
from dlm.distill.counts.count import LocalCounts, NgramCounts, ln_likelihood, local_counts
from dlm.distill.fitting import fit as fit_module, kernels
from dlm.distill.fitting.fit import as_log10
from dlm.distill.fitting.prior import as_seen
from dlm.distill.fitting.topology import closed, first_child, restricted, united
from dlm.distill.sources.backoff import BackoffSource, exact_counts
from dlm.estimate.columns import ModelColumns

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


class Solved:
    """The KL step's own numbers, before they become float32 logarithms."""

    def __init__(self, topology: ModelColumns, counts: NgramCounts, **options: Any) -> None:
        options = {"prior": 0.0, "tolerance": 1e-14} | options
        local = local_counts(topology, counts)
        prior = as_seen(topology, counts, local, options["prior"])
        self.topology = topology
        self.prob, self.left, self.weight = [], [], []
        with ThreadPoolExecutor(1) as pool:
            for k in range(topology.order):
                prob, left, _, self.residual, _ = fit_module._fit_length(
                    topology, counts, local, k, prior, options["tolerance"], pool
                )
                self.prob.append(prob)
                self.left.append(left)
        self.unvisited = [np.isnan(left) for left in self.left]
        for k in range(1, topology.order):
            columns = topology.orders[k - 1]
            weight = np.empty(len(columns))
            kernels.weigh(
                columns.suffix, first_child(topology, k - 1), columns.first_child,
                topology.orders[k].suffix, self.prob[k - 1], self.left[k - 1], self.prob[k],
                self.left[k], weight,
            )  # fmt: skip
            self.weight.append(weight)

    @property
    def source(self) -> BackoffSource:
        """As a source whose contexts sum to 1 to the last digits."""
        prob = [each.copy() for each in self.prob]
        return BackoffSource(
            self.topology, prob, [*self.weight, np.ones(len(self.topology.orders[-1]))]
        )

    def cross_entropy(self, local: LocalCounts, words: float) -> float:
        """Nats per word."""
        return -ln_likelihood(local, as_log10(self.prob), as_log10(self.weight)) / words


def a_case(seed: int, folder: Path) -> tuple[Plain, ModelColumns, oracle.Counts, NgramCounts]:
    """A source's sampled counts on another model's topology, twice."""
    source, columns, _ = a_source(seed, folder)
    _, other, _ = a_source(seed + 100, folder)
    topology = closed(restricted(other, columns.vocabulary).model)
    expected, counts = by_definition(source, topology, sampled(source, 300, seed))
    return source, topology, expected, counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prior", [0.0, 0.01])
def test_contexts_sum_to_one_and_nothing_is_negative(
    tmp_path: Path, seed: int, prior: float
) -> None:
    """To 1e-12; direct visits too are never below 0 before what rounding does is cut off."""
    _, topology, _, counts = a_case(seed, tmp_path)
    solved = Solved(topology, counts, prior=prior)
    for k, columns in enumerate(topology.orders):
        contexts = 1 if k == 0 else len(topology.orders[k - 1])
        total = np.bincount(columns.prefix, solved.prob[k], contexts) + solved.left[k]
        np.testing.assert_allclose(total, 1, atol=1e-12)
        assert (solved.prob[k] >= 0).all()
        assert (solved.left[k] >= 0).all()
    for k in range(1, topology.order):
        direct = counts.contexts[k - 1].copy()
        suffix = topology.orders[k - 1].suffix if k > 1 else np.zeros(len(counts.contexts[1]), int)
        np.subtract.at(direct, suffix, counts.contexts[k])
        assert (direct >= 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_comes_nearer(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relative entropy never grows, up to the last digits of its sum."""
    _, topology, _, counts = a_case(seed, tmp_path)
    local, found = local_counts(topology, counts), []
    for steps in (*range(12), 30, 1000):
        monkeypatch.setattr(fit_module, "MOST_STEPS", steps)
        found.append(Solved(topology, counts).cross_entropy(local, counts.words))
    assert (np.diff(found) <= 4e-15 * found[0]).all()
    assert found[0] > found[-1]


@pytest.mark.promise("nearest")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_papers_iteration_ends_there(tmp_path: Path, seed: int) -> None:
    """The difference of convex functions, to 1e-9."""
    source, topology, expected, counts = a_case(seed, tmp_path)
    solved = Solved(topology, counts, tolerance=1e-12)
    assert solved.residual.max() < 1e-8
    prob, left = oracle.difference_of_convex(expected, source.words)
    names = ngrams_of(topology)
    for k, order in enumerate(names):
        for i, ngram in enumerate(order):
            if ngram[:-1] in left and ngram[-1] != "<s>":
                assert solved.prob[k][i] == pytest.approx(prob[ngram], abs=1e-9), ngram


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_model_is_found_again_to_ten_digits(tmp_path: Path, seed: int, order: int) -> None:
    """From its exact counts on its own n-grams, where it is visited."""
    _, columns, _ = a_source(seed, tmp_path, order=order, missing_suffixes=False)
    topology = closed(columns)
    model = Solved(topology, exact_counts(BackoffSource.of(columns, topology)), prior=0.01)
    counts = exact_counts(model.source)
    again = Solved(topology, counts)
    for k in range(order):
        seen = counts.contexts[k] > 1e-6
        rows = seen[topology.orders[k].prefix]
        np.testing.assert_allclose(again.prob[k][rows], model.prob[k][rows], atol=1e-10)
        if k:
            np.testing.assert_allclose(
                again.weight[k - 1][seen], model.weight[k - 1][seen], rtol=1e-9, atol=1e-9
            )
    local = local_counts(topology, counts)
    lost = again.cross_entropy(local, counts.words) - model.cross_entropy(local, counts.words)
    assert abs(lost) < 1e-13


def test_few_n_grams_and_all_of_them(tmp_path: Path) -> None:
    """Words alone, with and without what begins a sentence: counts divided by their sum. All
    n-grams of the source's order: the source itself."""
    source, columns, _ = a_source(3, tmp_path, missing_suffixes=False)
    whole = closed(columns)
    counts = exact_counts(BackoffSource.of(columns, whole))
    words = whole.orders[0].ids
    begin, predicted = columns.vocabulary.begin_id, words[:, 0] != columns.vocabulary.begin_id
    pairs = np.array([(begin, w) for w in words[predicted, 0]], np.uint32)

    def shape(*sections: np.ndarray) -> ModelColumns:
        empty = [(ids.astype(np.uint32), *np.zeros((2, len(ids)), np.float32)) for ids in sections]
        return closed(ModelColumns.of(columns.vocabulary, empty))

    alone = shape(words)
    solved = Solved(alone, counts.of(whole, alone))
    np.testing.assert_allclose(solved.prob[0], counts.ngrams[0] / counts.words, atol=3e-8)
    np.testing.assert_allclose(
        solved.prob[0], counts.ngrams[0] / counts.ngrams[0].sum(), rtol=1e-14
    )
    both = united([whole, shape(words, pairs)])
    counts = exact_counts(BackoffSource.of(columns, both))
    begins = shape(words, pairs)
    kept = counts.of(both, begins)
    solved = Solved(begins, kept)
    first = solved.prob[1]
    np.testing.assert_allclose(first, kept.ngrams[1] / kept.ngrams[1].sum(), rtol=1e-7)
    other = local_counts(begins, kept).found[0]
    np.testing.assert_allclose(solved.prob[0], other / other.sum(), atol=1e-7)
    # All trigrams.
    follow = words[predicted, 0]
    inner = follow[follow != columns.vocabulary.end_id]
    two = np.array([(a, b) for a in (begin, *inner) for b in follow])
    three = np.array([(*ab, c) for ab in two if ab[1] in inner for c in follow])
    full = shape(words, two, three)
    known = BackoffSource.of(columns, full)
    for k, order in enumerate(ngrams_of(full)):  # the source's probabilities, to the last digits
        for i, ngram in enumerate(order):
            if ngram[-1] != "<s>":
                known.prob[k][i] = source.after(ngram[:-1])[ngram[-1]]
    counts = exact_counts(known)
    found = Solved(full, counts)
    local = local_counts(full, counts)
    own = -ln_likelihood(local, as_log10(known.prob), as_log10(known.weight[:-1])) / counts.words
    assert abs(found.cross_entropy(local, counts.words) - own) < 1e-12
