"""Real shard servers for tests: as threads of this process, or as processes that a test may kill.

Threads are quick to start, so tests that need no signal take them; all share one event loop.
Nothing here sleeps: a test waits for an event or for a line of a child, or looks again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlm.client.topology import Endpoint, write_cluster_file
from dlm.client.transport import GrpcConnection
from dlm.index.build import build_shard_set
from dlm.index.layout import Manifest, read_manifest
from dlm.index.search.shard import Shard
from dlm.ngram.backoff import DictModel
from dlm.server.app import ShardServer
from dlm.server.config import ServerConfig
from dlm.server.health import Event
from dlm.server.ready import Notice, Ready
from dlm.wire._pb import shard_pb2 as pb
from models import PlainModel

ROOT = Path(__file__).resolve().parents[1]
# Far above what anything here takes, a first start that compiles and a machine whose host gives it
# a tenth of its time included: only a hang meets it.
WAIT_S = 300.0

CHILD = """
import json, sys
from pathlib import Path
from dlm.server.app import serve
from dlm.server.config import ServerConfig
directories, index, config = json.loads(sys.argv[1])
sys.exit(serve(
    ServerConfig(**config), [Path(directory) for directory in directories], index,
    on_ready=lambda ready: print(ready.port, flush=True),
))
"""


def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()` is true; looks again and again, and fails after a long while."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        os.sched_yield()


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


def build(model: PlainModel, folder: Path, shards: int) -> ModelFiles:
    """Shards `model` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    arpa = model.write(folder / "model.arpa")
    build_shard_set(arpa, folder / f"{shards}-None", shards)
    return ModelFiles(folder / f"{shards}-None", DictModel.from_arpa(arpa))


class ProcessServer:
    """A shard server in processes of its own; `ready` waits for it.

    Args
        directory  of a shard set, or a list of them
        within     what the command line begins with: `ip netns exec NAME`, say
    """

    def __init__(
        self,
        directory: Path | list[Path],
        index: int,
        port: int = 0,
        within: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self.port = port
        self.host = config.get("host", "127.0.0.1")
        directories = [str(d) for d in (directory if isinstance(directory, list) else [directory])]
        arguments = json.dumps([directories, index, {"port": port, **config}])
        self.process = subprocess.Popen(
            [*within, sys.executable, "-c", CHILD, arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )

    def ready(self) -> ProcessServer:
        """Returns once the first query can be answered."""
        assert self.process.stdout is not None
        waiting = select.poll()  # not select(), which takes descriptors below 1,024 only
        waiting.register(self.process.stdout, select.POLLIN)
        waiting.poll(WAIT_S * 1000)
        line = self.process.stdout.readline()
        assert line, f"the server ended with {self.process.wait(WAIT_S)}"
        self.port = int(line)
        return self

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    def workers(self) -> list[int]:
        """The processes that it has started."""
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def pause(self) -> None:
        """Stops the process where it is; returns once the system says so."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once, whatever it does; the port is free when this returns."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def end(self) -> None:
        """Ends it and closes its pipe."""
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


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
        shard  an open `Shard`, or what stands in for one; or a list of them, of several models
    """

    def __init__(self, shard: Any, port: int = 0, **config: Any) -> None:
        self.shard = shard
        self.server: ShardServer | None = None
        self._ready: Future[Ready] = Future()
        self._config = ServerConfig(port=port, **config)
        self._run: Future[int] = asyncio.run_coroutine_threadsafe(self._main(), _Host.get().loop)
        self._run.add_done_callback(self._ended)

    async def _main(self) -> int:
        notice = Notice(self._ready.set_result)
        shards = self.shard if isinstance(self.shard, list) else [self.shard]
        self.server = ShardServer(self._config, shards, notice=notice)
        return await self.server.run()

    def _ended(self, run: Future[int]) -> None:
        error = run.exception()
        if error is not None and not self._ready.done():
            self._ready.set_exception(error)

    def ready(self) -> ThreadServer:
        """Returns once the first query can be answered."""
        self._ready.result(WAIT_S)
        return self

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._ready.result(WAIT_S).port

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def messages(self) -> int:
        """Score messages answered so far, by its own count."""
        assert self.server is not None
        return int(self.server.service.metrics.messages)

    def end(self) -> None:
        """Drains and ends it; the port is free when this returns."""
        if self.server is not None and not self._run.done():
            self.server.post(Event.STOP)
            self._run.result(WAIT_S)


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
        write_cluster_file(path, endpoints, shard_set=self.manifest.shard_set)
        return path

    def beats(self) -> list[pb.HeartbeatReply]:
        """A heartbeat of each server, over the wire."""
        out = []
        for address in self.addresses:
            connection = GrpcConnection(address)
            out.append(connection.heartbeat(pb.HeartbeatRequest(sequence=7), WAIT_S))
            connection.close()
        return out

    def messages(self) -> int:
        """Score messages that all servers together have answered, by their own count."""
        return sum(server.messages for server in self.servers)

    def end(self) -> None:
        """Ends every server."""
        for server in self.servers:
            server.end()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
