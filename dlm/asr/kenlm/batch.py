"""Many states and many words at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.kenlm.opened import OpenedModel
from dlm.asr.kenlm.state import KenlmState
from dlm.asr.kenlm.table import ROW_MASK, ModelTable, StepTable
from dlm.client import States
from dlm.errors import QueryError


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """Next states that are not created yet.

    Shapes
        rows (K,) int64;  words (1, W) or (K, W) uint32
        reach (K, W) uint8  how many words of (state, word) the next state keeps
    """

    table: StepTable
    rows: NDArray[np.int64]
    words: NDArray[np.uint32]
    reach: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reach.shape

    def words_of(self, k: int, w: int) -> tuple[int, ...]:
        """The ids of one state, most recent first."""
        length = int(self.reach[k, w])
        word = int(self.words[k if len(self.words) > 1 else 0, w])
        return (word, *self.table.words(int(self.rows[k])))[:length]


class NextStates:
    """The states after K states and W words; `after[k, w]` is one, created on access."""

    def __init__(
        self,
        table: ModelTable,
        model: OpenedModel,
        states: States | Extended | NDArray[np.uint32],
    ) -> None:
        self._table, self._model, self._states = table, model, states

    @property
    def shape(self) -> tuple[int, ...]:
        return self._states.shape

    def __getitem__(self, at: tuple[int, int]) -> KenlmState:
        k, w = at
        states = self._states
        if isinstance(states, np.ndarray):
            made = KenlmState()
            made._table, made._answer = self._table, int(states[k, w])
            return made
        words = states.words_of(k, w) if isinstance(states, Extended) else states[k, w]._words[::-1]
        made = KenlmState()
        made._table, made._answer = self._model.entered(self._table, words)
        return made


def score_batch(
    model: OpenedModel, states: Sequence[KenlmState], words: Any
) -> tuple[NDArray[np.float32], NextStates]:
    if isinstance(states, KenlmState):
        raise QueryError("found a State, expected a sequence of states; give [state]")
    if isinstance(words, (str, bytes)):
        raise QueryError("found a string, expected a sequence of words; give [word]")
    table, rows = _rows_of(model, states)
    find = table.id_of
    nested = len(words) > 0 and not isinstance(words[0], str)
    if nested:
        if len(words) != len(states) or len({len(row) for row in words}) > 1:
            raise QueryError(
                f"{len(words)} rows of words for {len(states)} states; expected one row per state, "
                "all of the same length"
            )
        ids = np.array([list(map(find, row)) for row in words], np.uint32)
    else:
        ids = np.fromiter(map(find, words), np.uint32, len(words))
    if isinstance(table, StepTable) and not table.is_whole:
        found = table.utterance.extend(table.states(rows), ids)
        model.count_asked(found.source)
        return found.log10_prob, NextStates(table, model, found.states)
    ids = np.atleast_2d(ids)
    log10_prob, after = table.score_rows(rows, ids)
    model.counts.queries += log10_prob.size
    if isinstance(table, StepTable):
        return log10_prob, NextStates(table, model, Extended(table, rows, ids, after))
    return log10_prob, NextStates(table, model, after)


def _rows_of(
    model: OpenedModel, states: Sequence[KenlmState]
) -> tuple[ModelTable, NDArray[np.int64]]:
    """The rows of states in one table; a state of another table of the same model is entered."""
    while True:
        table = model.table
        rows = []
        for state in states:
            if getattr(state, "_table", None) is table:
                rows.append(state._answer & ROW_MASK)
                continue
            found, row = model.resolve(state)
            if found is not table:
                break
            rows.append(row)
        else:
            return table, np.array(rows, np.int64)
        if found is not model.table:
            raise QueryError(
                "the states belong to different models, since the servers changed models after "
                "some of these sentences had begun; score them one by one"
            )
