"""Uses a backoff model as the source: computes exact expected counts, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import NgramCounts, ln_likelihood, local_counts
from dlm.distill.fitting import kernels
from dlm.distill.fitting.fit import DistilledModel, as_log10, distilled, fit
from dlm.distill.fitting.topology import closed, first_child, restricted, united
from dlm.errors import DlmError, SourceError
from dlm.estimate.columns import MISSING, ModelColumns
from dlm.units import counted

F64 = np.float64

MOST_STEPS = 1_000
_RESTARTS = 4
_TOLERANCE = 1e-12
SUM_TOLERANCE = 0.01  # how far the contexts' mean sum may be from 1; values may have 4 digits


def distill_backoff(
    source: ModelColumns,
    topology: ModelColumns,
    *,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> DistilledModel:
    """Fits the model nearest to the source, by relative entropy, on the n-grams of a topology.
    Drops n-grams with words that the source lacks; adds the source's words and missing suffixes.

    Raises
        ConfigError  the topology has no n-gram in the source's words
        DlmError     the source's sentences do not end
    """
    tell = progress or (lambda _: None)
    part = restricted(topology, source.vocabulary)
    target = closed(part.model, threads)
    whole = united([source, target], threads)
    tell(f"computing the expected counts of {counted(sum(whole.counts), 'n-gram')}")
    known = BackoffSource.of(source, whole)
    counts = exact_counts(known)
    found = fit(target, counts.of(whole, target), threads=threads, progress=progress)
    return distilled(found, counts, known.entropy(counts), part.foreign_words, part.dropped)


@dataclass(frozen=True, eq=False)
class BackoffSource:
    """A backoff model as the source, on a topology that has all of its n-grams.

    Every context is scaled to sum to 1; otherwise a rounding error would count as unlisted mass.

    Shapes, n_k n-grams of order k of the topology
        prob[k - 1]     (n_k,)  float64  P(w | h)
        weight[k - 1]   (n_k,)  float64  backoff weight; 1 for contexts that the model lacks
    """

    topology: ModelColumns
    prob: list[NDArray[np.float64]]
    weight: list[NDArray[np.float64]]

    @classmethod
    def of(cls, model: ModelColumns, topology: ModelColumns) -> BackoffSource:
        """Puts a model on a closed topology that contains its n-grams and words; SourceError if the
        contexts do not sum to 1, as in a filtered model or one with wrong values."""
        prob, weight = [], []
        for columns in topology.orders:
            prob.append(10.0 ** model.log10_probs(columns.ids))
            alpha = np.ones(len(columns))
            k = columns.ids.shape[1]
            if k < model.order:
                rows = model.rows_of(columns.ids)
                there = rows != MISSING
                alpha[there] = 10.0 ** model.orders[k - 1].log10_backoff[rows[there]].astype(F64)
            weight.append(alpha)
        prob[0][model.vocabulary.begin_id] = 0.0
        if not model.vocabulary.unk_in_model:
            prob[0][0] = 0.0
        made = cls(topology, prob, weight)
        _check_sums(made)
        _normalise(made)
        return made

    def entropy(self, counts: NgramCounts) -> float:
        """Returns the entropy for counts on the source's topology, summed over visits, in nats."""
        log10_weight = as_log10(self.weight[: self.topology.order - 1])
        return -ln_likelihood(
            local_counts(self.topology, counts), as_log10(self.prob), log10_weight
        )


def _check_sums(source: BackoffSource) -> None:
    contexts = [np.ones(1), *(np.ones(len(columns)) for columns in source.topology.orders[:-1])]
    with np.errstate(all="ignore"):
        total = sum(float(found.sum()) for found in _step(source, contexts))
    mean = total / sum(map(len, contexts))
    if not abs(mean - 1) <= SUM_TOLERANCE:
        raise SourceError(
            f"the model's word probabilities sum to {mean:.4g} on average over its contexts; "
            "expected 1. If the model was filtered, run dlm filter --renormalise; otherwise "
            "estimate it again"
        )


def _normalise(source: BackoffSource) -> None:
    topology = source.topology
    source.prob[0] /= source.prob[0].sum()
    back = np.zeros(1)
    for k in range(1, topology.order):
        shorter, here_back = topology.orders[k - 1], np.zeros(len(topology.orders[k - 1]))
        kernels.normalise(
            shorter.suffix, first_child(topology, k - 1), shorter.first_child,
            topology.orders[k].suffix, source.prob[k - 1], back, source.prob[k],
            source.weight[k - 1], here_back,
        )  # fmt: skip
        back = here_back


def exact_counts(source: BackoffSource) -> NgramCounts:
    """Computes a backoff model's expected counts per sentence, on its topology, without sampling.

    The expected visits of the model's states solve a sparse linear system (Suresh et al. 2021
    compute them as a shortest distance). BiCGSTAB (van der Vorst 1992) finds them in a few dozen
    steps, each linear in the number of n-grams. If it fails (DlmError), sentences do not end.
    """
    topology = source.topology
    if topology.order == 1:
        return _unigram_counts(source)
    sizes = [1, *map(len, topology.orders[:-1])]
    places = np.cumsum([0, *sizes])
    end = topology.vocabulary.end_id
    # Nothing follows the end of a sentence.
    ends = [np.flatnonzero(columns.ids[:, -1] == end) for columns in topology.orders]

    def parts(visits: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        return [visits[a:b] for a, b in pairwise(places)]

    def missing(visits: NDArray[np.float64]) -> NDArray[np.float64]:
        found = _step(source, parts(visits))
        for counts, rows in zip(found, ends, strict=True):
            counts[rows] = 0.0
        kernels.add_at(found[-1], topology.orders[-1].suffix, found[-2])
        out = visits.copy()
        out[1:] -= np.concatenate(found[:-1])
        return out

    start = np.zeros(places[-1])
    start[1 + topology.vocabulary.begin_id] = 1.0
    visits = _solved(missing, start)
    if visits is None or not (visits > -_TOLERANCE * visits.sum()).all():
        raise DlmError(
            "the source's sentences do not end: </s> is hardly ever predicted, so n-grams have no "
            "expected count per sentence. Estimate the source again, from whole sentences"
        )
    return counts_of_visits(source, parts(np.maximum(visits, 0.0)))


def counts_of_visits(source: BackoffSource, visits: Sequence[NDArray[np.float64]]) -> NgramCounts:
    """Computes n-gram counts from visits[k], (n_k,) float64: how often each context of length k,
    0 to N - 1, is the longest context that applies."""
    return _summed(source.topology, _step(source, visits), visits)


def _solved(
    apply: Callable[[NDArray[np.float64]], NDArray[np.float64]], wanted: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Returns x with apply(x) = wanted for a linear `apply`, or None if no such x is found."""
    x = wanted
    for _ in range(_RESTARTS):
        x, is_solved = _bicgstab(apply, wanted, x)
        if is_solved:
            return x
    return None


def _bicgstab(
    apply: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    wanted: NDArray[np.float64],
    x: NDArray[np.float64],
) -> tuple[NDArray[np.float64], bool]:
    """Returns a better x, and whether that is good enough; after a breakdown, call again with x."""
    residual = wanted - apply(x)
    shadow, direction = residual.copy(), residual.copy()
    rho = np.float64(shadow @ residual)
    for _ in range(MOST_STEPS):
        if float(np.abs(residual).sum()) <= _TOLERANCE * float(np.abs(x).sum()):
            return x, True
        image = apply(direction)
        with np.errstate(all="ignore"):
            alpha = rho / np.float64(shadow @ image)
            half = residual - alpha * image
            turned = apply(half)
            omega = np.float64(turned @ half) / np.float64(turned @ turned)
            better = x + alpha * direction + omega * half
            residual = half - omega * turned
            rho, before = np.float64(shadow @ residual), rho
            direction = residual + rho / before * alpha / omega * (direction - omega * image)
            if not np.isfinite(better.sum() + direction.sum()):
                return x, False
        x = better
    return x, False


def _step(
    source: BackoffSource, visits: Sequence[NDArray[np.float64]]
) -> list[NDArray[np.float64]]:
    topology = source.topology
    reached = [counts.copy() for counts in visits]
    passed: list[NDArray[np.float64]] = [np.zeros(0)] * len(visits)
    for k in range(len(visits) - 1, 0, -1):
        passed[k] = source.weight[k - 1] * reached[k]
        kernels.add_at(passed[k], topology.orders[k - 1].suffix, reached[k - 1])
    found = []
    for k, columns in enumerate(topology.orders, 1):
        mass = reached[k - 1][columns.prefix]
        if k < topology.order:
            longer = topology.orders[k]
            kernels.subtract_from_prefix(passed[k], longer.prefix, longer.suffix, mass)
        found.append(source.prob[k - 1] * mass)
    return found


def _summed(
    topology: ModelColumns,
    found: Sequence[NDArray[np.float64]],
    visits: Sequence[NDArray[np.float64]],
) -> NgramCounts:
    ngrams = [np.maximum(counts, 0.0) for counts in found]
    contexts = [counts.copy() for counts in visits]
    for k in range(topology.order, 1, -1):
        kernels.add_at(ngrams[k - 1], topology.orders[k - 1].suffix, ngrams[k - 2])
    for k in range(topology.order - 1, 0, -1):
        kernels.add_at(contexts[k], topology.orders[k - 1].suffix, contexts[k - 1])
    return NgramCounts(ngrams, contexts)


def _unigram_counts(source: BackoffSource) -> NgramCounts:
    ending = float(source.prob[0][source.topology.vocabulary.end_id])
    if not ending > 0:
        raise DlmError(
            "the source's sentences do not end: </s> is never predicted. Estimate the source "
            "again, from whole sentences"
        )
    words = float(source.prob[0].sum()) / ending
    return NgramCounts([source.prob[0] / ending], [np.array([words])])
