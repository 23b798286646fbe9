"""Does everything that an utterance's calls need, except waiting.

A call is a generator that yields whatever must be waited for (`Steps`): `Utterance` waits in its
caller's thread, `AsyncUtterance` on its event loop. This module is long because both
classes share all calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.client.config import MAX_DEADLINE_S
from dlm.client.core import Asked, Scorer
from dlm.client.health import Mode
from dlm.client.inputs import (
    Inputs,
    Parts,
    Queries,
    Sentence,
    Word,
    inputs_of,
)
from dlm.client.phrases import BoundPhrases, Phrases
from dlm.client.router import LowGrams, Snapshot
from dlm.client.rules import GiveUp, after_call
from dlm.client.server import SCORES, Asks
from dlm.client.states import (
    FULL_MODEL,
    LOCAL_MODEL,
    Extension,
    PhraseState,
    SentenceScore,
    State,
    States,
)
from dlm.errors import (
    DeadlineExceeded,
    DlmError,
    ModelMismatch,
    ModelSwitched,
    QueryError,
    StaleShardSet,
)
from dlm.index.layout import Manifest
from dlm.index.search.local import LocalModel
from dlm.kenlm.model import KenlmFile
from dlm.ngram.query import Answers
from dlm.ngram.vocab import UNK_ID, Vocabulary

T = TypeVar("T")
# What a call may yield: another call, with the seconds to wait for its end; a function that may
# block; or None, between two parts, so that an event loop can run other tasks.
Wait: TypeAlias = tuple[Asked, float] | Callable[[], None] | None
Steps: TypeAlias = Generator[Wait, None, T]

# A caller waits this many seconds beyond the deadline, because the transport ends calls at the
# deadline with a more precise error. With a bigram fallback, the caller waits only until the
# deadline: the fallback gives the same answers whatever went wrong.
GRACE_S = 0.02
# A large call stops waiting before its deadline, so that its bigram-fallback answers and results
# have half of its planning time, plus SHAPE_SHARE of its time limit (at most SHAPE_S seconds).
SHAPE_SHARE, SHAPE_S = 0.05, 0.1
SHAPED = 128  # number of sentences scored between two checks of the clock

# What happens to an utterance on the full model when its client switches to the local fallback.
FINISH, RESCORE = "finish", "rescore"


def check_deadline(deadline_s: float) -> None:
    """Raises `QueryError` unless the deadline is above 0 and below `MAX_DEADLINE_S` seconds."""
    if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s < MAX_DEADLINE_S:
        raise QueryError(
            f"the deadline is {deadline_s!r}; expected seconds above 0 and below {MAX_DEADLINE_S:g}"
        )


def source_of(answers: Answers) -> NDArray[np.uint8]:
    return np.zeros(len(answers), np.uint8) if answers.source is None else answers.source


def joined(answers: Sequence[Answers]) -> Answers:
    if len(answers) == 1:
        return answers[0]
    plain = all(a.source is None for a in answers)
    return Answers(
        np.concatenate([a.log10_prob for a in answers]),
        np.concatenate([a.matched_order for a in answers]),
        np.concatenate([a.ngram_length for a in answers]),
        np.concatenate([a.state_length for a in answers]),
        None if plain else np.concatenate([source_of(a) for a in answers]),
    )


class Asking:
    """A call in progress: its parts, and a clock that starts when this object is created."""

    __slots__ = ("_begun", "_handle", "_limit_s", "_parts", "_planned_s")

    def __init__(self, handle: BaseUtterance, deadline_s: float | None) -> None:
        self._begun = time.monotonic()
        self._handle = handle
        limit_s = handle._limit(deadline_s)
        self._limit_s = limit_s if handle._core.keeps_deadlines else MAX_DEADLINE_S
        self._parts: list[tuple[Queries, Asked]] = []
        self._planned_s = 0.0

    @property
    def left_s(self) -> float:
        return max(self._limit_s - (time.monotonic() - self._begun), 0.0)

    def ask(self, parts: Parts, asks: Asks) -> Steps[list[tuple[Queries, Any]]]:
        """Plans and sends the parts; once all have ended, returns each part's queries and answers.

        Raises  DeadlineExceeded, or the error of a part
        """
        self._parts = []
        try:
            for queries, ahead in parts:
                if self._parts:
                    yield None
                self._submit(queries, ahead, asks)
            found = []
            for number, (queries, call) in enumerate(self._parts):
                if number:
                    yield None
                if not call.done():
                    yield call, self._wait_s(number)
                if not call.done():
                    # `cancel` would count the call as abandoned by its caller.
                    call.give_up(
                        DeadlineExceeded(
                            f"no answer within {self._limit_s:g} s; retry, or raise the deadline"
                        )
                    )
                found.append((queries, call.result(0.0)))
            return found
        finally:
            for _, call in self._parts:
                call.cancel()  # does nothing if the call has ended
                call.close(self._handle._core.counts)

    def _submit(self, queries: Queries, ahead: int, asks: Asks) -> None:
        """Plans and sends a part. The first is sent even when late: low orders may answer it."""
        more = bool(self._parts)
        if more:
            if self.left_s <= 0.0:
                raise self._too_large()
            last = self._parts[-1][1]
            if last.done():
                last.result()  # raises if the call has failed, so that the rest is not sent
        call = self._handle._submit(queries, self.left_s, more=more, ahead=ahead, asks=asks)
        self._parts.append((queries, call))
        self._planned_s = time.monotonic() - self._begun

    def _wait_s(self, number: int) -> float:
        left_s = self.left_s
        if not self._handle.bigram_fallback:
            return left_s + GRACE_S
        if len(self._parts) > 1:
            # Keeps time for the work that follows: bigram-fallback answers, and the results
            # made from all answers.
            left_s -= self._planned_s / 2 * (1.0 - number / len(self._parts))
            left_s -= min(SHAPE_SHARE * self._limit_s, SHAPE_S)
        return max(left_s, 0.0)

    def check(self) -> None:
        """Raises `DeadlineExceeded` if the results of a call in several parts are late, except with
        a bigram fallback, whose users want no errors."""
        if len(self._parts) > 1 and not self._handle.bigram_fallback and self.left_s <= 0.0:
            raise self._too_large()

    def _too_large(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no answer within {self._limit_s:g} s; this process alone needs longer than that for "
            "a call of this size. Make smaller calls, or raise the deadline"
        )


class BaseUtterance:
    """An utterance on one model; the base of `Utterance` and `AsyncUtterance`."""

    def __init__(
        self,
        core: Scorer,
        snapshot: Snapshot,
        deadline_s: float | None,
        kind: str = FULL_MODEL,
        on_switch: str = FINISH,
        phrases: Phrases | None = None,
        settled: bool = False,
    ) -> None:
        if on_switch not in (FINISH, RESCORE):
            raise QueryError(f"on_switch is {on_switch!r}; expected {FINISH!r} or {RESCORE!r}")
        self._core = core
        self._deadline_s = deadline_s
        self._rescores = on_switch == RESCORE
        self._lock = threading.Lock()
        self._calls = 0  # calls in progress
        self._blocks_unknown_until = 0.0  # `monotonic` time before which no ContextBlock is sent
        self.bigram_fallback = core.config.bigram_fallback
        self._phrases = phrases
        self._pin(inputs_of(snapshot, kind, phrases))
        self._inputs.settled = settled or kind == LOCAL_MODEL

    def _pin(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.order = self.manifest.order
        self.vocabulary_size = inputs.vocabulary_size
        self.model_info = inputs.model_info

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order}, model={self.model_info.model})"

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the utterance's model. Reading them fixes the utterance to this model."""
        self._inputs.settled = True  # ids that the caller looks up are of this model
        return self._inputs.words

    @property
    def local_model(self) -> LocalModel | KenlmFile | None:
        """The model, if it is in this process; None if servers hold it."""
        return self._core.local_model

    @property
    def manifest(self) -> Manifest:
        """The manifest of the shard set that answers: the local fallback's while servers fail."""
        return self._inputs.snapshot.topology.manifest

    @property
    def low_orders(self) -> LowGrams:
        """The model's 1- and 2-grams. Reading them fixes the utterance to this model."""
        self._inputs.settled = True
        return self._inputs.snapshot.grams

    @property
    def phrases(self) -> BoundPhrases | None:
        """The utterance's phrases, in word ids of its model; None if it has none. Reading this
        property fixes the utterance to its model."""
        self._inputs.settled = True
        return self._inputs.phrases

    def without_phrases(self) -> Self:
        """Returns an utterance that is pinned to the same model and has no phrases."""
        return self.with_phrases(None)

    def with_phrases(self, phrases: Phrases | None) -> Self:
        """Returns an utterance that is pinned to the same model and has these phrases instead."""
        self._inputs.settled = True
        on_switch = RESCORE if self._rescores else FINISH
        snapshot, kind = self._inputs.snapshot, self.model_info.kind
        return type(self)(self._core, snapshot, self._deadline_s, kind, on_switch, phrases, True)

    def ids_of(self, words: Sequence[Word]) -> NDArray[np.uint32]:
        """Returns the ids of words, 0 for unknown words. In this utterance, new words of phrases
        have ids from `vocabulary_size` on. Fixes the utterance to its model."""
        self._inputs.settled = True
        return self._inputs.ids(words)

    def bonus(self, before: State, after: State) -> float:
        """The log10 bonus that phrases add to the step between two states; 0 without phrases.
        Raises `ModelMismatch` for a state of another utterance."""
        phrases, own = self._inputs.phrases, self._inputs.own
        first, second = own(before), own(after)
        if phrases is None:
            return 0.0
        assert isinstance(first, PhraseState) and isinstance(second, PhraseState)
        return float(phrases.bonus(first._node, second._node))

    def finish(self, state: State) -> float:
        """The log10 value to add at the end of a sentence, for a decoder that does not score </s>:
        it undoes the partial bonus of an incomplete phrase. 0 without phrases. Raises
        `ModelMismatch` for a state of another utterance."""
        phrases, last = self._inputs.phrases, self._inputs.own(state)
        if phrases is None:
            return 0.0
        assert isinstance(last, PhraseState)
        return float(phrases.finish(last._node))

    def begin(self) -> State:
        """The state at the beginning of a sentence."""
        return self._inputs.begin()

    def null(self) -> State:
        """The state whose context is empty."""
        return self._inputs.null()

    def states(self, states: States | Sequence[State]) -> States:
        """Returns states of this utterance as one array; raises `ModelMismatch` for a state of
        another model."""
        return self._inputs.states(states)

    def states_after(self, contexts: Sequence[Sequence[Word]]) -> States:
        """Returns a state per context, which has the context's last words, at most order - 1.

        Use this for stored contexts (`States.contexts`) or another utterance's. The states are
        not minimised: the state that `extend` returns after the same words may keep fewer. With
        phrases, give all words of a sentence: a phrase may be longer than a state's context.

        Raises  QueryError  a context that is not a sequence of words, an id that is too large
        """
        return self._inputs.states_after(contexts)

    def states_from_bytes(self, states: Sequence[bytes]) -> States:
        """Rebuilds states from bytes that `States.to_bytes` returned, in this or another process.
        Fixes the utterance to its model.

        Raises  ModelMismatch  a state of another model;  QueryError  bytes that are not a state
        """
        self._inputs.settled = True
        return self._inputs.states_from_bytes(states)

    # -- what each call does ------------------------------------------------------------------

    def _score(
        self, asking: Asking, contexts: Sequence[Sequence[Word]], words: Sequence[Word]
    ) -> Steps[Answers]:
        parts = yield from self._ask(asking, lambda: self._inputs.score(contexts, words))
        return joined([answers for _, answers in parts])

    def _extend(
        self, asking: Asking, states: States | Sequence[State], words: Any
    ) -> Steps[Extension]:
        given = count, width, _ = self._inputs.extend_shape(states, words)
        parts = yield from self._ask(asking, lambda: self._inputs.extend(given, states, words))
        after, bonuses = [], []
        for queries, found in parts:
            states_after, bonus = self._inputs.after(queries, found)
            after.append(states_after)
            if bonus is not None:
                bonuses.append(bonus)
            asking.check()
        oov = [kernels.are_word(queries.words, UNK_ID) for queries, _ in parts]
        answers = joined([answers for _, answers in parts])
        shape = count, width
        return Extension(
            answers.log10_prob.reshape(shape),
            answers.matched_order.reshape(shape),
            answers.ngram_length.reshape(shape),
            (after[0] if len(after) == 1 else States.joined(after)).reshape(*shape),
            source_of(answers).reshape(shape),
            (oov[0] if len(oov) == 1 else np.concatenate(oov)).reshape(shape),
            np.concatenate(bonuses).reshape(shape) if bonuses else None,
        )

    def _score_sentences(
        self, asking: Asking, sentences: Sequence[Sentence], bos: bool, eos: bool
    ) -> Steps[list[SentenceScore]]:
        counts: list[int] = []
        parts = yield from self._ask(
            asking, lambda: self._inputs.sentences(sentences, bos, eos, counts)
        )
        answers = joined([answers for _, answers in parts])
        words = np.concatenate([queries.words for queries, _ in parts])
        bonuses = self._inputs.bonuses([queries for queries, _ in parts], counts)
        source, out, begin = source_of(answers), [], 0
        for number, (count, bonus) in enumerate(zip(counts, bonuses, strict=False), 1):
            part = slice(begin, begin + count)
            prob = answers.log10_prob[part]
            oov = words[part] == UNK_ID
            out.append(
                SentenceScore(
                    float(prob.sum(dtype=np.float64)),
                    count,
                    int(oov.sum()),
                    float(prob[oov].sum(dtype=np.float64)),
                    prob,
                    answers.matched_order[part],
                    oov,
                    source[part],
                    bonus,
                )
            )
            begin += count
            if number % SHAPED == 0:
                asking.check()
                yield None  # lets an event loop run other tasks
        return out

    # -- asking -------------------------------------------------------------------------------

    def _limit(self, deadline_s: float | None) -> float:
        limit = self._deadline_s if deadline_s is None else deadline_s
        limit = self._core.config.deadline_s if limit is None else limit
        check_deadline(limit)
        return limit

    def _ask(
        self, asking: Asking, parts: Callable[[], Parts], asks: Asks = SCORES
    ) -> Steps[list[tuple[Queries, Any]]]:
        """Sends a call's parts, and sends them again if a new utterance's model was replaced."""
        with self._lock:
            self._calls += 1
        try:
            try:
                found = yield from asking.ask(parts(), asks)
            except StaleShardSet as error:
                stale = error
                yield lambda: self._move(stale, asking)
                self._inputs.settled = True
                try:
                    found = yield from asking.ask(parts(), asks)
                except ModelMismatch:  # the caller's states are of the old model
                    raise error from None
            self._inputs.settled = True
            return found
        finally:
            with self._lock:
                self._calls -= 1

    def _move(self, error: StaleShardSet, asking: Asking) -> None:
        """Switches the utterance to the model that replaced its own; may block. Raises `error` if
        no time is left or the utterance must keep its model."""
        self._check_may_move(error, asking)
        with suppress(DlmError):  # without another model, low orders answer what they can
            fresh = self._core.current(asking.left_s, self.model_info.model)
            with self._lock:
                if not self._inputs.settled and self._calls == 1:
                    kind = self.model_info.kind
                    self._pin(inputs_of(fresh, kind, self._phrases, self._inputs))
        self._check_may_move(error, asking)

    def _check_may_move(self, error: StaleShardSet, asking: Asking) -> None:
        with self._lock:
            then = after_call(self._inputs.settled, self._calls, asking.left_s)
        if isinstance(then, GiveUp):
            raise error

    def _submit(
        self,
        queries: Queries,
        limit_s: float,
        *,
        more: bool = False,
        ahead: int = 0,
        asks: Asks = SCORES,
    ) -> Asked:
        if self._rescores and self._core.mode() is Mode.LOCAL_FALLBACK:
            raise ModelSwitched(
                "the servers are failing, so new utterances use the local fallback; score this "
                "utterance again, from its start, in a new one"
            )
        return self._core.submit(
            self.model_info.model,
            queries.contexts,
            queries.lengths,
            queries.counts,
            queries.words,
            limit_s,
            None if self._rescores else self._inputs.snapshot,
            moves_on=not self._inputs.settled,
            more=more,
            ahead=ahead,
            asks=asks,
        )
