"""Shards, opened for a server: mapped, checked, and with the messages that warm them up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlm.errors import ConfigError
from dlm.index.layout import check_file, map_columns, read_manifest
from dlm.index.search.shard import Shard
from dlm.logs import EventLog
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.ngram.partition import slots_of
from dlm.ngram.query import QueryGroups
from dlm.server.answers import OpenShard
from dlm.server.config import ServerConfig
from dlm.server.downloads import open_files
from dlm.server.sets import Listed
from dlm.wire import codec

logger = EventLog(__name__)

WARM_UP_SEED = 20190812


def open_shard(
    directory: Path, index: int, *, verify: bool, memory_options: MemoryOptions = MAPPED
) -> Shard:
    """Opens the shard, and checks that the vocabulary it hands out is whole too."""
    begun = time.monotonic()
    shard = Shard.open(directory, index, verify=verify, memory_options=memory_options)
    vocabulary = shard.manifest.file("vocabulary")
    map_columns(shard.directory / vocabulary.name, vocabulary, verify=verify)
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


def reopen_shard(
    shard: Shard, memory_options: MemoryOptions, tick: Callable[[], object] | None = None
) -> Shard:
    """Maps the same shard again, after reading all of its files.

    For the worker that follows one that could not read a page of its map: by now the file may have
    been replaced or restored; otherwise the error says what is wrong.

    Args    tick  called every few megabytes
    Raises  ShardFormatError  a file is damaged;  ConfigError  the folder has another shard set
    """
    directory, index = shard.directory, shard.index
    manifest = read_manifest(directory)
    if manifest.shard_set != shard.manifest.shard_set:
        raise ConfigError(
            f"{directory} now holds shard set {manifest.shard_set}, but this server was started "
            f"with {shard.manifest.shard_set}; restart the server"
        )
    for entry in (
        manifest.file("shard", index),
        manifest.file("low_orders"),
        manifest.file("vocabulary"),
    ):
        check_file(directory / entry.name, entry, tick or (lambda: None))
    return open_shard(directory, index, verify=False, memory_options=memory_options)


@dataclass(slots=True, eq=False)
class Opened:
    """A mapped shard, and the descriptors of its files that clients download."""

    shard: Shard
    files: dict[int, int]

    def again(self, memory_options: MemoryOptions, tick: Callable[[], object] | None) -> Opened:
        shard = reopen_shard(self.shard, memory_options, tick)
        return Opened(shard, open_files(shard))

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)


def check_files(config: ServerConfig, index: int, folders: Sequence[Path]) -> None:
    """Reads all files of the shard sets in `folders`, as `open_shard` does."""
    for folder in folders:
        open_shard(folder, index, verify=config.verify)


def of_list(
    listed: Listed, index: int, opened: Sequence[Opened], config: ServerConfig, *, verify: bool
) -> Opened:
    """A shard set of the list: opened before the fork, or here."""
    for one in opened:
        if one.shard.manifest.shard_set == listed.shard_set:
            return one
    shard = open_listed(listed, index, config, verify=verify)
    return Opened(shard, open_files(shard))


def open_listed(listed: Listed, index: int, config: ServerConfig, *, verify: bool = False) -> Shard:
    """Opens a shard set of the list, whose files were checked.

    Raises  ConfigError  its folder has another shard set by now;  ShardFormatError
    """
    folder = Path(listed.folder)
    memory_options = MemoryOptions(config.preload, config.mlock, config.huge_pages)
    shard = open_shard(folder, index, verify=verify, memory_options=memory_options)
    if shard.manifest.shard_set != listed.shard_set:
        raise ConfigError(
            f"{folder} now holds shard set {shard.manifest.shard_set}, but had {listed.shard_set} "
            "when the list was read; give each shard set a folder of its own, and write the list "
            "again"
        )
    return shard


def warm_up_messages(shard: OpenShard) -> list[bytes]:
    """Score requests that take every path through the kernels, as a client would send them: one
    context and many, one word and many, each context length. None for a model of order 2 or less.

    They pass through the codec, whose read-only arrays are what kernels compile for.
    """
    if shard.order <= 2:
        return []
    rng = np.random.default_rng(WARM_UP_SEED)
    pairs = rng.integers(0, shard.vocabulary_size, (1 << 14, 2), dtype=np.uint32)
    owned = shard.manifest.slots[slots_of(pairs[:, 0], pairs[:, 1])] == shard.index
    pairs = pairs[owned] if owned.any() else pairs
    messages = []
    for contexts in (1, 33, 256):
        lengths = (2 + np.arange(contexts) % (shard.order - 2)).astype(np.uint8)
        words = rng.integers(0, shard.vocabulary_size, int(lengths.sum()), dtype=np.uint32)
        ends = np.cumsum(lengths, dtype=np.int64)
        words[ends - 2], words[ends - 1] = pairs[rng.integers(0, len(pairs), contexts)].T
        counts = (1 + np.arange(contexts) % 5).astype(np.uint32)
        asked = rng.integers(0, shard.vocabulary_size, int(counts.sum()), dtype=np.uint32)
        groups = QueryGroups(lengths, words, counts, asked)
        messages.append(
            codec.encode_score_request(shard.manifest.shard_set_bytes, shard.index, groups)[0]
        )
    return messages
