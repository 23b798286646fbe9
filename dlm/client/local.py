"""The same handles over a shard set in this process: no server, no message.

`Client.local(DIR)` is a client like any other, so that a decoder is written and tested offline; the
small model of a client that falls back on one is opened the same way.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.asks import SCORES, Asks, BlockPart
from dlm.client.cascade import CascadeStatus
from dlm.client.config import ClientConfig
from dlm.client.core import Core
from dlm.client.lowgrams import LowGrams, check_queries
from dlm.client.runtime import Snapshot
from dlm.client.topology import FixedEndpoints, Topology
from dlm.client.utterance import Utterance
from dlm.errors import ConfigError, DlmError
from dlm.index.search.local import LocalModel
from dlm.ngram.query import FULL, SMALL, QueryGroups


class _LocalCore(Core):
    """Answers every call at once from the mapped shards.

    Args
        source  what the answers say of themselves
    """

    def __init__(self, model: LocalModel, directory: Path, source: int = FULL) -> None:
        super().__init__(FixedEndpoints([]), ClientConfig())
        self.timed = source == SMALL  # which answers within the deadlines of a client of servers
        self.local_model: LocalModel = model
        self.source = source
        grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self.table.known = Snapshot(Topology(model.manifest, {}, {}), grams)

    def current(self, timeout_s: float, unlike: str | None = None) -> Snapshot:
        """See `Core.current`; it is the only one."""
        return self.snapshot()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "directory": self.snapshot().grams.directory.absolute(),
            "source": self.source,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        directory = state["directory"]
        _LocalCore.__init__(self, LocalModel.open(directory), directory, state["source"])

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
    ) -> Future[Any]:
        """See `Core.submit`; the future is done."""
        self.check_open()
        manifest = self.local_model.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        runtime = self._runtime
        with runtime.lock:
            runtime.stats.queries += len(words)
        future: Future[Any] = Future()
        if asks is not SCORES:
            future.set_result(self._stored(contexts, lengths))
            return future
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
            answers = self.local_model.score_groups(groups)
            if self.source != FULL:
                source = np.full(len(answers), self.source, np.uint8)
                answers = replace(answers, source=source)
            future.set_result(answers)
        except DlmError as exc:
            future.set_exception(exc)
        return future

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
            found = self.local_model.stored_words(context)
            total = int(found.totals[0])
            parts.append(BlockPart(total, found.log10_backoffs, found.words, found.answers))
        return parts, np.full(len(parts), self.source, np.uint8)

    def cascade(self) -> CascadeStatus:
        """See `Core.cascade`; there is none."""
        raise ConfigError("this client asks a shard set in its own process; it has no servers")


def open_local(directory: Path, *, verify: bool = True) -> Core:
    """What answers from the shard set in `directory`.

    Raises
        ConfigError       there is no such folder, or it is a file
        ShardFormatError  it is damaged
    """
    _check_folder("the shard set", directory)
    return _LocalCore(LocalModel.open(directory, verify=verify), directory)


def open_small(directory: Path) -> Core:
    """The small model of a client, its kernels compiled; raises as `open_local` does."""
    _check_folder("the small model", directory)
    core = _LocalCore(LocalModel.open(directory), directory, SMALL)
    Utterance(core, core.snapshot(), None).score_sentences([b"", b"<unk> <unk>"])
    return core


def _check_folder(what: str, directory: Path) -> None:
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{what} {directory} {found}; the folder of a shard set is expected, "
            "as `dlm shard` makes them"
        )
