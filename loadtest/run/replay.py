"""Sends the requests of a trace through a client, and counts their outcomes by window.

A window is a stretch of planned time. A request belongs to the window in which it was due, whenever
it ends, so a stall shows where it hit. Latency counts from the planned time, `service` from
sending; both are measured only for requests that were answered or exceeded their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client import ModelInfo, States
from dlm.client.metrics import FAILED, OK, Stats, result_of
from dlm.errors import DlmError
from dlm.ngram.query import BIGRAM_FALLBACK, FULL, LOCAL_FALLBACK
from loadtest.run.latency import Latencies
from loadtest.traces.schedule import Schedule
from loadtest.traces.trace import BLOCKS, Trace

Record: TypeAlias = dict[str, Any]
LOAD_ENDED = "the load ended"  # why a run ended, if nothing ended it early
# Latency is measured for answers and for exceeded deadlines, which show a stalled server. A refusal
# is quick, and would make a failing server look fast.
DEADLINE = "deadline_exceeded"
LASTED = (OK, DEADLINE)
LONG_S = 0.2  # `stop` can end longer waits, except their last part, which must be precise
# A client counts a message just after it has answered its callers; on a busy machine, some time
# later.
COUNTED_S, LOOK_S = 5.0, 0.005
_Prepared: TypeAlias = tuple[States, NDArray[np.uint32] | None]
SOURCES = {FULL: "full", BIGRAM_FALLBACK: "bigram_fallback", LOCAL_FALLBACK: "local_fallback"}


class Asked(Protocol):
    """The interface of clients for a replay: `AsyncClient`, or a baseline's."""

    @property
    def stats(self) -> Stats:
        """The client's counts."""

    @property
    def cascade(self) -> Any:
        """The client's cascade, with its `mode`; `ConfigError` if the client has none."""

    @property
    def metrics(self) -> Any:
        """The client's metric families for Prometheus."""

    def utterance(self) -> Any:
        """An object with the `model_info`, `vocabulary`, `states_after`, `extend` and
        `context_blocks` of `AsyncUtterance`."""


@dataclass
class _Window:
    sent: int = 0
    ended: int = 0
    audio_s: float = 0.0
    call_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)  # the text of the first error, by outcome
    sources: Counter[str] = field(default_factory=Counter)  # scores by source
    latency_s: list[float] = field(default_factory=list)
    service_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    sample: Record | None = None  # the client's counts and mode in this window

    def record(self, number: int) -> Record:
        return {
            "window": number,
            "requests": self.sent,
            "audio_s": self.audio_s,
            "call_s": self.call_s,
            "outcomes": dict(self.outcomes),
            "errors": self.errors,
            "sources": dict(self.sources),
            "latency": Latencies(self.latency_s).encode(),
            "service": Latencies(self.service_s).encode(),
            "late": Latencies(self.late_s).encode(),
            **(self.sample or {}),
        }


class Replay:
    """One client process's part of a run.

    Args  window_s  length of a window; window 0 begins at time 0, earlier ones are warm-up
          emit      gets the record of each window, in order, once all of its requests have ended
    """

    def __init__(
        self, client: Asked, trace: Trace, window_s: float, emit: Callable[[Record], None]
    ) -> None:
        self._client = client
        self._trace = trace
        self._window_s = window_s
        self._emit = emit
        self._prepared: dict[ModelInfo, dict[int, _Prepared]] = {}
        self._windows: defaultdict[int, _Window] = defaultdict(_Window)
        self._next: int | None = None  # window to be emitted next
        self._stopped = asyncio.Event()
        self._start = 0.0
        self._due_s = math.inf  # due time of the next request: all earlier ones are sent
        self._before: Record = {}
        self.fault: BaseException | None = None  # an error that no decoder should meet: a bug
        # (model, request) -> scores, if scores are checked. Each later answer must equal the
        # first one.
        self.answers: dict[tuple[str, int], NDArray[np.float32]] | None = None
        self.compared = self.differing = 0

    def prepare(self, requests: Iterable[int]) -> None:
        """Looks up the words of these requests now, to save that time during the run."""
        handle = self._client.utterance()
        for request in requests:
            self._asked(handle, request)

    def stop(self) -> None:
        self._stopped.set()

    async def open_loop(self, plan: Schedule, start: float, until_s: float) -> None:
        """Sends each request when it is due; returns when all have ended.

        Args  start  time 0, by `time.monotonic`;  until_s  end of the last window
        """
        self._begin(start, float(plan.due_s[0]) if len(plan) else 0.0)
        ends = _last_of_streams(plan.stream)
        handles: dict[int, Any] = {}
        tasks: set[asyncio.Task[None]] = set()
        sampler = asyncio.create_task(self._sample_windows(until_s))
        loop = asyncio.get_running_loop()
        for due, request, stream, is_last in zip(
            plan.due_s.tolist(), plan.request.tolist(), plan.stream.tolist(), ends, strict=True
        ):
            self._due_s = due
            await self._until(start + due)
            if self._stopped.is_set():
                break
            handle = handles.pop(stream, None) or self._open()
            if not is_last:
                handles[stream] = handle
            task = loop.create_task(self._send(handle, request, due, self._enter(request, due)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._due_s = math.inf
        if tasks:
            await asyncio.wait(tasks)
        await self._finish(sampler)

    async def _until(self, at: float) -> None:
        """Sleeps; `stop` can end a long wait, except for its last part."""
        if (left_s := at - time.monotonic()) > LONG_S:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), left_s - LONG_S / 2)
        if not self._stopped.is_set():
            await asyncio.sleep(max(at - time.monotonic(), 0.0))

    async def closed_loop(
        self, decoders: int, start: float, first_s: float, until_s: float, order: NDArray[np.int64]
    ) -> None:
        """Runs `decoders` decoders until `until_s`; each sends its next request when it has an
        answer.

        Args  first_s  when the decoders begin, before 0 for a warm-up
              order    order of the utterances, which are repeated
        """
        self._begin(start, first_s)
        sampler = asyncio.create_task(self._sample_windows(until_s))
        await asyncio.sleep(max(start + first_s - time.monotonic(), 0.0))
        taken = 0

        async def decode() -> None:
            nonlocal taken
            while time.monotonic() - start < until_s and not self._stopped.is_set():
                number = int(order[taken % len(order)])
                taken += 1
                handle = self._open()
                asked = False
                for request in range(*self._trace.first_request[number : number + 2].tolist()):
                    now = time.monotonic() - start
                    if now >= until_s or self._stopped.is_set():
                        return
                    if self._trace.asks[request]:
                        asked = True
                        await self._send(handle, request, now, self._enter(request, now))
                if not asked:
                    await asyncio.sleep(0)

        await asyncio.gather(*(decode() for _ in range(decoders)))
        await self._finish(sampler)

    # -- one request ---------------------------------------------------------------------------

    def _open(self) -> Any:
        try:
            return self._client.utterance()
        except DlmError as exc:
            return exc

    def _asked(self, handle: Any, request: int) -> _Prepared:
        """States and words of a request, in ids of the utterance's model; blocks have no words."""
        known = self._prepared.setdefault(handle.model_info, {})
        found = known.get(request)
        if found is None:
            one = self._trace.request(request)
            id_of = handle.vocabulary.id_of
            ids = np.array([[id_of(w) for w in row] for row in one.words], np.uint32)
            found = (handle.states_after(one.contexts), ids[0] if len(ids) == 1 else ids)
            found = (found[0], None) if one.call == BLOCKS else found
            known[request] = found
        return found

    def _enter(self, request: int, due_s: float) -> _Window:
        """Returns a request's window, which from now on waits for the request."""
        window = self._windows[self._number(due_s)]
        window.sent += 1
        window.audio_s += self._trace.audio_share_s[request]
        return window

    async def _send(self, handle: Any, request: int, due_s: float, window: _Window) -> None:
        sent = time.monotonic()
        try:
            if isinstance(handle, DlmError):
                raise handle
            states, words = self._asked(handle, request)
            if words is None:
                found = await handle.context_blocks(states)
            else:
                found = await handle.extend(states, words)
            outcome = OK
            if self.answers is not None and words is not None and not found.source.any():
                self._compare(self.answers, (handle.model_info.model, request), found.log10_prob)
            if found.source.any():
                for source, count in zip(*np.unique(found.source, return_counts=True), strict=True):
                    window.sources[SOURCES[int(source)]] += int(count)
            else:
                window.sources[SOURCES[FULL]] += found.source.size
        except DlmError as exc:
            outcome = result_of(exc)
            window.errors.setdefault(outcome, str(exc))
        except Exception as exc:  # noqa: BLE001 - told to whoever started the run
            outcome = FAILED
            self.fault = self.fault or exc
            self.stop()
        done = time.monotonic()
        window.outcomes[outcome] += 1
        window.late_s.append(sent - self._start - due_s)
        if outcome in LASTED:
            window.latency_s.append(done - self._start - due_s)
            window.service_s.append(done - sent)
        window.call_s += done - sent
        window.ended += 1

    def _compare(
        self,
        answers: dict[tuple[str, int], NDArray[np.float32]],
        key: tuple[str, int],
        log10_prob: NDArray[np.float32],
    ) -> None:
        first = answers.setdefault(key, log10_prob)
        self.compared += 1
        self.differing += first is not log10_prob and not np.array_equal(first, log10_prob)

    async def check(self, oracles: Mapping[str, Asked]) -> tuple[int, int]:
        """Compares each answer with the scores of the model that it names; returns (compared,
        wrong). An answer of an unknown model is wrong."""
        wrong = self.differing
        for (model, request), scores in (self.answers or {}).items():
            oracle = oracles.get(model)
            if oracle is None:
                wrong += 1
                continue
            handle = oracle.utterance()
            found = await handle.extend(*self._asked(handle, request))
            wrong += not np.array_equal(scores, found.log10_prob)
        return self.compared, wrong

    # -- windows -------------------------------------------------------------------------------

    def _number(self, at_s: float) -> int:
        return int(at_s // self._window_s)

    def _begin(self, start: float, first_s: float) -> None:
        self._start = start
        self._next = self._number(min(first_s, 0.0))
        self._before = self._counted()

    def _counted(self) -> Record:
        """The client's counts so far, and the processor seconds of this process."""
        counted = asdict(self._client.stats)
        answered = _messages(self._client).get(OK, 0)
        return {**counted, "messages_ok": answered, "cpu_s": time.process_time()}

    def _take_sample(self, number: int) -> None:
        """Assigns the counts since the last sample to this window."""
        now = self._counted()
        window = self._windows[number]
        window.sample = window.sample or {"counts": Counter(), "mode": None}
        window.sample["counts"].update({k: now[k] - self._before[k] for k in now})
        window.sample["mode"] = _mode_of(self._client)
        self._before = now

    async def _sample_windows(self, until_s: float) -> None:
        """Samples at each window's end; emits complete windows, except the last, which may grow."""
        last = self._number(until_s - 1e-9)
        assert self._next is not None
        for number in range(self._next, last + 1):
            at = self._start + min((number + 1) * self._window_s, until_s)
            await asyncio.sleep(max(at - time.monotonic(), 0.0))
            self._take_sample(number)
            self._emit_ended(before=last)

    def _emit_ended(self, before: float = math.inf, *, final: bool = False) -> None:
        assert self._next is not None
        while self._next in self._windows and self._next < before:
            window, end_s = self._windows[self._next], (self._next + 1) * self._window_s
            whole = window.ended == window.sent and self._due_s >= end_s
            if window.sample is None or not (whole or final):
                return
            self._emit(self._windows.pop(self._next).record(self._next))
            self._next += 1

    async def _finish(self, sampler: asyncio.Task[None]) -> None:
        """Called when all requests have ended: later counts go to the last window."""
        if not self._stopped.is_set():
            await sampler
        sampler.cancel()
        until = time.monotonic() + COUNTED_S
        while (ended := _messages(self._client)) and time.monotonic() < until:
            if sum(ended.values()) >= self._client.stats.messages:
                break
            await asyncio.sleep(LOOK_S)
        if self._windows:
            self._take_sample(max(self._windows))
        for window in self._windows.values():
            window.sample = window.sample or {"counts": Counter(), "mode": None}
        self._emit_ended(final=True)


def _last_of_streams(stream: NDArray[np.int32]) -> list[bool]:
    """For each request, whether it is the last one of its stream."""
    last = np.zeros(len(stream), bool)
    _, back = np.unique(stream[::-1], return_index=True)
    last[len(stream) - 1 - back] = True
    return [bool(one) for one in last]


def _messages(client: Asked) -> dict[str, int]:
    """Counts of finished messages, by result; empty for a client that does not report them."""
    named = (one for one in client.metrics.collect() if one.name == "dlm_client_messages")
    return {one.labels["result"]: int(one.value) for family in named for one in family.samples}


def _mode_of(client: Asked) -> str | None:
    try:
        return str(client.cascade.mode)
    except DlmError:
        return None
