"""Handles on one utterance: states in, scores and next states out.

A handle is pinned to a model family and its states carry that family, so that scores of two models
can never meet in one sentence: giving a state to another handle is a type error.

Both faces share everything but the waiting: `_Handle` prepares arrays and shapes answers, and the
two subclasses say how a future is waited for. That, and the states and answers that pass through a
handle, is one file past 500 lines: a decoder's whole vocabulary.
"""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.client.core import Core
from dlm.client.modes import Mode
from dlm.client.runtime import Snapshot
from dlm.errors import DeadlineExceeded, FamilyMismatch, ModelSwitched, QueryError
from dlm.ngram.query import Answers
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes

Word: TypeAlias = str | bytes | int
Sentence: TypeAlias = str | bytes | Sequence[str | bytes]

# As in ARPA files, words are split at spaces and tabs; a line end cannot be part of a word either.
_SPACES = re.compile(rb"[ \t\r\n]+")

# A caller's wait ends this long after the deadline at the latest, in seconds: the transport ends
# calls at the deadline by itself, and its own error says more. Not so where there is a partial
# model, whose answers are the same whatever went wrong.
GRACE_S = 0.25
MAX_DEADLINE_S = 1e6

FULL_KIND, SMALL_KIND = "full", "small"
# What becomes of an utterance on the full model when its client goes over to the small one.
FINISH, RESCORE = "finish", "rescore"


@dataclass(frozen=True, slots=True)
class Family:
    """What a score belongs to: the model, and the shard set it was opened on.

    kind  "full", or "small" for the local model of a client whose servers fail
    """

    kind: str
    model: str
    shard_set: str


@dataclass(frozen=True, slots=True)
class State:
    """What of the past still matters; opaque, hashable, picklable.

    Two states of one family are equal exactly if every continuation scores the same by the n-grams
    the model has (KenLM's rule: the longest suffix that an n-gram extends or that has a back-off
    weight), so hypotheses with equal states can be recombined.
    """

    family: Family
    _words: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class States:
    """States of one family in an array of any shape; index it to get a `State` or a part.

    Shapes
        _contexts  shape + (order - 1,)  uint32  right-aligned, zero where unused
        _lengths   shape                 uint8
    """

    family: Family
    _contexts: NDArray[np.uint32]
    _lengths: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of states."""
        return self._lengths.shape

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        lengths = self._lengths[index]
        # The axis of a state's words is no axis of the array: an ellipsis must stop before it.
        inner = index if isinstance(index, tuple) else (index,)
        contexts = self._contexts[(*inner, slice(None))]
        if np.ndim(lengths) == 0:
            width = contexts.shape[-1]
            return State(self.family, tuple(contexts[width - int(lengths) :].tolist()))
        return States(self.family, contexts, lengths)

    def reshape(self, *shape: int) -> States:
        """The same states in another shape."""
        lengths = self._lengths.reshape(*shape)
        return States(
            self.family, self._contexts.reshape(*lengths.shape, self._contexts.shape[-1]), lengths
        )


@dataclass(frozen=True, eq=False)
class Extension:
    """K states extended by W words.

    Shapes
        log10_prob     (K, W)  float32
        matched_order  (K, W)  uint8   order of the longest n-gram found
        ngram_length   (K, W)  uint8   the same as KenLM counts it
        states         (K, W)          what matters after each word
        source         (K, W)  uint8   `FULL`, or `PARTIAL` where no shard answered in time; all
                                       `SMALL` of the small model
    """

    log10_prob: NDArray[np.float32]
    matched_order: NDArray[np.uint8]
    ngram_length: NDArray[np.uint8]
    states: States
    source: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SentenceScore:
    """A sentence's score.

    log10_prob   sum over its tokens, in float64
    tokens       words, and the sentence end if it was asked for
    oovs         tokens that the vocabulary lacks
    log10_oovs   the part of log10_prob that falls on them
    token_log10_prob (tokens,) float32; token_matched_order (tokens,) uint8;
    token_oov (tokens,) bool; token_source (tokens,) uint8, `FULL`, `PARTIAL` or `SMALL`
    """

    log10_prob: float
    tokens: int
    oovs: int
    log10_oovs: float
    token_log10_prob: NDArray[np.float32]
    token_matched_order: NDArray[np.uint8]
    token_oov: NDArray[np.bool_]
    token_source: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Queries:
    """Contexts, right-aligned, and the words asked of each, one context after the other.

    Shapes  contexts (K, order - 1) uint32; lengths (K,) uint8; counts (K,) uint32; words (Q,)
    """

    contexts: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    counts: NDArray[np.uint32]
    words: NDArray[np.uint32]


def split_words(sentence: Sentence) -> list[bytes]:
    """The words of a sentence; a string is split at spaces, tabs and line ends, nowhere else."""
    if isinstance(sentence, (str, bytes)):
        return [w for w in _SPACES.split(as_bytes(sentence)) if w]
    return [as_bytes(w) for w in sentence]


class _Handle:
    """What both faces share."""

    def __init__(
        self,
        core: Core,
        snapshot: Snapshot,
        deadline_s: float | None,
        kind: str = FULL_KIND,
        on_switch: str = FINISH,
    ) -> None:
        if on_switch not in (FINISH, RESCORE):
            raise QueryError(f"on_switch is {on_switch!r}; {FINISH!r} or {RESCORE!r} is expected")
        self._core = core
        self._snapshot = snapshot
        self._deadline_s = deadline_s
        self._rescores = on_switch == RESCORE
        manifest = snapshot.topology.manifest
        self.order = manifest.order
        self.vocabulary_size = manifest.vocabulary_size
        self.family = Family(kind, manifest.model, manifest.shard_set)
        self._width = max(manifest.order - 1, 0)
        self._grace_s = 0.0 if core.config.partial else GRACE_S

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order}, model={self.family.model})"

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the handle's family."""
        return self._snapshot.grams.vocabulary

    def begin(self) -> State:
        """The state at the beginning of a sentence."""
        if self.order == 1:
            return State(self.family, ())
        return State(self.family, (self.vocabulary.begin_id,))

    def null(self) -> State:
        """The state that knows nothing of the past."""
        return State(self.family, ())

    # -- queries ------------------------------------------------------------------------------

    def _id(self, word: Word) -> int:
        if isinstance(word, (str, bytes)):
            return self.vocabulary.id_of(word)
        try:
            number = operator.index(word)
        except TypeError as exc:
            raise QueryError(
                f"a word is a string, bytes or an id, not {type(word).__name__}"
            ) from exc
        if not 0 <= number < self.vocabulary_size:
            raise QueryError(f"word id {number}; ids are 0 to {self.vocabulary_size - 1}")
        return number

    def _ids(self, words: Sequence[Word] | NDArray[Any]) -> NDArray[np.uint32]:
        if isinstance(words, (str, bytes)):
            raise QueryError("a sequence of words is expected, not one string")
        if isinstance(words, np.ndarray) and words.ndim != 1:
            raise QueryError(
                f"an array of words has shape {words.shape}; one dimension is expected"
            )
        if isinstance(words, np.ndarray) and words.dtype.kind in "iu":
            if words.size and (int(words.min()) < 0 or int(words.max()) >= self.vocabulary_size):
                raise QueryError(
                    f"word ids from {words.min()} to {words.max()}; "
                    f"ids are 0 to {self.vocabulary_size - 1}"
                )
            return words.astype(np.uint32)
        return np.fromiter((self._id(w) for w in words), np.uint32, len(words))

    def _contexts(
        self, contexts: Sequence[Sequence[Word]]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        dense = np.zeros((len(contexts), self._width), np.uint32)
        lengths = np.zeros(len(contexts), np.uint8)
        for row, context in enumerate(contexts):
            kept = self._ids(context[max(len(context) - self._width, 0) :] if self._width else ())
            dense[row, self._width - len(kept) :] = kept
            lengths[row] = len(kept)
        return dense, lengths

    def _score_queries(self, contexts: Sequence[Sequence[Word]], words: Sequence[Word]) -> _Queries:
        if len(contexts) != len(words):
            raise QueryError(
                f"{len(contexts)} contexts and {len(words)} words; one each is expected"
            )
        dense, lengths = self._contexts(contexts)
        return _Queries(dense, lengths, np.ones(len(words), np.uint32), self._ids(words))

    def _gather(self, states: States | Sequence[State]) -> States:
        """Any sequence of states as one flat array, their family checked."""
        if isinstance(states, States):
            if states.family != self.family:
                raise _mismatch(states.family, self.family)
            return states.reshape(-1)
        if isinstance(states, State):
            raise QueryError("a sequence of states is expected, not one State; give [state]")
        dense = np.zeros((len(states), self._width), np.uint32)
        lengths = np.zeros(len(states), np.uint8)
        for row, state in enumerate(states):
            if not isinstance(state, State):
                raise FamilyMismatch(f"a State is expected, not {type(state).__name__}")
            if state.family != self.family:
                raise _mismatch(state.family, self.family)
            count = len(state._words)
            dense[row, self._width - count :] = state._words
            lengths[row] = count
        return States(self.family, dense, lengths)

    def _after(self, queries: _Queries, answers: Answers) -> States:
        """The minimised state after each query's word."""
        # Slices of states would have the kernel compiled for each kind of array, within a call.
        given = (queries.contexts, queries.counts, queries.words, answers.state_length)
        return States(
            self.family,
            *kernels.next_states(*(np.require(a, requirements=["C", "W"]) for a in given)),
        )

    def _extend_queries(
        self, states: States | Sequence[State], words: Any
    ) -> tuple[_Queries, tuple[int, int]]:
        flat = self._gather(states)
        count = len(flat)
        nested = isinstance(words, np.ndarray) and words.ndim == 2
        if not nested and not isinstance(words, np.ndarray) and len(words):
            nested = isinstance(words[0], (Sequence, np.ndarray))
            nested = nested and not isinstance(words[0], (str, bytes))
        if nested:
            if isinstance(words, np.ndarray):
                shape = (len(words), words.shape[1])
                ids = self._ids(words.reshape(-1))
            else:
                rows = [self._ids(row) for row in words]
                widths = {len(row) for row in rows}
                if len(widths) > 1:
                    raise QueryError(
                        f"words for {len(rows)} states, {sorted(widths)} each; as many for each "
                        f"of {count} states are expected"
                    )
                shape = (len(rows), max(widths, default=0))
                ids = np.concatenate(rows) if rows else np.zeros(0, np.uint32)
            if shape[0] != count:
                raise QueryError(
                    f"words for {shape[0]} states, {shape[1]} each; as many for each of {count} "
                    "states are expected"
                )
        else:
            ids = self._ids(words)
            shape = (count, len(ids))
            ids = np.tile(ids, count)
        counts = np.full(count, shape[1], np.uint32)
        return _Queries(flat._contexts, flat._lengths, counts, ids), shape

    def _extension(self, queries: _Queries, shape: tuple[int, int], answers: Answers) -> Extension:
        return Extension(
            answers.log10_prob.reshape(shape),
            answers.matched_order.reshape(shape),
            answers.ngram_length.reshape(shape),
            self._after(queries, answers).reshape(*shape),
            _source(answers).reshape(shape),
        )

    def _sentence_queries(
        self, sentences: Sequence[Sentence], bos: bool, eos: bool
    ) -> tuple[_Queries, list[int]]:
        if isinstance(sentences, (str, bytes)):
            raise QueryError(
                "a sequence of sentences is expected, not one string, whose characters would be "
                "scored; give [sentence]"
            )
        vocabulary = self.vocabulary
        stream: list[int] = []
        lengths: list[int] = []
        context_lengths: list[int] = []
        counts = []
        head = [vocabulary.begin_id] * bos
        for sentence in sentences:
            ids = [vocabulary.ids.get(w, UNK_ID) for w in split_words(sentence)]
            if eos:
                ids.append(vocabulary.end_id)
            counts.append(len(ids))
            stream += head
            stream += ids
            lengths.append(len(ids) + len(head))
            context_lengths += range(len(head), len(ids) + len(head))
        flat = np.array(stream, np.uint32)
        begins = np.cumsum([0, *lengths])[:-1]
        at = np.concatenate(
            [np.arange(b + len(head), b + n) for b, n in zip(begins, lengths, strict=True)]
            or [np.zeros(0, np.int64)]
        ).astype(np.int64)
        kept = np.minimum(np.array(context_lengths, np.int64), self._width).reshape(len(at))
        back = np.arange(self._width, 0, -1)[None, :]
        used = back <= kept[:, None]
        contexts = np.where(used, flat[np.where(used, at[:, None] - back, 0)], 0).astype(np.uint32)
        ones = np.ones(len(at), np.uint32)
        return _Queries(contexts, kept.astype(np.uint8), ones, flat[at]), counts

    def _sentence_scores(
        self, queries: _Queries, counts: list[int], answers: Answers
    ) -> list[SentenceScore]:
        out = []
        begin = 0
        source = _source(answers)
        for count in counts:
            part = slice(begin, begin + count)
            prob = answers.log10_prob[part]
            oov = queries.words[part] == UNK_ID
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
                )
            )
            begin += count
        return out

    def _next_words_queries(self, state: State, k: int) -> _Queries:
        if k < 1:
            raise QueryError(f"{k} next words were asked for; at least 1 is expected")
        flat = self._gather([state])
        words = np.arange(self.vocabulary_size, dtype=np.uint32)
        begin = self.vocabulary.begin_id
        if begin != UNK_ID:  # <s> follows nothing, whatever probability the file gives it
            words = np.delete(words, begin)
        return _Queries(flat._contexts, flat._lengths, np.array([len(words)], np.uint32), words)

    @staticmethod
    def _top(queries: _Queries, answers: Answers, k: int) -> list[tuple[int, np.float32]]:
        order = np.argsort(-answers.log10_prob, kind="stable")[:k]
        return [(int(queries.words[i]), answers.log10_prob[i]) for i in order]

    def _submit(self, queries: _Queries, deadline_s: float | None) -> tuple[Future[Answers], float]:
        """The call's future, and the seconds it has."""
        if self._rescores and self._core.mode() is Mode.SMALL:
            raise ModelSwitched(
                "the servers fail, and new utterances go to the small model; open a new utterance "
                "and score this one from its start"
            )
        limit = self._deadline_s if deadline_s is None else deadline_s
        limit = self._core.config.deadline_s if limit is None else limit
        if not isinstance(limit, (int, float)) or not 0 < limit < MAX_DEADLINE_S:
            raise QueryError(
                f"a deadline of {limit!r}; seconds above 0, below {MAX_DEADLINE_S:g}, are expected"
            )
        future = self._core.submit(
            self.family.model,
            queries.contexts,
            queries.lengths,
            queries.counts,
            queries.words,
            limit,
            None if self._rescores else self._snapshot,
        )
        return future, limit

    def _end_late(self, future: Future[Answers], limit_s: float) -> None:
        """Ends a call whose time is over, for its caller and for whoever counts calls alike: one
        that is cancelled is taken for given up. Where there is a partial model, by its answers."""
        late = DeadlineExceeded(f"no answer within {limit_s:g} s")
        self._core.give_up(future, late)
        with suppress(InvalidStateError):  # answered just now, or by that
            future.set_exception(late)


def _mismatch(found: Family, expected: Family) -> FamilyMismatch:
    return FamilyMismatch(
        f"a state of the {found.kind} model {found.model} (shard set {found.shard_set}) was given "
        f"to a handle of the {expected.kind} model {expected.model} "
        f"(shard set {expected.shard_set}); scores of two models do not mix in a sentence"
    )


def _source(answers: Answers) -> NDArray[np.uint8]:
    return np.zeros(len(answers), np.uint8) if answers.source is None else answers.source


class Utterance(_Handle):
    """A synchronous handle; made by `Client.utterance`. Any thread may use it."""

    def _wait(self, queries: _Queries, deadline_s: float | None) -> Answers:
        future, limit_s = self._submit(queries, deadline_s)
        try:
            return future.result(limit_s + self._grace_s)
        except FutureTimeout:
            self._end_late(future, limit_s)
        return future.result()

    def score(
        self,
        contexts: Sequence[Sequence[Word]],
        words: Sequence[Word],
        *,
        deadline_s: float | None = None,
    ) -> Answers:
        """Scores each word after its context.

        Args
            contexts    Q contexts, most recent word last, of any length; ids or strings
            words       Q words
            deadline_s  seconds; the handle's own where not given
        Raises
            QueryError, UnavailableError, ProtocolError
        """
        return self._wait(self._score_queries(contexts, words), deadline_s)

    def extend(
        self,
        states: States | Sequence[State],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> Extension:
        """Extends each of K states by W words: on-the-fly rescoring (DLM 3.3).

        Args
            words  W words for all states, or K rows of W words
        Raises
            FamilyMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        queries, shape = self._extend_queries(states, words)
        return self._extension(queries, shape, self._wait(queries, deadline_s))

    def score_sentences(
        self,
        sentences: Sequence[Sentence],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """Scores whole sentences; all their queries travel together.

        Args
            sentences  each a string, split at spaces, tabs and line ends, or a sequence of words
            bos, eos   whether a sentence begins after <s>, and whether its end is scored
        Raises
            QueryError (one string in place of several), UnavailableError, ProtocolError
        """
        queries, counts = self._sentence_queries(sentences, bos, eos)
        return self._sentence_scores(queries, counts, self._wait(queries, deadline_s))

    def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """The `k` likeliest next words: (id, log10 P), best first, ties by id.

        The sentence end is one of them, and so is id 0, the unknown word, which stands for all that
        the vocabulary lacks; <s> is none, since it follows nothing. `vocabulary.words[id]` is the
        word of an id, in bytes.

        Cost  a query for every word of the vocabulary, in one message per `max_queries`
        """
        queries = self._next_words_queries(state, k)
        return self._top(queries, self._wait(queries, deadline_s), k)


class AsyncUtterance(_Handle):
    """An asynchronous handle; made by `AsyncClient.utterance`. The methods are `Utterance`'s."""

    async def _wait(self, queries: _Queries, deadline_s: float | None) -> Answers:
        future, limit_s = self._submit(queries, deadline_s)
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([wrapped], timeout=limit_s + self._grace_s)
        except asyncio.CancelledError:
            wrapped.cancel()  # and `future` with it
            raise
        if not done:
            self._end_late(future, limit_s)
        return await wrapped

    async def score(
        self,
        contexts: Sequence[Sequence[Word]],
        words: Sequence[Word],
        *,
        deadline_s: float | None = None,
    ) -> Answers:
        """See `Utterance.score`."""
        return await self._wait(self._score_queries(contexts, words), deadline_s)

    async def extend(
        self,
        states: States | Sequence[State],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> Extension:
        """See `Utterance.extend`."""
        queries, shape = self._extend_queries(states, words)
        return self._extension(queries, shape, await self._wait(queries, deadline_s))

    async def score_sentences(
        self,
        sentences: Sequence[Sentence],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """See `Utterance.score_sentences`."""
        queries, counts = self._sentence_queries(sentences, bos, eos)
        return self._sentence_scores(queries, counts, await self._wait(queries, deadline_s))

    async def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """See `Utterance.next_words`."""
        queries = self._next_words_queries(state, k)
        return self._top(queries, await self._wait(queries, deadline_s), k)
