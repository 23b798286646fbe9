"""The same handles over a shard set in this process: no server, no message.

`LocalClient.open(DIR).utterance()` is a `Utterance` like any other, for tools that score a model on
disk and for a model small enough to stand by locally.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.config import ClientConfig
from dlm.client.core import Core
from dlm.client.lowgrams import LowGrams, check_queries
from dlm.client.runtime import Snapshot
from dlm.client.topology import Topology
from dlm.client.utterance import Utterance
from dlm.errors import ConfigError, DlmError
from dlm.index.layout import Manifest
from dlm.index.local import LocalModel
from dlm.ngram.query import FULL, SMALL, Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary


class _LocalCore(Core):
    """Answers every call at once from the mapped shards.

    Args
        source  what the answers say of themselves
    """

    def __init__(self, model: LocalModel, directory: Path, source: int = FULL) -> None:
        super().__init__(list, ClientConfig())
        self.model = model
        self.source = source
        grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self.table.known = Snapshot(Topology(model.manifest, {}, {}), grams)

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
    ) -> Future[Answers]:
        """See `Core.submit`; the future is done."""
        manifest = self.model.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        runtime = self._runtime
        with runtime.lock:
            runtime.stats.queries += len(words)
        future: Future[Answers] = Future()
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
            answers = self.model.score_groups(groups)
            if self.source != FULL:
                source = np.full(len(answers), self.source, np.uint8)
                answers = replace(answers, source=source)
            future.set_result(answers)
        except DlmError as exc:
            future.set_exception(exc)
        return future


class LocalClient:
    """A shard set, all of it, in this process."""

    def __init__(self, core: _LocalCore) -> None:
        self._core = core

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, verify: bool = True) -> LocalClient:
        """Maps the shard set in `directory`; raises `ShardFormatError` where it is damaged."""
        return cls(_LocalCore(LocalModel.open(Path(directory), verify=verify), Path(directory)))

    @property
    def manifest(self) -> Manifest:
        """The shard set."""
        return self._core.model.manifest

    @property
    def vocabulary(self) -> Vocabulary:
        """Words and ids."""
        return self._core.model.vocabulary

    def utterance(self) -> Utterance:
        """A handle on the model."""
        return Utterance(self._core, self._core.snapshot(), None)


def open_small(directory: Path) -> Core:
    """The small model of a client, its kernels compiled.

    Raises
        ConfigError       there is no such folder, or it is a file
        ShardFormatError  it is damaged
    """
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"the small model {directory} {found}; the folder of a shard set is expected, "
            "as `dlm shard` makes them"
        )
    core = _LocalCore(LocalModel.open(directory), directory, SMALL)
    Utterance(core, core.snapshot(), None).score_sentences([b"", b"<unk> <unk>"])
    return core
