"""Scores all tokens after each state of a batch in one call, `TokenLM.advance(states)`.

The interface is NeMo's NGPU-LM: states are integers; scores and next states are (B, V) arrays. NeMo
holds a model on one GPU, and the model's words are the tokens. Here servers hold the model, which
may lack some tokens and some suffixes of its n-grams. A batch costs one message per shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.checks import check_utterance, word_ids
from dlm.asr.kenlm.table import STATES, ModelCounts, StepTable
from dlm.client import Utterance
from dlm.client.inputs import Word
from dlm.errors import QueryError
from dlm.units import LN_10

__all__ = ["TokenLM"]

WORD_BYTES = 16  # bytes of the cache per stored word
MAX_BYTES = 1 << 26


class TokenLM:
    """Computes scores and next states of all tokens after a batch of states; not thread-safe.

    States are numbered in the order in which they first occur, until `clear`. Equal numbers mean
    equal contexts, so hypotheses with equal numbers can be recombined.

    Args
        tokens     V tokens by index: strings, bytes or ids; tokens that the model lacks
                   are scored as its unknown word. Default: all words of the model, by id
        natural    scores are natural logarithms, as in NeMo; log10 if False
        max_bytes  limit of the cache of words that the model stores after states
    Raises  QueryError, ConfigError  see `word_ids`
    """

    def __init__(
        self,
        utterance: Utterance,
        tokens: Sequence[Word] | None = None,
        *,
        natural: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        check_utterance(utterance)
        if utterance.phrases is not None:
            raise QueryError(
                "the utterance has phrases, but TokenLM cannot add their bonuses; open an "
                "utterance without phrases, or use Utterance.extend"
            )
        every = range(utterance.vocabulary_size)
        self._ids = np.array(every if tokens is None else word_ids(utterance, tokens), np.int64)
        # One extra column is the sentence end, for `get_final`.
        self._asked = np.append(self._ids, utterance.vocabulary.end_id)
        self._utterance = utterance
        self._scale = LN_10 if natural else 1.0
        self._max_words = max_bytes // WORD_BYTES
        self.clear()

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        """Forgets all states and empties the cache; call it between utterances to limit memory."""
        self._table = StepTable(
            self._utterance, ModelCounts(), None, states=STATES, max_words=self._max_words
        )

    def get_init_states(self, batch_size: int, bos: bool = True) -> NDArray[np.int64]:
        """Returns B copies of a sentence's first state or, without `bos`, of the empty context."""
        return np.full(batch_size, self._table.start(bos), np.int64)

    def advance(
        self, states: NDArray[Any] | Sequence[int], eos_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns (B, V) float32 scores of all tokens after B states, and the next states, int64.

        Args    eos_id  index of a token that gets the score of the sentence end
        Raises  QueryError, UnavailableError, ProtocolError
        """
        scores, after = self._all(states)
        scores = scores[:, :-1].copy() if eos_id is None else self._with_end(scores, eos_id)
        return scores, after[:, :-1].copy()

    def get_final(self, states: NDArray[Any] | Sequence[int]) -> NDArray[np.float32]:
        """Returns the score of the sentence end after each state, (B,) float32."""
        return np.array(self._all(states)[0][:, -1])

    @staticmethod
    def _with_end(scores: NDArray[np.float32], eos_id: int) -> NDArray[np.float32]:
        if not 0 <= eos_id < scores.shape[1] - 1:
            raise QueryError(f"eos_id is {eos_id}; expected an index in 0..{scores.shape[1] - 2}")
        scores = scores.copy()
        scores[:, eos_id] = scores[:, -1]
        return scores[:, :-1]

    def _all(
        self, states: NDArray[Any] | Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        given = np.asarray(states)
        if given.size and given.dtype.kind not in "iu":
            raise QueryError(
                f"states have the type {given.dtype}; expected the integers from get_init_states "
                "or advance"
            )
        states, places = np.unique(given.astype(np.int64), return_inverse=True)
        for state in states:
            if not 0 <= state < len(self._table):
                raise QueryError(
                    f"state {state} is not known; give a state from get_init_states or advance, "
                    "created since the last clear()"
                )
        shape = len(states), len(self._asked)
        rows, words = np.repeat(states, shape[1]), np.tile(self._asked, len(states))
        while (found := self._table.score_all(rows, words)) is None:
            self._table = self._table.grown()
        places = places.reshape(-1)
        scores = (found[0] * self._scale).astype(np.float32).reshape(shape)
        return scores[places], found[1].reshape(shape)[places]
