"""The n-gram model on a topology that loses least relative entropy to counts.

    D(source || model) = const - sum over h of [ sum over w of C(w, h) ln P(w | h)
                                                 + C(phi, h) ln alpha(h) ]

falls apart into one convex problem for each context (Suresh et al. 2021, section 4.2, where each is
solved by a difference of convex functions; here by minorisation and maximisation, Hunter 2004,
whose fixed points are the same and whose multiplier has a closed form).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlm.distill import kernels
from dlm.distill.count import LocalCounts, NgramCounts, ln_likelihood, local_counts
from dlm.distill.prior import Prior, as_seen, check_visits
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge.union import run_parts, split
from dlm.units import counted

F32, F64, I64, U32 = np.float32, np.float64, np.int64, np.uint32

TOLERANCE = 1e-6  # of moment matching, as a share of a context's counts
MOST_STEPS = 1000
_LEAST_LOG10 = -99.0
_PARTS = 16


@dataclass(frozen=True, eq=False)
class FitResult:
    """The fitted model, and how well it is fitted.

    Fields
        model          on the topology; every context sums to 1
        ln_likelihood  expected, of the counts, in nats
        steps          the most that a context took
        residual       the largest of moment matching, as a share of a context's counts
        unvisited      contexts without counts, which took over what they back off to
        words          expected, ends of sentences included: what `ln_likelihood` is of
    """

    model: ModelColumns
    ln_likelihood: float
    steps: int
    residual: float
    unvisited: int
    words: float

    @property
    def perplexity(self) -> float:
        """Of text as the source says it, by the model."""
        return math.exp(-self.ln_likelihood / self.words)


@dataclass(frozen=True, eq=False)
class DistilledModel:
    """A model on another's n-grams.

    Fields
        fit               the model, and how well it is fitted
        entropy           of the source, in nats per word; nan of a source that spells its words,
                          which nobody knows, and so is the relative entropy
        relative_entropy  of the source against the model, in nats per word: e to this is how much
                          the perplexity grows on text that is as the source says
        foreign_words     words of the topology that the source does not know
        dropped           n-grams of the topology that hold one
    """

    fit: FitResult
    entropy: float
    relative_entropy: float
    foreign_words: int
    dropped: int


def fit(
    topology: ModelColumns,
    counts: NgramCounts,
    *,
    prior: float | Prior = 0.0,
    tolerance: float = TOLERANCE,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> FitResult:
    """Gives each n-gram of a topology its probability, and each context its backoff weight.

    Args
        topology   closed under prefixes and suffixes (`topology.closed`)
        counts     for its n-grams
        prior      visits that are added to each context which was visited; a number spreads them
                   over its words as they were seen after it: words that only longer contexts saw
                   keep some probability. 0 for exact counts; 1e-3 to 1 for samples
        tolerance  where a context's steps end: the most by which expected and given counts
                   differ, as a share of its counts
    Raises
        ConfigError  no counts at all; a prior below 0
    """
    if not counts.words > 0:
        raise ConfigError("there are no counts: the source said nothing")
    if not isinstance(prior, Prior):
        check_visits(prior)
    tell = progress or (lambda _: None)
    local = local_counts(topology, counts)
    added = prior if isinstance(prior, Prior) else as_seen(topology, counts, local, prior)
    prob: list[NDArray[np.float64]] = []
    back: list[NDArray[np.float64]] = []
    steps, residual, unvisited = 0, 0.0, 0
    with ThreadPoolExecutor(threads, "distill") as pool:
        for k in range(topology.order):
            tell(f"fitting what follows {counted(k, 'word')}")
            here, here_back, done, off = _fit_length(
                topology, counts, local, k, added, tolerance, pool
            )
            prob.append(here)
            back.append(here_back)
            steps, residual = (
                max(steps, int(done.max(initial=0))),
                max(residual, float(off.max(initial=0.0))),
            )
            unvisited += int(np.isnan(here_back).sum())
    weights = []
    for k in range(1, topology.order):
        columns = topology.orders[k - 1]
        weight = np.empty(len(columns))
        kernels.weigh(
            columns.suffix,
            _first_child(topology, k - 1),
            columns.first_child,
            topology.orders[k].suffix,
            prob[k - 1],
            back[k - 1],
            prob[k],
            back[k],
            weight,
        )
        weights.append(weight)
    log10_prob, log10_weight = [_log10(p) for p in prob], [_log10(w) for w in weights]
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
        unvisited,
        counts.words,
    )


def evaluate_model(model: ModelColumns, counts: NgramCounts) -> FitResult:
    """A model that was made otherwise, and how probable the counts are to it.

    Args
        model  closed under prefixes and suffixes
    """
    prob = [columns.log10_prob.astype(F64) for columns in model.orders]
    weight = [columns.log10_backoff.astype(F64) for columns in model.orders[:-1]]
    likelihood = ln_likelihood(local_counts(model, counts), prob, weight)
    return FitResult(model, likelihood, 0, 0.0, 0, counts.words)


def _fit_length(
    topology: ModelColumns,
    counts: NgramCounts,
    local: LocalCounts,
    k: int,
    prior: Prior,
    tolerance: float,
    pool: ThreadPoolExecutor,
) -> tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]
]:  # fmt: skip
    """Contexts of length k: P of their n-grams, what they leave, steps and residuals."""
    columns = topology.orders[k]
    first_child = _first_child(topology, k)
    contexts = len(first_child) - 1
    child_begin = np.zeros(contexts + 1, I64)
    children = np.zeros(len(columns), U32)
    grandchild, suffix = np.zeros(len(columns) + 1, U32), np.zeros(0, U32)
    child_backed = np.zeros(len(columns))
    if k + 1 < topology.order:
        kernels.group_by(columns.suffix, child_begin, children)
        grandchild, suffix = columns.first_child, topology.orders[k + 1].suffix
        child_backed = local.backed[k + 1]
    prob, back = np.empty(len(columns)), np.empty(contexts)
    steps, residual = np.zeros(contexts, I64), np.zeros(contexts)
    run_parts(
        pool,
        lambda *arrays: kernels.fit_contexts(*arrays[-2:], *arrays[:-2]),
        split(first_child, _PARTS),
        first_child,
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
        MOST_STEPS,
        prob,
        back,
        steps,
        residual,
    )
    return prob, back, steps, residual


def _first_child(topology: ModelColumns, length: int) -> NDArray[np.uint32]:
    """Of the contexts of some length, among the n-grams one longer."""
    if length == 0:
        return np.array([0, len(topology.orders[0])], U32)
    return topology.orders[length - 1].first_child


def _log10(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log10(values), _LEAST_LOG10)
