"""`dlm cluster`: every shard of one or more sets on this machine, in one command."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

RESTART_S = 2.0  # a server that ends at once is started this often


def check_free(cluster_file: Path) -> None:
    """Raises `ConfigError` unless `cluster_file` is free, or was left by a cluster that is gone."""
    from dlm.client.topology import WRITTEN_BY, read_cluster_file
    from dlm.errors import ConfigError

    if not cluster_file.exists():
        return
    if not cluster_file.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN_BY):
        raise ConfigError(
            f"{cluster_file} exists and was not written by dlm cluster; "
            "give another --cluster, or remove it first"
        )
    for endpoint in read_cluster_file(cluster_file):
        host, port = endpoint.address.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            raise ConfigError(
                f"{cluster_file} names a cluster that runs ({endpoint.address} listens); "
                "stop it, give another --cluster, or start this one in another folder"
            )


def cluster(
    directories: Annotated[
        list[Path], typer.Argument(help="Folder of a shard set; more folders, more models.")
    ],
    cluster_file: Annotated[
        Path, typer.Option("--cluster", help="File to write, which client commands take.")
    ] = Path("cluster.toml"),
    port: Annotated[
        int, typer.Option(help="Port of shard 0, the others follow; 0 takes free ports.")
    ] = 0,
    workers: Annotated[int, typer.Option(help="Processes of each server.")] = 1,
    replicas: Annotated[
        int,
        typer.Option(min=1, max=64, help="Servers of each shard; one may fail and nobody sees."),
    ] = 1,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start a server again that ended.")
    ] = False,
    small: Annotated[
        Path | None,
        typer.Option(help="Shard set that decoders' clients go over to while servers fail."),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(help="Port of the metrics of shard 0, the others follow; 0 is none.")
    ] = 0,
    tls_cert: Annotated[str | None, typer.Option(help="As of dlm serve.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="As of dlm serve.")] = None,
    tls_client_ca: Annotated[str | None, typer.Option(help="As of dlm serve.")] = None,
    tokens: Annotated[str | None, typer.Option(help="As of dlm serve.")] = None,
    ca: Annotated[str, typer.Option(help="As of dlm score; written for clients.")] = "",
    cert: Annotated[str, typer.Option(help="As of dlm score; written for clients.")] = "",
    key: Annotated[str, typer.Option(help="As of dlm score; written for clients.")] = "",
    token_file: Annotated[str, typer.Option(help="As of dlm score; written for clients.")] = "",
    log_level: Annotated[str, typer.Option(help="Of the servers.")] = "warning",
) -> None:
    """Serve every shard on loopback until Ctrl-C or SIGTERM.

    With several folders each server holds its shard of every set that has one. --small is written
    into cluster.toml, and clients with `partial` on open it by themselves.

    Example: dlm cluster shards/model, and in another terminal: dlm score text.txt
    """
    from dlm.cli.paths import check_reads
    from dlm.cli.processes import Server, running_servers
    from dlm.client.security import ClientSecurity
    from dlm.client.topology import write_cluster_file
    from dlm.errors import ConfigError, ShardDown
    from dlm.index.layout import read_manifest
    from dlm.index.search.local import LocalModel

    manifests = [read_manifest(directory) for directory in directories]
    count = replicas * max(manifest.shards for manifest in manifests)
    for name, first in (("port", port), ("metrics-port", metrics_port)):
        if first and not 1 <= first <= 65536 - count:
            raise ConfigError(f"--{name} {first}: {count} ports from there must lie in 1 to 65535")
    if not cluster_file.absolute().parent.is_dir():
        raise ConfigError(f"{cluster_file}: its folder does not exist")
    check_free(cluster_file)
    if small is not None:
        LocalModel.open(small)  # whole, every checksum right: not found out when it is needed
    check_reads("--tls-cert, --tokens", tls_cert, tls_key, tls_client_ca, tokens)
    beside = cluster_file.absolute().parent  # what clients take the paths of cluster.toml to be of
    for_clients = [beside / file for file in (ca, cert, key, token_file) if file]
    check_reads("--ca, --token-file", *for_clients)
    security = ClientSecurity(ca=ca, cert=cert, key=key, token_file=token_file)
    given = {
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--tls-client-ca": tls_client_ca,
        "--tokens": tokens,
    }
    options = [part for name, file in given.items() if file for part in (name, file)]
    stopping = threading.Event()

    def write(servers: list[Server]) -> str:
        endpoints = [server.endpoint for server in servers]
        shard_set = manifests[0].shard_set
        write_cluster_file(
            cluster_file, endpoints, shard_set=shard_set, security=security, small=small
        )
        return cluster_file.read_text()

    def ours(written: str | None) -> bool:
        # Another cluster may have written its own since.
        return written is not None and cluster_file.exists() and cluster_file.read_text() == written

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    previous = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    written: str | None = None
    try:
        with running_servers(
            directories,
            workers=workers,
            replicas=replicas,
            first_port=port,
            first_metrics_port=metrics_port,
            log_level=log_level,
            options=options,
        ) as servers:
            if not stopping.is_set():
                written = write(servers)
                for directory, manifest in zip(directories, manifests, strict=True):
                    print(
                        f"{manifest.shards} shards of {directory} (shard set {manifest.shard_set})"
                    )
                for server in servers:
                    print(f"  shard {server.endpoint.shard} at {server.endpoint.address}")
                if small is not None:
                    print(f"small model {small}")
                print(f"wrote {cluster_file}; Ctrl-C stops", flush=True)
            gone: set[str] = set()
            started: dict[str, float] = {}
            while not stopping.wait(0.2):
                for at, server in enumerate(servers):
                    endpoint, status = server.endpoint, server.process.poll()
                    if status is None or endpoint.address in gone:
                        continue
                    what = (
                        f"the server of shard {endpoint.shard} at {endpoint.address} ended with "
                        f"status {status}"
                    )
                    if restart:
                        now = time.monotonic()
                        if now - started.get(endpoint.address, -RESTART_S) >= RESTART_S:
                            started[endpoint.address] = now
                            servers[at] = server.again()
                            if ours(written):
                                written = write(servers)
                            print(f"{what}; started again", file=sys.stderr)
                        continue
                    gone.add(endpoint.address)
                    if all(
                        other.endpoint.address in gone
                        for other in servers
                        if other.endpoint.shard == endpoint.shard
                    ):
                        raise ShardDown(f"{what}; none is left, stopping the others")
                    print(f"{what}; its replicas go on", file=sys.stderr)
    finally:
        if ours(written):
            cluster_file.unlink()
        for number, handler in previous.items():
            signal.signal(number, handler)
    print("stopped", file=sys.stderr)
