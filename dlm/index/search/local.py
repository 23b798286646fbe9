"""A whole shard set in one process, which answers queries without a network.

The low orders answer what they can; other queries go to the tree of the shard that owns the
context's last two words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        Raises      QueryError  a wrong shape or type, or a length or id that is out of range
        Guarantees  scores equal ngram.backoff.score bit for bit
        """
        self._check(contexts, lengths, words)
        return self._run(_one_each(contexts, lengths, words))

    def score_groups(self, groups: QueryGroups) -> Answers:
        """Scores each word after its group's context, as `score` does; each context is walked once.

        Raises  QueryError  arrays that do not match, a length or an id out of range
        """
        check_types(groups)
        return self._run(groups)

    def _run(self, groups: QueryGroups) -> Answers:
        return run_kernel(self.low.view, self.order, groups, self.trees, self.slots)[0]

    def stored_words(self, context: NDArray[np.uint32]) -> StoredWords:
        """Returns everything stored after one context, from which `ContextBlock` answers any word;
        see also `Shard.stored_words`.

        Shapes  context (L,) uint32, most recent word last, L from 2 to N - 1
        Trusts  ids below the vocabulary's size
        """
        owner = int(self.manifest.slots[slots_of(context[-2:-1], context[-1:])[0]])
        length, skip = np.array([len(context)], np.uint8), np.zeros(1, np.uint32)
        shard, every = self.shards[owner], self.manifest.vocabulary_size
        pairs = self.low.stored_pairs(context[-2:-1], context[-1:])
        return shard.stored_words(shard.find_blocks(length, context, pairs), skip, every)

    def score_text(
        self, text: str | bytes, *, bos: bool = True, eos: bool = True
    ) -> NDArray[np.float64]:
        """Scores each line of `text`, as KenLM's `Model.score` scores a line.

        Args     text  sentences, one per line, with words separated by spaces, tabs or CR; a str is
                       encoded as UTF-8
                 bos   begin each line with `<s>`, which is not scored
                 eos   score `</s>` after each line
        Returns  (lines,) float64, log10: each line's sum of the words' float32 scores, which equal
                 ngram.backoff.score bit for bit. A text that ends in a line feed has an empty last
                 line
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
                    f"of order {self.order} need an array of {np.dtype(dtype)} of shape {shape}"
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
