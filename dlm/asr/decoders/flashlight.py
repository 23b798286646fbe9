"""A language model for flashlight-text decoders (and torchaudio's `ctc_decoder`).

flashlight asks for one word after one state, up to 36,000 times per second of audio, and compares
states by identity. So each `LMState` has a row in a table, and one message fetches everything that
the model stores after a context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlm.asr.decoders.checks import check_utterance, word_ids
from dlm.asr.kenlm.table import (
    MAX_WORDS,
    ROW_MASK,
    STATES,
    ModelCounts,
    StepTable,
    Stored,
)
from dlm.asr.settings import MIN_WEIGHT
from dlm.client import Utterance
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
END = -1  # index that flashlight's own models use for the sentence end


class DlmLM(LM):  # type: ignore[misc]
    """An utterance's model as flashlight-text's `LM`.

    Scores are log10, like those of flashlight's KenLM, so weights tuned with it stay valid. Give
    each decoder its own `DlmLM`, for one thread: `start` forgets the previous sentence's states.
    Fetched contexts are kept between sentences, up to `max_words`.

    Args
        words      by index, like the entries of flashlight's `Dictionary`: strings, bytes or ids;
                   words that the model lacks are scored as its unknown word
        recombine  whether equal contexts are the same state, so hypotheses that differ only outside
                   the context merge. flashlight's KenLM merges none, so its n-best lists are longer
        max_words  stored words to keep in memory, 11 bytes each
        ahead      how many more contexts to fetch along with a requested one, chosen from the
                   decoder's newest states; none if the model is in this process
        lm_weight  the weight by which the decoder multiplies all that `score` returns. Phrase
                   bonuses are divided by it here, so that the weight does not affect them
    Raises  QueryError, ConfigError  see `word_ids`
            QueryError, UnavailableError, ProtocolError, from the decoder's calls of `score`; with
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
        self._symbols: list[int] | None = None  # phrase symbol of each token
        if (phrases := utterance.phrases) is not None:
            if (
                isinstance(lm_weight, bool)
                or not isinstance(lm_weight, (int, float, np.integer, np.floating))
                or not MIN_WEIGHT <= lm_weight <= 1 / MIN_WEIGHT
            ):
                raise QueryError(
                    f"lm_weight is {lm_weight!r}, but the utterance has phrases, whose bonuses "
                    "lm_weight must not multiply; pass the decoder's lm_weight, from "
                    f"{MIN_WEIGHT:g} to {1 / MIN_WEIGHT:g}"
                )
            self._automaton, self._unit = phrases.automaton, UNIT * LN_10 / lm_weight
            self._symbols = phrases.symbols[[*ids, utterance.vocabulary.end_id]].tolist()
            ids = [word if word < phrases.size else UNK_ID for word in ids]
            utterance = utterance.without_phrases()  # contexts stay the same
        self._ids, self._size = [*ids, utterance.vocabulary.end_id], len(ids)  # the end is at END
        self._recombine = recombine
        self._ahead = ahead if utterance.local_model is None else 0
        self._table = StepTable(utterance, ModelCounts(), None, states=STATES, max_words=max_words)
        self._step = self._table.step
        # The states of this sentence.
        self._rows: dict[LMState, int] = {}
        self._coming: list[LMState] = []  # in the order in which the decoder reached them
        self._nodes: dict[LMState, int] = {}  # nodes of the phrases' automaton
        self._interned: dict[tuple[int, int], LMState] = {}  # by row and node
        self._known: dict[int, Stored] = {}  # by row; includes the fallback's answers
        self._answers: dict[LMState, dict[int, tuple[LMState, float]]] = {}

    @property
    def counts(self) -> ModelCounts:
        return self._table.count()

    def start(self, start_with_nothing: bool) -> LMState:
        """Begins a sentence; returns its first state, or the empty one if `start_with_nothing`."""
        for kept in (
            self._rows, self._coming, self._nodes, self._interned, self._known, self._answers
        ):  # fmt: skip
            kept.clear()
        if self._table.room > STATES:
            self._table = self._table.renewed(STATES)
        root, row = LMState(), self._table.start(not start_with_nothing)
        self._rows[root] = row
        self._interned[row, 0] = root
        return root

    def score(self, state: LMState, usr_token_idx: int) -> tuple[LMState, float]:
        """Returns the state after the word with this index, and log10 P of the word."""
        if (given := self._answers.get(state)) and usr_token_idx in given:
            return given[usr_token_idx]
        rows = self._rows
        row = rows.get(state)
        if row is None:
            raise QueryError(
                "found a state from another sentence or another decoder; give each decoder its own "
                "DlmLM, and do not use states from before start()"
            )
        if not END <= usr_token_idx < self._size:
            raise QueryError(
                f"word index {usr_token_idx} is not in the lexicon of {self._size} words; give "
                "the decoder and DlmLM the same words"
            )
        word = self._ids[usr_token_idx]
        log10_prob, after = self._step(self._table.address, row, word)
        if after < 0:
            log10_prob, after = self._ask(state, word)
        after &= ROW_MASK
        child, node = state.child(usr_token_idx), 0
        if self._symbols is not None:
            before, symbol = self._nodes.get(state, 0), self._symbols[usr_token_idx]
            if before or symbol:
                node = self._automaton.step(before, symbol)
                log10_prob += self._unit * self._automaton.added(before, node)
        if self._recombine and usr_token_idx != END:  # else all sentence ends would be one state
            child = self._interned.setdefault((after, node), child)
        if node:
            self._nodes[child] = node
        if self._ahead and child not in rows:
            self._coming.append(child)
        self._rows[child] = after
        found = self._answers.setdefault(state, {})[usr_token_idx] = child, log10_prob
        return found

    def finish(self, state: LMState) -> tuple[LMState, float]:
        """Returns the state after the sentence end, and log10 P of the end."""
        return self.score(state, END)

    def _ask(self, state: LMState, word: int) -> tuple[float, int]:
        while True:
            log10_prob, after = self._table.score(self._rows[state], word, self._fetch)
            if after >= 0:
                return log10_prob, after
            self._table = self._table.grown()

    def _fetch(self, row: int) -> Stored:
        if row not in self._known:
            wanted = {row: None}
            while self._coming and len(wanted) <= self._ahead and self._table.lacks(row):
                coming = self._rows[self._coming.pop()]
                if coming not in self._known and self._table.lacks(coming):
                    wanted[coming] = None
            self._known.update(self._table.blocks_of(wanted))
        return self._known[row]
