"""`dlm cluster`: serves every shard of one or more sets on this host."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import WRITE, check_reads
from dlm.cli.options import ACCESS, LogLevel, Options
from dlm.cli.output import compile_kernels, print_json_line
from dlm.client.config import ClientSecurity
from dlm.errors import ConfigError
from dlm.server.config import ServerConfig
from dlm.signals import stopping
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.client.cluster_file import Endpoint
    from dlm.cluster.processes import Server
    from dlm.index.layout import Manifest


def cluster(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of shard sets, one per model."),
    ],
    *,
    cluster_file: Annotated[
        Path,
        typer.Option("--cluster", metavar="FILE", help="File to write for clients to read."),
        WRITE,
    ] = Path("cluster.toml"),
    port: Annotated[
        int,
        typer.Option(help="Port of shard 0; other shards get the next ports. 0 picks free ports."),
    ] = 0,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Processes per server, which share its port.")
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(min=1, max=64, help="Servers per shard; with 2 or more, one may fail."),
    ] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Restart servers that exit.")] = False,
    local_fallback: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Shard set that decoders fall back to while servers fail; named in cluster.toml.",
        ),
    ] = None,
    metrics_port: Annotated[
        int,
        typer.Option(
            help="Port of the first process's metrics; other processes get the next ports. 0 "
            "disables metrics."
        ),
    ] = 0,
    access: Annotated[dict[str, Any], Options(ACCESS, of=ServerConfig)],
    security: Annotated[ClientSecurity, Options("ca cert key token_file")],
    log_level: LogLevel = "warning",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object once all servers are ready.")
    ] = False,
) -> None:
    """Serve every shard on this host until Ctrl-C or SIGTERM.

    The servers watch cluster.sets, a file beside cluster.toml that lists the folders; dlm rollout
    changes both. Stopping also removes the two files, unless a server started by hand still
    listens at one of the cluster's addresses.

    Servers listen on loopback. If one exits, the command reports it and the others keep running; it
    exits with 1 once none is left. With several folders, server N serves shard N of every set that
    has it. --ca, --cert, --key, --token-file and --local-fallback are written to cluster.toml for
    clients, as absolute paths; clients with `bigram_fallback` open the local fallback themselves.

    Examples:
        dlm cluster shards/model
        dlm cluster shards/model --replicas 2 --restart --local-fallback shards/small
    """
    from dlm.client.cluster_file import ClusterToml, write_cluster_file
    from dlm.cluster.processes import (
        by_number,
        claim,
        is_ours,
        listening,
        running_servers,
        supervise,
        write_pids,
    )
    from dlm.index.layout import read_manifest
    from dlm.index.search.local import LocalModel
    from dlm.server.sets import sets_file_of, write_sets

    manifests = [read_manifest(directory) for directory in directories]
    sets = sets_file_of(cluster_file)
    count = replicas * max(manifest.shards for manifest in manifests)
    for name, first, many in (
        ("port", port, count),
        ("metrics-port", metrics_port, count * processes),
    ):
        if first and not 1 <= first <= 65536 - many:
            raise ConfigError(
                f"--{name} is {first}; expected 1 to {65536 - many}, since this cluster needs "
                f"{many} consecutive ports, and the last port is 65535"
            )
    if local_fallback is not None:
        LocalModel.open(local_fallback)  # fails now if the model is damaged
    check_reads("--tls-cert, --tokens", *access.values())
    check_reads(
        "--ca, --token-file",
        *filter(None, (security.ca, security.cert, security.key, security.token_file)),
    )
    given = {f"--{name.replace('_', '-')}": file for name, file in access.items() if file}
    options = [part for option in given.items() for part in option]
    asked_to_stop = False
    is_written = False

    def is_listed(server: Endpoint) -> bool:
        with contextlib.suppress(ConfigError):
            return server.address in {
                by_number(one.address) for one in ClusterToml(cluster_file).servers()
            }
        return True

    def stop() -> None:
        # A flag, not an event: the interrupted thread may hold an event's lock.
        nonlocal asked_to_stop
        if asked_to_stop:
            raise KeyboardInterrupt
        asked_to_stop = True

    with claim(cluster_file), stopping(stop):
        write_sets(sets, directories)
        try:
            with running_servers(
                directories,
                processes=processes,
                replicas=replicas,
                first_port=port,
                first_metrics_port=metrics_port,
                log_level=log_level,
                options=options,
                sets=sets,
                compiling=compile_kernels,
            ) as servers:
                if not asked_to_stop:
                    write_cluster_file(
                        cluster_file,
                        [server.endpoint for server in servers],
                        security=security,
                        local_fallback=local_fallback,
                    )
                    is_written = True
                    facts = _facts(directories, manifests, servers, cluster_file, local_fallback)
                    print_json_line(facts) if as_json else _print(facts)
                for line in supervise(
                    servers,
                    lambda: asked_to_stop,
                    restart=restart,
                    sets=sets,
                    is_listed=is_listed,
                    changed=partial(write_pids, cluster_file),
                ):
                    print(line, file=sys.stderr)
        finally:
            if is_written and cluster_file.exists() and is_ours(cluster_file):
                # A server started by hand may have replaced one that this command started.
                with contextlib.suppress(ConfigError):  # the file is no longer readable
                    if address := listening(cluster_file):
                        print(f"kept {cluster_file}: {address} still listens", file=sys.stderr)
                    else:
                        cluster_file.unlink()
                        sets.unlink(missing_ok=True)
    print("stopped", file=sys.stderr)


def _facts(
    directories: Sequence[Path],
    manifests: Sequence[Manifest],
    servers: Sequence[Server],
    cluster_file: Path,
    local_fallback: Path | None,
) -> dict[str, Any]:
    return {
        "shard_sets": [
            {"directory": str(directory), "shard_set": one.shard_set, "shards": one.shards}
            for directory, one in zip(directories, manifests, strict=True)
        ],
        "servers": [
            {"shard": server.endpoint.shard, "address": server.endpoint.address}
            for server in {one.endpoint.address: one for one in servers}.values()
        ],
        "local_fallback": None if local_fallback is None else str(local_fallback),
        "cluster": str(cluster_file),
    }


def _print(facts: dict[str, Any]) -> None:
    for one in facts["shard_sets"]:
        print(
            f"{counted(one['shards'], 'shard')} of {one['directory']} (shard set "
            f"{one['shard_set']})"
        )
    for server in facts["servers"]:
        print(f"  shard {server['shard']} at {server['address']}")
    if facts["local_fallback"] is not None:
        print(f"local fallback {facts['local_fallback']}")
    print(f"wrote {facts['cluster']}; Ctrl-C stops the servers and removes it", flush=True)
