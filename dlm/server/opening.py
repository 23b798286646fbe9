"""Opens the shard sets that a server serves; as a process of its own it reads their files.

`python -m dlm.server.child PID dlm.server.opening SHARD FOLDER...` reads all files of the sets in
these folders, and prints what is wrong with one. It gives way to every other process if the first
argument is --give-way.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dlm.errors import ConfigError, DlmError
from dlm.index.layout import map_columns
from dlm.index.search.shard import Shard
from dlm.logs import EventLog
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.resources import give_way
from dlm.server.config import ServerConfig
from dlm.server.sets import Listed

logger = EventLog(__name__)


def open_shard(
    directory: Path, index: int, *, verify: bool, memory_options: MemoryOptions = MAPPED
) -> Shard:
    """Opens the shard, and checks that the files that it hands out are whole, too."""
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


def open_listed(listed: Listed, index: int, config: ServerConfig) -> Shard:
    """Opens a shard set of the list, whose files were checked.

    Raises  ConfigError  its folder has another shard set by now;  ShardFormatError
    """
    folder = Path(listed.folder)
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    shard = open_shard(folder, index, verify=False, memory_options=memory_options)
    if shard.manifest.shard_set != listed.shard_set:
        raise ConfigError(
            f"{folder} now holds shard set {shard.manifest.shard_set}, but had {listed.shard_set} "
            "when the list was read; give each shard set a folder of its own, and write the list "
            "again"
        )
    return shard


def main(arguments: list[str]) -> int:
    if arguments[0] == "--give-way":
        give_way()
        del arguments[0]
    index, *folders = arguments
    try:
        for folder in folders:
            open_shard(Path(folder), int(index), verify=True)
    except (DlmError, OSError) as exc:
        sys.stdout.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
