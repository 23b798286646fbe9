"""A language model for flashlight-text decoders (and torchaudio's `ctc_decoder`).

flashlight asks for one word after one state, up to 36,000 times per second of audio, and compares
states by identity. So answers are cached under each `LMState`, and everything that the model stores
after a context is fetched in one message.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from dlm.asr.decoders.contexts import (
    MAX_WORDS,
    Contexts,
    Counts,
    KnownContext,
    check_utterance,
    word_ids,
)
from dlm.asr.settings import MIN_WEIGHT
from dlm.client import State, Utterance
from dlm.client.inputs import Word
from dlm.client.phrases import UNIT
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
INDEX_BITS = 32
ROW_WORDS = 1 << 12  # fewer are all scored when a context is first used: they are word pieces
END = -1  # index that flashlight's own models use for the sentence end


class _Asked(dict[int, tuple[LMState, float]]):
    """A state that the decoder used: maps the index of a word to what `score` returns.

    first  what a word's index is added to, for the number of the state after it
    log10_prob, state_length  by index, of word pieces: see `Contexts.score_all`
    """

    __slots__ = ("context", "first", "log10_prob", "node", "state", "state_length")
    log10_prob: array[float]
    state_length: bytes

    def __init__(self, state: LMState, context: KnownContext, node: int, first: int) -> None:
        self.state, self.context, self.node, self.first = state, context, node, first


class DlmLM(LM):  # type: ignore[misc]
    """A model behind an utterance as flashlight-text's `LM`.

    Scores are log10, like those of flashlight's KenLM, so weights tuned with it stay valid. Each
    decoder needs its own, used by one thread: `start` forgets the states of the previous sentence.
    Fetched contexts are kept between sentences, up to `max_words`.

    Args
        words      by index, like the entries of flashlight's `Dictionary`: strings, bytes or ids;
                   the model's unknown word scores those it lacks
        recombine  whether equal contexts are the same state, so hypotheses that differ only outside
                   the context merge. flashlight's KenLM does not, and keeps more of an n-best list
        max_words  stored words to keep in memory, 11 bytes each
        ahead      how many more contexts to fetch with each, chosen from the decoder's newest
                   states; a model in this process needs no messages, so none are fetched ahead
        lm_weight  the decoder's, which multiplies all that `score` returns. If the utterance has
                   phrases, their bonuses are divided by it, so it does not multiply them
    Raises  QueryError, ConfigError  see `word_ids`
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
        ids = word_ids(utterance, words)
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
            self._symbols = phrases.symbols[[*ids, utterance.vocabulary.end_id]].tolist()
            ids = [word if word < phrases.size else UNK_ID for word in ids]
            utterance = utterance.without_phrases()  # its contexts are the same
        self._ids, self._size = [*ids, utterance.vocabulary.end_id], len(ids)  # the last at END
        self._utterance = utterance
        self._by_row = not recombine and self._symbols is None and self._size < ROW_WORDS
        self._row = np.array(self._ids, np.uint32)
        self._contexts = Contexts(utterance, max_words)
        self._recombine = recombine
        self._ahead = ahead if utterance.local_model is None else 0
        self._coming: list[LMState] = []  # in the order the decoder reached them
        self._counts = self._contexts.counts
        # Most states are never used. They are only numbers, which are no work for the collector of
        # garbage: that of the word and of the state before it.
        self._states: dict[LMState, int] = {}
        self._used: list[_Asked] = []
        self._asked: dict[LMState, _Asked] = {}
        self._interned: dict[State | tuple[State, int], LMState] = {}
        self._nodes: dict[LMState, int] = {}  # of phrases

    @property
    def counts(self) -> Counts:
        return self._counts

    def start(self, start_with_nothing: bool) -> LMState:
        """The state at the beginning of a sentence, or the empty context."""
        self._states.clear()
        self._used.clear()
        self._asked.clear()
        self._interned.clear()
        self._nodes.clear()
        self._coming.clear()
        self._contexts.begin_sentence()
        state = self._utterance.null() if start_with_nothing else self._utterance.begin()
        root = LMState()
        if self._recombine:
            self._interned[state] = root
        self._states[root], self._first = 0, state
        return root

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """The state after the word with this index, and log10 P of the word."""
        self._counts.queries += 1
        try:
            asked = self._asked[state]
        except KeyError:
            asked = self._use(state)
        found = asked.get(usr_token_idx)
        if found is not None:
            return found
        if not END <= usr_token_idx < self._size:
            raise QueryError(
                f"word index {usr_token_idx} is not in the lexicon of {self._size} words; give "
                "the decoder and DlmLM the same words"
            )
        child = asked.state.child(usr_token_idx)
        if not self._by_row:
            return self._ask(asked, usr_token_idx, child)
        # Of pieces, only answers asked for a second time are kept: a search asks for nearly every
        # pair of state and piece once, a thousand times per frame.
        found = child, asked.log10_prob[usr_token_idx]
        if child in self._states:
            asked[usr_token_idx] = found
        else:
            self._states[child] = asked.first + usr_token_idx
            if self._ahead:
                self._coming.append(child)
        return found

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """The state after the sentence end, and its log10 P."""
        return self.score(state, END)

    def _use(self, state: LMState) -> _Asked:
        if state not in self._states:
            raise QueryError(
                "found a state of another sentence or another decoder; give each decoder its "
                "own DlmLM, and do not use states from before start()"
            )
        context, node = self._fetch(self._state_of(state)), self._nodes.get(state, 0)
        first = ((len(self._used) + 1) << INDEX_BITS) - END
        asked = self._asked[state] = _Asked(state, context, node, first)
        if self._by_row:
            asked.log10_prob, asked.state_length = self._contexts.score_all(context, self._row)
        self._used.append(asked)
        return asked

    def _state_of(self, state: LMState) -> State:
        used, index = divmod(self._states[state], 1 << INDEX_BITS)
        if used == 0:
            return self._first
        asked, index = self._used[used - 1], index + END
        if self._by_row:
            return asked.context.after(self._ids[index], asked.state_length[index])
        return asked.context.score(self._ids[index])[1]

    def _ask(self, asked: _Asked, index: int, child: LMState) -> tuple[LMState, float]:
        """As `score`, where equal contexts may be one state, and phrases may add their bonuses."""
        log10_prob, after = asked.context.score(self._ids[index])
        node = 0
        if self._symbols is not None and (asked.node or self._symbols[index]):
            node = self._automaton.step(asked.node, self._symbols[index])
            log10_prob += self._unit * self._automaton.added(asked.node, node)
        if self._recombine and index != END:  # all sentences that end would be one
            child = self._interned.setdefault((after, node) if node else after, child)
        if child not in self._states:
            self._states[child] = asked.first + index
            self._coming.append(child)
            if node:
                self._nodes[child] = node
        found = asked[index] = child, log10_prob
        return found

    def _fetch(self, state: State) -> KnownContext:
        found = self._contexts.find(state)
        if found is not None:
            return found
        wanted = {state: None}
        while len(state) >= 2 and self._coming and len(wanted) <= self._ahead:
            coming = self._state_of(self._coming.pop())
            if len(coming) >= 2 and self._contexts.find(coming) is None:
                wanted[coming] = None
        return self._contexts.get_all(list(wanted))[0]
