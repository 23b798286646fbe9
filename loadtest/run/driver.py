"""Runs a load test: starts client processes, watches the servers, and collects reports of both.

Every event becomes a record that `keep` gets immediately, so measurements survive however the run
ends. `report.build` makes a report of the records.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dlm.client import ClientConfig
from dlm.client.cluster_file import ClusterFile
from dlm.client.metrics import OK
from dlm.client.server import Connection
from dlm.cluster.status import ClusterStatus
from dlm.errors import ConfigError, DlmError
from dlm.units import counted
from loadtest.children import start_child
from loadtest.run import INTERRUPTED
from loadtest.run.faults import Faults
from loadtest.run.latency import Latencies
from loadtest.run.replay import LOAD_ENDED, Record
from loadtest.run.worker import ClientSettings, WorkerSettings
from loadtest.traces.schedule import Load

READY_S = 600.0  # time limit for clients to get ready: a version's first run compiles kernels
LEAD_S = 0.25  # seconds between the order to start and the earliest time of a request
GRACE_S = 20.0  # seconds after the last deadline in which client processes must end
KILL_S = 5.0
CHECK_S = 120.0  # time limit for clients to check scores against the models' files
BACK_S = 30.0  # time that clients and servers may need after the last planned fault
SILENT_WINDOWS = 2  # windows in a row without a server's answer before the cluster counts as gone
Keep = Callable[[Record], None]


POLL_S = 2.0  # a server's time limit for answering a poll


def machine_cpu() -> dict[str, float] | None:
    """CPU seconds of this machine since it started, busy and in total; None if unknown."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            ticks = [int(one) for one in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    hertz = os.sysconf("SC_CLK_TCK")
    total = sum(ticks) / hertz
    return {"busy_s": total - (ticks[3] + ticks[4]) / hertz, "total_s": total}


class ServerWatch:
    """Records servers' reports about themselves, once per interval, until it is closed.

    Args    put   gets a record of each poll, in the watch's thread
            at_s  seconds since time 0 of the run; None before time 0 is known
    Raises  ConfigError  a client cannot start with this cluster.toml
    """

    def __init__(
        self,
        cluster: Path,
        config: ClientConfig,
        interval_s: float,
        put: Callable[[Record], None],
        at_s: Callable[[], float | None],
    ) -> None:
        file = ClusterFile(cluster, config)
        connect = partial(Connection, security=file.started.security)
        self._status = ClusterStatus(file(), connect, POLL_S, model=file.model())
        self._interval_s = interval_s
        self._put = put
        self._at_s = at_s
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="loadtest-servers", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        facts = self._status.poll().facts()
        self._put({"type": "servers", "at_s": self._at_s(), "machine": machine_cpu(), **facts})

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(max(began + self._interval_s - time.monotonic(), 0.0)):
            began = time.monotonic()
            self._look()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._look()
        self._status.close()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a load test.

    processes  client processes, which share the load
    window_s   length of the windows by which results are stored
    oracles  shard sets whose scores are checked against their files once the load has ended
    """

    cluster: Path
    trace: Path
    load: Load
    client: ClientSettings = ClientSettings()  # noqa: RUF009 - frozen
    processes: int = 1
    window_s: float = 5.0
    seed: int = 1
    oracles: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= 256:
            raise ConfigError(f"--processes is {self.processes}; expected 1 to 256")
        if not 0.1 <= self.window_s <= 3600:
            raise ConfigError(f"--window is {self.window_s:g} s; expected 0.1 to 3600")
        if 0 < self.load.concurrency < self.processes:
            raise ConfigError(
                f"the concurrency is {self.load.concurrency} for {self.processes} client "
                "processes, but each needs at least one decoder; use fewer --processes"
            )


class _Worker:
    def __init__(self, settings: WorkerSettings, heard: queue.Queue[Record]) -> None:
        self.index = settings.index
        self.process = start_child(
            "loadtest.run.worker",
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which stops workers
        )
        self.tell(json.dumps(asdict(settings)))
        self._listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _listen(self, heard: queue.Queue[Record]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                heard.put(json.loads(line))
        status = self.process.wait()
        heard.put({"type": "exit", "client": self.index, "status": status})

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._listener.join()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one window shows about the servers, for all client processes together.

    answered  requests answered, some by the clients' own data without any server
    messages  messages that servers answered
    """

    requests: int
    answered: int
    messages: int


def is_gone(windows: Sequence[Outcome]) -> bool:
    last = windows[-SILENT_WINDOWS:]
    return len(last) == SILENT_WINDOWS and all(
        one.answered < one.requests and one.messages == 0 for one in last
    )


class Run:
    """One run, record by record.

    Args  keep  called with every record as it comes;  tell  called with lines for a person
    """

    def __init__(
        self,
        settings: RunSettings,
        keep: Keep,
        tell: Callable[[str], None],
        faults: Faults | None = None,
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._keep = keep
        self._tell = tell
        self._heard: queue.Queue[Record] = queue.Queue()
        self._parts: dict[int, list[Record]] = {}
        self._outcomes: list[Outcome] = []
        self._ended: set[int] = set()
        self._start = 0.0
        self._stopping = False

    def run(self) -> None:
        """Runs until the load ends, or no server answers.

        Raises  ConfigError, UnavailableError, ...  nothing could be measured
        """
        settings = self._settings
        # Workers start before this process uses gRPC, which does not support forks well.
        workers = [_Worker(self._part(index), self._heard) for index in range(settings.processes)]
        try:
            self._tell(f"starting {counted(settings.processes, 'client process')}")
            self._wait_ready()
            config = settings.client.config()
            watch = ServerWatch(
                settings.cluster, config, settings.window_s, self._heard.put, self._at_s
            )
            try:
                self._start = time.monotonic() + LEAD_S + settings.load.warmup_s
                for worker in workers:
                    worker.tell(json.dumps({"start": self._start}))
                self._keep({"type": "started", "at": time.time()})
                if self._faults is not None:
                    self._faults.start(self._start, self._heard.put)
                why = self._measure(workers)
                if self._faults is not None and why == LOAD_ENDED:
                    self._faults.wait()
            finally:
                watch.close()
            self._drain()
            self._keep({"type": "end", "why": why})
        finally:
            for worker in workers:
                worker.end()

    def _part(self, index: int) -> WorkerSettings:
        s = self._settings
        cluster = s.cluster if self._faults is None else self._faults.through
        return WorkerSettings(
            str(cluster.absolute()),
            str(s.trace.absolute()),
            s.load,
            s.client,
            s.window_s,
            s.seed,
            index,
            s.processes,
            tuple(str(one.absolute()) for one in s.oracles),
        )

    def _at_s(self) -> float | None:
        return time.monotonic() - self._start if self._start else None

    def _wait_ready(self) -> None:
        limit = time.monotonic() + READY_S
        missing = set(range(self._settings.processes))
        while missing:
            try:
                record = self._heard.get(timeout=max(limit - time.monotonic(), 0.01))
            except queue.Empty:
                raise ConfigError(
                    f"client processes {', '.join(map(str, sorted(missing)))} were not ready "
                    f"within {READY_S:g} s; start fewer (--processes)"
                ) from None
            if record["type"] == "error":
                raise DlmError(f"client process {record['client']}: {record['error']}")
            if record["type"] == "exit":
                raise DlmError(
                    f"client process {record['client']} ended with status {record['status']} "
                    "before it was ready; see its message above"
                )
            self._keep(record)
            missing.discard(record["client"])

    def _measure(self, workers: list[_Worker]) -> str:
        settings = self._settings
        why = LOAD_ENDED
        last = self._start + settings.load.seconds + settings.client.deadline_s + GRACE_S
        last += CHECK_S if settings.oracles else 0.0
        try:
            while len(self._ended) < settings.processes:
                now = time.monotonic()
                if now > last:
                    return f"client processes did not end within {GRACE_S:g} s of the last deadline"
                try:
                    record = self._heard.get(timeout=0.5)
                except queue.Empty:
                    continue
                fault = self._take(record)
                if fault:
                    why = fault
                    self._stop(workers)
                elif not self._stopping and (early := self._early()):
                    why = early
                    self._stop(workers)
                    last = time.monotonic() + settings.client.deadline_s + GRACE_S
        except KeyboardInterrupt:
            why = INTERRUPTED
            self._stop(workers)
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait
                self._wait_ended()
        return why

    def _stop(self, workers: list[_Worker]) -> None:
        self._stopping = True
        for worker in workers:
            worker.tell("stop")

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._heard.get_nowait())

    def _wait_ended(self) -> None:
        limit = time.monotonic() + self._settings.client.deadline_s + KILL_S
        while len(self._ended) < self._settings.processes and time.monotonic() < limit:
            with contextlib.suppress(queue.Empty):
                self._take(self._heard.get(timeout=0.1))

    def _take(self, record: Record) -> str:
        """Keeps a record; returns the fault of a client process, or ""."""
        kind = record["type"]
        if kind == "exit":
            was_well = record["client"] in self._ended
            self._ended.add(record["client"])
            if not was_well:
                self._keep(record)
                return f"client process {record['client']} ended with status {record['status']}"
            return ""
        self._keep(record)
        if kind == "error":
            return f"client process {record['client']}: {record['error']}"
        if kind == "end":
            self._ended.add(record["client"])
        elif kind == "window":
            self._add(record)
        elif kind == "fault":
            self._tell(f"at {record['at_s']:g} s: {record['what']}")
        return ""

    def _add(self, record: Record) -> None:
        """Adds a client's part of a window; when all parts are there, prints the window's line."""
        parts = self._parts.setdefault(record["window"], [])
        parts.append(record)
        if len(parts) < self._settings.processes:
            return
        del self._parts[record["window"]]
        merged = Latencies()
        for part in parts:
            merged.merge(Latencies.decode(part["latency"]))
        answered = sum(part["outcomes"].get(OK, 0) for part in parts)
        requests = sum(part["requests"] for part in parts)
        messages = sum(part["counts"].get("messages_ok", 0) for part in parts)
        self._outcomes.append(Outcome(requests, answered, messages))
        self._tell(self._line(record["window"], parts, merged, requests, answered))

    def _line(
        self, window: int, parts: list[Record], merged: Latencies, requests: int, answered: int
    ) -> str:
        s = self._settings
        begin = window * s.window_s
        seconds = min(s.window_s, s.load.seconds - begin)
        cells = [f"{requests / seconds:7.1f} requests/s"]
        if merged.count:
            p50, p99 = merged.at_ms(50.0), merged.at_ms(99.0)
            cells.append(f"p50 {p50:7.2f} ms, p99 {p99:7.2f} ms")
        cells.append(f"{requests - answered} failed")
        cpu_s = sum(part["counts"].get("cpu_s", 0.0) for part in parts)
        cells.append(f"clients {cpu_s / seconds:.2f} cores")
        cells.append("warm-up" if window < 0 else f"{s.load.seconds - begin - seconds:.0f} s left")
        return ", ".join(cells)

    def _early(self) -> str:
        if is_gone(self._outcomes) and not self._is_breaking():
            return f"the cluster vanished: no server answered for {2 * self._settings.window_s:g} s"
        return ""

    def _is_breaking(self) -> bool:
        """Whether a planned fault may be the reason that no server answers."""
        back_s = SILENT_WINDOWS * self._settings.window_s + BACK_S
        return self._faults is not None and (self._at_s() or 0.0) < self._faults.last_s + back_s


def records_of(path: Path) -> Iterator[Record]:
    """The records of a journal, without an incomplete last line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
