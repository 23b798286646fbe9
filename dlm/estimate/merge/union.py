"""The n-grams of several models with one numbering of words, order by order, with their links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import MISSING, ModelColumns, kernels as column_kernels
from dlm.estimate.merge import kernels
from dlm.ngram.vocab import UNK_ID, Vocabulary

T = TypeVar("T")

U8, U32, I64, F32 = np.uint8, np.uint32, np.int64, np.float32


@dataclass(frozen=True, eq=False)
class Union:
    """Several models with a common numbering of words.

    Shapes, m models, v words
        known   (m, v)  uint8   whether a model has an n-gram for the word
    Guarantees
        words of the first model keep their ids, then come words that only later models have; row
        w of order 1 is word w in every model. `blanks` holds the suffixes that models lack and the
        prefixes of these; None if no suffix is missing
    """

    vocabulary: Vocabulary
    models: list[ModelColumns]
    known: NDArray[np.uint8]
    blanks: ModelColumns | None

    @property
    def order(self) -> int:
        return max(model.order for model in self.models)


@dataclass(frozen=True, eq=False)
class Nodes:
    """An order of the union, blanks included; `kernels` explains the terms used.

    Shapes, m models, k the order, n nodes
        ids             (n, k)    uint32   in prefix order
        prefix, suffix  (n,)      uint32   nodes of order k - 1
        row, own        (m, n)    uint32, uint8; `blanks`, if any, is the last model
        real            (n,)      uint8    whether a model has the n-gram
        first_child     (n + 1,)  uint32   filled when the next order is made
    """

    ids: NDArray[np.uint32]
    prefix: NDArray[np.uint32]
    suffix: NDArray[np.uint32]
    row: NDArray[np.uint32]
    own: NDArray[np.uint8]
    real: NDArray[np.uint8]
    first_child: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.ids)


def unite(models: Sequence[ModelColumns]) -> Union:
    """Gives models a common numbering of words; ConfigError if there is no model. A model that
    lacks words, or whose ids change, is sorted again, and takes twice its memory meanwhile."""
    if not models:
        raise ConfigError("no model was given; expected at least one")
    first = models[0].vocabulary
    words = list(first.words)
    ids = dict(first.ids)
    for model in models[1:]:
        for word in model.vocabulary.words[1:]:
            if word not in ids:
                ids[word] = len(words)
                words.append(word)
    in_any = any(model.vocabulary.unk_in_model for model in models)
    vocabulary = Vocabulary(words, unk_in_model=in_any)
    known = np.zeros((len(models), len(words)), U8)
    renumbered = []
    for i, model in enumerate(models):
        own = model.vocabulary
        place = np.fromiter((ids[word] for word in own.words), U32, len(own))
        known[i, place] = 1
        known[i, UNK_ID] = own.unk_in_model
        renumbered.append(_renumbered(model, place, vocabulary))
    return Union(vocabulary, renumbered, known, _blanks(renumbered, vocabulary))


def _renumbered(
    model: ModelColumns, place: NDArray[np.uint32], vocabulary: Vocabulary
) -> ModelColumns:
    if len(place) == len(vocabulary) and bool((place == np.arange(len(place))).all()):
        return model
    sections = [(place[c.ids], c.log10_prob, c.log10_backoff) for c in model.orders]
    return ModelColumns.of(vocabulary, sections, comments=model.comments)


def _blanks(models: Sequence[ModelColumns], vocabulary: Vocabulary) -> ModelColumns | None:
    """Returns the suffixes that models lack, with all suffixes and prefixes of these, as a model
    without values. The suffix of an added prefix is itself such a prefix, so this is enough."""
    order = max(model.order for model in models)
    wanted: list[NDArray[np.uint32]] = [np.zeros((0, k), U32) for k in range(1, order + 1)]
    for k in range(order, 2, -1):
        parts = [wanted[k - 1][:, 1:]]
        for model in models:
            if k <= model.order:
                columns = model.orders[k - 1]
                parts.append(columns.ids[columns.suffix == MISSING][:, 1:])
        wanted[k - 2] = _distinct(np.concatenate(parts), len(vocabulary))
    if not any(len(rows) for rows in wanted):
        return None
    for k in range(order, 2, -1):
        both = np.concatenate([wanted[k - 2], wanted[k - 1][:, :-1]])
        wanted[k - 2] = _distinct(both, len(vocabulary))
    wanted[0] = np.arange(len(vocabulary), dtype=U32)[:, None]
    sections = [(rows, np.zeros(len(rows), F32), np.zeros(len(rows), F32)) for rows in wanted]
    return ModelColumns.of(vocabulary, sections)


def _distinct(rows: NDArray[np.uint32], words: int) -> NDArray[np.uint32]:
    place = np.arange(len(rows), dtype=U32)
    other = np.empty(len(rows), U32)
    begin = np.empty(words + 1, I64)
    for column in range(rows.shape[1] - 1, -1, -1):
        column_kernels.count_words(rows, column, begin)
        column_kernels.scatter(rows, column, begin, place, other)
        place, other = other, place
    rows = rows[place]
    keep = np.ones(len(rows), np.bool_)
    keep[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    out: NDArray[np.uint32] = rows[keep]
    return out


class Walk:
    """Computes the orders of a union, from 1 up, in parts that run in `pool`. The suffix of every
    node is a node, too."""

    def __init__(self, union: Union, pool: ThreadPoolExecutor, threads: int) -> None:
        self._union = union
        self._pool = pool
        self._threads = threads
        self._models = [*union.models, *([union.blanks] if union.blanks is not None else [])]
        known = union.known
        if union.blanks is not None:
            known = np.concatenate([known, np.ones((1, known.shape[1]), U8)])
        self._known = known

    def orders(self) -> Iterator[Nodes]:
        """Yields each order's nodes, and fills in `first_child` when the next order is taken."""
        union = self._union
        size, models = len(union.vocabulary), len(self._models)
        words = np.arange(size, dtype=U32)
        # A word that a model does not know has the row of <unk>. A model without <unk> has this row
        # as well, but without values, and only n-grams that begin with <unk> extend it.
        row = np.where(self._known.astype(np.bool_), words, U32(UNK_ID)).astype(U32)
        below = Nodes(
            words[:, None], np.zeros(size, U32), np.zeros(size, U32), row, self._known,
            _any(union.known), np.zeros(size + 1, U32),
        )  # fmt: skip
        shorter = None
        yield below
        for k in range(2, union.order + 1):
            first, first_base = _joined([_first(m, k - 1) for m in self._models])
            last, word_base = _joined([_words(m, k) for m in self._models])
            count = np.zeros(len(below), I64)
            self._each(
                kernels.count_children, len(below),
                below.row, below.own, first, first_base, word_base, last, count,
            )  # fmt: skip
            total = int(count.sum())
            if total > int(MISSING) - 1:
                raise ConfigError(
                    f"{total:,} n-grams of order {k} are too many; expected at most "
                    f"{int(MISSING) - 1:,}. Prune the models first (dlm prune)"
                )
            np.cumsum(count, out=below.first_child[1:], dtype=U32)
            del count
            nodes = Nodes(
                np.empty((total, k), U32), np.empty(total, U32), np.empty(total, U32),
                np.empty((models, total), U32), np.empty((models, total), U8),
                np.zeros(0, U8), np.zeros(total + 1, U32),
            )  # fmt: skip
            self._each(
                kernels.place_children, split(below.first_child, self._threads),
                below.row, below.own, first, first_base, word_base, last, self._known,
                below.first_child, below.ids, nodes.ids, nodes.prefix, nodes.row, nodes.own,
            )  # fmt: skip
            if shorter is None:
                np.copyto(nodes.suffix, nodes.ids[:, 1])
            else:
                self._each(
                    column_kernels.link_suffixes, split(below.first_child, self._threads),
                    nodes.ids, below.first_child, below.suffix, below.ids, shorter.first_child,
                    nodes.suffix,
                )  # fmt: skip
            shorter = below
            real = _any(nodes.own[: len(union.models)])
            below = Nodes(
                nodes.ids, nodes.prefix, nodes.suffix, nodes.row, nodes.own, real,
                nodes.first_child,
            )  # fmt: skip
            yield below

    def _each(self, kernel: Callable[..., object], parts: int | list[int], *arrays: object) -> None:
        if isinstance(parts, int):
            edges = [parts * j // self._threads for j in range(self._threads + 1)]
        else:
            edges = parts
        run_parts(self._pool, kernel, edges, *arrays)


def run_parts(
    pool: ThreadPoolExecutor, kernel: Callable[..., T], edges: Sequence[int], *arrays: object
) -> list[T]:
    """Runs kernel(*arrays, begin, end) on the ranges between edges, in threads; returns results."""
    steps = [
        pool.submit(kernel, *arrays, begin, end) for begin, end in pairwise(edges) if begin < end
    ]
    return [step.result() for step in steps]


def split(first_child: NDArray[np.uint32], parts: int) -> list[int]:
    """Returns the edges of context ranges with about the same number of children each."""
    wanted = [int(first_child[-1]) * j // parts for j in range(1, parts)]
    inside = np.searchsorted(first_child, np.array(wanted, U32)).tolist()
    return [0, *(min(edge, len(first_child) - 1) for edge in inside), len(first_child) - 1]


def _any(own: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out: NDArray[np.uint8] = np.bitwise_or.reduce(own, axis=0)
    return out


def _first(model: ModelColumns, order: int) -> NDArray[np.uint32]:
    return model.orders[order - 1].first_child if order <= model.order else np.zeros(1, U32)


def _words(model: ModelColumns, order: int) -> NDArray[np.uint32]:
    return model.orders[order - 1].ids[:, -1] if order <= model.order else np.zeros(0, U32)


def _joined(
    parts: Sequence[NDArray[np.uint32]],
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    ends = np.cumsum([0, *map(len, parts)], dtype=I64)
    return np.concatenate(parts), ends[:-1]
