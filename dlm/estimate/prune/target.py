"""Which n-grams to keep: those above a threshold, or a given number.

Scores are raised (`criterion.raised_scores`), so what is kept is closed under prefixes. Equal
scores are ordered by order, the shorter first, and then by place, so that a number is met exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.estimate.prune import kernels
from dlm.spill.arrays import IN_MEMORY, Storage

Keep = list[NDArray[np.bool_]]


def above(
    scores: Sequence[NDArray[np.float32]], threshold: float, storage: Storage = IN_MEMORY
) -> Keep:
    """N-grams, of orders 2 to N, without which perplexity would grow by `threshold` (relative
    growth, e**D - 1; 0 keeps all) or more."""
    least = np.float32(math.log1p(threshold))
    keep = [storage.empty(len(score), np.bool_) for score in scores]
    for score, kept in zip(scores, keep, strict=True):
        np.greater_equal(score, least, out=kept)
    return keep


def best(scores: Sequence[NDArray[np.float32]], most: int, storage: Storage = IN_MEMORY) -> Keep:
    """The `most` n-grams of highest score, of all orders together."""
    if most >= sum(map(len, scores)):
        return above(scores, 0.0, storage)
    least, ties = _boundary(scores, most)
    keep = []
    for score in scores:
        kept = storage.empty(len(score), np.bool_)
        _, ties = kernels.keep_above(score, least, ties, kept)
        keep.append(kept)
    return keep


def best_of_each(
    scores: Sequence[NDArray[np.float32]],
    prefixes: Sequence[NDArray[np.uint32]],
    most: Sequence[int | None],
) -> Keep:
    """The highest scores of each order, among those whose prefix stays; None for no limit."""
    keep: Keep = []
    for score, prefix, limit in zip(scores, prefixes, most, strict=True):
        there = np.ones(len(score), np.bool_) if not keep else keep[-1][prefix]
        candidates = np.flatnonzero(there)
        if limit is not None and limit < len(candidates):
            candidates = candidates[best([score[candidates]], limit)[0]]
        kept = np.zeros(len(score), np.bool_)
        kept[candidates] = True
        keep.append(kept)
    return keep


def _boundary(scores: Sequence[NDArray[np.float32]], most: int) -> tuple[np.float32, int]:
    """The score of the n-gram that is number `most` from the top, and how many equal to it stay."""
    if most <= 0:
        return np.float32(np.inf), 0
    left = most
    leading = -1
    for _ in range(2):
        count = np.zeros(1 << 16, np.int64)
        for score in scores:
            kernels.count_leading(score.view(np.uint32), leading, 16, count)
        # How many lie in this place or in a higher one.
        from_top = np.cumsum(count[::-1])
        place = int(np.searchsorted(from_top, left))
        left -= int(from_top[place]) - int(count[::-1][place])
        value = (1 << 16) - 1 - place
        leading = value if leading < 0 else (leading << 16) | value
    return np.uint32(leading).view(np.float32), left
