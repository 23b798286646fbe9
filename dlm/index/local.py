"""A whole shard set in one process: the path of a query without a network.

The low orders answer what they can; the rest goes to the shard that owns the context's last two
words, as a client would send it. Tests, benchmarks and one-machine uses stand on this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.errors import QueryError
from dlm.index.decode import ShardSet
from dlm.index.layout import Manifest
from dlm.index.shard import LowOrders, Shard, run_kernel
from dlm.ngram.partition import slots_of
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary


@dataclass(frozen=True, eq=False)
class LocalModel:
    """All shards of a set, mapped here; `LocalModel.open` is the way to make one."""

    manifest: Manifest
    vocabulary: Vocabulary
    low: LowOrders
    shards: list[Shard]

    @classmethod
    def open(cls, directory: str | os.PathLike[str], verify: bool = True) -> LocalModel:
        """Maps every file of the shard set in `directory`.

        Args
            verify  check the checksum of each file; offsets and keys are checked regardless
        Raises
            ShardFormatError  a file is missing, damaged or contradicts the manifest
        """
        opened = ShardSet.open(directory, verify=verify)
        return cls(opened.manifest, opened.vocabulary, opened.low, opened.shards)

    @property
    def order(self) -> int:
        """N; contexts have at most N - 1 words."""
        return self.manifest.order

    def score(
        self,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        words: NDArray[np.uint32],
    ) -> Answers:
        """What each word scores after its context.

        Shapes
            contexts  (Q, N - 1)  uint32  word ids, the most recent in the last column; columns
                      that a context does not reach hold 0
            lengths   (Q,)        uint8   words of each context, 0 .. N - 1
            words     (Q,)        uint32
        Raises
            QueryError  a wrong shape or type, a length or an id out of range
        Guarantees
            equals ngram.backoff.score bit for bit
        """
        self._check(contexts, lengths, words)
        groups = _one_each(contexts, lengths, words)
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
        if queries and int(lengths.max()) > width:
            raise QueryError(
                f"a context of {int(lengths.max())} words was asked of a model of order "
                f"{self.order}, which takes {width} at most; leave the oldest out"
            )
        size = self.manifest.vocabulary_size
        for array in (contexts, words):
            if array.size and int(array.max()) >= size:
                raise QueryError(f"word id {int(array.max())} was asked; ids are below {size}")


def _one_each(
    contexts: NDArray[np.uint32], lengths: NDArray[np.uint8], words: NDArray[np.uint32]
) -> QueryGroups:
    """A group for each query."""
    width = contexts.shape[1]
    reached = np.arange(width) >= width - lengths[:, None].astype(np.int64)
    return QueryGroups(
        np.ascontiguousarray(lengths),
        contexts[reached],
        np.ones(len(words), np.uint32),
        np.ascontiguousarray(words),
    )
