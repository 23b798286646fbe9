"""The same handles over a shard set in this process: no server, no message.

`Client.local(DIR)` is a client like any other, so that a decoder is written and tested offline; the
small model of a client that falls back on one is opened the same way.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.config import ClientConfig
from dlm.client.api.metrics import ClientMetrics, Stats
from dlm.client.api.utterance import MAX_DEADLINE_S, Utterance
from dlm.client.deliver.asks import SCORES, Asks, BlockPart
from dlm.client.deliver.call import EndedCall
from dlm.client.deliver.runtime import Snapshot, closed_error
from dlm.client.health.cascade import CascadeStatus
from dlm.client.health.modes import Mode
from dlm.client.plan.lowgrams import LowGrams, check_queries
from dlm.client.plan.topology import Topology
from dlm.errors import ConfigError, DlmError
from dlm.index.search.local import LocalModel
from dlm.ngram.query import FULL, SMALL, QueryGroups


class LocalScorer:
    """A `Scorer` that answers every call at once from the mapped shards.

    Args
        source  what the answers say of themselves; those of a `SMALL` one keep the deadlines of a
                client of servers
    """

    begun = True

    def __init__(self, model: LocalModel, directory: Path, source: int = FULL) -> None:
        self.config = ClientConfig()
        self.local_model: LocalModel | None = model
        self.source = source
        self.counts = ClientMetrics()
        self._model = model
        self._closed = False
        grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self._snapshot = Snapshot(Topology(model.manifest, {}, {}), grams)
        _open.add(self)

    def begin_small(self) -> None:
        """See `Scorer`; it is not without its model."""

    def check_open(self) -> None:
        """See `Scorer`."""
        if self._closed:
            raise closed_error()

    def close(self) -> None:
        """See `Scorer`."""
        self._closed = True

    def snapshot(self) -> Snapshot:
        """See `Scorer`."""
        return self._snapshot

    def current(self, timeout_s: float, unlike: str | None = None) -> Snapshot:
        """See `Scorer`; it is the only one."""
        return self._snapshot

    def known(self) -> Topology:
        """See `Scorer`."""
        return self._snapshot.topology

    def mode(self) -> Mode:
        """See `Scorer`."""
        return Mode.FULL

    def limit_s(self, deadline_s: float) -> float:
        """See `Scorer`; a call ends with its answer."""
        return deadline_s if self.source == SMALL else MAX_DEADLINE_S

    def watch(self) -> None:
        """See `Scorer`; there are no servers."""

    def cascade(self) -> CascadeStatus:
        """See `Scorer`; there is none."""
        raise ConfigError("this client asks a shard set in its own process; it has no servers")

    def load(self) -> dict[int, tuple[int, int]]:
        """See `Scorer`; nothing waits."""
        return {}

    def cache_bytes(self) -> int:
        """See `Scorer`."""
        return self._snapshot.low_bytes

    @property
    def stats(self) -> Stats:
        """See `Scorer`."""
        return self.counts.now()

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self._snapshot.grams.directory.absolute(), "source": self.source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        directory = state["directory"]
        self.__init__(LocalModel.open(directory), directory, state["source"])  # type: ignore[misc]

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        deadline_s: float | None = None,
        held: Snapshot | None = None,
        *,
        moves_on: bool = False,
        more: bool = False,
        ahead: int = 0,
        asks: Asks = SCORES,
    ) -> EndedCall:
        """See `Scorer`; the call has ended."""
        self.check_open()
        manifest = self._model.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        self.counts.planned(len(words))
        if asks is not SCORES:
            return EndedCall(self._stored(contexts, lengths))
        width = contexts.shape[1]
        reached = np.arange(width) >= width - lengths[:, None].astype(np.int64)
        try:
            # A kernel is compiled for each kind of array; callers may bring slices.
            groups = QueryGroups(
                *(
                    np.require(array, requirements=["C", "W"])
                    for array in (lengths, contexts[reached], counts, words)
                )
            )
            answers = self._model.score_groups(groups)
            if self.source != FULL:
                source = np.full(len(answers), self.source, np.uint8)
                answers = replace(answers, source=source)
            return EndedCall(answers)
        except DlmError as exc:
            return EndedCall(error=exc)

    def _stored(
        self, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8]
    ) -> tuple[list[BlockPart | None], NDArray[np.uint8]]:
        """See `BlockCall`; all that is stored comes at once."""
        parts: list[BlockPart | None] = []
        width = contexts.shape[1]
        for row, length in enumerate(lengths.tolist()):
            if length < 2:
                parts.append(None)
                continue
            context = np.ascontiguousarray(contexts[row, width - length :])
            found = self._model.stored_words(context)
            total = int(found.totals[0])
            parts.append(BlockPart(total, found.log10_backoffs, found.words, found.answers))
        return parts, np.full(len(parts), self.source, np.uint8)


_open: weakref.WeakSet[LocalScorer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for scorer in list(_open):
        scorer.counts = ClientMetrics()


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_local(directory: Path, *, verify: bool = True) -> LocalScorer:
    """What answers from the shard set in `directory`.

    Raises
        ConfigError       there is no such folder, or it is a file
        ShardFormatError  it is damaged
    """
    _check_folder("the shard set", directory)
    return LocalScorer(LocalModel.open(directory, verify=verify), directory)


def open_small(directory: Path) -> LocalScorer:
    """The small model of a client, its kernels compiled; raises as `open_local` does."""
    _check_folder("the small model", directory)
    scorer = LocalScorer(LocalModel.open(directory), directory, SMALL)
    Utterance(scorer, scorer.snapshot(), None).score_sentences([b"", b"<unk> <unk>"])
    return scorer


def _check_folder(what: str, directory: Path) -> None:
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{what} {directory} {found}; the folder of a shard set is expected, "
            "as `dlm shard` makes them"
        )
