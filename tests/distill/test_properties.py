"""What must hold of every distilled model, in float64, beside independent ways to the same."""

from __future__ import annotations

import random
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
from dlm.distill.fitting import fit as fit_module
from dlm.distill.fitting import kernels
from dlm.distill.fitting.fit import fit
from dlm.distill.fitting.prior import as_seen
from dlm.distill.fitting.topology import closed, first_child, restricted, united
from dlm.distill.sources.backoff import BackoffSource, as_log10, exact_counts
from dlm.estimate.columns import ModelColumns
from dlm.estimate.prune import Goal, prune
from dlm.units import LN_10

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]


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


@pytest.mark.promise("nearest")
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_another_optimiser_finds_nothing_nearer(tmp_path: Path, seed: int) -> None:
    """BFGS on the whole table, without derivatives."""
    optimize = pytest.importorskip("scipy.optimize")
    _, topology, _, counts = a_case(seed, tmp_path)
    solved = Solved(topology, counts, tolerance=1e-12)
    # Every probability and what each context leaves, as a softmax of free numbers.
    local = local_counts(topology, counts)
    found, backed = np.concatenate(local.found), local.backed
    words = topology.orders[0].ids[:, 0] != topology.vocabulary.begin_id
    sizes = [len(columns) for columns in topology.orders]
    contexts = [1, *sizes[:-1]]

    def cross_entropy(free: np.ndarray) -> float:
        parts = np.split(free, np.cumsum([*sizes, *contexts[:-1]]))
        log_prob: list[np.ndarray] = []
        total = 0.0
        for k, columns in enumerate(topology.orders):
            here = np.exp(np.clip(parts[k], -60, 60))
            if k == 0:
                here = here * words
            rest = np.exp(np.clip(parts[topology.order + k], -60, 60)) if k else np.zeros(1)
            whole = np.bincount(columns.prefix, here, contexts[k]) + rest
            with np.errstate(divide="ignore"):
                log_prob.append(np.log(here / whole[columns.prefix]))
            if k:
                below = np.exp(log_prob[k - 1])[columns.suffix]
                left_below = 1 - np.bincount(columns.prefix, below, contexts[k])
                there = backed[k] > 1e-12
                alpha = np.log(rest / whole) - np.log(np.maximum(left_below, 1e-300))
                total -= float(backed[k][there] @ alpha[there])
        seen = found > 0
        return (total - float(found[seen] @ np.concatenate(log_prob)[seen])) / counts.words

    best = solved.cross_entropy(local, counts.words)
    rng = np.random.default_rng(seed)
    start = rng.normal(size=sum(sizes) + sum(contexts), scale=0.5)
    other = optimize.minimize(cross_entropy, start, method="L-BFGS-B", options={"maxfun": 30_000})
    assert best <= other.fun + 1e-9
    assert other.fun < best + 0.05  # it did look for it


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


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_nearer_than_sums_and_than_pruning(tmp_path: Path, seed: int) -> None:
    """Than counts of each n-gram wherever it ends a longer one, without any optimisation, and than
    the source pruned to the same n-grams by relative entropy."""
    _, columns, _ = a_source(seed, tmp_path, missing_suffixes=False, contexts=0.9)
    size = columns.counts[0] + (sum(columns.counts) - columns.counts[0]) // 3
    pruned = prune(columns, Goal(ngrams=size), keep_suffixes=True).model
    target, whole = closed(pruned), closed(columns)
    counts = exact_counts(BackoffSource.of(columns, whole)).of(whole, target)
    local = local_counts(target, counts)
    best = Solved(target, counts).cross_entropy(local, counts.words)
    theirs = BackoffSource.of(pruned, target)
    of_pruned = ln_likelihood(
        local, as_log10(theirs.prob), as_log10(theirs.weight[: target.order - 1])
    )
    assert best < -of_pruned / counts.words
    summed = Solved(target, counts)
    for k, columns_k in enumerate(target.orders):
        seen = np.maximum(counts.contexts[k][columns_k.prefix], 1e-300)
        summed.prob[k] = counts.ngrams[k] / seen
        if k:
            left = 1 - np.bincount(columns_k.prefix, summed.prob[k], len(counts.contexts[k]))
            below = 1 - np.bincount(
                columns_k.prefix, summed.prob[k - 1][columns_k.suffix], len(counts.contexts[k])
            )
            summed.weight[k - 1] = np.maximum(left, 1e-30) / np.maximum(below, 1e-30)
    assert best < summed.cross_entropy(local, counts.words)


def test_kenlm_reads_the_same_perplexity(tmp_path: Path) -> None:
    """Of text, from the file that is written; to 1e-5 of it."""
    kenlm = pytest.importorskip("kenlm")
    _, topology, _, counts = a_case(4, tmp_path)
    found = fit(topology, counts, prior=0.01)
    found.model.write(tmp_path / "out.arpa")
    read = kenlm.Model(str(tmp_path / "out.arpa"))
    rng = random.Random(0)
    lines = [rng.choices("abcdefgh", k=rng.randint(0, 8)) for _ in range(200)]
    log10 = sum(score for line in lines for score, _, _ in read.full_scores(" ".join(line)))
    ours, tokens = 0.0, 0
    solved = Solved(topology, counts, prior=0.01)
    prob, weight = as_log10(solved.prob), as_log10(solved.weight)
    for line in lines:
        ids = topology.vocabulary.ids_of([b"<s>", *(w.encode() for w in line), b"</s>"])
        for at in range(1, len(ids)):
            tokens += 1
            ours += float(
                topology.log10_probs(ids[None, max(0, at - 2) : at + 1], prob, weight)[0]  # type: ignore[arg-type]
            )
    assert np.exp(-log10 * LN_10 / tokens) == pytest.approx(
        np.exp(-ours * LN_10 / tokens), rel=1e-5
    )
