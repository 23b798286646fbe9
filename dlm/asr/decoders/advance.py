"""For decoders that need every token after every state at once: `advance(states)`.

The interface is NeMo's NGPU-LM: states are integers, scores and next states (B, V) arrays. There
one GPU holds the model, token by token. Here servers do, with any vocabulary and possibly missing
suffixes, and a batch costs one message per shard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.asr.decoders.checks import check_utterance, word_ids
from dlm.client import State, Utterance
from dlm.client.inputs import Word
from dlm.errors import QueryError
from dlm.ngram.query import BIGRAM_FALLBACK
from dlm.units import LN_10

__all__ = ["TokenLM"]

MAX_ROWS_BYTES = 1 << 28  # of cached scores and next states
_ROW_BYTES = 12  # a token of a row: a score and a state


class TokenLM:
    """Scores and next states of all tokens after a batch of states; not thread-safe.

    States are numbered in the order they first occur, until `clear`. Equal numbers are equal
    contexts, so hypotheses with equal numbers can be recombined.

    Args
        tokens     V tokens by index: strings, bytes or ids; the model's unknown word scores those
                   it lacks. Default: all words of the model, by id
        natural    scores are natural logarithms, as in NeMo; log10 if False
        max_bytes  size of the rows cached between calls
    Raises  QueryError, ConfigError  see `word_ids`
    """

    def __init__(
        self,
        utterance: Utterance,
        tokens: Sequence[Word] | None = None,
        *,
        natural: bool = True,
        max_bytes: int = MAX_ROWS_BYTES,
    ) -> None:
        check_utterance(utterance)
        if utterance.phrases is not None:
            raise QueryError(
                "the utterance has phrases, whose bonuses these arrays do not have; open one "
                "without, or use Utterance.extend"
            )
        every = range(utterance.vocabulary_size)
        self._ids = np.array(every if tokens is None else word_ids(utterance, tokens), np.int64)
        # One extra column is the sentence end, for `get_final`.
        self._asked = np.append(self._ids, utterance.vocabulary.end_id)
        self._utterance = utterance
        self._scale = LN_10 if natural else 1.0
        self._most = max(max_bytes // (_ROW_BYTES * len(self._asked)), 1)
        self.clear()

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        """Forgets all numbers and rows; call it between utterances to limit memory."""
        self._numbers: dict[tuple[int, ...], int] = {}
        self._contexts: list[tuple[int, ...]] = []
        self._rows: OrderedDict[int, tuple[NDArray[np.float32], NDArray[np.int64]]] = OrderedDict()

    def get_init_states(self, batch_size: int, bos: bool = True) -> NDArray[np.int64]:
        """(B,) the state at the beginning of a sentence, or the empty context if not `bos`."""
        state = self._utterance.begin() if bos else self._utterance.null()
        return np.full(batch_size, self._number(state._words), np.int64)

    def advance(
        self, states: NDArray[Any] | Sequence[int], eos_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores of all tokens after each of B states, (B, V) float32, and the states after them,
        int64.

        Args    eos_id  index of a token that gets the score of the sentence end
        Raises  QueryError, UnavailableError, ProtocolError
        """
        scores, after = self._all(states)
        scores = scores[:, :-1].copy() if eos_id is None else self._with_end(scores, eos_id)
        return scores, after[:, :-1].copy()

    def get_final(self, states: NDArray[Any] | Sequence[int]) -> NDArray[np.float32]:
        """(B,) float32: the score of the sentence end after each state."""
        scores: NDArray[np.float32] = self._all(states)[0][:, -1].copy()
        return scores

    @staticmethod
    def _with_end(scores: NDArray[np.float32], eos_id: int) -> NDArray[np.float32]:
        if not 0 <= eos_id < scores.shape[1] - 1:
            raise QueryError(f"eos_id is {eos_id}; expected an index below {scores.shape[1] - 1}")
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
        numbers = given.astype(np.int64).reshape(-1).tolist()
        missing = [n for n in dict.fromkeys(numbers) if n not in self._rows]
        fetched = dict(zip(missing, self._fetch(missing), strict=True)) if missing else {}
        scores = np.empty((len(numbers), len(self._asked)), np.float32)
        after = np.empty(scores.shape, np.int64)
        for row, number in enumerate(numbers):
            scores[row], after[row] = fetched.get(number) or self._rows[number]
            if number in self._rows:
                self._rows.move_to_end(number)
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)
        return scores, after

    def _fetch(self, numbers: list[int]) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        model_info = self._utterance.model_info
        asked = [State(model_info, self._context(number)) for number in numbers]
        blocks = self._utterance.context_blocks(asked)
        found = blocks.extend(self._asked)
        scores = (found.log10_prob * np.float64(self._scale)).astype(np.float32)
        after = self._number_all(found.states._contexts, found.states._lengths)
        rows = []
        for place, number in enumerate(numbers):
            row = scores[place], after[place]
            if blocks.source[place] != BIGRAM_FALLBACK:
                self._rows[number] = row
            rows.append(row)
        return rows

    # -- numbers ------------------------------------------------------------------------------
    # 0 is the empty context, 1 + w the context of the single word w; longer ones follow in order.

    def _number(self, words: tuple[int, ...]) -> int:
        if len(words) < 2:
            return 1 + words[0] if words else 0
        found = self._numbers.get(words)
        if found is None:
            found = 1 + self._utterance.vocabulary_size + len(self._contexts)
            self._numbers[words] = found
            self._contexts.append(words)
        return found

    def _number_all(
        self, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8]
    ) -> NDArray[np.int64]:
        width = contexts.shape[-1]
        numbers = np.zeros(lengths.shape, np.int64)
        if width:
            np.add(contexts[..., -1], 1, out=numbers, where=lengths == 1, casting="unsafe")
        longer = np.nonzero(lengths >= 2)
        rows = zip(contexts[longer].tolist(), lengths[longer].tolist(), strict=True)
        numbers[longer] = [self._number(tuple(row[width - length :])) for row, length in rows]
        return numbers

    def _context(self, number: int) -> tuple[int, ...]:
        size = self._utterance.vocabulary_size
        if number == 0:
            return ()
        if 0 < number <= size:
            return (number - 1,)
        if not 0 < number <= size + len(self._contexts):
            raise QueryError(
                f"state {number} is not known; give a state from get_init_states or advance, "
                "created since the last clear()"
            )
        return self._contexts[number - size - 1]
