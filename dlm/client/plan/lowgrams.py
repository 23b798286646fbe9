"""The low orders on the client: the 1- and 2-grams and the vocabulary, mapped from a folder.

Paper: DLM 3.1 (caching). The bit that saves messages beyond it: shards/FORMAT.md, "Stored".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.errors import QueryError, ShardFormatError
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.search.shard import LowOrders, open_vocabulary, run_kernel
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary


@dataclass(frozen=True, eq=False)
class LowGrams:
    """Vocabulary and low orders of one shard set, mapped from `directory`."""

    directory: Path
    manifest: Manifest
    low: LowOrders
    vocabulary: Vocabulary

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> LowGrams:
        """Maps a complete folder; raises `ShardFormatError` if it is not complete."""
        found = layout.read_manifest(directory)
        if found.shard_set != manifest.shard_set:
            raise ShardFormatError(
                f"{directory} holds shard set {found.shard_set}, not {manifest.shard_set}"
            )
        low = LowOrders.open(directory, manifest)
        return cls(directory, manifest, low, open_vocabulary(directory, manifest))

    def score(self, groups: QueryGroups) -> tuple[Answers, NDArray[np.bool_]]:
        """Answers from the low orders, and for each context whether a shard is needed."""
        answers, needs_shard = run_kernel(self.low.view, self.manifest.order, groups)
        return answers, needs_shard.astype(np.bool_)


def check_queries(
    order: int,
    size: int,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> None:
    """Raises `QueryError` unless shapes agree, lengths are below `order` and ids below `size`."""
    width = max(order - 1, 0)
    rows = len(contexts)
    if contexts.shape != (rows, width) or lengths.shape != (rows,) or counts.shape != (rows,):
        raise QueryError(
            f"contexts have shape {contexts.shape}, lengths {lengths.shape}, counts "
            f"{counts.shape}; expected ({rows}, {width}), ({rows},) and ({rows},)"
        )
    if words.ndim != 1 or int(counts.sum(dtype=np.uint64)) != len(words):
        raise QueryError(
            f"counts add up to {int(counts.sum(dtype=np.uint64))} words, but words has shape "
            f"{words.shape}; expected as many words as are counted"
        )
    if rows and int(lengths.max()) > width:
        raise QueryError(f"a context has {int(lengths.max())} words; expected at most {width}")
    for ids in (contexts, words):
        if ids.size and int(ids.max()) >= size:
            raise QueryError(f"word id {int(ids.max())} is out of range; ids are below {size}")
