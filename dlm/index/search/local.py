"""A whole shard set in one process: the path of a query without a network.

The low orders answer what they can; other queries go to the shard that owns the context's last two
words, as a client would send them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import QueryError
from dlm.index.search.shard import ShardSet, check_types, run_kernel
from dlm.index.search.text.score import score_lines
from dlm.ngram.partition import slots_of
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.ngram.vocab import as_bytes
from dlm.ngram.wordtable import WordTable


@dataclass(frozen=True, eq=False)
class LocalModel(ShardSet):
    """All shards of a set, mapped in this process; make one with `LocalModel.open`."""

    @property
    def order(self) -> int:
        return self.manifest.order

    @cached_property
    def trees(self) -> NDArray[np.int64]:
        """(shards,) the address of each shard's view."""
        return np.array([shard.view.ctypes.data for shard in self.shards], np.int64)

    @property
    def slots(self) -> NDArray[np.uint16]:
        """(4096,) the shard of each slot."""
        return self.manifest.slots

    def score(
        self,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        words: NDArray[np.uint32],
    ) -> Answers:
        """Scores each word after its context.

        Shapes      contexts  (Q, N - 1) uint32  word ids, the most recent in the last column;
                              columns that a context does not reach hold 0
                    lengths   (Q,) uint8  words of each context, 0 .. N - 1;  words  (Q,) uint32
        Raises      QueryError  a wrong shape or type, a length or an id out of range
        Guarantees  equals ngram.backoff.score bit for bit
        """
        self._check(contexts, lengths, words)
        groups = _one_each(contexts, lengths, words)
        if len(self.shards) == 1:
            return run_kernel(self.shards[0].view, self.order, groups)[0]
        answers, needs_shard = run_kernel(self.low.view, self.order, groups)
        rest = np.flatnonzero(needs_shard)
        if not len(rest):
            return answers
        owner = self.manifest.slots[slots_of(contexts[rest, -2], contexts[rest, -1])]
        place = np.argsort(owner, kind="stable")
        rest, owner = rest[place], owner[place]
        edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(rest)]
        for first, end in pairwise(edges):
            asked = rest[first:end]
            shard = self.shards[int(owner[first])]
            found = shard.score(_one_each(contexts[asked], lengths[asked], words[asked]))
            answers.log10_prob[asked] = found.log10_prob
            answers.matched_order[asked] = found.matched_order
            answers.ngram_length[asked] = found.ngram_length
            answers.state_length[asked] = found.state_length
        return answers

    def score_groups(self, groups: QueryGroups) -> Answers:
        """Scores each word after the context of its group, as `score`; each context is walked once.

        Raises  QueryError  arrays that do not match, a length or an id out of range
        """
        check_types(groups)
        if len(self.shards) == 1:
            return run_kernel(self.shards[0].view, self.order, groups)[0]
        answers, needs_shard = run_kernel(self.low.view, self.order, groups)
        if not needs_shard.any():
            return answers
        ends = np.cumsum(groups.context_lengths, dtype=np.int64)
        rest = np.flatnonzero(needs_shard)
        last = ends[rest]
        words = groups.context_words
        owner = self.manifest.slots[slots_of(words[last - 2], words[last - 1])]
        for shard in np.unique(owner).tolist():
            mine = rest[owner == shard]
            part, queries = _some(groups, mine)
            found = self.shards[shard].score(part)
            for column in ("log10_prob", "matched_order", "ngram_length", "state_length"):
                getattr(answers, column)[queries] = getattr(found, column)
        return answers

    def stored_words(self, context: NDArray[np.uint32]) -> StoredWords:
        """All that is stored after one context, with which `ContextBlock` answers any word.

        Shapes  context (L,) uint32, most recent word last, L from 2 to N - 1
        Trusts  ids below the vocabulary's size
        """
        owner = int(self.manifest.slots[slots_of(context[-2:-1], context[-1:])[0]])
        length, skip = np.array([len(context)], np.uint8), np.zeros(1, np.uint32)
        shard, every = self.shards[owner], self.manifest.vocabulary_size
        return shard.stored_words(shard.find_blocks(length, context), skip, every)

    def score_text(
        self, text: str | bytes, *, bos: bool = True, eos: bool = True
    ) -> NDArray[np.float64]:
        """Scores each line of `text`, as KenLM's `Model.score` does for one.

        Args     text  sentences, one per line, words between spaces, tabs and CR; UTF-8 if it is a
                       str
                 bos   begin each with `<s>`, which is not scored
                 eos   score `</s>` after each
        Returns  (lines,) float64, log10: the sum of the float32 scores of the words, which equal
                 those of ngram.backoff.score bit for bit. A text that ends in a line feed has an
                 empty last line
        """
        return score_lines(self, as_bytes(text), bos=bos, eos=eos).totals

    @cached_property
    def word_table(self) -> WordTable:
        return WordTable.from_vocabulary(self.vocabulary)

    def _check(
        self,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        words: NDArray[np.uint32],
    ) -> None:
        queries, width = len(words), max(self.order - 1, 0)
        for name, array, dtype, shape in (
            ("contexts", contexts, np.uint32, (queries, width)),
            ("lengths", lengths, np.uint8, (queries,)),
            ("words", words, np.uint32, (queries,)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise QueryError(
                    f"{name} is {array.dtype} of shape {array.shape}; {queries} queries to a model "
                    f"of order {self.order} need {np.dtype(dtype)} of shape {shape}"
                )


def _one_each(
    contexts: NDArray[np.uint32], lengths: NDArray[np.uint8], words: NDArray[np.uint32]
) -> QueryGroups:
    width = contexts.shape[1]
    reached = np.arange(width) >= width - lengths[:, None].astype(np.int64)
    return QueryGroups(
        np.ascontiguousarray(lengths),
        contexts[reached],
        np.ones(len(words), np.uint32),
        np.ascontiguousarray(words),
    )


def _some(groups: QueryGroups, chosen: NDArray[np.int64]) -> tuple[QueryGroups, NDArray[np.int64]]:
    """The chosen groups, and the places of their words among all."""
    lengths = groups.context_lengths[chosen]
    counts = groups.word_counts[chosen]
    context_end = np.cumsum(groups.context_lengths, dtype=np.int64)[chosen]
    word_end = np.cumsum(groups.word_counts, dtype=np.int64)[chosen]
    queries = _ranges(word_end, counts)
    contexts = groups.context_words[_ranges(context_end, lengths)]
    return QueryGroups(lengths, contexts, counts, groups.words[queries]), queries


def _ranges(ends: NDArray[np.int64], sizes: NDArray[Any]) -> NDArray[np.int64]:
    """end - size .. end - 1 of each, one after the other."""
    sizes = sizes.astype(np.int64)
    before = np.cumsum(sizes) - sizes
    out: NDArray[np.int64] = np.repeat(ends - sizes - before, sizes) + np.arange(int(sizes.sum()))
    return out
