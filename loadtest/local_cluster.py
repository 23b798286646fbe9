"""A cluster on this machine, for a load test that has none to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

from dlm.cli.compiling import compile_kernels
from dlm.client.topology import write_cluster_file
from dlm.client.warm import KERNELS as ASKING
from dlm.cluster.processes import running_servers
from dlm.files import scratch_folder
from dlm.index.build import build_shard_set
from dlm.index.build.shard_set import KERNELS as BUILDING
from dlm.index.layout import read_manifest
from dlm.server.compiling import KERNELS as SERVING

DEMO = "books20k.arpa.zst"


@contextmanager
def local_cluster(
    shard_set: Path | None, shards: int, tell: Callable[[str], None], *, workers: int = 1
) -> Iterator[Path]:
    """Path of the cluster.toml of servers that run until the end of the block.

    Args
        shard_set  folder of the model that is served; None takes the small model of the package,
                   in `shards` shards
        workers    processes of each server
    Raises
        ConfigError, ShardFormatError, ShardDown
    """
    with scratch_folder(None, "dlm-loadtest") as scratch:
        compile_kernels((*SERVING, *ASKING, *BUILDING))
        folder = scratch / "shards" if shard_set is None else shard_set
        if shard_set is None:
            tell(f"sharding the packaged model {DEMO} in {shards}")
            with as_file(files("dlm") / "data" / DEMO) as arpa:
                build_shard_set(arpa, folder, shards)
        manifest = read_manifest(folder)
        tell(f"starting {manifest.shards} servers on this machine")
        with running_servers([folder], workers=workers) as servers:
            cluster = scratch / "cluster.toml"
            write_cluster_file(
                cluster, [server.endpoint for server in servers], shard_set=manifest.shard_set
            )
            yield cluster
