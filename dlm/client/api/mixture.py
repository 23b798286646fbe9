"""Several models as one, mixed word by word: a general model and a domain's, say.

    mixture = Mixture([(general.utterance(), 0.7), (radiology.utterance(), 0.3)])
    first = mixture.extend([mixture.begin()], ["the", "a", "there"])

Models have different ids, so words are strings. `AsyncMixture` is the same for asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.base_mixture import (
    ZERO,
    BaseMixture,
    MixtureExtension,
    MixtureState,
    MixtureStates,
)
from dlm.client.api.states import SentenceScore
from dlm.client.api.utterance import AsyncUtterance, Utterance, awaited, waited


class Mixture(BaseMixture[Utterance]):
    """Utterances whose models are mixed; one thread at a time.

    Args
        members  utterances, of one client or of several, and their weights, which sum to 1. At most
                 one has phrases; they count for the whole mixture
        unknown  what a member says of a word that it lacks, and another has:
                 "zero": probability 0, so that all words together have 1 (SRILM without -unk, and
                 `dlm merge`); "shared": its P(<unk>) in equal shares to all words that it lacks and
                 the unknown word, also 1 together (OpenGrm's OOV class); "whole": P(<unk>) to each,
                 more than 1 together (SRILM with -unk). A word that all lack is scored by each
                 member's P(<unk>), of which "shared" gives it one share
    Raises
        ConfigError    weights that are not numbers of 0 or more with the sum 1
        QueryError     no members, another rule, or phrases in several members
        ModelSwitched  some members are on their local fallback and others not: open all again
    """

    _member = Utterance

    @classmethod
    def tuned(
        cls,
        members: Sequence[Utterance],
        sentences: Sequence[str],
        *,
        unknown: str = ZERO,
        deadline_s: float | None = None,
    ) -> Mixture:
        """The mixture under which held-out sentences are most probable; as `dlm merge --tune`.

        Raises  EstimationError  no word of the sentences is in any model;  see `Mixture`
        """
        weights = waited(cls.even(members, unknown)._tuned_weights(sentences, deadline_s))
        return cls(list(zip(members, weights, strict=True)), unknown=unknown)

    def extend(
        self,
        states: MixtureStates | Sequence[MixtureState],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> MixtureExtension:
        """Extends each of K states by W words, see `Utterance.extend`; words are strings.

        Cost    that of the slowest member
        Raises  ModelMismatch, QueryError, and what members raise: no score without all of them
        """
        return waited(self._extend(states, words, deadline_s))

    def score_sentences(
        self,
        sentences: Sequence[Any],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """Scores whole sentences, see `Utterance.score_sentences`; words are strings."""
        return waited(self._score_sentences(sentences, bos, eos, deadline_s))

    def next_words(
        self, state: MixtureState, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[str, np.float32]]:
        """The `k` likeliest next words: (word, log10 P), best first. They may include the sentence
        end and `words[0]`, the unknown word; never <s>."""
        return waited(self._next_words(state, k, deadline_s))

    def next_distribution(
        self, state: MixtureState, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """(U,) float32: log10 P of each of `words` after a state."""
        return waited(self._next_distribution(state, deadline_s))


class AsyncMixture(BaseMixture[AsyncUtterance]):
    """A mixture for asyncio, of utterances of `AsyncClient`s: `Mixture`'s methods, awaited.

    Raises  ConfigError  a client has not connected yet: use `await client.utterance()`;
            see `Mixture`
    """

    _member = AsyncUtterance

    @classmethod
    async def tuned(
        cls,
        members: Sequence[AsyncUtterance],
        sentences: Sequence[str],
        *,
        unknown: str = ZERO,
        deadline_s: float | None = None,
    ) -> AsyncMixture:
        """See `Mixture.tuned`."""
        weights = await awaited(cls.even(members, unknown)._tuned_weights(sentences, deadline_s))
        return cls(list(zip(members, weights, strict=True)), unknown=unknown)

    async def extend(
        self,
        states: MixtureStates | Sequence[MixtureState],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> MixtureExtension:
        """See `Mixture.extend`."""
        return await awaited(self._extend(states, words, deadline_s))

    async def score_sentences(
        self,
        sentences: Sequence[Any],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """See `Mixture.score_sentences`."""
        return await awaited(self._score_sentences(sentences, bos, eos, deadline_s))

    async def next_words(
        self, state: MixtureState, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[str, np.float32]]:
        """See `Mixture.next_words`."""
        return await awaited(self._next_words(state, k, deadline_s))

    async def next_distribution(
        self, state: MixtureState, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """See `Mixture.next_distribution`."""
        return await awaited(self._next_distribution(state, deadline_s))
