"""Starts, watches and restarts shard servers as child processes."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlm.client.cluster_file import WRITTEN_BY, ClusterToml, Endpoint, replace_servers
from dlm.errors import ConfigError, DlmError, ShardDown
from dlm.files import locked, scratch_folder
from dlm.index.layout import Manifest, read_manifest
from dlm.index.placed import manifest_of
from dlm.jit import compile_ahead
from dlm.server.child import command_of_child
from dlm.server.compiling import KERNELS
from dlm.server.config import is_loopback
from dlm.server.sets import FileWatcher, read_sets
from dlm.units import counted

START_S = 120.0  # seconds for a start; the first one compiles kernels, slowly on a busy machine
STOP_S = 10.0
LOOK_S = 0.2  # seconds between checks of the processes
RESTART_S = 2.0  # seconds between restarts of a server that ends at once
HELD_S = 5.0  # seconds before a port in use is reported; a killed server's port is free sooner
SHARED = "--share-port"


@dataclass(frozen=True, slots=True)
class Server:
    """A server process and its `dlm` command; other processes may share its address."""

    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    command: Sequence[str]

    def again(self) -> Server:
        """Starts a server to replace this one, on the same port; returns it before it is ready."""
        command = self._words({"--port": self.endpoint.address.rsplit(":", 1)[1]})
        process = _start(command)
        return Server(process, replace(self.endpoint, pid=process.pid), command)

    def beside(self, shard: int, ready: Path) -> Server:
        """Starts a server of another shard with the same options, on a free port; returns it once
        it is ready. Raises ShardDown or ConfigError if the server did not start; the server's
        message is on standard error."""
        own = {"--shard": str(shard), "--ready-file": str(ready), "--port": "0"}
        command = [part for part in self._words(own) if part != SHARED]
        process = _start(command)
        try:
            (endpoint,) = _servers_ready([process], [ready], [shard])
        except BaseException:
            stop([process])
            raise
        return Server(process, endpoint, command)

    def by_hand(self, changes: Mapping[str, str] | None = None) -> str:
        """Returns the command line, with `changes` to options, that starts a replacement."""
        port = self.endpoint.address.rsplit(":", 1)[1]
        left_out: dict[str, str | None] = {"--ready-file": None}
        if self.command[self.command.index("--metrics-port") + 1] == "0":
            left_out["--metrics-port"] = None
        return shlex.join(["dlm", *self._words({"--port": port, **(changes or {}), **left_out})])

    def _words(self, changes: Mapping[str, str | None]) -> list[str]:
        words = list(self.command)
        for name, value in changes.items():
            at = words.index(name)
            words[at : at + 2] = [] if value is None else [name, value]
        return words


def by_number(address: str) -> str:
    """Replaces a loopback host in an address with 127.0.0.1, which `running_servers` uses."""
    host, port = address.rsplit(":", 1)
    return f"127.0.0.1:{port}" if is_loopback(host) else address


def _is_free(address: str, *, shared: bool) -> bool:
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError), _bound(host, int(port), shared=shared):
        return True
    return False


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    found = socket.socket()
    try:
        # This stops connections of a server that has ended from keeping its port in use.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def free_port() -> str:
    with _bound("127.0.0.1", 0, shared=False) as found:
        return str(found.getsockname()[1])


def how_it_ended(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed ({signal.Signals(-status).name})"
    return f"ended with status {status}"


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_of_child("dlm.cli.main", *command),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the parent, which stops the servers
    )


def holders(manifests: Sequence[Manifest]) -> list[list[int]]:
    """Returns, for each server of a cluster, indices in `manifests` of the sets with its shard."""
    return [
        [at for at, manifest in enumerate(manifests) if index < manifest.shards]
        for index in range(max(manifest.shards for manifest in manifests))
    ]


@contextlib.contextmanager
def running_servers(
    directories: Sequence[Path],
    *,
    processes: int = 1,
    replicas: int = 1,
    first_port: int = 0,
    first_metrics_port: int = 0,
    log_level: str = "warning",
    options: Sequence[str] = (),
    sets: Path | None = None,
    compiling: Callable[[Sequence[Any]], object] = compile_ahead,
) -> Iterator[list[Server]]:
    """Runs servers for each shard index of the shard sets in `directories`; stops them at the end.

    Server i holds shard i of every set that has one; its default is the first of these sets. The
    list has the first replica of each shard, then the second of each, and so on; processes of one
    port follow each other. Code that starts a server `again` must replace the old one in the list.

    Args    processes, replicas  number of processes per port, and of ports per shard
            first_port  port i is first_port + i; 0 means free ports
            first_metrics_port  process i gets first_metrics_port + i; 0 means no metrics
            sets        a file that lists the folders; servers follow changes to this file
            compiling   compiles kernels that an earlier start did not cache
    Raises  ShardDown, ConfigError  if a server did not start; its message is on standard error
    """
    compiling(KERNELS)  # otherwise all servers would compile the same kernels at once
    held = holders([read_manifest(directory) for directory in directories])
    shards = len(held)
    with contextlib.ExitStack() as ports, scratch_folder(None, "dlm-servers") as scratch:
        commands: list[list[str]] = []
        ready: list[Path] = []
        started: list[subprocess.Popen[bytes]] = []
        servers: list[Server] = []
        try:
            for index, held_sets in enumerate(held * replicas):
                port = first_port + index if first_port else 0
                if processes > 1:  # this socket keeps the port while processes start
                    kept = ports.enter_context(_bound("127.0.0.1", port, shared=True))
                    port = int(kept.getsockname()[1])
                folders = [os.fspath(directories[at]) for at in held_sets]
                for _ in range(processes):
                    at = len(commands)
                    ready.append(scratch / f"server-{at}.json")
                    command = [
                        *("serve", *(folders if sets is None else ("--sets", os.fspath(sets)))),
                        *("--shard", str(index % shards), "--port", str(port)),
                        *[SHARED] * (processes > 1),
                        *("--metrics-port", str(first_metrics_port and first_metrics_port + at)),
                        *("--ready-file", os.fspath(ready[at])),
                        *("--host", "127.0.0.1", "--log-level", log_level, *options),
                    ]
                    commands.append(command)
                    started.append(_start(command))
            endpoints = _servers_ready(
                started, ready, [at // processes % shards for at in range(len(started))]
            )
            servers = [Server(*one) for one in zip(started, endpoints, commands, strict=True)]
            yield servers
        finally:
            stop([server.process for server in servers] or started)


def _servers_ready(
    processes: list[subprocess.Popen[bytes]], ready: list[Path], shards: list[int]
) -> list[Endpoint]:
    said = _wait_ready(processes, ready, [f"a server of shard {shard}" for shard in shards])
    return [
        Endpoint(f"127.0.0.1:{one['port']}", shard, process.pid)
        for one, shard, process in zip(said, shards, processes, strict=True)
    ]


def _wait_ready(
    processes: list[subprocess.Popen[bytes]], ready: list[Path], names: list[str]
) -> list[dict[str, Any]]:
    limit = time.monotonic() + START_S
    for path, name in zip(ready, names, strict=True):
        while not path.exists():
            for other, candidate in zip(names, processes, strict=True):
                if candidate.poll() is not None:
                    raise ConfigError(
                        f"{other} {how_it_ended(candidate.returncode)} before it was ready; see "
                        "its message above"
                    )
            if time.monotonic() > limit:
                raise ShardDown(
                    f"{name} was not ready within {START_S:g} s; start the cluster again when this "
                    "machine is less busy"
                )
            time.sleep(0.02)
    return [json.loads(path.read_text()) for path in ready]


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
    """Runs a gateway to the servers of a cluster file, on free ports unless `options` name others,
    and stops it at the end. Yields its process, and the facts that it wrote when ready: `port`,
    `http_port`, `pid`. Raises what `running_servers` raises."""
    with scratch_folder(None, "dlm-gateway") as scratch:
        ready = scratch / "gateway.json"
        command = [
            "gateway",
            "--cluster",
            os.fspath(cluster_file),
            "--ready-file",
            os.fspath(ready),
            *("--port", "0", "--http-port", "0", "--log-level", "warning", *options),
        ]
        process = _start(command)
        try:
            (said,) = _wait_ready([process], [ready], ["the gateway"])
            yield process, said
        finally:
            stop([process])


def shards_listed(sets: Path) -> int:
    """Returns the number of shards of the largest listed set; 0 if the list is invalid."""
    try:
        return max(manifest_of(folder).shards for folder in read_sets(sets))
    except (DlmError, OSError):
        return 0


def joining(servers: Sequence[Server], sets: Path, shard: int) -> Iterator[str]:
    """Says how to start as many servers of this shard as shard 0 has, on free ports."""
    ports: dict[str, str] = {}
    for like in servers:
        if like.endpoint.shard == 0:
            port = ports.setdefault(like.endpoint.address, free_port())
            changes = {"--shard": str(shard), "--port": port, "--metrics-port": free_port()}
            yield (
                f"{sets} lists a shard set with shard {shard}, of which no server runs. To start "
                f"one: {like.by_hand(changes)}; then add 127.0.0.1:{port} to the cluster file"
            )


def supervise(
    servers: list[Server],
    stopping: Callable[[], bool],
    *,
    restart: bool,
    sets: Path,
    is_listed: Callable[[Endpoint], bool],
    changed: Callable[[list[Server]], None],
) -> Iterator[str]:
    """Yields a line for each event of a server, until `stopping()`.

    If a server ends, the others keep running, even if its shard has no server left: clients with
    `bigram_fallback` answer for that shard.

    Args    restart  whether a server that ended is replaced in `servers` by a new one
            is_listed  whether clients know a server; an unknown server that ends is not restarted
                     until clients know it again
            changed  called after a restart
    Raises  ShardDown  if every server has ended, and none is restarted
    """
    listing, known = FileWatcher([sets]), 1 + max(one.endpoint.shard or 0 for one in servers)
    gone: set[int] = set()  # indices in `servers` of servers that have ended
    started: dict[int, float] = {}
    held: dict[int, float] = {}  # index of a server -> when to report its port as in use
    while not stopping():
        time.sleep(LOOK_S)
        if listing.changed():
            listing.applied()
            needed = shards_listed(sets)
            for shard in range(known, needed):
                yield from joining(servers, sets, shard)
            known = max(known, needed)
        for at, server in enumerate(servers):
            endpoint, status = server.endpoint, server.process.poll()
            if status is None or (at in gone and not restart):
                continue
            what = (
                f"the server of shard {endpoint.shard} at {endpoint.address} {how_it_ended(status)}"
            )
            listed = is_listed(endpoint)
            if restart and listed:
                now = time.monotonic()
                if not _is_free(endpoint.address, shared=SHARED in server.command):
                    if now >= held.setdefault(at, now + HELD_S):
                        held[at] = math.inf
                        yield f"{what}; it will be restarted once another process frees its port"
                    continue
                held.pop(at, None)
                if now - started.get(at, -RESTART_S) >= RESTART_S:
                    started[at] = now
                    try:
                        servers[at] = server.again()
                    except OSError as exc:  # out of processes or memory: try again next time
                        yield f"{what}; it cannot be restarted yet: {exc}"
                        continue
                    gone.discard(at)
                    changed(servers)
                    yield f"{what}; restarted"
                continue
            if at in gone:
                continue
            gone.add(at)
            left = [one.endpoint.shard for n, one in enumerate(servers) if n not in gone]
            what += "" if listed else "; it is retired, since the cluster file does not list it"
            if not left:
                advice = "Start the cluster again" if restart else "Run again with --restart"
                raise ShardDown(
                    f"{what}; every server that this command started has exited. {advice}"
                )
            if not listed:
                yield what
                continue
            of_shard = left.count(endpoint.shard)
            others = counted(of_shard, "other server") if of_shard else "no server"
            yield (
                f"{what}; its shard has {others} left. To start it again: {server.by_hand()} "
                "(or use dlm cluster --restart)"
            )


def write_pids(cluster_file: Path, servers: Sequence[Server]) -> None:
    """Writes process ids into cluster.toml, if it can be read; keeps servers that others added."""
    pids = {(one.endpoint.address, one.endpoint.shard): one.endpoint.pid for one in servers}
    with contextlib.suppress(ConfigError, OSError):
        replace_servers(
            cluster_file,
            lambda listed: [
                replace(one, pid=pids.get((by_number(one.address), one.shard), one.pid))
                for one in listed
            ],
        )


@contextlib.contextmanager
def claim(cluster_file: Path) -> Iterator[None]:
    """Locks `cluster_file` for this process's cluster, with a lock file next to it. Raises
    ConfigError if another cluster is starting or running with the file, or dlm did not write it."""
    with locked(
        cluster_file.with_name(f".{cluster_file.name}.lock"),
        ConfigError(
            f"another dlm cluster is writing {cluster_file}; stop that command, give another "
            "--cluster, or start this one in another folder"
        ),
        remove=True,
    ):
        check_free(cluster_file)
        yield


def is_ours(cluster_file: Path) -> bool:
    """Whether `dlm cluster` wrote the file, and nobody has replaced it."""
    text = cluster_file.read_text(encoding="utf-8", errors="replace")
    return text.startswith(WRITTEN_BY)


def check_free(cluster_file: Path) -> None:
    if not cluster_file.exists():
        return
    if not is_ours(cluster_file):
        raise ConfigError(
            f"{cluster_file} exists and was not written by dlm cluster; "
            "give another --cluster, or remove the file first"
        )
    if address := listening(cluster_file):
        raise ConfigError(
            f"{cluster_file} belongs to a running cluster (a server listens on {address}); stop "
            "that cluster, give another --cluster, or start this one in another folder"
        )


def listening(cluster_file: Path) -> str | None:
    for endpoint in ClusterToml(cluster_file).servers():
        host, port = endpoint.address.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return endpoint.address
    return None
