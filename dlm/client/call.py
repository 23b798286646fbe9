"""One caller's batch on its way: what was asked, which parts are out, and how it ends.

A call ends once: with all its answers, or with an error of its own.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels, partial, router
from dlm.client.asks import BLOCKS, SCORES, Asks, BlockPart
from dlm.client.lowgrams import LowGrams
from dlm.errors import DlmError, StaleShardSet, UnknownCall
from dlm.ngram.query import FULL, PARTIAL, Answers, QueryGroups
from dlm.tracing import Span

UNKNOWN = 255  # as a source: no server that was asked knows the call


class Pending(Future[Any]):
    """The future of a call; `call` until it has ended, so that whoever waits can give it up."""

    call: Call | None = None


class Call:
    """One caller's batch: distinct queries, and which of them still wait for an answer.

    Each is answered once, by whoever comes first: a part may be ended twice (given up by one
    thread, found stale by another), and what comes second is dropped, query by query.

    Args
        answers  to all the distinct queries; those of the low orders are there already
        groups   the distinct queries
        remote   (C,) bool: contexts whose queries a server is to answer
        place    (Q,) int64: where the answer of each query that was asked stands
    Attributes
        messages  messages that carried a part of it
        span      where it is traced
        moves_on  its handle can go over to another model, so that its own being gone is an error
    """

    asks: ClassVar[Asks] = SCORES
    __slots__ = (
        *(
            "_closed",
            "_grams",
            "_groups",
            "_unanswered",
            "_missing",
            "_source",
            "answers",
            "deadline",
        ),
        *("future", "lock", "messages", "model", "moves_on", "place", "span"),
    )

    def __init__(
        self,
        model: str,
        answers: Answers,
        groups: QueryGroups,
        remote: NDArray[np.bool_],
        place: NDArray[np.int64],
        deadline: float,
    ) -> None:
        self.model = model
        self.answers = answers
        self.place = place
        self.deadline = deadline
        self.future = Pending()
        self.future.call = self
        self.lock = threading.Lock()
        self.messages = 0
        self.span: Span | None = None
        self.moves_on = False
        self._groups = groups
        self._missing = np.repeat(remote, groups.word_counts)
        self._unanswered = int(np.count_nonzero(self._missing))
        self._grams: LowGrams | None = None
        self._source: NDArray[np.uint8] | None = None
        self._closed = False

    @property
    def unanswered(self) -> int:
        """Distinct queries that still wait for an answer."""
        return self._unanswered

    def fall_back(self, grams: LowGrams) -> None:
        """Lets the partial model answer what no shard does in time."""
        self._grams = grams

    def fill(self, at: NDArray[np.int64], of: NDArray[np.int64], answers: Any) -> None:
        """Writes answers `of` to the distinct queries `at`; the last part completes the call."""
        self._fill(at, of, answers, FULL)

    def miss(self, piece: router.Piece, error: DlmError) -> int:
        """No shard answers this part in time: the partial model does, or the call fails.

        Returns  queries that the partial model answered
        """
        moves_on = self.moves_on and isinstance(error, StaleShardSet)
        if self._grams is None or moves_on or not partial.allows_fallback(error):
            self.fail(error)
            return 0
        answers = self._partial(self._grams, piece.groups)
        return self._fill(piece.at, np.arange(len(piece.at)), answers, PARTIAL)

    def missing_shards(self) -> list[int]:
        """Shards that have not answered yet; none where there is no partial model."""
        if self._grams is None:
            return []
        with self.lock:
            missing = self._missing.copy()
        if not missing.any():
            return []
        groups, manifest = router.select(self._groups, missing), self._grams.manifest
        remote = np.ones(len(groups.word_counts), np.bool_)
        most = max(len(groups.words), 1)
        pieces = router.route(groups, remote, manifest.slots, manifest.shards, most)
        return sorted({piece.shard for piece in pieces})

    def give_up(self, error: DlmError) -> int:
        """No time is left: as `miss`, for whatever is still missing."""
        if self._grams is None or not partial.allows_fallback(error):
            self.fail(error)
            return 0
        with self.lock:
            missing = self._missing.copy()
        filled = 0
        if missing.any():
            at = np.flatnonzero(missing)
            answers = self._partial(self._grams, router.select(self._groups, missing))
            filled = self._fill(at, np.arange(len(at)), answers, PARTIAL)
        if not self.future.done():
            self.succeed()  # whoever brought the last answer meanwhile has not come to it yet
        return filled

    def _fill(self, at: NDArray[np.int64], of: NDArray[np.int64], answers: Any, source: int) -> int:
        with self.lock:
            if self._closed:
                return 0  # what came too late
            awaited = self._missing[at]
            if not awaited.all():
                at, of = at[awaited], of[awaited]
            self._store(at, of, answers)
            self._missing[at] = False
            if source != FULL:
                if self._source is None:
                    self._source = np.zeros(len(self.answers), np.uint8)
                self._source[at] = source
            self._unanswered -= len(at)
            done = self._closed = self._unanswered == 0
        if done:
            self.succeed()
        return len(at)

    def succeed(self) -> None:
        """Ends the call with its answers."""
        try:
            result = self._result(self._source)
        except Exception as exc:  # noqa: BLE001 - a caller must never be left waiting
            error = DlmError(f"the answers to a call could not be put together: {exc!r}")
            error.__cause__ = exc
            self.fail(error)
            return
        with contextlib.suppress(InvalidStateError):  # given up by its caller, or failed already
            self.future.set_result(result)
        self.future.call = None

    def _partial(self, grams: LowGrams, groups: QueryGroups) -> Any:
        """What the partial model answers."""
        return partial.score(grams, groups)

    def _store(self, at: NDArray[np.int64], of: NDArray[np.int64], answers: Any) -> None:
        _copy(at, of, answers, self.answers)

    def _result(self, source: NDArray[np.uint8] | None) -> Any:
        result = Answers.empty(len(self.place))
        _copy(np.arange(len(self.place)), self.place, self.answers, result)
        return result if source is None else replace(result, source=source[self.place])

    def fail(self, error: DlmError) -> None:
        """Ends the call with an error of its own."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(own_copy(error))
        self.future.call = None


class BlockCall(Call):
    """A call for what is stored after contexts.

    Its answer is a `BlockPart` for each context, in order; None where nothing is stored that the
    low orders do not say (`FULL`), where no shard told in time (`PARTIAL`), or where none knows
    this call (`UNKNOWN`); and which of these each is of, as an array of uint8.
    """

    asks: ClassVar[Asks] = BLOCKS
    __slots__ = ("_parts",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts: list[BlockPart | None] = [None] * len(self.answers)

    def miss(self, piece: router.Piece, error: DlmError) -> int:
        """As `Call.miss`; servers that do not know this call are no failure."""
        if not isinstance(error, UnknownCall):
            return super().miss(piece, error)
        self._fill(piece.at, np.arange(len(piece.at)), [None] * len(piece.at), UNKNOWN)
        return 0

    def _partial(self, grams: LowGrams, groups: QueryGroups) -> Any:
        return [None] * len(groups.words)

    def _store(self, at: NDArray[np.int64], of: NDArray[np.int64], answers: Any) -> None:
        for to, place in zip(at.tolist(), of.tolist(), strict=True):
            self._parts[to] = answers[place]

    def _result(self, source: NDArray[np.uint8] | None) -> Any:
        sources = np.zeros(len(self.answers), np.uint8) if source is None else source
        return [self._parts[place] for place in self.place.tolist()], sources[self.place]


def _copy(to: NDArray[np.int64], of: NDArray[np.int64], part: Answers, whole: Answers) -> None:
    """whole[to] = part[of]"""
    kernels.copy_answers(
        to,
        of,
        part.log10_prob,
        part.matched_order,
        part.ngram_length,
        part.state_length,
        whole.log10_prob,
        whole.matched_order,
        whole.ngram_length,
        whole.state_length,
    )


def own_copy(error: DlmError) -> DlmError:
    """A copy for one caller: an exception raised in several threads would mix their traces."""
    mine = copy.copy(error)
    mine.__cause__ = error.__cause__
    if notes := getattr(error, "__notes__", None):
        mine.__notes__ = list(notes)
    return mine


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of a call, waiting for or on its way to a shard.

    shard_set  whose table routed it
    reroutes   fresh tables so far
    queued     when it began to wait, by `perf_counter`
    """

    call: Call
    piece: router.Piece
    shard_set: str
    reroutes: int
    queued: float


def deliver(items: list[Item], merged: router.Grouped, answers: Any) -> None:
    """Hands each call its part of one message's answers."""
    begin = 0
    for item in items:
        end = begin + len(item.piece.at)
        item.call.fill(item.piece.at, merged.place[begin:end], answers)
        begin = end
