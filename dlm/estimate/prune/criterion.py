"""Measures how much worse the model is without one n-gram.

Without (h, w), the model backs off from h: P'(w | h) = alpha'(h) P(w | h'), and alpha'(h) makes
all P'(v | h) sum to 1 again. The relative entropy between the two models grows by

    D = -P(h) (  P(w | h) [ln P(w | h') + ln alpha'(h) - ln P(w | h)]
               + (1 - sum of P(v | h) over the listed v) [ln alpha'(h) - ln alpha(h)] )

which is exact for this n-gram only; e**D - 1 is then the relative growth of perplexity. The loss of
many n-grams together is not the sum of their D: one may back off to another. P(h) is the product of
the probabilities of the words of h, each after the earlier ones; `<s>`, which is never predicted,
has the probability of `</s>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.columns import MISSING, ModelColumns, OrderColumns
from dlm.estimate.prune import kernels
from dlm.ngram.vocab import BEGIN_SENTENCE
from dlm.spill.arrays import Storage
from dlm.units import LN_10

F32, F64, I64 = np.float32, np.float64, np.int64

# N-grams that a thread takes at a time.
_ROWS_AT_ONCE = 1 << 18


def ln_histories(
    model: ModelColumns, history: ModelColumns | None = None
) -> Iterator[NDArray[np.float64]]:
    """Yields ln P of every n-gram as a history, for each order from 1 to N - 1.

    Args
        history  the model for the probabilities of histories, if not the model itself; its words
                 may differ, and its order may be lower. Kneser-Ney's lower orders count contexts,
                 not occurrences: they suit interpolation, but not histories
    Paper        Stolcke 1998, section 3; Chelba et al. 2010 for the second model
    """
    shorter = np.zeros(0, F64)
    here = np.zeros(0, np.uint32)
    if history is not None:
        here = history.vocabulary.ids_of(model.vocabulary.words)
    for k, columns in enumerate(model.orders[:-1], 1):
        if history is None:
            log10_prob: NDArray[Any] = columns.log10_prob
        elif k == 1:
            log10_prob = history.orders[0].log10_prob[here]
        else:
            log10_prob = _by_parts(history, here, columns.ids, model.storage)
        if k == 1:
            ln_history = LN_10 * log10_prob.astype(F64)
            ln_history[model.vocabulary.begin_id] = ln_history[model.vocabulary.end_id]
        else:
            ln_history = model.storage.empty(len(columns), F64)
            kernels.chain(log10_prob, columns.prefix, shorter, ln_history)
        yield ln_history
        shorter = ln_history


def _by_parts(
    history: ModelColumns,
    here: NDArray[np.uint32],
    ids: NDArray[np.uint32],
    storage: Storage,
) -> NDArray[np.float64]:
    out = storage.empty(len(ids), F64)
    for begin in range(0, len(ids), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        out[part] = history.log10_probs(here[ids[part, -history.order :]])
    return out


def own_scores(
    model: ModelColumns,
    order: int,
    ln_history: NDArray[np.float64],
    threads: int = 2,
) -> NDArray[np.float32]:
    """Computes D, (n,) float32 >= 0, for pruning each n-gram of one order alone; inf where backing
    off gives the n-gram no probability. `ln_history` (m,) is that of the order below."""
    columns, contexts = model.orders[order - 1], model.orders[order - 2]
    orphan, orphan_log10 = orphans(model, columns)
    score = model.storage.empty(len(columns), F32)

    def run(begin: int, end: int) -> None:
        kernels.score_contexts(
            begin,
            end,
            contexts.first_child,
            ln_history,
            columns.ids,
            columns.log10_prob,
            columns.suffix,
            contexts.log10_prob,
            orphan,
            orphan_log10,
            never_predicted(model),
            score,
        )

    over_contexts(run, contexts.first_child, threads)
    return score


def raised_scores(
    model: ModelColumns,
    scores: Sequence[NDArray[np.float32]],
    *,
    keep_suffixes: bool = False,
) -> list[NDArray[np.float32]]:
    """Raises the scores of orders 2 to N so that an n-gram stays together with those it needs.

    An n-gram gets the highest score among itself and all n-grams whose prefix it is (with
    `keep_suffixes`, also whose suffix), since it stays as long as one of them does. A threshold on
    these scores keeps the same n-grams as pruning order by order, from the longest down.
    """
    raised = [model.storage.copy(score) for score in scores[:-1]] + list(scores[-1:])
    for k in range(model.order, 2, -1):
        columns = model.orders[k - 1]
        kernels.raise_to(raised[k - 2], columns.prefix, raised[k - 3])
        if keep_suffixes:
            kernels.raise_to(raised[k - 2], columns.suffix, raised[k - 3])
    return raised


def orphans(
    model: ModelColumns,
    columns: OrderColumns,
    probs: Sequence[NDArray[Any]] | None = None,
    weights: Sequence[NDArray[np.float32]] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the rows whose suffix the model lacks, as entropy-pruned models do, and the rows'
    log10 P(w | h')."""
    rows = rows_without_suffix(columns)
    return rows, model.log10_probs(columns.ids[rows, 1:], probs, weights)


def rows_without_suffix(columns: OrderColumns) -> NDArray[np.int64]:
    parts = [
        begin + np.flatnonzero(columns.suffix[begin : begin + _ROWS_AT_ONCE] == MISSING)
        for begin in range(0, len(columns), _ROWS_AT_ONCE)
    ]
    return np.concatenate([np.zeros(0, I64), *parts])


def never_predicted(model: ModelColumns) -> int:
    """Returns the id of `<s>`, which is not an event and is left out of all sums."""
    return model.vocabulary.ids.get(BEGIN_SENTENCE, -1)


def over_contexts(
    run: Callable[[int, int], Any], first_child: NDArray[np.uint32], threads: int
) -> list[Any]:
    """Calls `run(begin, end)` on ranges of contexts with about the same number of n-grams."""
    contexts = len(first_child) - 1
    rows = int(first_child[-1])
    marks = np.arange(_ROWS_AT_ONCE, max(rows, 1), _ROWS_AT_ONCE, dtype=np.uint32)
    ends = np.unique(np.append(np.searchsorted(first_child[:-1], marks), contexts))
    begins = np.append(0, ends[:-1])
    if threads == 1 or len(ends) == 1:
        return [run(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
    with ThreadPoolExecutor(threads, "prune") as pool:
        return list(pool.map(run, begins.tolist(), ends.tolist()))
