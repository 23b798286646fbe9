"""Static linear interpolation: one backoff model that mixes several, p(w | h) = sum_i weight_i
p_i(w | h) for every n-gram (h, w) that some model lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.estimate.columns import ModelColumns
from dlm.estimate.merge import kernels
from dlm.estimate.merge.union import Nodes, Union, Walk, run_parts, split
from dlm.estimate.merge.weights import check_weights
from dlm.ngram.arpa import SectionColumns, write_arpa
from dlm.ngram.vocab import Vocabulary
from dlm.units import counted

F32, F64 = np.float32, np.float64


@dataclass(frozen=True, eq=False)
class MergedModel:
    """A mixture, and the corrections that made it sum to 1.

    Fields
        sections  (ids, log10_prob, log10_backoff) of order 1, 2, ..., in prefix order; the weights
                  of the highest order are None
        word_sum  the sum of the words' probabilities, which were scaled if it is not 1 within 2e-7
        lacking   number of contexts that did not sum to 1 with the models' own weights, and so got
                  weights computed from the mass that their n-grams leave
        scaled    number of contexts whose n-grams were scaled, because they summed to more than 1,
                  or to less while unlisted words, if any, had under 1e-7 of the mass below
    """

    vocabulary: Vocabulary
    sections: list[SectionColumns]
    word_sum: float
    lacking: int
    scaled: int

    @property
    def counts(self) -> tuple[int, ...]:
        first = len(self.sections[0][0]) - (not self.vocabulary.unk_in_model)
        return (first, *(len(ids) for ids, _, _ in self.sections[1:]))

    def write(self, path: str | os.PathLike[str], *, comments: Iterable[str] = ()) -> None:
        write_arpa(path, self.vocabulary, self.sections, comments=comments)

    def columns(self) -> ModelColumns:
        return ModelColumns.of(
            self.vocabulary,
            [
                (ids, prob, np.zeros(len(ids), F32) if backoff is None else backoff)
                for ids, prob, backoff in self.sections
            ],
        )


def needed_bytes(counts: Sequence[Sequence[int]]) -> int:
    """Returns the approximate peak memory of merging models with `counts`, besides the models."""
    models = len(counts) + 1
    order = max(map(len, counts))
    by_order = [sum(c[k] for c in counts if len(c) > k) for k in range(order)]
    kept = sum((4 * k + 8) * count for k, count in enumerate(by_order, 1))
    links = max(
        sum((13 * models + 4 * k + 40) * by_order[k - 1] for k in range(j, min(j + 2, order) + 1))
        for j in range(1, order + 1)
    )
    return kept + links


def merge_models(
    union: Union,
    weights: Sequence[float],
    *,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> MergedModel:
    """Mixes models into one model; ConfigError unless the weights are 0 or more and sum to 1.

    Guarantees
        the n-grams are those that some model lists, whatever its weight
        every context sums to 1 within 1e-6 without <s>, even if the models' contexts do not
    Edge cases
        ================================  ==========================================================
        a word that a model lacks         has probability 0 in that model; in a context, it counts
                                          as the model's <unk>, as in a query
        <unk> in only some models         gets these models' share; left out if no model has <unk>
        <s>                               mixed like a word, but left out of all sums
        models of different orders        a model of lower order backs off with weight 1
        a suffix that no model lists      has its probability from backing off, and is not written
        a probability of 0                -99 in the file
        ================================  ==========================================================
    Cost   linear in the n-grams, and a search for each suffix; memory: `needed_bytes`
    Paper  Stolcke 2002 (SRILM, `-mix-lm`), but with the models' own backoff weights if contexts sum
           to 1 with them: 1 minus a sum near 1 would lose digits
    """
    shares = check_weights(weights, len(union.models))
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    say = progress or (lambda line: None)
    with ThreadPoolExecutor(threads, thread_name_prefix="merge") as pool:
        return _Mixing(union, shares, pool, threads).run(say)


class _Mixing:
    def __init__(
        self, union: Union, shares: NDArray[np.float64], pool: ThreadPoolExecutor, threads: int
    ) -> None:
        self._union = union
        self._shares = shares
        self._pool = pool
        self._threads = threads
        self._word_sum = 1.0
        self._lacking = self._scaled = 0

    def run(self, say: Callable[[str], None]) -> MergedModel:
        sections: list[SectionColumns] = []
        below: tuple[Nodes, NDArray[np.float64], NDArray[np.float64]] | None = None
        words = 0
        for nodes in Walk(self._union, self._pool, self._threads).orders():
            say(f"mixing {counted(int(nodes.real.sum()), 'n-gram')} of order {nodes.ids.shape[1]}")
            if below is None:
                prob, mixed = self._words(nodes)
                words = int(nodes.real.sum()) - 1  # without <s>
            else:
                prob, mixed, backoff = self._order(nodes, *below, words)
                sections.append(_section(below[0], below[2], backoff))
            below = nodes, prob, mixed
        assert below is not None
        sections.append(_section(below[0], below[2], None))
        return MergedModel(
            self._union.vocabulary, sections, self._word_sum, self._lacking, self._scaled
        )

    def _words(self, nodes: Nodes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        union = self._union
        prob, mixed = np.empty((len(union.models), len(nodes)), F64), np.empty(len(nodes), F64)
        values, base = self._values(1, "log10_prob")
        self._word_sum = float(
            kernels.mix_words(
                self._shares, nodes.row, union.known, values, base,
                union.vocabulary.begin_id, prob, mixed,
            )
        )  # fmt: skip
        if abs(self._word_sum - 1.0) > kernels.TOLERANCE and self._word_sum > 0.0:
            begin = union.vocabulary.begin_id
            kept = mixed[begin]
            mixed /= self._word_sum
            mixed[begin] = kept
        return prob, mixed

    def _order(
        self,
        nodes: Nodes,
        below: Nodes,
        prob_below: NDArray[np.float64],
        mixed_below: NDArray[np.float64],
        words: int,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        union, order = self._union, nodes.ids.shape[1]
        prob, mixed = np.empty((len(union.models), len(nodes)), F64), np.empty(len(nodes), F64)
        backoff = np.empty(len(below), F64)
        log10_backoff, backoff_base = self._values(order - 1, "log10_backoff")
        log10_prob, prob_base = self._values(order, "log10_prob")
        changed = run_parts(
            self._pool, kernels.mix_order, split(below.first_child, self._threads),
            self._shares, union.vocabulary.begin_id, words, union.known,
            below.first_child, below.row, below.real, log10_backoff, backoff_base, prob_below,
            mixed_below, nodes.ids, nodes.suffix, nodes.row, nodes.real, log10_prob, prob_base,
            prob, mixed, backoff,
        )  # fmt: skip
        for lacking, scaled in changed:
            self._lacking += lacking
            self._scaled += scaled
        return prob, mixed, backoff

    def _values(self, order: int, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        parts = [
            getattr(model.orders[order - 1], name) if order <= model.order else np.zeros(0, F32)
            for model in self._union.models
        ]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.concatenate(parts), ends[:-1]


def _section(
    nodes: Nodes,
    mixed: NDArray[np.float64],
    backoff: NDArray[np.float64] | None,
) -> SectionColumns:
    kept = slice(None) if nodes.real.all() else nodes.real.astype(np.bool_)
    if nodes.ids.shape[1] == 1:
        kept = slice(None)  # row w is word w
    log10_prob = np.empty(len(nodes), F32)
    kernels.store(mixed, log10_prob)
    # A probability may exceed 1 by a rounding error.
    np.minimum(log10_prob, F32(0), out=log10_prob)
    weights = None
    if backoff is not None:
        weights = np.empty(len(nodes), F32)
        kernels.store(backoff, weights)
        weights = weights[kept]
    return nodes.ids[kept], log10_prob[kept], weights
