"""`dlm cluster`: every shard of one or more sets on this machine, in one command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer


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
    from dlm.cli.compiling import compile_kernels
    from dlm.cli.paths import check_reads
    from dlm.client.security import ClientSecurity
    from dlm.client.topology import write_cluster_file
    from dlm.cluster.processes import Server, check_free, running_servers, supervise
    from dlm.errors import ConfigError
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
    asked_to_stop = False
    written: str | None = None

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

    def rewrite(servers: list[Server]) -> None:
        nonlocal written
        if ours(written):
            written = write(servers)

    def stop(number: int, frame: FrameType | None) -> None:
        # A flag: an event has a lock, which the thread that is interrupted here may hold.
        nonlocal asked_to_stop
        if asked_to_stop:
            raise KeyboardInterrupt
        asked_to_stop = True

    previous = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        with running_servers(
            directories,
            workers=workers,
            replicas=replicas,
            first_port=port,
            first_metrics_port=metrics_port,
            log_level=log_level,
            options=options,
            compiling=compile_kernels,
        ) as servers:
            if not asked_to_stop:
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
            for line in supervise(servers, lambda: asked_to_stop, restart=restart, changed=rewrite):
                print(line, file=sys.stderr)
    finally:
        if ours(written):
            cluster_file.unlink()
        for number, handler in previous.items():
            signal.signal(number, handler)
    print("stopped", file=sys.stderr)
