"""Handles on one utterance: states in, scores and next states out.

A handle is pinned to a model family and its states carry that family, so that scores of two models
can never meet in one sentence: giving a state to another handle is a type error.

Both faces share everything but the waiting: `_Handle` prepares arrays and shapes answers, and the
two subclasses say how a future is waited for. A call's time begins here (`_Asking`), and a large
call is planned and sent in parts, with a look at the clock in between. All this, and the states and
answers that pass through a handle, is one file past 500 lines: a decoder's whole vocabulary.
"""

from __future__ import annotations

import asyncio
import operator
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.blocks import UNKNOWN_S, BlockFetch, blocks_asked, joined
from dlm.client.api.scorer import Asked, Scorer
from dlm.client.deliver.asks import BLOCKS, SCORES, Asks
from dlm.client.deliver.runtime import Snapshot
from dlm.client.health.modes import Mode
from dlm.client.plan import kernels
from dlm.client.plan.lowgrams import LowGrams
from dlm.errors import (
    ConfigError,
    DeadlineExceeded,
    DlmError,
    FamilyMismatch,
    ModelSwitched,
    QueryError,
    StaleShardSet,
)
from dlm.index.search.blocks import ContextBlock
from dlm.index.search.local import LocalModel
from dlm.ngram.query import FULL, SMALL, Answers
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes
from dlm.units import counted

Word: TypeAlias = str | bytes | int
Sentence: TypeAlias = str | bytes | Sequence[Word]
# What a handle is made of, see `_Handle`.
Opened: TypeAlias = tuple[Scorer, Snapshot, float | None, str, str]

# As in ARPA files, words are split at spaces and tabs; a line end cannot be part of a word either.
_SPACES = re.compile(rb"[ \t\r\n]+")

# A caller's wait ends this long after the deadline at the latest, in seconds: the transport ends
# calls at the deadline by itself, and its own error says more. Not so where there is a partial
# model, whose answers are the same whatever went wrong.
GRACE_S = 0.02
MAX_DEADLINE_S = 1e6

# Queries that are planned at a time; a larger call looks at the clock in between. A few
# milliseconds, and for words of text some ten.
PART = 4096
# Bytes of a sentence that are split at a time.
SPLIT_BYTES = 1 << 16
# Sentences between two looks at the clock, when scores are made of answers.
SHAPED = 512
_NO_WORDS = np.zeros(0, np.uint32)
# Partial answers to a large call, and its results, are made before its deadline: as long before as
# half of its planning took, and this part of its time, up to so many seconds.
SHAPE_SHARE, SHAPE_S = 0.05, 0.1

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

    def __len__(self) -> int:
        """Words that still matter."""
        return len(self._words)


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

    @classmethod
    def joined(cls, parts: Sequence[States]) -> States:
        """The states of one array after those of another, all in one dimension.

        Raises  FamilyMismatch, QueryError (no parts)
        """
        if not parts:
            raise QueryError("no arrays of states were given; one at the least is expected")
        for part in parts:
            if part.family != parts[0].family:
                raise _mismatch(part.family, parts[0].family)
        flat = [part.reshape(-1) for part in parts]
        return cls(
            parts[0].family,
            np.concatenate([part._contexts for part in flat]),
            np.concatenate([part._lengths for part in flat]),
        )

    def keys(self) -> list[bytes]:
        """Bytes for each state of the flattened array: within a family, two are equal exactly where
        their states are. Many times faster than a `State` for each."""
        flat = self.reshape(-1)
        words = np.column_stack([flat._lengths.astype(np.uint32), flat._contexts])
        step, content = words.itemsize * words.shape[1], words.tobytes()
        return [content[at : at + step] for at in range(0, len(content), step)]

    def reshape(self, *shape: int) -> States:
        """The same states in another shape."""
        lengths = self._lengths.reshape(*shape)
        return States(
            self.family, self._contexts.reshape(*lengths.shape, self._contexts.shape[-1]), lengths
        )

    def contexts(self) -> list[tuple[int, ...]]:
        """The word ids that each state of the flattened array keeps, most recent last."""
        flat = self.reshape(-1)
        width = flat._contexts.shape[-1]
        rows = zip(flat._contexts.tolist(), flat._lengths.tolist(), strict=True)
        return [tuple(row[width - length :]) for row, length in rows]


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
        oov            (K, W)  bool    whether the vocabulary lacks the word, which was scored as
                                       its unknown word
    """

    log10_prob: NDArray[np.float32]
    matched_order: NDArray[np.uint8]
    ngram_length: NDArray[np.uint8]
    states: States
    source: NDArray[np.uint8]
    oov: NDArray[np.bool_]


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


@dataclass(frozen=True, eq=False)
class ContextBlocks:
    """K states with all that the model stores after them: any word is scored without a message.

    Made by `Utterance.context_blocks`; any thread may use it. The answers are those of
    `Utterance.extend`, bit for bit.

    Shapes  states (K,)
    """

    states: States
    _handle: _Handle
    _blocks: tuple[ContextBlock, ...]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def source(self) -> NDArray[np.uint8]:
        """(K,) whose answers they give, as in `Extension`."""
        return np.array([block.source for block in self._blocks], np.uint8)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(K,) words that are held of each state: 11 bytes each."""
        return np.array([len(block.words) for block in self._blocks], np.int64)

    def extend(self, words: Any = None) -> Extension:
        """As `Utterance.extend` of these states.

        Args
            words  W words for all states, or K rows of W words; the whole vocabulary, in the order
                   of ids, where not given
        Raises  QueryError
        """
        handle = self._handle
        if words is None:
            width, asked = handle.vocabulary_size, None
        else:
            _, width, nested = handle._extend_shape(self.states, words)
            rows = words if nested else [words]
            asked = [handle._ids(row, f"words[{at}]") for at, row in enumerate(rows)]
        each, after, oov = [], [], np.zeros((len(self), width), bool)
        for row, block in enumerate(self._blocks):
            if asked is None:
                ids, answers = np.arange(width, dtype=np.uint32), block.score_all()
            else:
                ids = asked[row % len(asked)]
                answers = block.score(ids)
            here, count = slice(row, row + 1), np.array([width], np.uint32)
            queries = _Queries(self.states._contexts[here], self.states._lengths[here], count, ids)
            each.append(answers)
            oov[row] = ids == UNK_ID
            after.append(handle._after(queries, answers))
        shape = (len(self), width)
        some = joined(each) if each else Answers.empty(0)
        contexts = [self.states._contexts[:0], *(one._contexts for one in after)]
        lengths = [self.states._lengths[:0], *(one._lengths for one in after)]
        flat = States(self.states.family, np.concatenate(contexts), np.concatenate(lengths))
        return Extension(
            some.log10_prob.reshape(shape),
            some.matched_order.reshape(shape),
            some.ngram_length.reshape(shape),
            flat.reshape(*shape),
            np.broadcast_to(self.source.reshape(-1, 1), shape).copy(),
            oov,
        )

    def answers(self, row: int, words: NDArray[np.uint32]) -> Answers:
        """Answers to words by id, each after one of the states.

        Trusts  the ids are below the vocabulary's size
        """
        return self._blocks[row].score(words)

    def score(self, row: int, word: Word) -> tuple[float, State]:
        """log10 P of one word after one of the states, and the state after it."""
        block, handle = self._blocks[row], self._handle
        known = type(word) is int and 0 <= word < handle.vocabulary_size
        number: int = word if known else handle._id(word)  # type: ignore[assignment]
        log10_prob, length = block.score_word(number)
        words = (*block.words_before, number)
        return log10_prob, State(self.states.family, words[len(words) - length :])

    def distribution(self) -> NDArray[np.float32]:
        """(K, V) log10 P of every word of the vocabulary, by id."""
        out = np.empty((len(self), self._handle.vocabulary_size), np.float32)
        for row, block in enumerate(self._blocks):
            out[row] = block.score_all().log10_prob
        return out


@dataclass(frozen=True, slots=True)
class _Queries:
    """Contexts, right-aligned, and the words asked of each, one context after the other.

    Shapes  contexts (K, order - 1) uint32; lengths (K,) uint8; counts (K,) uint32; words (Q,)
    """

    contexts: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    counts: NDArray[np.uint32]
    words: NDArray[np.uint32]


def split_words(sentence: str | bytes) -> list[bytes]:
    """The words of a sentence, split at spaces, tabs and line ends, nowhere else."""
    return [word for some in _split(sentence) for word in some]


def _split(sentence: str | bytes) -> Iterator[list[bytes]]:
    """The same, some words at a time."""
    text = as_bytes(sentence)
    begin = 0
    while begin < len(text):
        cut = _SPACES.search(text, begin + SPLIT_BYTES) if len(text) - begin > SPLIT_BYTES else None
        end = len(text) if cut is None else cut.end()
        yield [w for w in _SPACES.split(text[begin:end]) if w]
        begin = end


def _check_sequence(value: Any, name: str, expected: str) -> None:
    """Raises `QueryError` unless `value` can be counted and indexed, and is not one string."""
    kind = type(value)
    if kind is list or kind is tuple or (kind is np.ndarray and value.ndim):
        return
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        found = "one string"
    elif isinstance(value, np.ndarray) and value.ndim == 0:
        found = "an array without dimensions"
    elif (
        not hasattr(value, "__len__")
        or not hasattr(value, "__getitem__")
        or isinstance(value, Mapping)
    ):
        found = "None" if value is None else f"of type {type(value).__name__}"
    else:
        return
    raise QueryError(f"{name} is {found}; {expected} is expected")


@contextmanager
def _typed() -> Iterator[None]:
    """Whoever asks gets errors of dlm, even where this process has no memory left."""
    try:
        yield
    except MemoryError as exc:
        raise DlmError(
            f"this process has no memory for the call ({exc!r}); ask less at once"
        ) from exc


def check_count(k: int) -> None:
    """Raises `QueryError` unless so many next words can be asked for."""
    if not isinstance(k, (int, np.integer)) or k < 1:
        raise QueryError(f"{k!r} next words were asked for; a number from 1 is expected")


def check_deadline(deadline_s: float) -> None:
    """Raises `QueryError` unless it is a number of seconds that a call can have."""
    if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s < MAX_DEADLINE_S:
        raise QueryError(
            f"a deadline of {deadline_s!r}; seconds above 0, below {MAX_DEADLINE_S:g}, are expected"
        )


class _Asking:
    """One call on its way, in parts, and its time, which begins with this.

    Args
        handle      whose call it is
        deadline_s  seconds; the handle's own where not given
    """

    def __init__(self, handle: _Handle, deadline_s: float | None) -> None:
        self._begun = time.monotonic()
        self._handle = handle
        self._limit_s = handle._core.limit_s(handle._limit(deadline_s))
        self._parts: list[tuple[_Queries, Asked]] = []
        self._planned_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._limit_s - (time.monotonic() - self._begun), 0.0)

    def submit(self, queries: _Queries, ahead: int = 0, asks: Asks = SCORES) -> None:
        """Plans and sends a part.

        Args
            ahead  queries that the parts after it will have, as far as that is known
            asks   see `Core.submit`
        Raises
            DeadlineExceeded  the time is over; the first part is planned in any case, since low
                              orders may answer all of it
        """
        if self._parts:
            if self.left_s <= 0.0:
                raise self._too_large()
            last = self._parts[-1][1]
            if last.done():
                last.future.result()  # the rest of a failed call is not sent
        more = bool(self._parts)
        call = self._handle._submit(queries, self.left_s, more=more, ahead=ahead, asks=asks)
        self._parts.append((queries, call))
        self._planned_s = time.monotonic() - self._begun

    def check(self) -> None:
        """Raises `DeadlineExceeded` where results of a call in several parts come too late; not
        where a partial model stands by, since whoever has one wants no error."""
        if len(self._parts) > 1 and not self._handle.partial and self.left_s <= 0.0:
            raise self._too_large()

    def _too_large(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no answer within {self._limit_s:g} s, which is less than this process needs for so "
            "large a call; ask less at once, or give it more time"
        )

    def waits(self) -> Iterator[tuple[Asked, float]]:
        """Each part's call, and the seconds to wait for it."""
        for number, (_, call) in enumerate(self._parts):
            left_s = self.left_s
            if len(self._parts) > 1 and self._handle.partial:
                # What is still to do by then: partial answers, and results made of all answers.
                to_do_s = self._planned_s / 2 * (1.0 - number / len(self._parts))
                left_s -= to_do_s + min(SHAPE_SHARE * self._limit_s, SHAPE_S)
            yield call, max(left_s, 0.0) + self._handle._grace_s

    def end_late(self, call: Asked) -> None:
        """Nobody answered in time."""
        self._handle._end_late(call, self._limit_s)

    def restart(self) -> None:
        """Begins anew, in the time that is left: what was planned was for another model."""
        self._parts = []

    def answers(self) -> list[tuple[_Queries, Any]]:
        """Of each part, once all have been waited for."""
        return [(queries, call.result()) for queries, call in self._parts]

    def cancel(self) -> None:
        """Gives up whatever is still under way."""
        for _, call in self._parts:
            call.cancel()


class _Handle:
    """What both faces share."""

    def __init__(
        self,
        core: Scorer,
        snapshot: Snapshot,
        deadline_s: float | None,
        kind: str = FULL_KIND,
        on_switch: str = FINISH,
    ) -> None:
        if on_switch not in (FINISH, RESCORE):
            raise QueryError(f"on_switch is {on_switch!r}; {FINISH!r} or {RESCORE!r} is expected")
        self._core = core
        self._deadline_s = deadline_s
        self._rescores = on_switch == RESCORE
        self._lock = threading.Lock()
        self._calls = 0  # under way
        self._settled = kind == SMALL_KIND  # on its model, for good
        self._blocks_unknown_until = 0.0  # on `monotonic`: servers that do not know ContextBlock
        self._before: tuple[Family, int] | None = None  # which it left, and that one's <s>
        self._pin(snapshot, kind)
        self.partial = core.config.partial
        self._grace_s = 0.0 if self.partial else GRACE_S

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order}, model={self.family.model})"

    def _pin(self, snapshot: Snapshot, kind: str) -> None:
        manifest = snapshot.topology.manifest
        self._snapshot = snapshot
        self.order = manifest.order
        self.vocabulary_size = manifest.vocabulary_size
        self.family = Family(kind, manifest.model, manifest.shard_set)
        self._width = max(manifest.order - 1, 0)

    @property
    def _words(self) -> Vocabulary:
        return self._snapshot.grams.vocabulary

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the handle's family, on which it stays from then on."""
        self._settled = True  # whoever looks up an id means this model
        return self._words

    @property
    def local_model(self) -> LocalModel | None:
        """The model, where it is in this process; None where servers hold it."""
        return self._core.local_model

    @property
    def low_orders(self) -> LowGrams:
        """The 1- and 2-grams of the handle's family, on which it stays from then on."""
        self._settled = True
        return self._snapshot.grams

    # -- a new handle whose model was taken away ----------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
        try:
            yield
            self._settled = True
        finally:
            with self._lock:
                self._calls -= 1

    def _remaining_s(self, error: StaleShardSet, asking: _Asking) -> float:
        """Seconds that a call has for another model; raises `error` where there are none, or where
        its handle must stay: something was answered by it already, asked by id, or looked up."""
        left_s = asking.left_s
        with self._lock:
            if self._settled or self._calls > 1 or left_s <= 0.0:
                raise error
        return left_s

    def _move(self, error: StaleShardSet, fresh: Snapshot) -> None:
        """Goes over to the model that took the place of its own."""
        with self._lock:
            if self._settled or self._calls > 1:
                raise error
            self._before = self.family, self._words.begin_id
            self._pin(fresh, self.family.kind)

    def _moved(self, state: State) -> State:
        """A state from before the handle went over to another model: its `begin` or `null`."""
        family, begin_id = self._before or (None, -1)
        if state.family == family and state._words in ((), (begin_id,)):
            return self.begin() if state._words else self.null()
        raise _mismatch(state.family, self.family)

    def _again(
        self, error: StaleShardSet, asking: _Asking, make: Callable[[], Iterator[None]]
    ) -> Iterator[None]:
        """The parts of a call once more; what fails now is told as it is."""
        self._remaining_s(error, asking)
        self._settled = True
        asking.restart()
        try:
            yield from make()
        except FamilyMismatch:  # states that another handle gave
            raise error from None

    def states_after(self, contexts: Sequence[Sequence[Word]]) -> States:
        """A state for each context, which keeps its last words as they stand, order - 1 at most.

        For contexts that were written down (`States.contexts`) or that another handle had. They are
        not minimised: the state that `extend` gives after the same words may keep fewer.

        Raises  QueryError  a context that is not a sequence of words, an id that is too large
        """
        _check_sequence(contexts, "contexts", "a sequence of contexts, each a sequence of words,")
        return States(self.family, *self._contexts(contexts, 0))

    def begin(self) -> State:
        """The state at the beginning of a sentence."""
        if self.order == 1:
            return State(self.family, ())
        return State(self.family, (self._words.begin_id,))

    def null(self) -> State:
        """The state that knows nothing of the past."""
        return State(self.family, ())

    def states(self, states: Sequence[State]) -> States:
        """Several states of this handle's as one array, which can be indexed and joined.

        Raises  FamilyMismatch  a state of another model
        """
        return self._gather(states)

    # -- queries ------------------------------------------------------------------------------

    def _id(self, word: Word) -> int:
        if isinstance(word, (str, bytes)):
            return self._words.id_of(word)
        self._settled = True
        try:
            number = operator.index(word)
        except TypeError as exc:
            raise QueryError(
                f"a word is a string, bytes or an id, not {type(word).__name__}"
            ) from exc
        if not 0 <= number < self.vocabulary_size:
            raise QueryError(f"word id {number}; ids are 0 to {self.vocabulary_size - 1}")
        return number

    def _ids(
        self, words: Sequence[Word] | NDArray[Any], name: str = "words", *, planned: bool = False
    ) -> NDArray[np.uint32]:
        """The ids of words.

        Args
            planned  they are asked next, and checked with all of the call
        """
        _check_sequence(words, name, "a sequence of words")
        if isinstance(words, np.ndarray) and words.ndim != 1:
            raise QueryError(
                f"an array of words has shape {words.shape}; one dimension is expected"
            )
        if isinstance(words, np.ndarray) and words.dtype.kind in "iu":
            self._settled = True
            if words.dtype == np.uint32 and planned:
                return np.array(words, order="C")  # its caller may change it meanwhile
            if words.size and (int(words.min()) < 0 or int(words.max()) >= self.vocabulary_size):
                raise QueryError(
                    f"word ids from {words.min()} to {words.max()}; "
                    f"ids are 0 to {self.vocabulary_size - 1}"
                )
            return words.astype(np.uint32)
        return np.fromiter((self._id(w) for w in words), np.uint32, len(words))

    def _contexts(
        self, contexts: Sequence[Sequence[Word]], first: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        dense = np.zeros((len(contexts), self._width), np.uint32)
        lengths = np.zeros(len(contexts), np.uint8)
        for row, context in enumerate(contexts):
            name = f"contexts[{first + row}]"
            _check_sequence(context, name, "a sequence of words")
            last = context[max(len(context) - self._width, 0) :] if self._width else ()
            kept = self._ids(last, name)
            dense[row, self._width - len(kept) :] = kept
            lengths[row] = len(kept)
        return dense, lengths

    def _score_queries(
        self, contexts: Sequence[Sequence[Word]], words: Sequence[Word], first: int = 0
    ) -> _Queries:
        dense, lengths = self._contexts(contexts, first)
        return _Queries(dense, lengths, np.ones(len(words), np.uint32), self._ids(words))

    def _score_parts(
        self, asking: _Asking, contexts: Sequence[Sequence[Word]], words: Sequence[Word]
    ) -> Iterator[None]:
        """Submits the parts of a call, one at each step."""
        _check_sequence(contexts, "contexts", "a sequence of contexts, each a sequence of words,")
        _check_sequence(words, "words", "a sequence of words")
        if len(contexts) != len(words):
            raise QueryError(
                f"{counted(len(contexts), 'context')} and {counted(len(words), 'word')}; one "
                "each is expected"
            )
        if len(words) <= PART:
            asking.submit(self._score_queries(contexts, words))
            yield
            return
        for begin in range(0, len(words), PART):
            part = slice(begin, begin + PART)
            ahead = max(len(words) - begin - PART, 0)
            asking.submit(self._score_queries(contexts[part], words[part], begin), ahead)
            yield

    def _gather(self, states: States | Sequence[State]) -> States:
        """Any sequence of states as one flat array, their family checked."""
        if isinstance(states, States):
            if states.family is not self.family and states.family != self.family:
                raise _mismatch(states.family, self.family)
            return states if states._lengths.ndim == 1 else states.reshape(-1)
        if isinstance(states, State):
            raise QueryError("a sequence of states is expected, not one State; give [state]")
        _check_states(states)
        dense = np.zeros((len(states), self._width), np.uint32)
        lengths = np.zeros(len(states), np.uint8)
        for row, state in enumerate(states):
            if not isinstance(state, State):
                raise FamilyMismatch(f"a State is expected, not {type(state).__name__}")
            if state.family != self.family:
                state = self._moved(state)
            count = len(state._words)
            dense[row, self._width - count :] = state._words
            lengths[row] = count
        return States(self.family, dense, lengths)

    def _after(self, queries: _Queries, answers: Answers) -> States:
        """The minimised state after each query's word."""
        given = (queries.contexts, queries.counts, queries.words, answers.state_length)
        return States(self.family, *kernels.next_states(*map(np.ascontiguousarray, given)))

    def _extend_shape(self, states: States | Sequence[State], words: Any) -> tuple[int, int, bool]:
        """How many states, how many words for each, and whether each has words of its own."""
        if isinstance(states, State):
            raise QueryError("a sequence of states is expected, not one State; give [state]")
        if not isinstance(states, States):
            _check_states(states)
        _check_sequence(words, "words", "a sequence of words, or one for each state,")
        count = states._lengths.size if isinstance(states, States) else len(states)
        if isinstance(words, np.ndarray):
            if words.ndim != 2:
                return count, len(words if words.ndim == 1 else self._ids(words)), False
            rows, widths = len(words), {words.shape[1]}
        elif len(words) and (
            isinstance(words[0], (Sequence, np.ndarray)) and not isinstance(words[0], (str, bytes))
        ):
            for at, row in enumerate(words):
                _check_sequence(row, f"words[{at}]", "a sequence of words")
            rows, widths = len(words), {len(row) for row in words}
        else:
            return count, len(words), False
        if len(widths) > 1 or rows != count:
            each = max(widths, default=0) if len(widths) == 1 else sorted(widths)
            raise QueryError(
                f"words for {rows} states, {each} each; as many for each of {count} states are "
                "expected"
            )
        return count, max(widths), True

    def _extend_parts(
        self, asking: _Asking, states: States | Sequence[State], words: Any
    ) -> Iterator[None]:
        """As `_score_parts`."""
        count, width, nested = self._extend_shape(states, words)
        if isinstance(states, States):
            states = self._gather(states)
        ids = None if nested else self._ids(words, planned=True)
        rows, columns = max(PART // max(width, 1), 1), max(min(width, PART), 1)
        for first in range(0, count or 1, rows):
            whole = count <= rows
            flat = self._gather(states if whole else states[first : first + rows])
            some = () if ids is not None else words if whole else words[first : first + rows]
            for begin in range(0, width or 1, columns):
                part = slice(begin, begin + columns)
                if ids is not None:
                    asked = np.tile(ids[part], len(flat))
                elif isinstance(some, np.ndarray):
                    asked = self._ids(some[:, part].reshape(-1), planned=True)
                else:
                    named = [(row[part], f"words[{at}]") for at, row in enumerate(some, first)]
                    asked = np.concatenate([_NO_WORDS, *(self._ids(*one) for one in named)])
                counts = np.full(len(flat), min(columns, width - begin), np.uint32)
                ahead = count * width - first * width - len(flat) * begin - len(asked)
                asking.submit(_Queries(flat._contexts, flat._lengths, counts, asked), ahead)
                yield

    def _extension(
        self, asking: _Asking, states: States | Sequence[State], words: Any
    ) -> Extension:
        count, width, _ = self._extend_shape(states, words)
        shape = count, width
        parts, after = asking.answers(), []
        oov = [kernels.are_word(queries.words, UNK_ID) for queries, _ in parts]
        for queries, answers in parts:
            after.append(self._after(queries, answers))
            asking.check()
        answers = _joined(parts)
        if len(after) == 1:
            contexts, lengths = after[0]._contexts, after[0]._lengths
        else:
            contexts = np.concatenate([part._contexts for part in after])
            lengths = np.concatenate([part._lengths for part in after])
        return Extension(
            answers.log10_prob.reshape(shape),
            answers.matched_order.reshape(shape),
            answers.ngram_length.reshape(shape),
            States(self.family, contexts, lengths).reshape(*shape),
            _source(answers).reshape(shape),
            (oov[0] if len(oov) == 1 else np.concatenate(oov)).reshape(shape),
        )

    def _sentence_parts(
        self,
        asking: _Asking,
        sentences: Sequence[Sentence],
        bos: bool,
        eos: bool,
        counts: list[int],
    ) -> Iterator[None]:
        """As `_score_parts`; adds the tokens of each sentence to `counts`."""
        counts.clear()
        if isinstance(sentences, (str, bytes)):
            raise QueryError(
                "a sequence of sentences is expected, not one string, whose characters would be "
                "scored; give [sentence]"
            )
        _check_sequence(sentences, "sentences", "a sequence of sentences")
        begin, end = self._words.begin_id, self._words.end_id
        segments: list[tuple[list[int], list[int]]] = []  # what stands before, and the tokens
        tokens = total = 0
        for row, sentence in enumerate(sentences):
            before, count = [begin] * bos, 0
            for ids in self._sentence_ids(sentence, f"sentences[{row}]"):
                segments.append((before, ids))
                # A sentence that is cut goes on after its own last words.
                before = [*before, *ids][-self._width :] if self._width else []
                count += len(ids)
                tokens += len(ids)
                if tokens >= PART:
                    total += tokens
                    ahead = (len(sentences) - row - 1) * total // (row + 1)
                    asking.submit(self._sentence_queries(segments), ahead)
                    segments, tokens = [], 0
                    yield
            if eos:
                segments.append((before, [end]))
                tokens += 1
            counts.append(count + eos)
        if segments or not total:
            asking.submit(self._sentence_queries(segments))
            yield

    def _sentence_ids(self, sentence: Sentence, name: str) -> Iterator[list[int]]:
        """The ids of its words, some at a time."""
        known = self._words.ids
        if isinstance(sentence, (str, bytes)):
            for words in _split(sentence):
                yield [known.get(word, UNK_ID) for word in words]
            return
        _check_sequence(sentence, name, "a string or a sequence of words")
        if isinstance(sentence, np.ndarray):
            sentence = self._ids(sentence, name).tolist()
        given = iter(sentence)
        while some := list(islice(given, PART)):
            yield [known.get(w, UNK_ID) if type(w) is bytes else self._id(w) for w in some]

    def _sentence_queries(self, segments: list[tuple[list[int], list[int]]]) -> _Queries:
        """A query for each token of the segments, after what stands before it."""
        stream: list[int] = []
        at: list[int] = []
        context_lengths: list[int] = []
        for before, ids in segments:
            stream += before
            at += range(len(stream), len(stream) + len(ids))
            context_lengths += range(len(before), len(before) + len(ids))
            stream += ids
        flat = np.array(stream, np.uint32)
        places = np.array(at, np.int64)
        kept = np.minimum(np.array(context_lengths, np.int64), self._width).reshape(len(at))
        back = np.arange(self._width, 0, -1)[None, :]
        used = back <= kept[:, None]
        before_each = np.where(used, places[:, None] - back, 0)
        contexts = np.where(used, flat[before_each] if len(flat) else 0, 0).astype(np.uint32)
        ones = np.ones(len(at), np.uint32)
        return _Queries(contexts, kept.astype(np.uint8), ones, flat[places])

    def _sentence_scores(self, asking: _Asking, counts: list[int]) -> list[SentenceScore]:
        parts = asking.answers()
        answers = _joined(parts)
        words = np.concatenate([queries.words for queries, _ in parts])
        out = []
        begin = 0
        source = _source(answers)
        for number, count in enumerate(counts, 1):
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
                )
            )
            begin += count
            if number % SHAPED == 0:
                asking.check()
        return out

    # -- all that is stored after states ------------------------------------------------------

    def _block_rounds(
        self, asking: _Asking, states: States | Sequence[State], found: list[ContextBlocks]
    ) -> Iterator[Callable[[], Iterator[None]]]:
        """What is to be asked, one after the other: each is asked once its predecessor has been
        answered. At the end `found` has the blocks."""
        flat: list[States] = []
        yield lambda: self._first_round(asking, states, flat)
        source = SMALL if self.family.kind == SMALL_KIND else FULL
        fetch = BlockFetch(flat[-1]._contexts, flat[-1]._lengths, source)
        answers = asking.answers()
        if not self._asks_blocks():
            fetch.skip_all()
        while len(fetch.wanted):
            parts = [part for _, (some, _) in answers for part in some]
            sources = [sources for _, (_, sources) in answers]
            fetch.take((parts, np.concatenate(sources) if sources else np.zeros(0, np.uint8)))
            if not len(fetch.wanted):
                break
            asking.restart()
            yield lambda: self._block_parts(asking, flat[-1], fetch.wanted, fetch.skips)
            answers = asking.answers()
        instead: dict[int, Answers] = {}
        if rows := fetch.unknown():
            self._blocks_unknown_until = time.monotonic() + UNKNOWN_S
            asking.restart()
            yield lambda: self._whole_parts(asking, flat[-1], rows)
            every = asking.answers()
            each = len(every) // len(rows)
            for place, row in enumerate(rows):
                instead[row] = _joined(every[place * each : (place + 1) * each])
        blocks = fetch.blocks(self._snapshot.grams.low, instead)
        found.append(ContextBlocks(flat[-1], self, tuple(blocks)))

    def _first_round(
        self, asking: _Asking, states: States | Sequence[State], flat: list[States]
    ) -> Iterator[None]:
        # Here, since a new handle may go over to another model with its first call.
        flat.append(self._gather(states))
        rows = blocks_asked(flat[-1]._lengths)
        if self._asks_blocks():
            yield from self._block_parts(asking, flat[-1], rows, np.zeros(len(rows), np.uint32))

    def _asks_blocks(self) -> bool:
        """Whether servers may know this call."""
        return time.monotonic() >= self._blocks_unknown_until

    def _block_parts(
        self,
        asking: _Asking,
        flat: States,
        rows: NDArray[np.int64],
        skips: NDArray[np.uint32],
    ) -> Iterator[None]:
        """As `_score_parts`: what is stored after `rows` of the states, but the first `skips`."""
        for first in range(0, len(rows), PART):
            some = rows[first : first + PART]
            ones = np.ones(len(some), np.uint32)
            queries = _Queries(
                flat._contexts[some], flat._lengths[some], ones, skips[first : first + PART]
            )
            asking.submit(queries, asks=BLOCKS)
            yield

    def _whole_parts(self, asking: _Asking, flat: States, rows: list[int]) -> Iterator[None]:
        """As `_score_parts`: every word of the vocabulary after `rows` of the states."""
        for place, row in enumerate(rows):
            for first in range(0, self.vocabulary_size, PART):
                last = min(first + PART, self.vocabulary_size)
                words = np.arange(first, last, dtype=np.uint32)
                count = np.array([len(words)], np.uint32)
                here = slice(row, row + 1)
                ahead = (len(rows) - place) * self.vocabulary_size - last
                asking.submit(
                    _Queries(flat._contexts[here], flat._lengths[here], count, words), ahead
                )
                yield

    def _top(self, log10_prob: NDArray[np.float32], k: int) -> list[tuple[int, np.float32]]:
        """The best words of all; among equals the first."""
        words = np.arange(len(log10_prob))
        begin = self._words.begin_id
        if begin != UNK_ID:  # <s> follows nothing, whatever probability the file gives it
            words = np.delete(words, begin)
        if k < len(words):
            found = log10_prob[words]
            words = words[found >= np.partition(found, len(found) - k)[len(found) - k]]
        best = words[np.argsort(-log10_prob[words], kind="stable")[:k]]
        return [(word, log10_prob[word]) for word in best.tolist()]

    def _limit(self, deadline_s: float | None) -> float:
        """Seconds that a call has."""
        limit = self._deadline_s if deadline_s is None else deadline_s
        limit = self._core.config.deadline_s if limit is None else limit
        check_deadline(limit)
        return limit

    def _submit(
        self,
        queries: _Queries,
        limit_s: float,
        *,
        more: bool = False,
        ahead: int = 0,
        asks: Asks = SCORES,
    ) -> Asked:
        """See `Core.submit`."""
        if self._rescores and self._core.mode() is Mode.SMALL:
            raise ModelSwitched(
                "the servers fail, and new utterances go to the small model; open a new utterance "
                "and score this one from its start"
            )
        return self._core.submit(
            self.family.model,
            queries.contexts,
            queries.lengths,
            queries.counts,
            queries.words,
            limit_s,
            None if self._rescores else self._snapshot,
            moves_on=not self._settled,
            more=more,
            ahead=ahead,
            asks=asks,
        )

    def _end_late(self, call: Asked, limit_s: float) -> None:
        """Ends a call whose time is over, for its caller and for whoever counts calls alike: one
        that is cancelled is taken for given up. Where there is a partial model, by its answers."""
        call.give_up(DeadlineExceeded(f"no answer within {limit_s:g} s"))


def _check_states(states: Any) -> None:
    _check_sequence(states, "states", "a sequence of states, as begin() and extend() give them,")


def _mismatch(found: Family, expected: Family) -> FamilyMismatch:
    return FamilyMismatch(
        f"a state of the {found.kind} model {found.model} (shard set {found.shard_set}) was given "
        f"to a handle of the {expected.kind} model {expected.model} "
        f"(shard set {expected.shard_set}); scores of two models do not mix in a sentence"
    )


def _joined(parts: list[tuple[_Queries, Answers]]) -> Answers:
    """The answers to all parts, one after another."""
    every = [answers for _, answers in parts]
    if len(every) == 1:
        return every[0]
    if all(a.source is None for a in every):
        return joined(every)
    return replace(joined(every), source=np.concatenate([_source(a) for a in every]))


def _source(answers: Answers) -> NDArray[np.uint8]:
    return np.zeros(len(answers), np.uint8) if answers.source is None else answers.source


class Utterance(_Handle):
    """A synchronous handle; made by `Client.utterance`. Any thread may use it."""

    def _ask(self, asking: _Asking, make: Callable[[], Iterator[None]]) -> None:
        """Submits all parts that `make` gives, and waits until each has ended; of a new handle
        whose model was taken away, on the one that took its place."""
        with self._call():
            try:
                self._wait(asking, make())
            except StaleShardSet as error:
                left_s = self._remaining_s(error, asking)
                with suppress(DlmError):  # where nothing did: what low orders say, if they may
                    self._move(error, self._core.current(left_s, self.family.model))
                self._wait(asking, self._again(error, asking, make))

    def _wait(self, asking: _Asking, parts: Iterator[None]) -> None:
        try:
            for _ in parts:
                pass
            for call, wait_s in asking.waits():
                try:
                    call.future.result(wait_s)
                except TimeoutError:
                    asking.end_late(call)
                    call.future.result()
        finally:
            asking.cancel()

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
        with _typed():
            asking = _Asking(self, deadline_s)
            self._ask(asking, lambda: self._score_parts(asking, contexts, words))
            return _joined(asking.answers())

    def extend(
        self,
        states: States | Sequence[State],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> Extension:
        """Extends each of K states by W words, as on-the-fly rescoring needs it.

        Source: Long et al., "A Distributed System for Large-scale n-gram Language Models at
        Tencent", PVLDB 12(12), 2019, section 3.3.

        Args
            words  W words for all states, or K rows of W words: strings, bytes or ids. A string is
                   one word, whatever spaces are in it; `oov` marks those that the model lacks
        Raises
            FamilyMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        with _typed():
            asking = _Asking(self, deadline_s)
            self._ask(asking, lambda: self._extend_parts(asking, states, words))
            return self._extension(asking, states, words)

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
            sentences  each a string, split at spaces, tabs and line ends, or a sequence of words,
                       ids or strings
            bos, eos   whether a sentence begins after <s>, and whether its end is scored
        Raises
            QueryError (one string in place of several), UnavailableError, ProtocolError
        """
        with _typed():
            asking, counts = _Asking(self, deadline_s), list[int]()
            self._ask(asking, lambda: self._sentence_parts(asking, sentences, bos, eos, counts))
            return self._sentence_scores(asking, counts)

    def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """The `k` likeliest next words: (id, log10 P), best first, ties by id.

        The sentence end is one of them, and so is id 0, the unknown word, which stands for all that
        the vocabulary lacks; <s> is none, since it follows nothing. `vocabulary.words[id]` is the
        word of an id, in bytes.

        Cost  that of `next_distribution`
        """
        with _typed():
            asking = _Asking(self, deadline_s)
            check_count(k)
            return self._top(self._blocks(asking, [state]).distribution()[0], k)

    def next_distribution(
        self, state: State, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """(V,) float32: log10 P of every word of the vocabulary after `state`, by id; <s> has the
        probability that the model gives it, which is that of nothing that can follow.

        Cost  one message at most, and a pass over the vocabulary here
        """
        with _typed():
            asking = _Asking(self, deadline_s)
            found: NDArray[np.float32] = self._blocks(asking, [state]).distribution()[0]
            return found

    def context_blocks(
        self, states: States | Sequence[State], *, deadline_s: float | None = None
    ) -> ContextBlocks:
        """All that is stored after each of K states, so that any word is scored without a message.

        For decoders that ask many words of few states. In one message per shard, or several where
        much is stored; of servers that do not know the call, every word of the vocabulary is asked.

        Raises
            FamilyMismatch (a TypeError), QueryError, UnavailableError, ProtocolError
        """
        with _typed():
            return self._blocks(_Asking(self, deadline_s), states)

    def _blocks(self, asking: _Asking, states: States | Sequence[State]) -> ContextBlocks:
        found: list[ContextBlocks] = []
        for make in self._block_rounds(asking, states, found):
            self._ask(asking, make)
        return found[0]


class AsyncUtterance(_Handle):
    """An asynchronous handle; made by `AsyncClient.utterance`. The methods are `Utterance`'s.

    It can be awaited, which gives itself: where its client has not connected yet, connected.
    """

    _open_later: Callable[[], Opened] | None = None
    _opening: asyncio.Task[None] | None = None

    @classmethod
    def later(
        cls, opened: Callable[[], Opened], core: Scorer, deadline_s: float | None
    ) -> AsyncUtterance:
        """A handle of `core` whose first call gets, in a thread, what `opened` returns."""
        handle = cls.__new__(cls)
        handle._core, handle._deadline_s = core, deadline_s
        handle._open_later = opened
        return handle

    def __repr__(self) -> str:
        return super().__repr__() if self._open_later is None else "AsyncUtterance(not connected)"

    def __await__(self) -> Generator[Any, None, AsyncUtterance]:
        return self._connected(None).__await__()

    async def _connected(self, asking: _Asking | None) -> AsyncUtterance:
        """Itself, once its client has connected."""
        if self._open_later is not None:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._connect(self._open_later))
                # Whoever waited may have gone by the time that it fails.
                self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            opening = self._opening
            # Others may wait for it as well, and the next call finds it further.
            await asyncio.wait([opening], timeout=None if asking is None else asking.left_s)
            if not opening.done():
                raise DeadlineExceeded("the client had not connected by the deadline of this call")
            opening.result()
        return self

    async def _connect(self, opened: Callable[[], Opened]) -> None:
        self.__init__(*await asyncio.to_thread(opened))  # type: ignore[misc]
        self._open_later = None

    def __getattr__(self, name: str) -> Any:
        if self._open_later is None or name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"{name} is not known before the client has connected; open this handle with "
            "`await client.utterance()`"
        )

    async def _ask(self, asking: _Asking, make: Callable[[], Iterator[None]]) -> None:
        """See `Utterance._ask`."""
        await self._connected(asking)
        with self._call():
            try:
                await self._wait(asking, make())
            except StaleShardSet as error:
                left_s, model = self._remaining_s(error, asking), self.family.model
                with suppress(DlmError):
                    fresh = await asyncio.to_thread(self._core.current, left_s, model)
                    self._move(error, fresh)
                await self._wait(asking, self._again(error, asking, make))

    async def _wait(self, asking: _Asking, parts: Iterator[None]) -> None:
        """Between two parts the loop goes on."""
        try:
            for number, _ in enumerate(parts):
                if number:
                    await asyncio.sleep(0)
            for call, wait_s in asking.waits():
                if not await call.future.wait(wait_s):
                    asking.end_late(call)
                call.future.result(0.0)
        finally:
            asking.cancel()

    async def score(
        self,
        contexts: Sequence[Sequence[Word]],
        words: Sequence[Word],
        *,
        deadline_s: float | None = None,
    ) -> Answers:
        """See `Utterance.score`."""
        with _typed():
            asking = _Asking(self, deadline_s)
            await self._ask(asking, lambda: self._score_parts(asking, contexts, words))
            return _joined(asking.answers())

    async def extend(
        self,
        states: States | Sequence[State],
        words: Any,
        *,
        deadline_s: float | None = None,
    ) -> Extension:
        """See `Utterance.extend`."""
        with _typed():
            asking = _Asking(self, deadline_s)
            await self._ask(asking, lambda: self._extend_parts(asking, states, words))
            return self._extension(asking, states, words)

    async def score_sentences(
        self,
        sentences: Sequence[Sentence],
        *,
        bos: bool = True,
        eos: bool = True,
        deadline_s: float | None = None,
    ) -> list[SentenceScore]:
        """See `Utterance.score_sentences`."""
        with _typed():
            asking, counts = _Asking(self, deadline_s), list[int]()
            await self._ask(
                asking, lambda: self._sentence_parts(asking, sentences, bos, eos, counts)
            )
            return self._sentence_scores(asking, counts)

    async def next_words(
        self, state: State, k: int, *, deadline_s: float | None = None
    ) -> list[tuple[int, np.float32]]:
        """See `Utterance.next_words`."""
        with _typed():
            asking = _Asking(self, deadline_s)
            check_count(k)
            blocks = await self._blocks(asking, [state])
            return self._top(blocks.distribution()[0], k)

    async def next_distribution(
        self, state: State, *, deadline_s: float | None = None
    ) -> NDArray[np.float32]:
        """See `Utterance.next_distribution`."""
        with _typed():
            blocks = await self._blocks(_Asking(self, deadline_s), [state])
            found: NDArray[np.float32] = blocks.distribution()[0]
            return found

    async def context_blocks(
        self, states: States | Sequence[State], *, deadline_s: float | None = None
    ) -> ContextBlocks:
        """See `Utterance.context_blocks`."""
        with _typed():
            return await self._blocks(_Asking(self, deadline_s), states)

    async def _blocks(self, asking: _Asking, states: States | Sequence[State]) -> ContextBlocks:
        await self._connected(asking)
        found: list[ContextBlocks] = []
        for make in self._block_rounds(asking, states, found):
            await self._ask(asking, make)
        return found[0]
