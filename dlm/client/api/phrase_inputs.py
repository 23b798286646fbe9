"""The inputs of an utterance with phrases: ids of new words, and nodes in its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.inputs import Inputs, Queries, Word
from dlm.client.api.phrases import Phrases
from dlm.client.api.states import PhraseState, State, States
from dlm.client.deliver.runtime import Snapshot
from dlm.ngram.query import Answers


class PhraseInputs(Inputs):
    """The inputs of an utterance with phrases: its states have a node of their automaton."""

    def __init__(
        self, snapshot: Snapshot, kind: str, phrases: Phrases, before: Inputs | None = None
    ) -> None:
        super().__init__(snapshot, kind, before, digest=phrases.digest)
        self.phrases = self._bound = phrases.bound(self.words)
        self.ids_end = len(self._bound.symbols)

    def _find(self) -> Callable[[bytes, int], int]:
        ids, new = self.words.ids, self._bound.new
        return lambda word, default: ids.get(word) or new.get(word, default)

    def id_of(self, word: Word) -> int:
        if isinstance(word, (str, bytes)):
            return self._bound.id_of(word)
        return super().id_of(word)

    def queries(self, states: States, counts: NDArray[np.uint32], words: Any) -> Queries:
        spoken = np.ascontiguousarray(words)
        return Queries(
            states._contexts,
            states._lengths,
            counts,
            self._bound.model_words(spoken),
            states._nodes,
            spoken,
        )

    def begin(self) -> State:
        return PhraseState(self.model_info, super().begin()._words)

    def null(self) -> State:
        return PhraseState(self.model_info, ())

    def states(self, states: States | Sequence[State]) -> States:
        found = super().states(states)
        if found._nodes is not None:
            return found
        each = (state._node for state in states if isinstance(state, PhraseState))
        nodes = np.fromiter(each, np.int32, len(states))
        return States(found.model_info, found._contexts, found._lengths, nodes)

    def states_after(self, contexts: Sequence[Sequence[Word]], first: int = 0) -> States:
        found = super().states_after(contexts, first)
        said = [self.ids(list(context)) for context in contexts]
        words = np.concatenate([np.zeros(0, np.uint32), *said])
        _, nodes = self._bound.walk(words, [len(one) for one in said])
        contexts_ = self._bound.model_words(found._contexts)
        return States(found.model_info, contexts_, found._lengths, nodes)

    def _tokens(self, segments: list[tuple[list[int], list[int]]]) -> Queries:
        found, fold = super()._tokens(segments), self._bound.model_words
        return found._replace(
            contexts=fold(found.contexts), words=fold(found.words), spoken=found.words
        )

    def after(
        self, queries: Queries, answers: Answers
    ) -> tuple[States, NDArray[np.float32] | None]:
        assert queries.nodes is not None and queries.spoken is not None
        found, _ = super().after(queries, answers)
        nodes, bonus = self._bound.automaton.advance(
            queries.nodes, queries.counts, queries.spoken, self._bound.symbols
        )
        return States(found.model_info, found._contexts, found._lengths, nodes), bonus

    def bonuses(self, parts: Sequence[Queries], counts: Sequence[int]) -> list[float]:
        words = np.concatenate([part.spoken for part in parts if part.spoken is not None])
        found: list[float] = self._bound.walk(words, counts)[0].tolist()
        return found


def inputs_of(
    snapshot: Snapshot, kind: str, phrases: Phrases | None, before: Inputs | None = None
) -> Inputs:
    """The inputs of an utterance."""
    if phrases is None:
        return Inputs(snapshot, kind, before)
    return PhraseInputs(snapshot, kind, phrases, before)
