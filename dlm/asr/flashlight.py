"""The language model of a flashlight-text decoder (and of torchaudio's `ctc_decoder`).

flashlight asks one word of one state at a time, and tells states apart by identity. So each state
has a record here, under its `LMState`, which knows the state of dlm and what was answered of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from flashlight.lib.text.decoder import LM, LMState

from dlm.client.utterance import State, Utterance, Word
from dlm.errors import QueryError

__all__ = ["DlmLM"]

END = -1  # what flashlight's own models call the child of the sentence end
WHOLE = 4096  # words of a lexicon that are scored with the first of them


@dataclass(slots=True)
class _Record:
    """What is known of a state: its answers by index of a word, and the states after them."""

    state: State
    scores: dict[int, float] = field(default_factory=dict)
    after: dict[int, LMState] = field(default_factory=dict)


class DlmLM(LM):  # type: ignore[misc]
    """A model behind an utterance as flashlight-text's `LM`.

    Scores are log10, as those of flashlight's KenLM: weights tuned with that stay valid. Each
    decoder needs one of its own, since `start` forgets the states of the sentence before.

    Args
        utterance  of a `Client`; also `Client.local`'s
        words      by index, as the entries of flashlight's `Dictionary`: strings, bytes or ids. One
                   that the model lacks is scored as its unknown word
        recombine  whether equal contexts are one state for flashlight, so that hypotheses that
                   differ in words the model does not look at any more become one. flashlight's
                   KenLM does not, and keeps more of an n-best list
    Raises
        QueryError, UnavailableError, ProtocolError, out of the decoder that calls it
    """

    def __init__(
        self, utterance: Utterance, words: Sequence[Word], *, recombine: bool = False
    ) -> None:
        LM.__init__(self)
        self._utterance = utterance
        vocabulary = utterance.vocabulary
        self._ids = np.array(
            [vocabulary.id_of(w) if isinstance(w, (str, bytes)) else w for w in words], np.uint32
        )
        self._end_id = vocabulary.end_id
        self._recombine = recombine
        self._records: dict[LMState, _Record] = {}
        self._interned: dict[State, LMState] = {}

    def start(self, start_with_nothing: bool) -> LMState:
        """The state at the beginning of a sentence, or the one that knows nothing of the past."""
        self._records.clear()
        self._interned.clear()
        root = LMState()
        state = self._utterance.null() if start_with_nothing else self._utterance.begin()
        return self._put(root, state)

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """The state after the word with this index, and log10 P of the word."""
        record = self._record(state)
        if usr_token_idx not in record.scores:
            self._ask(state, record, usr_token_idx)
        return record.after[usr_token_idx], record.scores[usr_token_idx]

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """The state after the sentence end, and its log10 P."""
        return self.score(state, END)

    def _record(self, state: LMState) -> _Record:
        try:
            return self._records[state]
        except KeyError:
            raise QueryError(
                "a state of another sentence, or of another decoder, was given; each decoder needs "
                "a DlmLM of its own, and start() ends the states of the sentence before"
            ) from None

    def _ask(self, state: LMState, record: _Record, index: int) -> None:
        if index != END and not 0 <= index < len(self._ids):
            raise QueryError(f"word {index} of a lexicon of {len(self._ids)} was asked")
        if len(self._ids) <= WHOLE:
            asked, ids = [*range(len(self._ids)), END], np.append(self._ids, self._end_id)
        else:
            asked = [index]
            ids = np.array([self._end_id if index == END else self._ids[index]], np.uint32)
        found = self._utterance.extend([record.state], ids)
        for column, (word, log10_prob) in enumerate(
            zip(asked, found.log10_prob[0].tolist(), strict=True)
        ):
            record.scores[word] = log10_prob
            record.after[word] = self._put(state.child(word), found.states[0, column])

    def _put(self, child: LMState, state: State) -> LMState:
        if self._recombine:
            child = self._interned.setdefault(state, child)
        if child not in self._records:
            self._records[child] = _Record(state)
        return child
