"""Times each call of a trace: the driver's closed loop with a single decoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.run.replay import Asked, Replay
from loadtest.traces.trace import Trace

LIMIT_S = 600.0


@dataclass(frozen=True, eq=False)
class Timing:
    """The times and messages of a client.

    call_s    (calls,) median seconds of each call over the passes;  messages  per pass
    """

    call_s: NDArray[np.float64]
    messages: float


class _Clock:
    def __init__(self, client: Any, until: int) -> None:
        self._client = client
        self._until = until
        self.replay: Replay | None = None
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def utterance(self) -> Any:
        return _TimedHandle(self._client.utterance(), self)

    def note(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) >= self._until and self.replay is not None:
            self.replay.stop()


class _TimedHandle:
    def __init__(self, handle: Any, clock: _Clock) -> None:
        self._handle = handle
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    async def extend(self, states: Any, words: Any) -> Any:
        began = time.perf_counter()
        found = await self._handle.extend(states, words)
        self._clock.note(time.perf_counter() - began)
        return found


async def timed(client: Asked, trace: Trace, passes: int, warmups: int = 1) -> Timing:
    """All calls of a trace, one after another, `passes` times after `warmups` that do not count."""
    calls = int(trace.asks.sum())
    runs = passes + warmups
    clock = _Clock(client, runs * calls)
    replay = Replay(clock, trace, LIMIT_S, lambda record: None)
    replay.prepare(np.flatnonzero(trace.asks).tolist())
    clock.replay = replay
    order = np.arange(len(trace.names))
    before = client.stats.messages
    await replay.closed_loop(1, time.monotonic(), 0.0, LIMIT_S, order)
    if replay.fault is not None:
        raise replay.fault
    await asyncio.sleep(0)
    taken = np.array(clock.seconds[: runs * calls]).reshape(runs, calls)
    sent = (client.stats.messages - before) / runs
    return Timing(np.median(taken[warmups:], axis=0), sent)


def fitted(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cost (k,) of each kind of work (n, k), at least 0: least squares of absolute errors, by
    trying all subsets. For a handful of kinds."""
    best, least = np.zeros(work.shape[1]), np.inf
    for count in range(1, work.shape[1] + 1):
        for some in combinations(range(work.shape[1]), count):
            costs = np.linalg.lstsq(work[:, some], seconds, rcond=None)[0]
            error = float(np.square(work[:, some] @ costs - seconds).sum())
            if (costs >= 0).all() and error < least:
                best, least = np.zeros(work.shape[1]), error
                best[list(some)] = costs
    return best


def work_of(per_call: Sequence[tuple[int, int, int]]) -> NDArray[np.float64]:
    """(calls, 4): 1, rounds, messages, look-ups of each call; see `baselines.Counts`."""
    counted = np.array(per_call, np.float64).reshape(-1, 3)
    return np.column_stack([np.ones(len(counted)), counted])
