"""A client process of a load test: `python -m loadtest.run.worker`, started by `driver`.

The first line of input is JSON, `WorkerSettings`; the process connects, plans, and prints a line
with its findings. The second line is JSON with time 0; the process then prints a line for each
window and a last line. Any further line, or the end of the input, stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from dlm.client import AsyncClient, ClientConfig
from dlm.client.metrics import Stats
from dlm.errors import ConfigError, DlmError
from loadtest.run.replay import Record, Replay
from loadtest.traces.schedule import Load, Schedule, Segment, schedule, shuffled
from loadtest.traces.trace import Trace, read_trace

# The driver's own cost is measured with this many requests, at this rate, to a client that answers
# at once.
CALIBRATION_REQUESTS, CALIBRATION_PER_S = 1500, 3000.0
CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of a run's clients; see `ClientConfig`."""

    deadline_s: float = 2.0
    bigram_fallback: bool = False
    local_fallback: str | None = None
    cache_dir: str | None = None
    gateway: str = ""  # the gateway's address, if requests go through one

    def config(self) -> ClientConfig:
        small = None if self.local_fallback is None else Path(self.local_fallback)
        config = ClientConfig(
            self.deadline_s, CONNECT_S, bigram_fallback=self.bigram_fallback, local_fallback=small
        )
        return config if self.cache_dir is None else replace(config, cache_dir=Path(self.cache_dir))


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One client process's part of a run; it is number `index`, from 0, of `of` processes.

    oracles  folders of the shard sets whose scores are checked against their files; () for none
    """

    cluster: str
    trace: str
    load: Load
    client: ClientSettings
    window_s: float
    seed: int
    index: int
    of: int
    oracles: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        found = json.loads(text)
        found["client"] = ClientSettings(**found["client"])
        segments = tuple(Segment(**one) for one in found["load"].pop("segments"))
        found["load"] = Load(segments, **found["load"])
        found["oracles"] = tuple(found["oracles"])
        return cls(**found)


def say(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"type": kind, **facts}) + "\n")
    sys.stdout.flush()


class _Instant:
    """A client whose utterances give empty answers at once: the remaining cost is the driver's."""

    def __init__(self, handle: Any) -> None:
        self.stats = Stats()
        self.metrics = CollectorRegistry()
        self._found = SimpleNamespace(source=np.zeros((1, 1), np.uint8))
        self._handle = SimpleNamespace(
            model_info=handle.model_info,
            vocabulary=handle.vocabulary,
            states_after=handle.states_after,
            extend=self._answer,
            context_blocks=self._answer,
        )

    @property
    def cascade(self) -> Any:
        raise ConfigError("this client does not support a cascade")

    def utterance(self) -> Any:
        return self._handle

    async def _answer(self, states: Any, words: Any = None) -> Any:
        return self._found


async def driver_cost_s(handle: Any, trace: Trace, requests: Sequence[int]) -> float:
    """Processor seconds per request that planning, sending on time and counting take."""
    some = [requests[at % len(requests)] for at in range(CALIBRATION_REQUESTS)]
    due = np.arange(CALIBRATION_REQUESTS) / CALIBRATION_PER_S
    stream = np.arange(CALIBRATION_REQUESTS, dtype=np.int32) // 10
    plan = Schedule(due, np.array(some, np.int32), stream)
    replay = Replay(_Instant(handle), trace, 1.0, lambda record: None)
    replay.prepare(some)
    began, start = time.process_time(), time.monotonic()
    await replay.open_loop(plan, start, float(due[-1]))
    return (time.process_time() - began) / CALIBRATION_REQUESTS


async def work(settings: WorkerSettings, lines: asyncio.Queue[str]) -> None:
    load, trace = settings.load, read_trace(Path(settings.trace))
    plan = order = None
    if load.is_open:
        plan = schedule(trace, load, settings.seed).share(settings.index, settings.of)
        requests = np.unique(plan.request).tolist()
    else:
        rng = np.random.default_rng([settings.seed, settings.index])
        order = shuffled(len(trace.names), 20 * len(trace.names), rng)
        requests = np.flatnonzero(trace.asks).tolist()
        if not requests:
            raise ConfigError("the trace has no requests; record a trace with requests")
    async with contextlib.AsyncExitStack() as opened:
        connecting = AsyncClient.connect(settings.cluster, settings.client.config())
        client = await opened.enter_async_context(connecting)

        def emit(record: Record) -> None:
            say("window", client=settings.index, **record)

        through = None
        if settings.client.gateway:
            from loadtest.run.through import GatewayClient  # needs an extra's packages

            given = settings.client.gateway, settings.client.deadline_s
            through = GatewayClient(client, *given)
            opened.push_async_callback(through.close)
        replay = Replay(through or client, trace, settings.window_s, emit)
        replay.prepare(requests)
        replay.answers = {} if settings.oracles else None
        gc.collect()
        gc.freeze()  # garbage collections then scan only objects of the run
        cost_s = await driver_cost_s(client.utterance(), trace, requests) if requests else 0.0
        manifest = client.manifest
        say(
            "ready",
            client=settings.index,
            pid=os.getpid(),
            driver_cpu_us=cost_s * 1e6,
            planned=None if plan is None else len(plan),
            model=manifest.model,
            shard_set=manifest.shard_set,
            order=manifest.order,
            encoding=manifest.encoding,
            vocabulary_size=manifest.vocabulary_size,
            ngrams=sum(manifest.counts),
            shard_bytes=[f.bytes for f in manifest.files if f.kind == "shard"],
        )
        text = await lines.get()
        if not text:
            return
        start = float(json.loads(text)["start"])
        stopper = asyncio.create_task(_stop(replay, lines))
        if plan is not None:
            await replay.open_loop(plan, start, load.seconds)
        else:
            share = load.concurrency // settings.of
            share += settings.index < load.concurrency % settings.of
            assert order is not None
            await replay.closed_loop(share, start, -load.warmup_s, load.seconds, order)
        stopper.cancel()
        if replay.fault is not None:
            raise replay.fault
        if settings.oracles:
            compared, wrong = await _check(replay, settings.oracles)
            say("checked", client=settings.index, answers=compared, wrong=wrong)
        say("end", client=settings.index)


async def _check(replay: Replay, folders: Sequence[str]) -> tuple[int, int]:
    """Compares each answer with scores from the files of the model that it names."""
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(AsyncClient.local(Path(folder), verify=False))
            for folder in folders
        ]
        return await replay.check({one.manifest.model: one for one in found})


async def _stop(replay: Replay, lines: asyncio.Queue[str]) -> None:
    await lines.get()
    replay.stop()


def _read_input(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    with contextlib.suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(lines.put_nowait, "")


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that wakes within microseconds: epoll and uvloop round up to a millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    """Runs the process; sends a DlmError or OSError to the parent, and prints other errors."""
    settings = WorkerSettings.from_json(sys.stdin.readline())

    async def run() -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        reader = (asyncio.get_running_loop(), lines)
        threading.Thread(target=_read_input, args=reader, daemon=True).start()
        await work(settings, lines)

    try:
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(run())
    except (DlmError, OSError) as exc:
        notes = getattr(exc, "__notes__", [])
        say("error", client=settings.index, error="\n".join([str(exc), *notes]))
        sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # does not wait for the thread that reads the input, or for open calls


if __name__ == "__main__":
    main()
