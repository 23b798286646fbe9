"""The inputs of an utterance with phrases: ids of new words, and nodes in its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.inputs import Inputs, Queries, Word
from dlm.client.api.phrases import Phrases
from dlm.client.api.states import State, States
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

    def model_words(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return self._bound.model_words(words)

    def unknown(self, words: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return super().unknown(self._bound.model_words(words))

    def states(self, states: States | Sequence[State]) -> States:
        found = super().states(states)
        if found._nodes is not None:
            return found
        nodes = np.fromiter((state._node for state in states), np.int32, len(states))
        return States(found.model_info, found._contexts, found._lengths, nodes)

    def states_after(self, contexts: Sequence[Sequence[Word]], first: int = 0) -> States:
        found = super().states_after(contexts, first)
        said = [self.ids(list(context)) for context in contexts]
        words = np.concatenate([np.zeros(0, np.uint32), *said])
        _, nodes = self._bound.walk(words, [len(one) for one in said])
        contexts_ = self._bound.model_words(found._contexts)
        return States(found.model_info, contexts_, found._lengths, nodes)

    def _tokens(self, segments: list[tuple[list[int], list[int]]]) -> Queries:
        found = super()._tokens(segments)
        return found._replace(contexts=self._bound.model_words(found.contexts))

    def after(self, queries: Queries, answers: Answers) -> States:
        assert queries.nodes is not None
        words = np.ascontiguousarray(queries.words)
        model = queries._replace(words=self._bound.model_words(words))
        found = super().after(model, answers)
        nodes = self._bound.automaton.advance(
            queries.nodes, queries.counts, words, self._bound.symbols
        )
        return States(found.model_info, found._contexts, found._lengths, nodes)

    def bonus(self, parts: Sequence[Queries], after: States) -> NDArray[np.float32] | None:
        before = [np.repeat(part.nodes, part.counts) for part in parts if part.nodes is not None]
        assert after._nodes is not None
        whole = np.concatenate(before).reshape(after.shape)
        found: NDArray[np.float32] = self._bound.bonus(whole, after._nodes).astype(np.float32)
        return found

    def bonuses(self, words: NDArray[np.uint32], counts: Sequence[int]) -> list[float]:
        found: list[float] = self._bound.walk(words, counts)[0].tolist()
        return found


def inputs_of(
    snapshot: Snapshot, kind: str, phrases: Phrases | None, before: Inputs | None = None
) -> Inputs:
    """The inputs of an utterance."""
    if phrases is None:
        return Inputs(snapshot, kind, before)
    return PhraseInputs(snapshot, kind, phrases, before)
