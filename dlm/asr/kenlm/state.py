"""KenLM's `State`: the part of the history that still matters."""

from __future__ import annotations

from typing import Any

from dlm.asr.kenlm.table import NULL, ModelTable
from dlm.client import ModelInfo


class PickledStates:
    """An unpickled state, as a table of one row, until a model uses it."""

    def __init__(self, model_info: ModelInfo, words: tuple[int, ...]) -> None:
        self.model_info = model_info
        self._words = words

    def words(self, row: int) -> tuple[int, ...]:
        return self._words


class KenlmState:
    """The state of a model; like `kenlm.State`, only `Model` writes it.

    Two states of a model are equal exactly if all continuations score the same with the model's
    n-grams (a state is the longest suffix that an n-gram extends or that has a back-off weight). A
    new one is the empty context. Its hash depends on its content: do not write to a state that is
    a dict key. Unlike KenLM's, it can be pickled and accepts the argument of `copy.deepcopy`.
    """

    __slots__ = ("_row", "_table")

    def __init__(self) -> None:
        self._table: ModelTable | PickledStates | None = None
        self._row = NULL

    def _words(self) -> tuple[int, ...]:
        return () if self._table is None else self._table.words(self._row)

    def _is(self, other: KenlmState) -> bool:
        if self._table is other._table:
            return self._row == other._row
        words = self._words()
        if words != other._words():
            return False
        if not words or self._table is None or other._table is None:
            return True
        return self._table.model_info == other._table.model_info

    def _key(self) -> tuple[int, tuple[int, ...]]:
        words = self._words()
        return len(words), words

    def __eq__(self, other: object) -> bool:
        return self._is(other) if isinstance(other, KenlmState) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self._is(other) if isinstance(other, KenlmState) else NotImplemented

    def __lt__(self, other: KenlmState) -> bool:
        return self._key() < other._key() if isinstance(other, KenlmState) else NotImplemented

    def __le__(self, other: KenlmState) -> bool:
        return self._key() <= other._key() if isinstance(other, KenlmState) else NotImplemented

    def __gt__(self, other: KenlmState) -> bool:
        return self._key() > other._key() if isinstance(other, KenlmState) else NotImplemented

    def __ge__(self, other: KenlmState) -> bool:
        return self._key() >= other._key() if isinstance(other, KenlmState) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._words())

    def __copy__(self) -> KenlmState:
        made = KenlmState()
        made._table, made._row = self._table, self._row
        return made

    def __deepcopy__(self, memo: Any = None) -> KenlmState:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        model_info = None if self._table is None else self._table.model_info
        return _unpickled, (model_info, self._words())


def _unpickled(model_info: ModelInfo | None, words: tuple[int, ...]) -> KenlmState:
    made = KenlmState()
    made._table = None if model_info is None else PickledStates(model_info, words)
    return made
