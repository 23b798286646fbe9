"""Opens the shard sets that a server serves; run as a process, this module reads their files.

`python -m dlm.server.child PID dlm.server.opening KEY SHARD FOLDER...` reads all files of the sets
in these folders, and prints the first error; KEY is the setting `public_key`. With
--give-way as the first argument, it gives way to every other process.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from dlm.errors import ConfigError, DlmError
from dlm.index.layout import map_columns
from dlm.index.placed import fetch_set
from dlm.index.search.shard import Shard
from dlm.logs import EventLog
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.resources import give_way
from dlm.server.config import ServerConfig
from dlm.server.sets import Listed
from dlm.stores.remote import AnyPath, RemotePath, located

logger = EventLog(__name__)


def open_shard(
    directory: Path, index: int, *, verify: bool, memory_options: MemoryOptions = MAPPED
) -> Shard:
    """Opens the shard, and checks that its files for clients are complete."""
    begun = time.monotonic()
    shard = Shard.open(directory, index, verify=verify, memory_options=memory_options)
    for kind in ("vocabulary", "low_orders"):
        entry = shard.manifest.file(kind)
        map_columns(shard.directory / entry.name, entry, verify=verify)
    logger.info(
        "server.opened",
        extra={
            "shard": index,
            "shard_set": shard.manifest.shard_set,
            "verified": verify,
            "duration_s": round(time.monotonic() - begun, 3),
        },
    )
    return shard


def fetched(named: AnyPath, index: int, public_key: str) -> Path:
    """Returns a folder with shard `index` and the files for clients: `named` or, if that is in a
    store, a folder of the cache. Raises what `fetch_set` raises."""
    if not isinstance(named, RemotePath):
        return named
    told = partial(logger.info, "server.fetching")
    key = Path(public_key) if public_key else None
    return fetch_set(
        named, [index], public_key=key, tell=lambda line: told(extra={"progress": line})
    )


def open_listed(listed: Listed, index: int, config: ServerConfig) -> Shard:
    """Opens a listed shard set, whose files have been checked.

    Raises  ConfigError  its folder now has another shard set;  ShardFormatError
    """
    folder = fetched(located(listed.folder), index, config.public_key)
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    shard = open_shard(folder, index, verify=False, memory_options=memory_options)
    if shard.manifest.shard_set != listed.shard_set:
        raise ConfigError(
            f"{folder} now holds shard set {shard.manifest.shard_set}, but held {listed.shard_set} "
            "when the list was read; give each shard set a separate folder, and write the list "
            "again"
        )
    return shard


def main(arguments: list[str]) -> int:
    if arguments[0] == "--give-way":
        give_way()
        del arguments[0]
    key, index, *folders = arguments
    try:
        for folder in folders:
            open_shard(fetched(located(folder), int(index), key), int(index), verify=True)
    except (DlmError, OSError) as exc:
        sys.stdout.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
