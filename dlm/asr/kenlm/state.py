"""KenLM's `State`: the part of the history that still matters."""

from __future__ import annotations

from typing import Any

from dlm.asr.kenlm.table import NULL, ROW_MASK, ModelTable
from dlm.client import ModelInfo


class PickledStates:
    """A table whose only row is an unpickled state, until a model takes the state over."""

    def __init__(self, model_info: ModelInfo, words: tuple[int, ...]) -> None:
        self.model_info = model_info
        self._words = words

    def words(self, row: int) -> tuple[int, ...]:
        return self._words


class KenlmState:
    """A model's state. As with `kenlm.State`, only `Model` writes to it; a new state is the empty
    context.

    Two states of a model are equal exactly if all continuations score the same with the model's
    n-grams. The hash depends on the content: do not write to a state that is a dict key. Unlike
    KenLM's, states can be pickled and copied with `copy.deepcopy`.
    """

    __slots__ = ("_answer", "_table")

    # A new state lacks both attributes: without an __init__, creating it takes half the time.
    _table: ModelTable | PickledStates
    _answer: int  # the row in the low bits; the last n-gram's length in the others

    def _place(self) -> tuple[ModelTable | PickledStates | None, int]:
        """Returns the table (None for a new state) and the row."""
        try:
            return self._table, self._answer & ROW_MASK
        except AttributeError:
            return None, NULL

    def _words(self) -> tuple[int, ...]:
        table, row = self._place()
        return () if table is None else table.words(row)

    def _is(self, other: KenlmState) -> bool:
        (table, row), (theirs, other_row) = self._place(), other._place()
        if table is theirs:
            return row == other_row
        words = self._words()
        if words != other._words():
            return False
        if not words or table is None or theirs is None:
            return True
        return table.model_info == theirs.model_info

    def _key(self) -> tuple[int, tuple[int, ...]]:
        words = self._words()
        return len(words), words

    def __eq__(self, other: object) -> bool:
        return self._is(other) if isinstance(other, KenlmState) else NotImplemented

    def __lt__(self, other: KenlmState) -> bool:
        return self._key() < other._key() if isinstance(other, KenlmState) else NotImplemented

    def __le__(self, other: KenlmState) -> bool:
        return self._key() <= other._key() if isinstance(other, KenlmState) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._words())

    def __copy__(self) -> KenlmState:
        made = KenlmState()
        if hasattr(self, "_table"):
            made._table, made._answer = self._table, self._answer
        return made

    def __deepcopy__(self, memo: Any = None) -> KenlmState:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        table, _ = self._place()
        return _unpickled, (None if table is None else table.model_info, self._words())


def _unpickled(model_info: ModelInfo | None, words: tuple[int, ...]) -> KenlmState:
    made = KenlmState()
    if model_info is not None:
        made._table, made._answer = PickledStates(model_info, words), NULL
    return made


def not_a_state(*given: object) -> TypeError:
    for one in given:
        if not isinstance(one, KenlmState):
            found = f"{type(one).__module__}.{type(one).__qualname__}"
            return TypeError(
                f"a state has type {found}; expected dlm.asr.kenlm.State (dlm cannot read the "
                "kenlm package's states)"
            )
    return TypeError("wrong arguments; expected a state, a word and a state, in this order")
