"""A language model for flashlight-text decoders (and torchaudio's `ctc_decoder`).

flashlight asks for one word after one state, up to 36,000 times per second of audio, and compares
states by identity. So answers are cached under each `LMState`, and everything that the model stores
after a context is fetched in one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlm.asr.contexts import MAX_WORDS, Contexts, Counts, KnownContext
from dlm.asr.settings import MIN_WEIGHT
from dlm.asr.word_ids import check_utterance, word_ids
from dlm.client import State, Utterance
from dlm.client.api.inputs import Word
from dlm.client.plan.automaton import UNIT
from dlm.errors import QueryError
from dlm.extras import needed
from dlm.ngram.vocab import UNK_ID
from dlm.units import LN_10

try:
    from flashlight.lib.text.decoder import LM, LMState
except ModuleNotFoundError as exc:
    raise needed(exc, ["flashlight-text"]) from exc

__all__ = ["DlmLM"]

AHEAD = 32
END = -1  # index that flashlight's own models use for the sentence end


class _Asked(dict[int, tuple[LMState, float]]):
    """A state that the decoder used: maps the index of a word to what `score` returns."""

    __slots__ = ("context",)

    def __init__(self, context: KnownContext) -> None:
        self.context = context


class DlmLM(LM):  # type: ignore[misc]
    """A model behind an utterance as flashlight-text's `LM`.

    Scores are log10, like those of flashlight's KenLM, so weights tuned with it stay valid. Each
    decoder needs its own, used by one thread: `start` forgets the states of the previous sentence.
    Fetched contexts are kept between sentences, up to `max_words`.

    Args
        utterance  of a `Client`, or of `Client.local`
        words      by index, like the entries of flashlight's `Dictionary`: strings, bytes or ids;
                   the model's unknown word scores those it lacks
        recombine  whether equal contexts are the same state, so hypotheses that differ only outside
                   the context merge. flashlight's KenLM does not, and keeps more of an n-best list
        max_words  stored words to keep in memory, 11 bytes each
        ahead      how many more contexts to fetch with each, chosen from the decoder's newest
                   states: it will use some next, and a message costs more than they do
        lm_weight  the decoder's, which multiplies all that `score` returns. If the utterance has
                   phrases, their bonuses are divided by it, so it does not multiply them
    Raises
        QueryError, ConfigError  see `word_ids`
        QueryError, UnavailableError, ProtocolError, through the decoder that calls it; with
            `ClientConfig(bigram_fallback=True)` server failures raise nothing
    """

    def __init__(
        self,
        utterance: Utterance,
        words: Sequence[Word],
        *,
        recombine: bool = False,
        max_words: int = MAX_WORDS,
        ahead: int = AHEAD,
        lm_weight: float | None = None,
    ) -> None:
        LM.__init__(self)
        check_utterance(utterance)
        # By index; the last is END, since Python's -1 is the last.
        self._ids = [*word_ids(utterance, words), utterance.vocabulary.end_id]
        self._symbols: list[int] | None = None  # of phrases, by index
        if (phrases := utterance.phrases) is not None:
            if (
                isinstance(lm_weight, bool)
                or not isinstance(lm_weight, (int, float, np.integer, np.floating))
                or not MIN_WEIGHT <= lm_weight <= 1 / MIN_WEIGHT
            ):
                raise QueryError(
                    f"lm_weight is {lm_weight!r}, and the utterance has phrases; pass the "
                    f"decoder's lm_weight, from {MIN_WEIGHT:g} to {1 / MIN_WEIGHT:g}, since "
                    "bonuses are added outside of it"
                )
            self._automaton, self._unit = phrases.automaton, UNIT * LN_10 / lm_weight
            self._symbols = phrases.symbols[self._ids].tolist()
            self._ids = [word if word < phrases.size else UNK_ID for word in self._ids]
            utterance = utterance.without_phrases()  # its contexts are the same
        self._utterance = utterance
        self._contexts = Contexts(utterance, max_words)
        self._recombine = recombine
        self._ahead = ahead
        self._coming: list[State] = []  # states in the order the decoder reached them
        self._counts = self._contexts.counts
        # Most states are never used: only those that are have a table.
        self._states: dict[LMState, State] = {}
        self._asked: dict[LMState, _Asked] = {}
        self._interned: dict[State | tuple[State, int], LMState] = {}
        self._nodes: dict[LMState, int] = {}  # of phrases

    @property
    def counts(self) -> Counts:
        return self._counts

    def start(self, start_with_nothing: bool) -> LMState:
        """The state at the beginning of a sentence, or the empty context."""
        self._states.clear()
        self._asked.clear()
        self._interned.clear()
        self._nodes.clear()
        self._coming.clear()
        self._contexts.begin_sentence()
        state = self._utterance.null() if start_with_nothing else self._utterance.begin()
        return self._put(LMState(), state)

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """The state after the word with this index, and log10 P of the word."""
        self._counts.queries += 1
        try:
            return self._asked[state][usr_token_idx]
        except KeyError:  # once per state and word; each pair is asked for some ten times
            return self._ask(state, usr_token_idx)

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """The state after the sentence end, and its log10 P."""
        return self.score(state, END)

    def _ask(self, state: LMState, index: int) -> tuple[LMState, float]:
        if not END <= index < len(self._ids) - 1:
            raise QueryError(
                f"word index {index} is not in the lexicon of {len(self._ids) - 1} words; give "
                "the decoder and DlmLM the same words"
            )
        asked = self._asked.get(state)
        if asked is None:
            known = self._states.get(state)
            if known is None:
                raise QueryError(
                    "found a state of another sentence or another decoder; give each decoder its "
                    "own DlmLM, and do not use states from before start()"
                )
            asked = self._asked[state] = _Asked(self._fetch(known))
        log10_prob, after = asked.context.score(self._ids[index])
        node = 0
        if self._symbols is not None:
            before, symbol = self._nodes.get(state, 0), self._symbols[index]
            if before or symbol:
                node = self._automaton.step(before, symbol)
                log10_prob += self._unit * self._automaton.added(before, node)
        found = asked[index] = self._put(state.child(index), after, node), log10_prob
        return found

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

    def _put(self, child: LMState, state: State, node: int = 0) -> LMState:
        if self._recombine:
            child = self._interned.setdefault((state, node) if node else state, child)
        if child not in self._states:
            self._states[child] = state
            if node:
                self._nodes[child] = node
            if len(state) >= 2:
                self._coming.append(state)
        return child
