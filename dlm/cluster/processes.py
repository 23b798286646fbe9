"""Shard servers as child processes: started, watched and restarted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlm.client.config.cluster_file import WRITTEN_BY, ClusterToml, Endpoint
from dlm.errors import ConfigError, ShardDown
from dlm.files import locked, scratch_folder
from dlm.index.layout import Manifest, read_manifest
from dlm.jit import compile_ahead
from dlm.server.child import command_of_child
from dlm.server.compiling import KERNELS
from dlm.server.port import reserved
from dlm.units import counted

START_S = 120.0  # the first start compiles the kernels: seconds, more on a busy machine
STOP_S = 10.0
LOOK_S = 0.2  # between two looks at the processes
RESTART_S = 2.0  # a server that ends at once is restarted at this interval
HELD_S = 5.0  # workers of a server that was killed leave its port sooner


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; its endpoint's pid is also the group of all its processes.

    command  its words after `dlm`
    """

    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    command: Sequence[str]

    def again(self) -> Server:
        """Starts another in its place, on the same port; it is not ready yet."""
        command = list(self.command)
        command[command.index("--port") + 1] = self.endpoint.address.rsplit(":", 1)[1]
        process = _start(command)
        return Server(process, replace(self.endpoint, pid=process.pid), command)

    def beside(self, shard: int, ready: Path) -> Server:
        """Starts a server of another shard with the same options, at a free port; returns it once
        it is ready.

        Args    ready  its file, for as long as it serves
        Raises  ShardDown, ConfigError  it did not start; its message is on standard error
        """
        command = list(self.command)
        changes = (("--shard", str(shard)), ("--ready-file", os.fspath(ready)), ("--port", "0"))
        for name, value in changes:
            command[command.index(name) + 1] = value
        process = _start(command)
        try:
            (endpoint,) = _wait_ready([process], [ready], 1)
        except BaseException:
            stop([process])
            raise
        return Server(process, replace(endpoint, shard=shard), command)

    def by_hand(self) -> str:
        """The command line that starts another in its place, for a user to type."""
        options = list(self.command)
        for name, plain in (("--ready-file", None), ("--workers", "1"), ("--metrics-port", "0")):
            at = options.index(name)
            if plain in (None, options[at + 1]):
                del options[at : at + 2]
        options[options.index("--port") + 1] = self.endpoint.address.rsplit(":", 1)[1]
        return shlex.join(["dlm", *options])


def _is_free(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(ConfigError), reserved(host, int(port), address=address):
        return True
    return False


def how_it_ended(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed ({signal.Signals(-status).name})"
    return f"ended with status {status}"


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_of_child("dlm.cli.main", *command),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the parent, which stops them
    )


def holders(manifests: Sequence[Manifest]) -> list[list[int]]:
    """For each server of a cluster, the indices in `manifests` of the sets that have its shard."""
    servers = max(manifest.shards for manifest in manifests)
    return [
        [at for at, manifest in enumerate(manifests) if index < manifest.shards]
        for index in range(servers)
    ]


@contextlib.contextmanager
def running_servers(
    directories: Sequence[Path],
    *,
    workers: int = 1,
    replicas: int = 1,
    first_port: int = 0,
    first_metrics_port: int = 0,
    log_level: str = "warning",
    options: Sequence[str] = (),
    sets: Path | None = None,
    compiling: Callable[[Sequence[Any]], object] = compile_ahead,
) -> Iterator[list[Server]]:
    """Servers for each shard index of the shard sets in `directories`; stopped at the end.

    Server i holds shard i of every set that has one; the first folder is the default of those that
    hold it. Further replicas come after the first of all shards, in the same order. Code that
    starts one `again` must put it into the list in place of the old one.

    Args    workers     processes of each server
            replicas    servers of each shard
            first_port  server i gets first_port + i; 0 takes free ports
            first_metrics_port  likewise; 0 means none
            options     of `dlm serve`, for each
            sets        a file that lists the folders, which the servers then follow
            compiling   compiles kernels that an earlier start did not cache
    Raises  ShardDown, ConfigError  a server did not start; its message is on standard error
    """
    compiling(KERNELS)  # otherwise all servers would compile the same at once
    held = holders([read_manifest(directory) for directory in directories])
    shards = len(held)
    with scratch_folder(None, "dlm-servers") as scratch:
        ready = [scratch / f"server-{index}.json" for index in range(shards * replicas)]
        commands: list[list[str]] = []
        processes: list[subprocess.Popen[bytes]] = []
        servers: list[Server] = []
        try:
            for index, held_sets in enumerate(held * replicas):
                folders = [os.fspath(directories[at]) for at in held_sets]
                command = ["serve", *(folders if sets is None else ("--sets", os.fspath(sets)))]
                command += [
                    "--workers",
                    str(workers),
                    "--shard",
                    str(index % shards),
                    "--ready-file",
                    os.fspath(ready[index]),
                ]
                command += ["--port", str(first_port + index if first_port else 0)]
                metrics_port = first_metrics_port + index if first_metrics_port else 0
                command += ["--metrics-port", str(metrics_port)]
                command += ["--host", "127.0.0.1", "--log-level", log_level, *options]
                commands.append(command)
                processes.append(_start(command))
            endpoints = _wait_ready(processes, ready, shards)
            servers = [Server(*one) for one in zip(processes, endpoints, commands, strict=True)]
            yield servers
        finally:
            stop([server.process for server in servers] or processes)


def _wait_ready(
    processes: list[subprocess.Popen[bytes]], ready: list[Path], shards: int
) -> list[Endpoint]:
    limit = time.monotonic() + START_S
    endpoints = []
    for index, (process, path) in enumerate(zip(processes, ready, strict=True)):
        while not path.exists():
            for other, candidate in enumerate(processes):
                if candidate.poll() is not None:
                    raise ConfigError(
                        f"a server of shard {other % shards} "
                        f"{how_it_ended(candidate.returncode)} before it was ready; its own "
                        "message is above"
                    )
            if time.monotonic() > limit:
                raise ShardDown(
                    f"a server of shard {index % shards} was not ready within {START_S:g} s; start "
                    "the cluster again when this machine has less to do"
                )
            time.sleep(0.02)
        port = json.loads(path.read_text())["port"]
        endpoints.append(Endpoint(f"127.0.0.1:{port}", index % shards, process.pid))
    return endpoints


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    limit = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(limit - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_gateway(
    cluster_file: Path, options: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A gateway to these servers, on free ports unless `options` say otherwise, and what it wrote
    when it was ready: `port`, `http_port`, `pid`. Stopped at the end.

    Raises  ShardDown, ConfigError  it did not start; its message is on standard error
    """
    with scratch_folder(None, "dlm-gateway") as scratch:
        ready = scratch / "gateway.json"
        command = [
            "gateway",
            "--cluster",
            os.fspath(cluster_file),
            "--ready-file",
            os.fspath(ready),
        ]
        command += ["--port", "0", "--http-port", "0", "--log-level", "warning", *options]
        process = _start(command)
        try:
            limit = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None:
                    raise ConfigError(
                        f"the gateway {how_it_ended(process.returncode)} before it was ready; its "
                        "own message is above"
                    )
                if time.monotonic() > limit:
                    raise ShardDown(
                        f"the gateway was not ready within {START_S:g} s; start the cluster again "
                        "when this machine has less to do"
                    )
                time.sleep(0.02)
            yield process, json.loads(ready.read_text())
        finally:
            stop([process])


def supervise(
    servers: list[Server],
    stopping: Callable[[], bool],
    *,
    restart: bool,
    changed: Callable[[list[Server]], None],
) -> Iterator[str]:
    """Yields a line for each event of a server, until `stopping()`.

    The other servers go on, even if a shard has none left: clients with `bigram_fallback` answer
    for it.

    Args    restart  whether a server that ended is restarted, in its place in `servers`
            changed  called after a restart
    Raises  ShardDown  every server ended, and none is restarted
    """
    gone: set[str] = set()
    started: dict[str, float] = {}
    held: dict[str, float] = {}  # address -> when it is said that its port is not free
    while not stopping():
        time.sleep(LOOK_S)
        for at, server in enumerate(servers):
            endpoint, status = server.endpoint, server.process.poll()
            if status is None or endpoint.address in gone:
                continue
            what = (
                f"the server of shard {endpoint.shard} at {endpoint.address} {how_it_ended(status)}"
            )
            if restart:
                now = time.monotonic()
                if not _is_free(endpoint.address):  # its workers have the port until they end
                    if now >= held.setdefault(endpoint.address, now + HELD_S):
                        held[endpoint.address] = math.inf
                        yield f"{what}; it is restarted once another process leaves its port"
                    continue
                held.pop(endpoint.address, None)
                if now - started.get(endpoint.address, -RESTART_S) >= RESTART_S:
                    started[endpoint.address] = now
                    servers[at] = server.again()
                    changed(servers)
                    yield f"{what}; restarted"
                continue
            gone.add(endpoint.address)
            left = [one.endpoint.shard for one in servers if one.endpoint.address not in gone]
            if not left:
                raise ShardDown(
                    f"{what}; every server that this command started has ended. Use --restart to "
                    "restart them"
                )
            of_shard = left.count(endpoint.shard)
            others = counted(of_shard, "other server") if of_shard else "no server"
            yield (
                f"{what}; its shard has {others} left. To start it again: {server.by_hand()} "
                "(or use dlm cluster --restart)"
            )


@contextlib.contextmanager
def claim(cluster_file: Path) -> Iterator[None]:
    """Locks `cluster_file` for the cluster of this process, by a file beside it.

    Raises  ConfigError  it belongs to a cluster that is starting or runs, or dlm did not write it
    """
    running = ConfigError(
        f"another dlm cluster writes {cluster_file}; "
        "stop it, choose another --cluster, or start this one in another folder"
    )
    with locked(cluster_file.with_name(f".{cluster_file.name}.lock"), running, remove=True):
        check_free(cluster_file)
        yield


def check_free(cluster_file: Path) -> None:
    if not cluster_file.exists():
        return
    if not cluster_file.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN_BY):
        raise ConfigError(
            f"{cluster_file} exists and was not written by dlm cluster; "
            "choose another --cluster, or remove it first"
        )
    if address := listening(cluster_file):
        raise ConfigError(
            f"{cluster_file} names a running cluster ({address} listens); "
            "stop it, choose another --cluster, or start this one in another folder"
        )


def listening(cluster_file: Path) -> str | None:
    for endpoint in ClusterToml(cluster_file).servers():
        host, port = endpoint.address.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return endpoint.address
    return None
