"""The language model of a flashlight-text decoder (and of torchaudio's `ctc_decoder`).

flashlight asks one word of one state at a time, up to 36,000 times per second of audio, and tells
states apart by identity. So each state has a record here, under its `LMState`; all that the model
stores after a context is fetched once, in one message, and answers from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashlight.lib.text.decoder import LM, LMState

from dlm.asr.contexts import MAX_WORDS, Contexts, Counts, KnownContext
from dlm.client.utterance import State, Utterance, Word
from dlm.errors import QueryError

__all__ = ["DlmLM"]

AHEAD = 32
END = -1  # what flashlight's own models call the child of the sentence end


class _Record:
    """A state of the decoder: by index of a word what `score` returns; its context once asked."""

    __slots__ = ("after", "context", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.context: KnownContext | None = None
        self.after: dict[int, tuple[LMState, float]] = {}


class DlmLM(LM):  # type: ignore[misc]
    """A model behind an utterance as flashlight-text's `LM`.

    Scores are log10, as those of flashlight's KenLM: weights tuned with that stay valid. Each
    decoder needs one of its own, in its own thread: `start` forgets the states of the sentence
    before. What was fetched is kept from sentence to sentence, up to `max_words`.

    Args
        utterance  of a `Client`; also `Client.local`'s
        words      by index, as the entries of flashlight's `Dictionary`: strings, bytes or ids. One
                   that the model lacks is scored as its unknown word
        recombine  whether equal contexts are one state for flashlight, so that hypotheses that
                   differ in words the model does not look at any more become one. flashlight's
                   KenLM does not, and keeps more of an n-best list
        max_words  stored words that are kept in memory, 11 bytes each
        ahead      contexts that are fetched along with one that is asked, of those that the decoder
                   came to last: some of them are asked next, and a message costs more than they do
    Raises
        QueryError, UnavailableError, ProtocolError, out of the decoder that calls it; with
        `ClientConfig(partial=True)` none of a server
    """

    def __init__(
        self,
        utterance: Utterance,
        words: Sequence[Word],
        *,
        recombine: bool = False,
        max_words: int = MAX_WORDS,
        ahead: int = AHEAD,
    ) -> None:
        LM.__init__(self)
        vocabulary = utterance.vocabulary
        ids = [vocabulary.id_of(w) if isinstance(w, (str, bytes)) else int(w) for w in words]
        if ids and not 0 <= min(ids) <= max(ids) < utterance.vocabulary_size:
            raise QueryError(
                f"word ids from {min(ids)} to {max(ids)}; ids are 0 to "
                f"{utterance.vocabulary_size - 1}"
            )
        # By index; the last is that of END, as Python counts.
        self._ids = [*ids, vocabulary.end_id]
        self._utterance = utterance
        self._contexts = Contexts(utterance, max_words)
        self._recombine = recombine
        self._ahead = ahead
        self._coming: list[State] = []  # states as the decoder came to them
        self._counts = self._contexts.counts
        self._records: dict[LMState, _Record] = {}
        self._interned: dict[State, LMState] = {}

    @property
    def counts(self) -> Counts:
        """What the decoder asked, and what it cost."""
        return self._counts

    def start(self, start_with_nothing: bool) -> LMState:
        """The state at the beginning of a sentence, or the one that knows nothing of the past."""
        self._records.clear()
        self._interned.clear()
        self._coming.clear()
        self._contexts.begin_sentence()
        state = self._utterance.null() if start_with_nothing else self._utterance.begin()
        return self._put(LMState(), state)

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """The state after the word with this index, and log10 P of the word."""
        self._counts.queries += 1
        record = self._records.get(state)
        if record is None:
            raise QueryError(
                "a state of another sentence, or of another decoder, was given; each decoder needs "
                "a DlmLM of its own, and start() ends the states of the sentence before"
            )
        found = record.after.get(usr_token_idx)
        if found is None:
            found = record.after[usr_token_idx] = self._ask(state, record, usr_token_idx)
        return found

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """The state after the sentence end, and its log10 P."""
        return self.score(state, END)

    def _ask(self, state: LMState, record: _Record, index: int) -> tuple[LMState, float]:
        if not END <= index < len(self._ids) - 1:
            raise QueryError(f"word {index} of a lexicon of {len(self._ids) - 1} was asked")
        if record.context is None:
            record.context = self._fetch(record.state)
        log10_prob, after = record.context.score(self._ids[index])
        return self._put(state.child(index), after), log10_prob

    def _fetch(self, state: State) -> KnownContext:
        found = self._contexts.find(state)
        if found is not None:
            return found
        wanted = {state: None}
        while len(state) >= 2 and self._coming and len(wanted) <= self._ahead:
            coming = self._coming.pop()
            if self._contexts.find(coming) is None:
                wanted[coming] = None
        return self._contexts.get_all(list(wanted))[0]

    def _put(self, child: LMState, state: State) -> LMState:
        if self._recombine:
            child = self._interned.setdefault(state, child)
        if child not in self._records:
            self._records[child] = _Record(state)
            if len(state) >= 2:
                self._coming.append(state)
        return child
