"""Starts a cluster on this machine, for a load test that is given none."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from dlm.cli.output import compile_kernels
from dlm.client.cluster_file import write_cluster_file
from dlm.client.table import KERNELS as ASKING
from dlm.cluster.processes import Server, running_servers
from dlm.errors import ConfigError
from dlm.files import scratch_folder
from dlm.index.layout import read_manifest
from dlm.index.making import build_shard_set
from dlm.index.making.shard_set import KERNELS as BUILDING
from dlm.server.compiling import KERNELS as SERVING
from dlm.server.sets import sets_file_of, write_sets
from dlm.units import counted

DEMO = "books20k.arpa.zst"
KILLED_S = 5.0  # time limit for a killed process to end


@dataclass(frozen=True, slots=True)
class LocalServers:
    """Servers on this machine that this process started, and their cluster.toml.

    folder  folder of the shard set;  sets  the list that the servers follow, or None
    """

    cluster: Path
    shard_set: str
    servers: list[Server]
    folder: Path
    sets: Path | None = None

    def beside(self, name: str) -> Path:
        """A path for a new folder, which is removed with the cluster."""
        return self.cluster.with_name(name)

    def write(self) -> None:
        write_cluster_file(self.cluster, [server.endpoint for server in self.servers])

    def start(self, at: int) -> None:
        """Restarts a killed server at its port, without waiting until it is ready; the server ends
        when the calling thread does. ConfigError if it is running."""
        try:
            self.servers[at].process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"server {at} is running; kill it before you restart it") from None
        self.servers[at] = self.servers[at].again()
        self.write()


@contextmanager
def local_servers(
    shard_set: Path | None,
    shards: int,
    tell: Callable[[str], None],
    *,
    replicas: int = 1,
    follow: bool = False,
) -> Iterator[LocalServers]:
    """Runs servers until the end of the block.

    Args  shard_set  folder of the model that is served; None: the packaged model, in
                     `shards` shards
          replicas   number of servers of each shard
          follow     whether the servers follow a list of shard sets
    """
    with scratch_folder(None, "dlm-loadtest") as scratch:
        compile_kernels((*SERVING, *ASKING, *BUILDING))
        folder = scratch / "shards" if shard_set is None else shard_set
        if shard_set is None:
            tell(f"sharding the packaged model {DEMO}, shards: {shards}")
            with as_file(files("dlm") / "data" / DEMO) as arpa:
                build_shard_set(arpa, folder, shards)
        manifest = read_manifest(folder)
        tell(f"starting {counted(manifest.shards * replicas, 'server')} on this machine")
        cluster = scratch / "cluster.toml"
        sets = sets_file_of(cluster) if follow else None
        if sets is not None:
            write_sets(sets, [folder])
        with running_servers([folder], replicas=replicas, sets=sets) as servers:
            found = LocalServers(cluster, manifest.shard_set, servers, folder, sets)
            found.write()
            yield found


def quantised(own: LocalServers, tell: Callable[[str], None]) -> Path:
    """Makes a second shard set with as many shards: the packaged model, quantised."""
    tell(f"sharding the packaged model {DEMO}, quantised")
    folder = own.beside("quantised")
    with as_file(files("dlm") / "data" / DEMO) as arpa:
        build_shard_set(arpa, folder, read_manifest(own.folder).shards, encoding="compact")
    return folder
