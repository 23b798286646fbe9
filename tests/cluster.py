"""Shard servers for tests, and the models that they serve. No test starts one in another way.

| helper | what runs | take it |
| --- | --- | --- |
| `ThreadServer` | `ShardServer` in a thread of this process | where a test needs no more: quick |
| `ProcessServer` | `dlm.server.app.serve` in processes of its own | to kill, pause or limit it |
| `CommandServer` | `dlm serve` or `dlm cluster`, as users start it | in tests of the command |
| `Cluster` | one of the first two for each shard of a set | for clients |

All have `ready`, which waits for the first answer, and `end`. Nothing waits for a time that passes:
`until` looks again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from dlm.client.cluster_file import Endpoint, write_cluster_file
from dlm.client.server import Connection
from dlm.index.layout import Manifest, read_manifest
from dlm.index.making import build_shard_set
from dlm.index.search.shard import Shard
from dlm.ngram.backoff import DictModel
from dlm.server.app import ShardServer
from dlm.server.config import ServerConfig
from dlm.server.health import Event
from dlm.server.process import Notice, Ready
from dlm.server.sets import FollowedSets
from dlm.wire._pb import shard_pb2 as pb
from forked import DLM, Process, start
from models import PlainModel

ROOT = Path(__file__).resolve().parents[1]
# Far above what anything here takes, a first start that compiles and a machine whose host gives it
# a tenth of its time included: only a hang meets it.
WAIT_S = 300.0

CHILD = """
import json, logging, sys
from pathlib import Path
from dlm.server.app import serve
from dlm.server.config import ServerConfig
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
directories, index, config, ready_file = json.loads(sys.argv[1])
sys.exit(serve(
    ServerConfig(**config), [Path(directory) for directory in directories], index,
    on_ready=lambda ready: print(ready["port"], flush=True), ready_file=Path(ready_file)
))
"""


def until(
    holds: Callable[[], bool], process: subprocess.Popen[Any] | Process | None = None
) -> None:
    """Returns once `holds()` is true; looks again and again, and fails after a long while.

    Args
        process  fails at once where this one ends meanwhile
    """
    end = time.monotonic() + WAIT_S
    while not holds():
        assert process is None or process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end, "not within the bound"
        time.sleep(0.001)


def command(*arguments: object) -> list[str]:
    """The command line of `dlm` in this environment."""
    return [sys.executable, "-m", "dlm.cli.main", *map(str, arguments)]


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass(frozen=True)
class ModelFiles:
    """A model, its oracle, and the folders of its shard sets."""

    directory: Path
    oracle: DictModel

    @cached_property
    def manifest(self) -> Manifest:
        """Of the shard set."""
        return read_manifest(self.directory)

    def words(self) -> list[str]:
        """The words by id."""
        return [w.decode("utf-8", "surrogateescape") for w in self.oracle.vocabulary.words]

    def again(self, shards: int, *, seed: int | None = None) -> ModelFiles:
        """The same model in another sharding; with `seed`, slots placed by a random load."""
        name = f"{shards}-{seed}"
        directory = self.directory.with_name(name)
        if not directory.exists():
            load = None if seed is None else np.random.default_rng(seed).integers(1, 1000, 4096)
            build_shard_set(
                self.directory.with_name("model.arpa"), directory, shards, slot_load=load
            )
        return ModelFiles(directory, self.oracle)


def build(model: PlainModel, folder: Path, shards: int, **options: Any) -> ModelFiles:
    """Shards `model` in `folder`; `options` as `build_shard_set` has them."""
    folder.mkdir(parents=True, exist_ok=True)
    arpa = model.write(folder / "model.arpa")
    build_shard_set(arpa, folder / f"{shards}-None", shards, **options)
    return ModelFiles(folder / f"{shards}-None", DictModel.from_arpa(arpa))


class _Process:
    """A command that serves, and the file that it writes when it is ready.

    Args
        file    that it writes; what is there before is stale
        forked  a program that `forked.start` runs, with `line` as its arguments
    """

    def __init__(
        self,
        line: Sequence[str],
        file: Path,
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        forked: str = "",
    ) -> None:
        self._file = file
        self._stale = self._content()
        # Files, not pipes: a child that prints much never waits for its parent.
        self._printed, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | Process
        if forked:
            streams = (self._printed.fileno(), self._printed.fileno(), self._errors.fileno())
            self.process = start(forked, line, streams=streams, cwd=cwd, env=env or os.environ)
        else:
            self.process = subprocess.Popen(
                line, cwd=cwd, env=env, stdout=self._printed, stderr=self._errors
            )

    def _content(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except FileNotFoundError:
            return None

    @property
    def printed(self) -> str:
        """Its standard output so far."""
        return _all_of(self._printed)

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        return _all_of(self._errors)

    def ready(self) -> Self:
        """Returns once the first query can be answered."""
        try:
            until(lambda: self._content() not in (None, self._stale), self.process)
        except AssertionError as exc:
            exc.add_note(self.errors)
            self.end()
            raise
        return self

    def children(self) -> list[int]:
        """The processes that it has started."""
        return children(self.process.pid)

    def pause(self) -> None:
        """Stops the process where it is; returns once the system says so."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to end; the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once it has ended; an error has what it printed, and its stacks."""
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired as exc:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            exc.add_note(self.errors)
            raise

    def kill(self) -> None:
        """Ends it at once, whatever it does; the port is free when this returns."""
        self.process.kill()
        self.wait()

    def end(self) -> None:
        """Ends it at once if it still runs, and lets go of what it printed."""
        if self.process.poll() is None:
            self.kill()
        self._printed.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Ends it as SIGTERM does, with status 0, unless it has ended."""
        try:
            if kind is None and self.process.poll() is None:
                assert self.stop() == 0, self.errors
        finally:
            self.end()


def _all_of(file: IO[bytes]) -> str:
    """What is in a file that another process writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class CommandServer(_Process):
    """`dlm serve` or `dlm cluster` as a user starts it; with `with` it must end with status 0.

    Its process is forked, and so are those of its servers, unless it is given options for Python.

    Args
        arguments   of dlm
        ready_file  that it writes when it is ready; of `dlm cluster` cluster.toml
        cwd         the current folder
        python      options of the interpreter, which starts anew, here and for each server
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        ready_file: str | Path = "cluster.toml",
        python: Sequence[str] = (),
    ) -> None:
        program, *line = command(*arguments)
        if python:
            super().__init__([program, *python, *line], cwd / ready_file, cwd=cwd, env=env)
        else:
            line = ["dlm", *map(str, arguments)]
            super().__init__(line, cwd / ready_file, cwd=cwd, env=env, forked=DLM)


class ProcessServer(_Process):
    """A shard server in processes of its own; `notice` holds what it said once it was `ready`.

    Args
        directory   of a shard set, or a list of them
        within      what the command line begins with: `ip netns exec NAME`, say
        ready_file  that it writes; one of its own where not given
        open_files  its limit of open files: soft and hard, or both in one
    """

    def __init__(
        self,
        directory: Path | list[Path],
        index: int,
        port: int = 0,
        within: Sequence[str] = (),
        *,
        ready_file: Path | None = None,
        open_files: int | tuple[int, int] | None = None,
        **config: Any,
    ) -> None:
        self.port = port
        self.host = config.get("host", "127.0.0.1")
        self.notice: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dlm-test-server-")
        file = ready_file or Path(self._folder.name) / "ready.json"
        directories = [str(d) for d in (directory if isinstance(directory, list) else [directory])]
        arguments = json.dumps([directories, index, {"port": port, **config}, str(file)])
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        if within or open_files is not None:
            line = [*within, sys.executable, "-c", CHILD, arguments]
            super().__init__(line, file, cwd=ROOT, env=environ)
        else:
            super().__init__(["-c", arguments], file, cwd=ROOT, env=environ, forked=CHILD)
        if open_files is not None:  # long before it opens or raises anything
            both = open_files if isinstance(open_files, tuple) else (open_files, open_files)
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, both)

    def ready(self) -> Self:
        """Returns once the first query can be answered."""
        super().ready()
        self.notice = json.loads(self._content() or b"")
        self.port = self.notice["port"]
        return self

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    def end(self) -> None:
        """Ends it at once if it still runs, and lets go of what it wrote."""
        super().end()
        self._folder.cleanup()


class _Host(threading.Thread):
    """The thread and the event loop of all thread servers."""

    _one: _Host | None = None

    def __init__(self) -> None:
        super().__init__(name="test-servers", daemon=True)
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @classmethod
    def get(cls) -> _Host:
        if cls._one is None:
            cls._one = cls()
            cls._one.start()
        return cls._one


class ThreadServer:
    """A `ShardServer`, the class that processes run, in a thread of this process.

    Args
        shard     an open `Shard`, or what stands in for one; or a list of them, of several models
        clock     instead of the system's
        own_loop  in a thread and an event loop of its own, which `shard` may hold up; the others
                  share one
        config    of `ServerConfig`, whose own default of drain_grace_s is for users' clients
    """

    def __init__(
        self,
        shard: Any,
        port: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        own_loop: bool = False,
        **config: Any,
    ) -> None:
        self.shard = shard
        self.server: ShardServer | None = None
        self.status: Future[int] = Future()  # or why it failed
        self._ready: Future[Ready] = Future()
        self._config = ServerConfig(**{"port": port, "drain_grace_s": 0.0, **config})
        self._clock = clock
        if own_loop:
            threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        else:
            asyncio.run_coroutine_threadsafe(self._run(), _Host.get().loop)

    async def _run(self) -> None:
        notice = Notice(self._ready.set_result)
        shards = self.shard if isinstance(self.shard, list) else [self.shard]
        try:
            sets = FollowedSets(self._config, shards[0].index) if self._config.sets else None
            self.server = ShardServer(
                self._config, shards, notice=notice, clock=self._clock, sets=sets
            )
            self.status.set_result(await self.server.run())
        except BaseException as exc:  # noqa: BLE001 - the test that waits gets it
            self.status.set_exception(exc)
            if not self._ready.done():
                self._ready.set_exception(exc)

    def ready(self) -> ThreadServer:
        """Returns once the first query can be answered."""
        self._ready.result(WAIT_S)
        return self

    @property
    def port(self) -> int:
        """The port it listens on; waits until there is one."""
        until(lambda: self.status.done() or bool(self.server and self.server.port))
        assert self.server is not None
        return self.server.port

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def messages(self) -> int:
        """Score messages answered so far, by its own count."""
        assert self.server is not None
        return int(self.server.service.metrics.messages)

    def post(self, event: Event) -> None:
        """Hands `event` to the server."""
        assert self.server is not None
        self.server.post(event)

    def end(self, *, at_once: bool = False) -> None:
        """Ends it, drained unless `at_once`; the port is free when this returns."""
        if self.server is None or self.status.done():
            return
        for _ in range(2 if at_once else 1):
            self.post(Event.STOP)
        self.status.exception(WAIT_S)


class Cluster:
    """A server for each shard of a shard set.

    Args
        ports  of each server; free ones where not given
        kind   `ThreadServer` or `ProcessServer`
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        ports: Sequence[int] = (),
        kind: type[ThreadServer] | type[ProcessServer] = ThreadServer,
        **config: Any,
    ) -> None:
        self.files = files
        self.manifest = files.manifest
        self.servers: list[Any] = []
        for index in range(self.manifest.shards):
            port = ports[index] if index < len(ports) else 0
            if kind is ThreadServer:
                shard = Shard.open(files.directory, index)
                self.servers.append(ThreadServer(shard, port, **config))
            else:
                self.servers.append(ProcessServer(files.directory, index, port, **config))
        try:
            for server in self.servers:
                server.ready()
        except BaseException:
            self.end()
            raise

    @property
    def addresses(self) -> list[str]:
        """host:port of each shard's server."""
        return [server.address for server in self.servers]

    @property
    def ports(self) -> list[int]:
        """Port of each shard's server."""
        return [server.port for server in self.servers]

    def write(self, path: Path) -> Path:
        """Writes the servers' cluster.toml; returns the path."""
        endpoints = [Endpoint(address, shard) for shard, address in enumerate(self.addresses)]
        write_cluster_file(path, endpoints)
        return path

    def beats(self) -> list[pb.HeartbeatReply]:
        """A heartbeat of each server, over the wire."""
        out = []
        for address in self.addresses:
            connection = Connection(address)
            out.append(connection.heartbeat(pb.HeartbeatRequest(sequence=7), WAIT_S))
            connection.close()
        return out

    def messages(self) -> int:
        """Score messages that all servers together have answered, by their own count."""
        return sum(server.messages for server in self.servers)

    def end(self) -> None:
        """Ends every server, all at the same time."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.end(), self.servers))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
