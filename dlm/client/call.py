"""One caller's batch on its way: what was asked, which parts are out, and how it ends.

A call ends once: with all its answers, or with an error of its own.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.client import kernels, router
from dlm.errors import DlmError
from dlm.ngram.query import Answers
from dlm.tracing import Span


class Call:
    """One caller's batch: distinct queries, and how many of them still wait for a server.

    messages  messages that carried a part of it
    span      where it is traced
    """

    __slots__ = (
        *("answers", "deadline", "future", "left", "lock", "messages", "model", "place", "span"),
    )

    def __init__(
        self, model: str, answers: Answers, place: NDArray[np.int64], deadline: float
    ) -> None:
        self.model = model
        self.answers = answers
        self.place = place
        self.deadline = deadline
        self.future: Future[Answers] = Future()
        self.left = 0
        self.lock = threading.Lock()
        self.messages = 0
        self.span: Span | None = None

    def fill(self, at: NDArray[np.int64], of: NDArray[np.int64], answers: Answers) -> None:
        """Writes answers `of` to the distinct queries `at`; the last part completes the call."""
        with self.lock:
            _copy(at, of, answers, self.answers)
            self.left -= len(at)
            done = self.left == 0
        if done:
            self.succeed()

    def succeed(self) -> None:
        result = Answers.empty(len(self.place))
        _copy(np.arange(len(self.place)), self.place, self.answers, result)
        with contextlib.suppress(InvalidStateError):  # given up by its caller, or failed already
            self.future.set_result(result)

    def fail(self, error: DlmError) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(own_copy(error))


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


def deliver(items: list[Item], merged: router.Grouped, answers: Answers) -> None:
    """Hands each call its part of one message's answers."""
    begin = 0
    for item in items:
        end = begin + len(item.piece.at)
        item.call.fill(item.piece.at, merged.place[begin:end], answers)
        begin = end
