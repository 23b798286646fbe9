"""Computes new back-off weights for a pruned model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.columns import MISSING, ModelColumns
from dlm.estimate.prune import kernels
from dlm.estimate.prune.criterion import (
    never_predicted,
    orphans,
    over_contexts,
    rows_without_suffix,
)

F32, F64 = np.float32, np.float64


def new_weights(
    model: ModelColumns, keep: Sequence[NDArray[np.bool_]], threads: int = 2
) -> tuple[list[NDArray[np.float32]], int]:
    """Computes the log10 back-off weights, by order up to N - 1, if only some n-grams are kept.

    Args        keep  by order; closed under prefixes, and all of order 1
    Returns     (weights of all rows, 0 for those not kept;
                 how many contexts have no probability left for words that they do not list)
    Guarantees  every context sums to 1 over the words without `<s>`, as far as float32 allows; a
                weight keeps every bit if its context lost nothing and backs off as before
    """
    weights: list[NDArray[np.float32]] = []
    without = 0
    # log10 P of every n-gram, kept or not, in the pruned model.
    probs: list[NDArray[Any]] = [model.orders[0].log10_prob.astype(F64)]
    never = never_predicted(model)
    events = model.orders[0].ids[:, 0] != never
    words = float(np.sum(10.0 ** probs[0][events]))
    totals: list[NDArray[np.float64]] = []
    for k in range(2, model.order + 1):
        columns, contexts = model.orders[k - 1], model.orders[k - 2]
        below = _totals_below(model, k - 1, totals, words)
        total = model.storage.empty(len(contexts), F64)
        orphan, before = orphans(model, columns)
        _, orphan_log10 = orphans(model, columns, probs, weights)
        moved = before != orphan_log10
        weight = model.storage.empty(len(contexts), F32)
        arrays = (
            contexts.first_child,
            columns.ids,
            columns.log10_prob,
            contexts.log10_backoff,
            columns.suffix,
            keep[k - 1],
            keep[k - 2],
            probs[-1],
            orphan,
            orphan_log10,
            moved,
            never,
            below,
            weight,
            total,
        )

        def run(begin: int, end: int, arrays: tuple[Any, ...] = arrays) -> int:
            return int(kernels.weigh_contexts(begin, end, *arrays))

        without += sum(over_contexts(run, contexts.first_child, threads))
        weights.append(weight)
        totals.append(total)
        if k < model.order:
            out = model.storage.empty(len(columns), F64)
            kernels.new_probs(
                columns.log10_prob,
                columns.prefix,
                columns.suffix,
                keep[k - 1],
                weight,
                probs[-1],
                orphan,
                orphan_log10,
                out,
            )
            probs.append(out)
    return weights, without


def _totals_below(
    model: ModelColumns, order: int, totals: Sequence[NDArray[np.float64]], words: float
) -> NDArray[np.float64]:
    """Returns, for each context of an order, the total P of all words after the context's suffix
    or, if the model lacks this suffix, after the longest one that it has."""
    columns = model.orders[order - 1]
    if order == 1:
        return np.full(len(columns), words)
    below = model.storage.empty(len(columns), F64)
    kernels.gather(totals[order - 2], columns.suffix, below)
    left = rows_without_suffix(columns)
    for length in range(order - 2, 0, -1):
        rows = model.rows_of(columns.ids[left, order - length :])
        there = rows != MISSING
        below[left[there]] = totals[length - 1][rows[there]]
        left = left[~there]
    return below
