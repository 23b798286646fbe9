"""Scores of batches of ids from a shard set or a KenLM file in this process, without servers."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.call import EndedCall
from dlm.client.cascade import CascadeStatus
from dlm.client.config import ClientConfig
from dlm.client.membership import Topology
from dlm.client.metrics import ClientMetrics, Stats
from dlm.client.modes import Mode
from dlm.client.router import LowGrams, Snapshot, WordsAlone, check_queries
from dlm.client.server import SCORES, Asks, BlockPart, client_closed
from dlm.errors import ConfigError, DlmError
from dlm.index.layout import Manifest
from dlm.index.search.local import LocalModel
from dlm.kenlm.layout import is_kenlm_file
from dlm.kenlm.model import KenlmFile
from dlm.ngram.query import FULL, LOCAL_FALLBACK, QueryGroups


class LocalScorer:
    """Answers each call at once, from mapped shards or a mapped KenLM file, without servers.

    Args
        directory  of the shard set; the path of the file
        source     of the answers; with `LOCAL_FALLBACK`, deadlines are kept as with servers
    """

    def __init__(self, model: LocalModel | KenlmFile, directory: Path, source: int = FULL) -> None:
        self.config = ClientConfig()
        self.local_model: LocalModel | KenlmFile = model
        self.source = source
        self.keeps_deadlines = source == LOCAL_FALLBACK
        self.begin_in_child()
        self._closed = False
        grams: LowGrams
        if isinstance(model, KenlmFile):
            grams = WordsAlone(directory, _manifest_of(model), None, model.vocabulary)
        else:
            grams = LowGrams(directory, model.manifest, model.low, model.vocabulary)
        self._snapshot = Snapshot(Topology(grams.manifest, {}, {}), grams)
        _open.add(self)

    def begin_in_child(self) -> None:
        self._counts = ClientMetrics()

    @property
    def begun(self) -> bool:
        return True

    def begin_local_fallback(self) -> None:
        raise NotImplementedError  # `snapshot` never fails here

    def check_open(self) -> None:
        if self._closed:
            raise client_closed()

    def close(self) -> None:
        self._closed = True

    def known(self) -> Topology:
        return self._snapshot.topology

    def cascade(self) -> CascadeStatus:
        raise ConfigError(
            "this client uses a shard set in its own process, so it has no servers to report on; "
            "connect to servers for that"
        )

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def current(
        self, timeout_s: float, unlike: str | None = None, key: str | bytes | None = None
    ) -> Snapshot:
        return self._snapshot

    def named(self, model: str) -> Snapshot | None:
        return self._snapshot if self._snapshot.model.startswith(model) else None

    def mode(self) -> Mode:
        return Mode.FULL

    def watch(self) -> None:
        return None

    def load(self) -> dict[int, tuple[int, int]]:
        return {}

    def cache_bytes(self) -> int:
        model = self.local_model
        return len(model.data) if isinstance(model, KenlmFile) else self._snapshot.low_bytes

    @property
    def counts(self) -> ClientMetrics:
        return self._counts

    @property
    def stats(self) -> Stats:
        return self._counts.now()

    def __getstate__(self) -> dict[str, Any]:
        file = self.local_model if isinstance(self.local_model, KenlmFile) else None
        directory = self._snapshot.grams.directory.absolute()
        return {"directory": directory, "source": self.source, "file": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        directory = state["directory"]
        model = state["file"] or LocalModel.open(directory)
        self.__init__(model, directory, state["source"])  # type: ignore[misc]

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        *_: Any,
        asks: Asks = SCORES,
        **__: Any,
    ) -> EndedCall:
        self.check_open()
        manifest = self._snapshot.topology.manifest
        check_queries(manifest.order, manifest.vocabulary_size, contexts, lengths, counts, words)
        self._counts.planned(len(words))
        if asks is not SCORES:
            return EndedCall(self._stored(contexts, lengths))
        width = contexts.shape[1]
        reached = np.arange(width) >= width - lengths[:, None].astype(np.int64)
        # A kernel is compiled for each kind of array, and callers may pass slices.
        given = (
            np.require(array, requirements=["C", "W"])
            for array in (lengths, contexts[reached], counts, words)
        )
        try:
            answers = self.local_model.score_groups(QueryGroups(*given))
        except DlmError as exc:
            return EndedCall(error=exc)
        if self.source != FULL:
            answers = replace(answers, source=np.full(len(answers), self.source, np.uint8))
        return EndedCall(answers)

    def _stored(
        self, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8]
    ) -> tuple[list[BlockPart | None], NDArray[np.uint8]]:
        assert isinstance(self.local_model, LocalModel)  # a KenLM file is not asked for this
        parts: list[BlockPart | None] = []
        width = contexts.shape[1]
        for row, length in enumerate(lengths.tolist()):
            if length < 2:
                parts.append(None)
                continue
            context = np.ascontiguousarray(contexts[row, width - length :])
            found = self.local_model.stored_words(context)
            total = int(found.totals[0])
            parts.append(BlockPart(total, found.log10_backoffs, found.ranks, found.answers))
        return parts, np.full(len(parts), self.source, np.uint8)


def _manifest_of(file: KenlmFile) -> Manifest:
    layout = file.layout
    return Manifest(
        text=b"",
        shard_set=file.model_id,
        model=file.model_id,
        order=layout.order,
        counts=(layout.words, *layout.counts[1:]),
        blanks=(0,) * layout.order,
        unk_in_model=True,
        encoding="kenlm",
        slots=np.zeros(0, np.uint16),
        files=(),
        provenance={},
    )


def open_local(
    directory: Path,
    source: int = FULL,
    *,
    verify: bool = True,
    vocab: str | os.PathLike[str] | None = None,
    what: str = "the shard set",
) -> LocalScorer:
    """Opens the shard set in `directory`, or the KenLM file at this path.

    Args  vocab  see `KenlmFile.open`
    Raises
        ConfigError       there is no such folder, or it is another file; `what` names it
        ShardFormatError, KenlmFormatError  it is damaged
    """
    if source == FULL and is_kenlm_file(directory):
        return LocalScorer(KenlmFile.open(directory, vocab=vocab), directory)
    if vocab is not None:
        raise ConfigError(
            f"vocab={os.fspath(vocab)} was given, but {directory} is not a KenLM binary file; only "
            "those may lack their words. Leave it out"
        )
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{what} {directory} {found}; expected the folder of a shard set, "
            "as `dlm shard` writes it"
        )
    return LocalScorer(LocalModel.open(directory, verify=verify), directory, source)


_open: weakref.WeakSet[LocalScorer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for scorer in list(_open):
        scorer.begin_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
