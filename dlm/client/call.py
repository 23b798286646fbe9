"""A call is a caller's batch of queries. The caller waits for it, and its parts go to shards. A
message to a shard asks either for the scores of words or for all words after contexts; the two
kinds of messages are encoded differently."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels
from dlm.client.loop import Mailbox
from dlm.client.metrics import CANCELLED, ClientMetrics, result_of
from dlm.client.router import CallPlan, LowGrams, Piece, allows_fallback
from dlm.client.server import BLOCKS, SCORES, Asks, BlockPart
from dlm.errors import DlmError, StaleShardSet, UnknownCall
from dlm.logs import EventLog
from dlm.ngram.query import BIGRAM_FALLBACK, Answers
from dlm.tracing import Span

# -------------------------------------------------------------------------------------------------
# The end of a call, which happens once; its caller waits in a thread or on an event loop.


log = EventLog(__name__)

T = TypeVar("T")


class Ending:
    """How a call ends: with success, an error or cancellation, whichever is first. Thread-safe."""

    __slots__ = ("_ends", "_gate", "_then")

    def __init__(self) -> None:
        # Appending is atomic, so all threads see the same first outcome.
        self._ends: list[list[BaseException | None]] = []
        self._gate = threading.Lock()  # released once the call has ended
        self._gate.acquire()
        self._then: Callable[[], object] | None = None

    def end(self, error: BaseException | None = None) -> bool:
        """Ends the call, with success or an error; False if it had already ended."""
        mine = [error]
        self._ends.append(mine)
        if self._ends[0] is not mine:
            return False
        try:
            self._gate.release()
        finally:
            if self._then is not None:
                self._then()
        return True

    def cancel(self) -> bool:
        """Ends the call as cancelled; False if it had already ended."""
        return not self._ends and self.end(CancelledError())

    def done(self) -> bool:
        return bool(self._ends)

    @property
    def outcome(self) -> str:
        """How the call ended, as a label for metrics."""
        error = self._ends[0][0]
        return CANCELLED if isinstance(error, CancelledError) else result_of(error)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Waits for the call to end, and returns its error, or None. Raises `TimeoutError` or
        `CancelledError`."""
        if not self._ends:
            send_kept()  # this wait may block the event loop that would send these calls
            limit_s = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            if not self._gate.acquire(timeout=limit_s):
                raise TimeoutError
            self._gate.release()  # lets the next waiting thread continue
        error = self._ends[0][0]
        if isinstance(error, CancelledError):
            raise error
        return error

    def result(self, timeout_s: float | None = None) -> None:
        """Waits for the call to end, and raises its error."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    async def wait(self, timeout_s: float) -> bool:
        """Waits for the call on an event loop; returns whether it has ended."""
        if self._ends:
            return True
        loop = asyncio.get_running_loop()
        turn = _turn_of(loop)
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)
                turn.note_woken()

        self.when_ended(lambda: turn.mailbox.post(wake))
        timer = loop.call_later(timeout_s, wake)
        try:
            await woken
        finally:
            timer.cancel()
        return bool(self._ends)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Runs the function `call` at once if this object has ended, else in the thread that ends
        it (twice in a race). `call` must not raise. Only one can be registered at a time."""
        self._then = call
        if self._ends:
            call()


class _Turn:
    """The tasks of an event loop that wait for calls. Tasks that wake together have their next
    queries sent together, once the last of them has made its query or the loop's turn ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.mailbox = Mailbox(loop, deque())
        self._woken = 0  # woken tasks that have made no new query yet
        self._kept: list[tuple[Callable[[Any], None], Any]] = []

    def note_woken(self) -> None:
        if not self._woken:  # woken tasks run in the next turn, and `end` after them
            self.loop.call_soon(self.loop.call_soon, self.end)
        self._woken += 1

    def send(self, post: Callable[[T], None], call: T) -> None:
        self._kept.append((post, call))
        self._woken -= 1
        if self._woken <= 0:
            self.end()

    def end(self) -> None:
        kept, self._kept, self._woken = self._kept, [], 0
        for post, call in kept:
            post(call)


_here = threading.local()  # `turn`: the `_Turn` of the thread's event loop


def _turn_of(loop: asyncio.AbstractEventLoop) -> _Turn:
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is None or turn.loop is not loop:
        send_kept()
        turn = _here.turn = _Turn(loop)
    return turn


def send(post: Callable[[T], None], call: T) -> None:
    """Sends a call with `post`: now, or together with other calls of this thread's event loop."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None and turn.loop.is_running():
        turn.send(post, call)
    else:
        post(call)


def send_kept() -> None:
    """Sends the calls that were held back for this thread's event loop."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None:
        turn.end()


# -------------------------------------------------------------------------------------------------
# Only the loop records a part's outcome, and only once. Only the caller assembles the answers,
# after its call has ended or its time is up. So parts need no lock, and nobody reads what a late
# reply changes.

Where: TypeAlias = slice | NDArray[np.int64]  # selects the answers of one part of a message

UNKNOWN = 255  # the source of an answer if no server that was asked knows the kind of call


class Place(NamedTuple):
    """A shard set, one of its shards, and a kind of message; each such place has a lane."""

    shard_set: str
    shard: int
    asks: str = SCORES.name


class Part:
    """A part of a call, which has been waiting for a shard, or on its way there, since `queued`
    (`perf_counter`). Fresh tables have rerouted the part `reroutes` times.

    Attributes
        answers    the whole message's answers, the part's own at `where`; None until they arrive
        error      why no shard answers the part; None if a shard did, or still may
    """

    __slots__ = (
        *("answers", "at", "call", "deadline", "error", "groups", "place", "queries"),
        *("queued", "reroutes", "shard", "where"),
    )

    def __init__(
        self, call: Call, piece: Piece, shard_set: str, queued: float, reroutes: int = 0
    ) -> None:
        self.call = call
        self.shard, self.groups, self.at = piece
        self.queries = len(self.at)
        self.deadline = call.deadline
        self.place = Place(shard_set, self.shard, call.asks.name)
        self.queued = queued
        self.reroutes = reroutes
        self.answers: Any = None
        self.where: Where = slice(0)
        self.error: DlmError | None = None

    @property
    def ended(self) -> bool:
        return self.answers is not None or self.error is not None


class Call(Ending):
    """One caller's batch of queries. Its end carries no value: `result` assembles the answers.

    Args
        model      the model whose word ids are in the queries
        deadline   when the call must end, on the client's clock
        shard_set  the shard set whose table routed the distinct queries, which are in `plan`
    Attributes
        parts     all parts that go to shards; replaced as a whole
        let_in    whether the call can no longer be refused
        planned_s  seconds from the caller's request until the call was queued
        moves_on  whether the utterance can switch models; if so, the call fails when its model goes
    """

    asks: ClassVar[Asks] = SCORES
    __slots__ = (
        *("_found", "_grams", "_late", "_left", "_bigram_scored", "_plan", "deadline"),
        *("let_in", "local_hits_share", "messages", "model", "moves_on", "parts", "planned_s"),
        "span",
    )

    def __init__(self, model: str, plan: CallPlan, deadline: float, shard_set: str) -> None:
        super().__init__()
        self.model = model
        self.deadline = deadline
        self.let_in = False
        self.moves_on = False
        self.messages = 0
        self.span: Span | None = None
        self.local_hits_share = self.planned_s = 0.0
        self._plan = plan
        queued = time.perf_counter()
        self.parts = tuple(Part(self, piece, shard_set, queued) for piece in plan.pieces)
        self._left = len(self.parts)
        self._grams: LowGrams | None = None
        self._bigram_scored: Callable[[Call, int, DlmError, int | None], None] | None = None
        self._late: DlmError | None = None
        self._found: Any = None

    @classmethod
    def of_pieces(cls, model: str, pieces: list[Piece], deadline: float, shard_set: str) -> Call:
        """A call that only shards can answer."""
        count = sum(len(piece.at) for piece in pieces)
        place = np.arange(count, dtype=np.int64)
        room = np.zeros((2, count), np.float32), np.empty(count, np.float32)
        known = np.zeros((3, count), np.uint8)
        at = np.concatenate([_NOWHERE, *(piece.at for piece in pieces)])
        return cls(model, CallPlan(count, place, *room, known, at, pieces), deadline, shard_set)

    def fall_back(
        self, grams: LowGrams, scored: Callable[[Call, int, DlmError, int | None], None]
    ) -> None:
        """Lets the bigram fallback answer queries that no shard answers in time. `scored` is called
        with the call, the number of queries, the reason, and the shard that failed."""
        self._grams, self._bigram_scored = grams, scored

    # -- on the loop --------------------------------------------------------------------------

    def answer(self, part: Part, answers: Any, where: Where) -> None:
        """Records a part's answers, `answers[where]`; the last part ends the call."""
        if part.answers is None and part.error is None:
            part.where = where
            part.answers = answers  # set last: whoever sees the answers must see `where`
            self._ended()

    def miss(self, part: Part, error: DlmError) -> None:
        """Lets the bigram fallback answer a part that no shard answers, or fails the call."""
        if part.ended:
            return
        if not self._may_miss(error):
            self.fail(error)
            return
        part.error = error
        self._ended()

    def replace(self, part: Part, pieces: Sequence[Piece], shard_set: str) -> list[Part]:
        """Replaces a part with new ones, routed by the table of another shard set."""
        more = [
            Part(self, p._replace(at=part.at[p.at]), shard_set, part.queued, part.reroutes)
            for p in pieces
        ]
        kept = [other for other in self.parts if other is not part]
        self.parts = (*kept, *more)
        part.error = _MOVED
        self._left += len(more) - 1
        return more

    def _ended(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.end()

    # -- in any thread ------------------------------------------------------------------------

    def fail(self, error: DlmError) -> None:
        """Ends the call with its own copy of the error."""
        if not self.done():  # it may have been abandoned, or have failed before
            self.end(own_copy(error))

    def give_up(self, error: DlmError) -> None:
        """Ends the call when no time is left or no server can be asked: the bigram fallback answers
        the rest, or the call fails."""
        if self._may_miss(error):
            self._late = self._late or error
            self.end()
        else:
            self.fail(error)

    def cut_off(self, cause: Exception) -> None:
        """Ends a call that could not be sent, or whose handling raised an error."""
        error = as_dlm_error(cause)
        self.give_up(error)
        self.fail(error)  # does nothing if the bigram fallback has ended the call

    def _may_miss(self, error: DlmError) -> bool:
        moves_on = self.moves_on and isinstance(error, StaleShardSet)
        return self._grams is not None and not moves_on and allows_fallback(error)

    # -- in the caller's thread ---------------------------------------------------------------

    def close(self, counts: ClientMetrics) -> None:
        """Adds the call to the metrics, before its caller continues."""
        counts.call(self.outcome, self.planned_s)
        if self.span is not None:
            share = self.local_hits_share
            self.span.end(self.outcome, messages=self.messages, local_hits_share=share)

    def result(self, timeout_s: float | None = None) -> Any:
        """The answers, in the order of the queries; raises `TimeoutError`, or the call's error."""
        super().result(timeout_s)
        if self._found is None:
            try:
                self._found = self._finish()
                self.parts = ()  # breaks a cycle: parts reference their call
            except DlmError:
                raise
            except Exception as exc:
                raise DlmError(
                    f"could not assemble the answers to a call: {exc!r}; retry, and report the "
                    "error if it persists"
                ) from exc
        return self._found

    def _finish(self) -> Any:
        parts = self.parts
        # The answers are read only once: later replies are too late.
        found = [(part, part.answers) for part in parts]
        missed = [part for part, answers in found if answers is None]
        try:
            answers = self._put(found)
        except Exception as exc:
            error = next((part.error or self._late for part in missed), None)
            if error is None:
                raise
            mine = own_copy(error)
            mine.add_note(f"the bigram fallback failed too: {exc!r}")
            raise mine from exc
        if missed:
            self._tell_fallback(missed)
        return answers

    def _put(self, found: list[tuple[Part, Any]]) -> Answers:
        plan = self._plan
        source: NDArray[np.uint8] | None = None
        columns: tuple[list[NDArray[Any]], ...] = [], [], [], [], []
        for part, answers in found:
            where = part.where
            if answers is None:
                if source is None:
                    source = np.zeros(len(plan.log10_prob), np.uint8)
                source[part.at] = BIGRAM_FALLBACK
                self._fall_back_to_bigrams(part)
                continue
            at, log10_prob, matched, ngram, state = columns
            at.append(part.at)
            log10_prob.append(answers.log10_prob[where])
            matched.append(answers.matched_order[where])
            ngram.append(answers.ngram_length[where])
            state.append(answers.state_length[where])
        given = [_joined(arrays, kind) for arrays, kind in zip(columns, _DTYPES, strict=True)]
        out, rest = kernels.finish(plan.place, *given, plan.low, plan.log10_prob, plan.known)
        return Answers(
            out, rest[0], rest[1], rest[2], None if source is None else source[plan.place]
        )

    def _fall_back_to_bigrams(self, part: Part) -> None:
        """Answers a part from the low orders, as the model reduced to order 2 would. States are as
        long as possible, since only a shard knows which words of a context still matter."""
        assert self._grams is not None
        most = self._grams.manifest.order - 1
        reach = np.minimum(part.groups.context_lengths.astype(np.int64) + 1, most)
        self._plan.known[2, part.at] = np.repeat(reach, part.groups.word_counts)

    def _tell_fallback(self, missed: list[Part]) -> None:
        if self._bigram_scored is None:
            return
        told: dict[tuple[str, int], tuple[int, DlmError]] = {}
        for part in missed:
            error = part.error or self._late
            if error is not None and not isinstance(error, UnknownCall):
                kind = type(error).__name__, part.shard
                told[kind] = told.get(kind, (0, error))[0] + part.queries, error
        for (_, shard), (queries, error) in told.items():
            self._bigram_scored(self, queries, error, shard)


class EndedCall(Ending):
    """A call that ends as soon as it begins, with its answers or an error."""

    def __init__(
        self, found: Any = None, error: DlmError | None = None, planned_s: float = 0.0
    ) -> None:
        super().__init__()
        self._found, self._planned_s = found, planned_s
        self.end(error)

    def close(self, counts: ClientMetrics) -> None:
        counts.call(self.outcome, self._planned_s)

    def give_up(self, error: DlmError) -> None:
        """Does nothing: the call has ended."""

    def result(self, timeout_s: float | None = None) -> Any:
        super().result()
        return self._found


class BlockCall(Call):
    """A call for all words stored after contexts.

    The result is a `BlockPart` per context, in order, and an array of their sources (uint8). A part
    is None if the low orders have everything (its source is `FULL`), if no shard answered in time
    (`BIGRAM_FALLBACK`), or if no server knows this call (`UNKNOWN`).
    """

    asks: ClassVar[Asks] = BLOCKS
    __slots__ = ()

    def miss(self, part: Part, error: DlmError) -> None:
        """Like `Call.miss`, but a server that does not know this call has not failed."""
        if isinstance(error, UnknownCall) and not part.ended:
            part.error = error
            self._ended()
        else:
            super().miss(part, error)

    def _put(self, found: list[tuple[Part, Any]]) -> Any:
        plan = self._plan
        stored: list[BlockPart | None] = [None] * len(plan.log10_prob)
        source = np.zeros(len(stored), np.uint8)
        for part, answers in found:
            if answers is None:
                source[part.at] = (
                    UNKNOWN if isinstance(part.error, UnknownCall) else BIGRAM_FALLBACK
                )
                continue
            here = np.arange(len(answers))[part.where].tolist()
            for place, to in zip(here, part.at.tolist(), strict=True):
                stored[to] = answers[place]
        return [stored[place] for place in plan.place.tolist()], source[plan.place]


_NOWHERE = np.zeros(0, np.int64)
# The types of the arrays that `Call._put` joins.
_DTYPES: tuple[type[np.generic], ...] = np.int64, np.float32, np.uint8, np.uint8, np.uint8
# The error of a part whose queries have moved to other parts.
_MOVED = StaleShardSet("the queries of this part of the call moved to other parts")


def _joined(arrays: Sequence[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Joins the arrays as bytes, because NumPy's own functions would release the GIL."""
    return np.frombuffer(b"".join(arrays), dtype)


def own_copy(error: DlmError) -> DlmError:
    """Returns a copy for one caller: an exception raised in several threads mixes tracebacks."""
    mine = copy.copy(error)
    mine.__cause__ = error.__cause__
    if notes := getattr(error, "__notes__", None):
        mine.__notes__ = list(notes)
    return mine


def as_dlm_error(error: Exception, shard: int | None = None) -> DlmError:
    """Returns a message's error as a `DlmError`; logs and wraps an exception of another kind."""
    if isinstance(error, DlmError):
        return error
    # If the bigram fallback answers, nothing else reports the error.
    log.error("client.message.failed", extra={"shard": shard, "error": type(error).__name__})
    where = "" if shard is None else f"shard {shard}: "
    wrapped = DlmError(
        f"{where}a message could not be encoded or decoded: {error!r}; retry, and report the error "
        "if it persists"
    )
    wrapped.__cause__ = error
    return wrapped
