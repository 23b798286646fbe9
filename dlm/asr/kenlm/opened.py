"""What `Model`s of the same name share in a process: a client, and the table in use."""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.scorer import FileScorer
from dlm.asr.kenlm.state import KenlmState, PickledStates
from dlm.asr.kenlm.table import (
    NEEDS_SHARD,
    NULL,
    ROW_MASK,
    ModelCounts,
    ModelTable,
    StepTable,
)
from dlm.asr.kenlm.unpacked import UnpackedTable, fits, unpack
from dlm.asr.open import SCHEME, open_model
from dlm.client import ClientConfig
from dlm.client.api.states import FULL_MODEL
from dlm.errors import DlmError, ModelMismatch
from dlm.index.search.local import LocalModel
from dlm.ngram.query import BIGRAM_FALLBACK
from dlm.progress import Tell, compiling_notice
from dlm.units import counted
from dlm.wire.secret import signature

TOLD_NGRAMS = 10_000_000  # more take seconds to unpack, which is announced
LOOK_S = 1.0  # between checks of which model new sentences use

_opened: weakref.WeakValueDictionary[tuple[Any, ...], OpenedModel] = weakref.WeakValueDictionary()


def opened(
    named: bytes,
    config: ClientConfig | None,
    *,
    unpacks: bool,
    show_progress: bool,
    vocab: str | None = None,
) -> OpenedModel:
    """The model of this name: the open one, unless its file has changed since."""
    text = os.fsdecode(named)
    stamp = None if text.startswith(SCHEME) else signature(Path(text))
    key = (named, repr(stamp), repr(config), unpacks, vocab)
    found = _opened.get(key)
    if found is None:
        tell = _tell if show_progress else _silent
        compiling_notice.use(tell)
        found = _opened[key] = OpenedModel(named, config, unpacks, tell, vocab)
    return found


def _tell(line: str) -> None:
    sys.stderr.write(f"dlm: {line}\n")


def _silent(line: str) -> None:
    pass


class OpenedModel:
    """A client, and the table of states in which new sentences begin."""

    def __init__(
        self,
        named: bytes,
        config: ClientConfig | None,
        unpacks: bool,
        tell: Tell,
        vocab: str | None,
    ) -> None:
        # Decoders cannot handle server errors: 2-grams answer what no shard does in time.
        config = replace(ClientConfig(), bigram_fallback=True) if config is None else config
        self.client = open_model(named, config=config, tell=tell, vocab=vocab)
        self.counts = ModelCounts()
        self._mark = object()  # of its tables, which do not keep it alive
        utterance = self.client.utterance()
        local = utterance.local_model
        self._is_fixed = local is not None and utterance.model_info.kind == FULL_MODEL
        self.table: ModelTable
        unpacks = unpacks and self._is_fixed
        if unpacks and isinstance(local, LocalModel) and fits(local):
            ngrams = sum(local.manifest.counts)
            if ngrams > TOLD_NGRAMS:
                tell(f"unpacking {counted(ngrams, 'n-gram')} into memory")
            unpacked = unpack(local)
            self.table = UnpackedTable(utterance, self.counts, self._mark, unpacked)
        else:
            self.table = StepTable(utterance, self.counts, self._mark)
        # Scores sentences of a KenLM file, for which a table is not needed.
        self.direct: FileScorer | None = None
        if isinstance(self.table.scorer, FileScorer):
            self.direct = self.table.scorer
        self._looked_s = time.monotonic()

    def current(self) -> ModelTable:
        if not self._is_fixed and time.monotonic() - self._looked_s > LOOK_S:
            self._look()
        return self.table

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        try:
            utterance = self.client.utterance(wait_s=0.0)
        except DlmError:
            return  # the sentence begins on the previous model, and its 2-grams answer
        if utterance.model_info != self.table.model_info:
            self.table.count()
            self.table = StepTable(utterance, self.counts, self._mark)

    def resolve(self, state: KenlmState) -> tuple[ModelTable, int]:
        """The table and row in which a state continues.

        Raises  TypeError  not a state of dlm;  ModelMismatch  of another model or shard set
        """
        if not isinstance(state, KenlmState):
            found = f"{type(state).__module__}.{type(state).__qualname__}"
            raise TypeError(
                f"a state is a {found}; expected a dlm.asr.kenlm.State, since states of the "
                "package kenlm cannot be read"
            )
        other, row = state._place()
        if other is None:
            return self.table, NULL
        if other.model_info == self.table.model_info:
            return self.entered(self.table, other.words(row))
        if not isinstance(other, PickledStates) and other.owner is self._mark:
            return other, row  # a sentence that began on the previous model
        theirs, ours = other.model_info, self.table.model_info
        raise ModelMismatch(
            f"found a state of the model {theirs.model} (shard set {theirs.shard_set}), expected "
            f"one of {ours.model} (shard set {ours.shard_set}); a sentence cannot mix scores of "
            "two models, or of two shard sets of one model"
        )

    def entered(self, table: ModelTable, words: tuple[int, ...]) -> tuple[ModelTable, int]:
        """The row of a state with these ids, most recent first, and its table: new if full."""
        row = table.row_of(words)
        return (table, row) if row >= 0 else self._renewed(table, words)

    def _renewed(self, table: ModelTable, words: tuple[int, ...]) -> tuple[ModelTable, int]:
        fresh = self.renew(table)
        return fresh, fresh.row_of(words)

    def renew(self, table: ModelTable) -> ModelTable:
        assert isinstance(table, StepTable)  # others are never full
        fresh = table.renewed()
        if table is self.table:
            self.table = fresh
        return fresh

    def ask(self, table: ModelTable, row: int, word: int) -> tuple[ModelTable, float, int]:
        """A step that the table did not know: the table of its answer, log10 P, answer."""
        row &= ROW_MASK
        while True:
            log10_prob, answer = table.step(table.address, row, word)
            if answer == NEEDS_SHARD and isinstance(table, StepTable):
                log10_prob, answer = table.ask(row, word)
            if answer >= 0:
                return table, log10_prob, answer
            table, row = self._renewed(table, table.words(row))

    def count_asked(self, source: NDArray[np.uint8] | None, queries: int = 0) -> None:
        """Counts queries not answered by the table; `source` None: the full model answered all."""
        asked = queries if source is None else source.size
        self.counts.queries += asked
        self.counts.cache_misses += asked
        if source is not None:
            self.counts.bigram_fallback += int((source == BIGRAM_FALLBACK).sum())

    def stats(self) -> dict[str, int]:
        self.table.count()
        return asdict(self.counts)
