"""Fits the n-gram model nearest to counts, by relative entropy, on the n-grams of a topology.

    D(source || model) = const - sum over h of [ sum over w of C(w, h) ln P(w | h)
                                                 + C(phi, h) ln alpha(h) ]

separates into one convex problem per context (Suresh et al. 2021, section 4.2), solved here by
minorisation and maximisation (Hunter 2004), which has the same fixed points as their algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import LocalCounts, NgramCounts, ln_likelihood, local_counts
from dlm.distill.fitting import kernels
from dlm.distill.fitting.prior import Prior, as_seen, check_visits
from dlm.distill.fitting.topology import first_child
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge.union import run_parts, split
from dlm.units import counted

F32, F64, I64, U32 = np.float32, np.float64, np.int64, np.uint32

TOLERANCE = 1e-6  # error of moment matching, as a share of a context's counts
MOST_STEPS = 1000
_ENOUGH = 1e-4  # a slow context may miss its optimum by _ENOUGH * tolerance nats per word
_LEAST_LOG10 = -99.0
_PARTS = 16


@dataclass(frozen=True, eq=False)
class FitResult:
    """The fitted model, and how good the fit is.

    Fields
        ln_likelihood  expected log-likelihood of the counts, in nats
        steps          the most steps that a context took
        residual       the largest moment-matching residual, as a share of a context's counts
        excess         the best model gains at most this many nats per word over `model`, on these
                       counts with the prior's visits; nan for a model that was not fitted
        rounding       visits that only seemed to back off, due to rounding, and were subtracted
        unvisited      contexts without counts, which copy the context that they back off to
        words          expected words that `ln_likelihood` covers, including ends of sentences
    """

    model: ModelColumns
    ln_likelihood: float
    steps: int
    residual: float
    excess: float
    rounding: float
    unvisited: int
    words: float

    @property
    def perplexity(self) -> float:
        return math.exp(-self.ln_likelihood / self.words)


@dataclass(frozen=True, eq=False)
class DistilledModel:
    """A model distilled onto a topology.

    Fields
        entropy           entropy of the source, in nats per word; nan (not known) if the source
                          spells its words
        relative_entropy  relative entropy of the source to the model, in nats per word or nan:
                          perplexity on the source's text grows by a factor of e to this power
        foreign_words     words of the topology that the source does not know
        dropped           n-grams of the topology that contain such a word
    """

    fit: FitResult
    entropy: float
    relative_entropy: float
    foreign_words: int
    dropped: int


def distilled(
    found: FitResult, counts: NgramCounts, entropy: float, foreign: int = 0, dropped: int = 0
) -> DistilledModel:
    words = counts.words
    lost = -found.ln_likelihood - entropy
    return DistilledModel(found, entropy / words, lost / words, foreign, dropped)


def fit(
    topology: ModelColumns,
    counts: NgramCounts,
    *,
    prior: float | Prior = 0.0,
    tolerance: float = TOLERANCE,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> FitResult:
    """Fits the probability of each n-gram of a topology and the backoff weight of each context.

    Args
        topology   closed under prefixes and suffixes (`topology.closed`)
        prior      visits to add to each visited context. A number is shared among words by how
                   often each follows the context, so words counted only at longer contexts
                   keep some probability here. Use 0 for exact counts, 1e-3 to 1 for samples
        tolerance  when to stop: the largest difference between expected and given counts, as a
                   share of the context's counts
    Raises  ConfigError  no counts; a prior below 0
    """
    if not counts.words > 0:
        raise ConfigError(
            "there are no counts: the source returned no sentences; take more samples, or check "
            "the source's sample()"
        )
    if not isinstance(prior, Prior):
        check_visits(prior)
    tell = progress or (lambda _: None)
    local = local_counts(topology, counts)
    added = prior if isinstance(prior, Prior) else as_seen(topology, counts, local, prior)
    prob: list[NDArray[np.float64]] = []
    back: list[NDArray[np.float64]] = []
    steps, residual, excess, unvisited = 0, 0.0, 0.0, 0
    with ThreadPoolExecutor(threads, "distill") as pool:
        for k in range(topology.order):
            tell(f"fitting contexts of {counted(k, 'word')}")
            here, here_back, done, off, lost = _fit_length(
                topology, counts, local, k, added, tolerance, pool
            )
            prob.append(here)
            back.append(here_back)
            steps, residual = (
                max(steps, int(done.max(initial=0))),
                max(residual, float(off.max(initial=0.0))),
            )
            excess += float(lost.sum())
            unvisited += int(np.isnan(here_back).sum())
    weights = []
    for k in range(1, topology.order):
        columns = topology.orders[k - 1]
        weight = np.empty(len(columns))
        kernels.weigh(
            columns.suffix,
            first_child(topology, k - 1),
            columns.first_child,
            topology.orders[k].suffix,
            prob[k - 1],
            back[k - 1],
            prob[k],
            back[k],
            weight,
        )
        weights.append(weight)
    log10_prob, log10_weight = as_log10(prob), as_log10(weights)
    orders = [
        replace(
            columns,
            log10_prob=np.minimum(p, 0.0).astype(F32),
            log10_backoff=(
                log10_weight[k].astype(F32) if k < len(weights) else np.zeros(len(columns), F32)
            ),
        )
        for k, (columns, p) in enumerate(zip(topology.orders, log10_prob, strict=True))
    ]
    return FitResult(
        replace(topology, orders=orders),
        ln_likelihood(local, log10_prob, log10_weight),
        steps,
        residual,
        excess / counts.words,
        local.rounding,
        unvisited,
        counts.words,
    )


def evaluate_model(model: ModelColumns, counts: NgramCounts) -> FitResult:
    prob = [columns.log10_prob.astype(F64) for columns in model.orders]
    weight = [columns.log10_backoff.astype(F64) for columns in model.orders[:-1]]
    local = local_counts(model, counts)
    likelihood = ln_likelihood(local, prob, weight)
    return FitResult(model, likelihood, 0, 0.0, math.nan, local.rounding, 0, counts.words)


def _fit_length(
    topology: ModelColumns,
    counts: NgramCounts,
    local: LocalCounts,
    k: int,
    prior: Prior,
    tolerance: float,
    pool: ThreadPoolExecutor,
) -> tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64],
    NDArray[np.float64],
]:  # fmt: skip
    columns = topology.orders[k]
    begins = first_child(topology, k)
    contexts = len(begins) - 1
    child_begin = np.zeros(contexts + 1, I64)
    children = np.zeros(len(columns), U32)
    grandchild, suffix = np.zeros(len(columns) + 1, U32), np.zeros(0, U32)
    child_backed = np.zeros(len(columns))
    if k + 1 < topology.order:
        kernels.group_by(columns.suffix, child_begin, children)
        grandchild, suffix = columns.first_child, topology.orders[k + 1].suffix
        child_backed = local.backed[k + 1]
    prob, back = np.empty(len(columns)), np.empty(contexts)
    steps, residual, excess = np.zeros(contexts, I64), np.zeros(contexts), np.zeros(contexts)
    run_parts(
        pool,
        lambda *arrays: kernels.fit_contexts(*arrays[-2:], *arrays[:-2]),
        split(begins, _PARTS),
        begins,
        child_begin,
        children,
        grandchild,
        suffix,
        local.found[k],
        local.backed[k],
        local.direct[k],
        child_backed,
        counts.contexts[k],
        prior.visits[k],
        prior.prob[k],
        prior.unlisted[k],
        float(tolerance),
        _ENOUGH * tolerance * counts.words,
        MOST_STEPS,
        prob,
        back,
        steps,
        residual,
        excess,
    )
    return prob, back, steps, residual, excess


def as_log10(values: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    with np.errstate(divide="ignore"):
        return [np.maximum(np.log10(each), _LEAST_LOG10) for each in values]
