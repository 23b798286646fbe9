"""The low orders on the client: the 1- and 2-grams and the vocabulary, mapped from a folder.

They answer what no shard needs to be asked. And they are the bigram fallback, for queries that no
shard answers in time: the order-2 reduction of the same model, P(w | v), normalised like any model.
Without the shard it is not known how much context still matters, so the state after the word is not
minimised.

Paper: DLM 3.1 (caching) and 3.4 ("if the message times out, we estimate the probability locally
using the cached 2-grams"). The bit that saves messages beyond it: shards/FORMAT.md, "Stored".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm.errors import DlmError, QueryError, ShardFormatError, StaleShardSet
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.search.shard import LowOrders, open_vocabulary
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
                f"{directory} holds shard set {found.shard_set}; expected {manifest.shard_set}"
            )
        low = LowOrders.open(directory, manifest)
        return cls(directory, manifest, low, open_vocabulary(directory, manifest))


@dataclass(frozen=True, eq=False)
class WordsAlone(LowGrams):
    """The vocabulary of a model in this process that has no low orders of its own."""

    low: None  # type: ignore[assignment]


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


QUIET_S = (
    10.0  # after this long without a bigram-fallback score, an answered message ends an outage
)


class Outage(NamedTuple):
    """A period in which bigram-fallback scores were given, first at `began` and last at `last`;
    pure.

    queries  that the bigram fallback answered
    error    kind of the error in its log line
    """

    began: float
    last: float
    queries: int
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.last - self.began

    def extended(self, queries: int, now: float) -> Outage:
        return self._replace(last=now, queries=self.queries + queries)

    def lasts(self, error: DlmError) -> bool:
        """Whether it will not end by itself: servers are back, but none holds the utterance's
        model."""
        return isinstance(error, StaleShardSet) and self.error != StaleShardSet.__name__

    def is_over(self, now: float) -> bool:
        """Whether an answered message ends it; not while only some are answered, so that the log
        has one line at its beginning and one at its end."""
        return now - self.last >= QUIET_S


def allows_fallback(error: DlmError) -> bool:
    """Whether the bigram fallback may answer instead: not if the caller failed.

    A server has failed, too, if it has another model, sends nonsense or no longer lets this client
    in; and anything else that keeps a message of this process from being answered counts.
    """
    return not isinstance(error, QueryError)
