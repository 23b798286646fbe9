"""Several processes on one port: the supervisor that starts, replaces and ends them.

It opens and compiles, then forks its workers, and never starts gRPC, an event loop or a thread:
none would survive the fork that replaces a worker. Workers send lines of JSON over a pipe, which
closes when one ends for any reason; SIGTERM drains them, SIGKILL ends them. One that is stuck, or
does not become ready, is ended. If metrics are on, one more process joins theirs, and outlives all.

A worker that dies of SIGBUS could not read a page of a mapped file. Later workers read the files
and map them again; while they find one damaged, the server is not ready and says which.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn

from dlm.errors import ConfigError, DlmError
from dlm.logs import EventLog
from dlm.server.child import as_error, end_with_parent, say
from dlm.server.config import Access
from dlm.server.exposition import WorkerSockets, serve_joined, worker_sockets
from dlm.server.port import reserved
from dlm.server.process import Notice, OnReady, Process, Ready, keep_objects
from dlm.server.sets import POLL_S, ListedSets, SharedText, ToldSets
from dlm.signals import END_SIGNALS, stop_signals

logger = EventLog(__name__)

# A worker that lived for less than this, in seconds, may well die of the same cause again.
QUICK_S = 30.0
# Then the next start waits this long, in seconds, and twice as long after each further quick death.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
# Seconds between the beats of a worker, and between the looks of its supervisor.
BEAT_S = 1.0
# Looks in a row without a sign of life after which a worker is given up: far more than a busy loop
# takes. Before its first sign it has longer, since a starting machine is busy.
SILENT_LOOKS = 10
START_LOOKS = 60
# Looks until it must be ready, while its loop runs: the warm-up may read from a slow disk.
READY_LOOKS = 600


@dataclass(slots=True)
class Pulse:
    """Whether a worker is alive, from its fork until it ends.

    Counted in looks of the supervisor, never in seconds: if the whole machine was paused, there
    were no looks, and no worker is given up.

    looks         made before it was ready; -1 from then on
    silent_looks  made since the last sign of life
    """

    looks: int = 0
    silent_looks: int = 0
    has_beaten: bool = False

    def beat(self) -> None:
        self.silent_looks = 0
        self.has_beaten = True

    def ready(self) -> None:
        self.beat()
        self.looks = -1

    def stuck_reason(self) -> str | None:
        """One look; the reason if the worker must be given up."""
        self.silent_looks += 1
        silence = SILENT_LOOKS if self.has_beaten else START_LOOKS
        if self.silent_looks > silence:
            return f"gave no sign of life for {silence * BEAT_S:g} s"
        if self.looks >= 0:
            self.looks += 1
            if self.looks > READY_LOOKS:
                return f"was not ready after {READY_LOOKS * BEAT_S:g} s"
        return None


def pause_after(lived_s: float, quick_deaths: int) -> tuple[int, float]:
    """Quick deaths in a row from now on, and the seconds to wait before the next start of a worker.

    The first quick death costs no pause, and a long life resets the count.
    """
    if lived_s >= QUICK_S:
        return 0, 0.0
    if quick_deaths == 0:
        return 1, 0.0
    doubled = FIRST_PAUSE_S * 2.0 ** min(quick_deaths - 1, 16)
    return quick_deaths + 1, min(doubled, LONGEST_PAUSE_S)


# Serves on a port until SIGTERM and returns the exit status; runs in the worker's process.
WorkerMain = Callable[[int, Process, OnReady], int]

# Seconds beyond drain_grace_s and shutdown_timeout_s for a worker to end by itself.
END_GRACE_S = 15.0


class _Stopped(BaseException):
    """A signal came while no worker was running."""


@dataclass(slots=True)
class _Worker:
    """A child process, or the pause before the next one.

    index   None for the process that shows the metrics of all
    pid     0 between two processes;  pipe  for its messages, -1 then
    again   when the next one starts
    suspect whether it may map files of which another worker could not read a page
    """

    index: int | None
    restarts: int = 0
    quick_deaths: int = 0
    pid: int = 0
    pipe: int = -1
    started: float = 0.0
    again: float = 0.0
    ready: bool = False
    said: bytes = field(default=b"", repr=False)
    error: DlmError | None = None
    pulse: Pulse = field(default_factory=Pulse)
    suspect: bool = False


class Supervisor:
    """Keeps `config.workers` processes serving.

    Args  warm    called once, before the first fork: what it leaves in memory is shared
          work    what each worker does; gets the port, its own `Process`, and what to call when
                  ready
          notice  published when all workers answer, withdrawn when they drain
          look    called several times per second: refreshes what new workers start with
          sets    the list of shard sets that the workers follow, if there is one
          labels  of the metrics that are shown for a dead worker
          ready   what a worker says once it is ready: a dataclass with `pid` and `workers`
    """

    def __init__(
        self,
        config: Access,
        *,
        warm: Callable[[], None],
        work: WorkerMain,
        notice: Notice,
        look: Callable[[], None] | None = None,
        sets: ListedSets | None = None,
        labels: Mapping[str, str] | None = None,
        ready: type[Any] = Ready,
    ) -> None:
        self._said_when_ready = ready
        self._config = config
        self._labels = dict(labels or {})
        self._warm, self._work, self._notice = warm, work, notice
        self._looks = [one for one in (look, sets.look if sets else None) if one is not None]
        self._sets = sets
        self._workers = [_Worker(index) for index in range(config.workers)]
        self._shows = _Worker(None) if config.metrics_port else None
        self._metrics: WorkerSockets | None = None
        self._port = 0
        self._signals = 0
        self._interruptible = False
        self._stopping_since: float | None = None
        self._killed = False
        self._whole = True
        self._published = False
        self._ready: Any = None
        self._damage = SharedText()
        self._doubts = False  # from a page that cannot be read until every worker maps anew
        self._next_look = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()

    def run(self) -> int:
        """Serves until one of `stop_signals`; a second one ends the workers at once.

        Returns  0 if every worker answered all of its messages, 1 if one was cut off
        Raises   ConfigError  the port cannot be bound, or a worker ended before all were ready
                 DlmError     the error that such a worker raised
        """
        try:
            return self._run()
        except _Stopped:
            return 0

    def _run(self) -> int:
        config = self._config
        with (
            self._selector,
            self._wake,
            self._woken,
            reserved(config.host, config.port, address=config.address) as self._port,
            worker_sockets(config) as self._metrics,
            self._handling_signals(),
        ):
            try:
                self._interruptible = True
                if self._signals:
                    raise _Stopped
                self._prepare()
                self._supervise()
            finally:
                self._interruptible = False
                self._notice.withdraw()
                self._end_all()
        logger.info("server.stopped", extra={"workers": config.workers, "whole": self._whole})
        return 0 if self._whole else 1

    # ------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        before = {number: signal.signal(number, self._signalled) for number in stop_signals()}
        wakes = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakes)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._interruptible and not any(worker.pid for worker in self._workers):
            raise _Stopped

    # ---------------------------------------------------------------- the whole

    @property
    def _processes(self) -> list[_Worker]:
        return [*self._workers, self._shows] if self._shows else self._workers

    def _prepare(self) -> None:
        begun = time.monotonic()
        self._warm()
        keep_objects()
        logger.info(
            "server.supervisor.warmed", extra={"duration_s": round(time.monotonic() - begun, 3)}
        )

    def _supervise(self) -> None:
        while True:
            now = time.monotonic()
            if self._signals and self._stopping_since is None:
                self._stop(now)
            if self._stopping_since is None:
                for look in self._looks:
                    look()
                for worker in self._processes:
                    if not worker.pid and worker.again <= now:
                        self._start_or_wait(worker)
                if self._next_look <= now:
                    self._next_look = now + BEAT_S  # from now, however long this process slept
                    self._look_for_stuck()
            elif not any(worker.pid for worker in self._workers):
                return
            elif self._signals > 1 or now >= self._last_moment():
                self._kill()
            for key, _ in self._selector.select(self._patience(now)):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._hear(key.data)

    def _last_moment(self) -> float:
        assert self._stopping_since is not None
        config = self._config
        return self._stopping_since + config.drain_grace_s + config.shutdown_timeout_s + END_GRACE_S

    def _patience(self, now: float) -> float | None:
        """Seconds until there is something to do, if no message or signal comes."""
        if self._killed:
            return None
        if self._stopping_since is not None:
            return max(self._last_moment() - now, 0.0)
        pauses = [max(w.again - now, 0.0) for w in self._processes if not w.pid]
        pauses.append(max(self._next_look - now, 0.0))
        if self._looks:
            pauses.append(POLL_S)
        return min(pauses)

    def _look_for_stuck(self) -> None:
        """Ends workers that do not become ready or do not beat; they are then replaced as usual."""
        for worker in self._workers:
            why = worker.pulse.stuck_reason() if worker.pid else None
            if why is not None:
                worker.pulse = Pulse()
                worker.error = ConfigError(
                    f"worker {worker.index} {why}; it was ended. The usual cause is a file on a "
                    "disk or network that does not answer: check dmesg and the mounts"
                )
                facts = {"worker": worker.index, "pid": worker.pid, "error": str(worker.error)}
                logger.error("server.worker.stuck", extra=facts)
                os.kill(worker.pid, signal.SIGKILL)

    def _stop(self, now: float) -> None:
        self._stopping_since = now
        self._notice.withdraw()
        if self._sets is not None:
            self._sets.close()
        logger.info("server.supervisor.draining", extra={"workers": len(self._workers)})
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._whole = False
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for worker in self._workers:
            if worker.pid:  # ours until we wait for it, so never another process of that number
                os.kill(worker.pid, number)

    def _end_all(self) -> None:
        if self._sets is not None:
            self._sets.close()
        for worker in self._processes:
            if worker.pid:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                os.close(worker.pipe)
                worker.pid = 0

    # --------------------------------------------------------------- one worker

    def _start_or_wait(self, worker: _Worker) -> None:
        """Starts a worker; or later, if the system has no process or no memory for it now. At
        the server's start, that is a ConfigError."""
        try:
            self._start(worker)
        except OSError as exc:
            if not self._published:
                raise ConfigError(f"worker {worker.index} cannot be started: {exc}") from exc
            worker.quick_deaths, pause = pause_after(0.0, max(worker.quick_deaths, 1))
            worker.again = time.monotonic() + pause
            facts = {"worker": worker.index, "again_in_s": pause, "error": str(exc)}
            logger.error("server.worker.not_started", extra=facts)

    def _start(self, worker: _Worker) -> None:
        worker.started, worker.ready, worker.said, worker.error = time.monotonic(), False, b"", None
        worker.pulse, worker.suspect = Pulse(), False
        ours, theirs = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        # A signal must find either our handler or the child's own, never ours in the child.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            worker.pid = os.fork()
            if not worker.pid:
                os.close(ours)
                self._be(worker, theirs, parent, blocked)
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(theirs)  # the worker's copy is the last: its end is the end of the pipe
        worker.pipe = ours
        os.set_blocking(ours, False)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        facts = {"worker": worker.index, "pid": worker.pid, "restarts": worker.restarts}
        is_worker = worker.index is not None
        name = "server.worker.started" if is_worker else "server.exposition.started"
        logger.info(name, extra=facts)

    def _be(
        self, worker: _Worker, pipe: int, parent: int, mask: set[int | signal.Signals]
    ) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is in flight yet
            # These reach every process of a terminal; the supervisor's SIGTERM follows.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            end_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._selector.close()
            if self._sets is not None:
                self._sets.turn.leave()
            metrics = self._metrics
            if worker.index is None:
                assert metrics is not None
                metrics.keep_own(None)
                serve_joined(metrics.listening, metrics.ways, self._damage.read, self._labels)
                status = 0
            else:
                if metrics is not None:
                    metrics.listening.close()
                    metrics.keep_own(worker.index)
                _name_in_logs(worker.index)
                process = Process(
                    worker.index,
                    len(self._workers),
                    worker.restarts,
                    metrics_socket=metrics.sockets[worker.index] if metrics else None,
                    beat=lambda: say(pipe, {"beat": 1}),
                    damage=self._damage,
                    doubts=self._doubts,
                    checks=lambda: say(pipe, {"checks": 1}),
                    sets=self._told(worker.index, pipe),
                    rejected=self._sets.rejected if self._sets else SharedText(),
                )
                # The beat must not wait for a supervisor that does not read.
                os.set_blocking(pipe, False)
                tell: OnReady = lambda ready: say(pipe, {"ready": asdict(ready)})  # noqa: E731
                status = int(self._work(self._port, process, tell))
        except (DlmError, OSError) as exc:
            say(pipe, {"error": type(exc).__name__, "message": str(exc)})
        except BaseException as exc:
            logger.critical("server.worker.failed", exc_info=exc, extra={"worker": worker.index})
        finally:
            try:
                logging.shutdown()
            finally:
                os._exit(status)

    def _told(self, worker: int, pipe: int) -> ToldSets | None:
        if self._sets is None:
            return None
        number, _ = self._sets.state.of(worker)
        return ToldSets(self._sets.told, worker, number, lambda said: say(pipe, {"sets": said}))

    def _hear(self, worker: _Worker) -> None:
        try:
            data = os.read(worker.pipe, 65_536)
        except BlockingIOError:
            return
        worker.said += data
        *lines, worker.said = worker.said.split(b"\n")
        for line in lines:
            content = json.loads(line)
            if "beat" in content:
                worker.pulse.beat()
            elif "checks" in content:
                worker.pulse = Pulse()  # as long as that takes
            elif "sets" in content:
                if self._sets is not None and worker.index is not None:
                    self._sets.heard(worker.index, content["sets"])
            elif "ready" in content:
                worker.ready = True
                worker.pulse.ready()
                self._ready = self._said_when_ready(**content["ready"])
                self._believe_again(worker)
                self._publish()
            else:
                worker.error = as_error(content["error"], content["message"])
        if not data:
            self._ended(worker)

    def _publish(self) -> None:
        if self._published or self._stopping_since is not None:
            return
        if all(worker.ready for worker in self._workers):
            self._published = True
            self._publish_notice()
            logger.info(
                "server.supervisor.ready", extra={"port": self._port, "workers": len(self._workers)}
            )

    def _publish_notice(self) -> None:
        ready = replace(self._ready, pid=os.getpid(), workers=len(self._workers))
        self._notice.publish(ready)

    def _ended(self, worker: _Worker) -> None:
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        _, how = os.waitpid(worker.pid, 0)
        status, pid = os.waitstatus_to_exitcode(how), worker.pid
        worker.pid, worker.pipe = 0, -1
        lived = time.monotonic() - worker.started
        facts: dict[str, Any] = {
            "worker": worker.index,
            "pid": pid,
            "status": status,
            "lived_s": round(lived, 3),
        }
        if status < 0:
            facts["signal"] = signal.Signals(-status).name
        if self._sets is not None and worker.index is not None and self._stopping_since is None:
            self._sets.ended(worker.index)
        if self._stopping_since is not None and worker.index is not None:
            # One that was not ready had nothing in flight, however it ended.
            self._whole = self._whole and (status == 0 or not worker.ready)
            logger.info("server.worker.exited", extra=facts)
            return
        if not self._published and worker.index is not None:
            raise worker.error or ConfigError(
                f"worker {worker.index} ended with status {status} before the server was ready; "
                "see its log for the reason"
            )
        if status == -signal.SIGBUS and not worker.suspect:
            self._doubts = True
            for other in self._workers:
                other.suspect = other.pid > 0
        if self._doubts and worker.error is not None:
            self._found_damage(worker.error)
            lived = 0.0  # however long it took to find: to look again is dear
            worker.quick_deaths = max(worker.quick_deaths, 1)
        worker.quick_deaths, pause = pause_after(lived, worker.quick_deaths)
        worker.again = time.monotonic() + pause
        worker.restarts += 1
        facts |= {"again_in_s": pause, "error": str(worker.error or "")}
        name = "server.exposition.exited" if worker.index is None else "server.worker.exited"
        logger.error(name, extra=facts)

    # ------------------------------------------------- files that are damaged

    def _found_damage(self, error: DlmError) -> None:
        """A new worker found why a page of a map could not be read: the server is not ready."""
        if self._damage.read() != str(error):
            self._damage.write(str(error))
            logger.error("server.file.damaged", extra={"error": str(error)})
        self._notice.withdraw()

    def _believe_again(self, worker: _Worker) -> None:
        """A worker read all of the files and is ready with new maps; the others follow it."""
        if not self._doubts or worker.suspect:
            return
        if self._damage.read():
            self._damage.write("")
            logger.info("server.file.recovered", extra={"worker": worker.index})
            if self._published and self._stopping_since is None:
                self._publish_notice()
        for other in self._workers:
            if other.pid and other.suspect:
                os.kill(other.pid, signal.SIGTERM)  # a second SIGTERM changes nothing
        if all(one.pid and one.ready and not one.suspect for one in self._workers):
            self._doubts = False  # a later death of a worker is another matter


def _name_in_logs(index: int) -> None:
    def named(record: logging.LogRecord) -> bool:
        if not hasattr(record, "worker"):
            record.worker = index
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(named)
