"""Prunes a model: chooses the n-grams to keep by score, and makes the smaller model. Equal scores
are ranked by order, lower orders first, then by row, so that a given number is met exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import (
    PARSER_BYTES,
    SORT_BYTES,
    WORD_BYTES,
    ModelColumns,
    memory_bytes,
)
from dlm.estimate.goal import Goal
from dlm.estimate.prune import kernels
from dlm.estimate.prune.criterion import ln_histories, own_scores, raised_scores
from dlm.estimate.prune.renormalise import new_weights
from dlm.ngram.arpa import arpa_bytes
from dlm.spill.arrays import IN_MEMORY, Storage

# The search for a text size ends when the text is below its limit by at most this share.
BYTES_TOLERANCE = 0.001
_MOST_TRIES = 24
# Memory of the interpreter, its libraries and compiled kernels.
_PROGRAM_BYTES = 192 << 20


@dataclass(frozen=True)
class PruneResult:
    """The smaller model, whose order may be lower (`_smaller`). `ln_divergence` is the sum
    of the scores of the pruned n-grams, in nats per word. A score is exact for pruning its n-gram
    alone; the real loss may be several times the sum (`measure`). `without_mass`, the number of
    contexts with no probability left for words that they do not list, is nearly always 0."""

    model: ModelColumns
    counts_before: tuple[int, ...]
    ln_divergence: float
    without_mass: int

    @property
    def counts(self) -> tuple[int, ...]:
        gone = len(self.counts_before) - self.model.order
        return self.model.counts + (0,) * gone


def needed_bytes(counts: Sequence[int], history: Sequence[int] = ()) -> int:
    """Returns the peak memory of pruning models with `counts`, including reading the models."""
    own = memory_bytes(counts) + (memory_bytes(history) if history else 0)
    working = sum(13 * n for n in counts[1:]) + 8 * sum(counts[:-1])
    chosen = sum((4 * k + 20) * n for k, n in enumerate(counts, 1))
    return own + working + chosen + _PROGRAM_BYTES


def least_bytes(counts: Sequence[int], history: Sequence[int] = ()) -> int:
    """Returns the peak memory of pruning with arrays in files (`Storage`). Pruning is fast as long
    as memory has room for about 12 more bytes per n-gram of the largest order."""
    words = counts[0] + (history[0] if history else 0)
    return (WORD_BYTES + 64) * words + PARSER_BYTES + SORT_BYTES + _PROGRAM_BYTES


def file_bytes(counts: Sequence[int], history: Sequence[int] = ()) -> int:
    largest = max(((4 * k + 8) * n for k, n in enumerate(counts, 1)), default=0)
    return needed_bytes(counts, history) + largest


def prune(
    model: ModelColumns,
    goal: Goal,
    *,
    history: ModelColumns | None = None,
    keep_suffixes: bool = False,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> PruneResult:
    """Drops the n-grams of order 2 and above that matter least.

    Args
        history        the model for the probabilities of histories, if not the model itself
        keep_suffixes  also keep the suffix of each kept n-gram, as toolkits whose models are
                       automata do; else only prefixes, which the format needs
    Raises      ConfigError  fewer n-grams or bytes requested than the words take
    Guarantees  words, and prefixes of kept n-grams, are kept; probabilities keep every bit, as do
                weights where nothing changed; contexts sum to 1; results do not depend on threads
    Paper       Stolcke 1998
    """
    tell = progress or (lambda _: None)
    tell("scoring n-grams")
    histories = ln_histories(model, history)
    own = [own_scores(model, k, next(histories), threads) for k in range(2, model.order + 1)]
    scores = raised_scores(model, own, keep_suffixes=keep_suffixes)
    tell("choosing the n-grams to keep")
    if goal.text_bytes is not None:
        keep, weights, without = _within_bytes(model, scores, goal.text_bytes, threads)
    else:
        keep = _chosen(model, scores, goal)
        tell("computing back-off weights")
        weights, without = new_weights(model, keep, threads)
    ln_divergence = sum(
        float(kernels.sum_dropped(score, kept)) for score, kept in zip(own, keep[1:], strict=True)
    )
    return PruneResult(_smaller(model, keep, weights), model.counts, ln_divergence, without)


def _chosen(model: ModelColumns, scores: Sequence[NDArray[np.float32]], goal: Goal) -> Keep:
    words = np.ones(len(model.orders[0]), np.bool_)
    if goal.threshold is not None:
        return [words, *above(scores, goal.threshold, model.storage)]
    if goal.ngrams is not None:
        most = _beyond_words(model, goal.ngrams, "n-grams")
        return [words, *best(scores, most, model.storage)]
    assert goal.by_order is not None
    if len(goal.by_order) != model.order:
        raise ConfigError(
            f"--ngrams has numbers for {len(goal.by_order)} orders, but the model has order "
            f"{model.order}: give one entry per order, from order 1 up, with - for no limit"
        )
    prefixes = [columns.prefix for columns in model.orders[1:]]
    return [words, *best_of_each(scores, prefixes, goal.by_order[1:])]


def _beyond_words(model: ModelColumns, asked: int, what: str) -> int:
    left = asked - model.counts[0]
    if left < 0:
        raise ConfigError(
            f"{asked:,} {what} are fewer than the {model.counts[0]:,} words, which are always "
            "kept; request more"
        )
    return left


def _within_bytes(
    model: ModelColumns, scores: Sequence[NDArray[np.float32]], most: int, threads: int
) -> tuple[Keep, list[NDArray[np.float32]], int]:
    """Chooses nearly as many n-grams as fit in `most` bytes of ARPA text. It does so by trial:
    weights get new digits, so the size cannot be computed directly."""
    words = np.ones(len(model.orders[0]), np.bool_)
    total = sum(map(len, scores))

    def tried(number: int) -> tuple[int, Keep, list[NDArray[np.float32]], int]:
        keep = [words, *best(scores, number, model.storage)]
        weights, without = new_weights(model, keep, threads)
        return _text_bytes(model, keep, weights), keep, weights, without

    low, high = tried(0), tried(total)
    if low[0] > most:
        raise ConfigError(
            f"the words, which are always kept, take {low[0]:,} bytes of ARPA text, more than the "
            f"{most:,} requested; request more bytes"
        )
    if high[0] <= most:
        return high[1:]
    at_low, at_high = 0, total
    found = low
    for _ in range(_MOST_TRIES):
        if most - low[0] <= BYTES_TOLERANCE * most or at_high - at_low < 2:
            break
        share = (most * (1 - BYTES_TOLERANCE / 2) - low[0]) / (high[0] - low[0])
        number = at_low + int((at_high - at_low) * min(max(share, 0.01), 0.99))
        number = min(max(number, at_low + 1), at_high - 1)
        middle = tried(number)
        if middle[0] <= most:
            low, at_low, found = middle, number, middle
        else:
            high, at_high = (middle[0], [], [], 0), number
    return found[1:]


def _text_bytes(model: ModelColumns, keep: Keep, weights: Sequence[NDArray[np.float32]]) -> int:
    smaller = _smaller(model, keep, weights)
    return arpa_bytes(model.vocabulary, smaller.sections(), comments=model.comments)


def _smaller(
    model: ModelColumns, keep: Keep, weights: Sequence[NDArray[np.float32]]
) -> ModelColumns:
    """Makes the model of the kept n-grams. The highest orders are dropped if they lost all n-grams,
    unless the order below has a weight other than 0: a context without n-grams may have one."""
    order = model.order
    while (
        order > 1
        and len(keep[order - 1])
        and not keep[order - 1].any()
        and not weights[order - 2][keep[order - 2]].any()
    ):
        order -= 1
    columns = [
        replace(columns, log10_backoff=weight)
        for columns, weight in zip(model.orders[:order], weights, strict=False)
    ]
    columns += model.orders[len(columns) : order]
    return replace(model, orders=columns).select([None, *keep[1:order]])


Keep = list[NDArray[np.bool_]]


def above(
    scores: Sequence[NDArray[np.float32]], threshold: float, storage: Storage = IN_MEMORY
) -> Keep:
    """Marks the n-grams, of orders 2 to N, without which perplexity would grow by `threshold` or
    more. This is relative growth, e**D - 1; 0 keeps all n-grams."""
    least = np.float32(math.log1p(threshold))
    keep = [storage.empty(len(score), np.bool_) for score in scores]
    for score, kept in zip(scores, keep, strict=True):
        np.greater_equal(score, least, out=kept)
    return keep


def best(scores: Sequence[NDArray[np.float32]], most: int, storage: Storage = IN_MEMORY) -> Keep:
    """Marks the `most` n-grams with the highest scores in all orders together."""
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
    """Marks each order's best n-grams with a kept prefix; in `most`, None means no limit."""
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
    """Returns the score of the n-gram with rank `most`, and how many with that score stay."""
    if most <= 0:
        return np.float32(np.inf), 0
    left = most
    leading = -1
    for _ in range(2):
        count = np.zeros(1 << 16, np.int64)
        for score in scores:
            kernels.count_leading(score.view(np.uint32), leading, 16, count)
        # The number of scores whose bits have this value or a higher one.
        from_top = np.cumsum(count[::-1])
        place = int(np.searchsorted(from_top, left))
        left -= int(from_top[place]) - int(count[::-1][place])
        value = (1 << 16) - 1 - place
        leading = value if leading < 0 else (leading << 16) | value
    return np.uint32(leading).view(np.float32), left
