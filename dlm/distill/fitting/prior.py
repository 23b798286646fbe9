"""Priors added to the counts of contexts, so that no word of a sample is lost or overrated. They
change only the fit of the context itself, not what longer contexts pass to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts.count import LocalCounts, NgramCounts
from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns


@dataclass(frozen=True, eq=False)
class Prior:
    """Visits to add to contexts.

    Shapes, n_k n-grams of order k, k from 0 to N - 1
        visits[k]    (n_k,)      float64  visits to add to each context of length k
        prob[k]      (n_{k+1},)  float64  share of a visit for an n-gram of order k + 1
        unlisted[k]  (n_k,)      float64  share of a visit for words that are not listed
    """

    visits: list[NDArray[np.float64]]
    prob: list[NDArray[np.float64]]
    unlisted: list[NDArray[np.float64]]


def as_seen(
    topology: ModelColumns, counts: NgramCounts, local: LocalCounts, visits: float
) -> Prior:
    """Gives each context the same number of visits, spread like the words seen after it."""
    found = Prior([], [], [])
    for k, columns in enumerate(topology.orders):
        visited = np.maximum(counts.contexts[k], np.finfo(float).tiny)
        found.visits.append(np.full(len(visited), float(visits)))
        found.prob.append(counts.ngrams[k] / visited[columns.prefix])
        found.unlisted.append(local.backed[k] / visited)
    return found


def as_backed_off(
    topology: ModelColumns,
    counts: NgramCounts,
    base: NDArray[np.float64],
    visits: float | None = None,
) -> Prior:
    """Spreads visits by the distribution of the next shorter context, for counts that lack words.

    A source that spells its words gives nothing to words that no sample spelled, so their n-grams
    would have probability 0. By default each context gets a visit per distinct word seen after it,
    and at least 1.

    Args    base    (v,) float64, sums to 1: spreads the visits to the empty context; a word
                    with base above 0 has a probability above 0 after every context
    Raises  ConfigError  visits below 0
    Paper   Witten and Bell 1991, method C, with fractional counts: a word with a count below 1
            adds that count to the number of distinct words
    """
    if visits is not None:
        check_visits(visits)
    found = Prior([], [], [])
    smoothed = np.zeros(0)
    for k, columns in enumerate(topology.orders):
        seen, visited = counts.ngrams[k], counts.contexts[k]
        # At k = 0, the only context is the empty one, row 0.
        prefix = columns.prefix if k else np.zeros(len(columns), np.intp)
        below = smoothed[columns.suffix] if k else base
        if visits is None:
            kinds = np.bincount(prefix, np.minimum(seen, 1.0), len(visited))
            rest = visited - np.bincount(prefix, seen, len(visited))
            added = np.maximum(kinds + np.clip(rest, 0.0, 1.0), 1.0)
        else:
            added = np.full(len(visited), float(visits))
        found.visits.append(added)
        found.prob.append(below)
        listed = np.bincount(prefix, below, len(visited))
        found.unlisted.append(np.maximum(1.0 - listed, 0.0) if k else np.zeros(1))
        total = np.maximum(visited + added, np.finfo(float).tiny)
        smoothed = (seen + added[prefix] * below) / total[prefix]
    return found


def check_visits(visits: float) -> None:
    if not 0 <= visits < math.inf:
        raise ConfigError(f"the prior is {visits} visits; expected a finite number, 0 or more")
