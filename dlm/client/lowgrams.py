"""The low orders on the client: fetched once, kept on disk, shared by processes.

A folder named by the shard set holds the manifest, the vocabulary and the 1- and 2-grams. Processes
take turns by a lock; what was fetched before an interruption is not fetched again; nothing is used
whose checksum is not the manifest's.

Paper: DLM 3.1 (caching). The bit that saves messages beyond it: shards/FORMAT.md, "Stored".
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client.transport import Connection
from dlm.errors import (
    ConfigError,
    DlmError,
    Overloaded,
    ProtocolError,
    QueryError,
    ShardDown,
    ShardFormatError,
    UnavailableError,
)
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.shard import LowOrders, open_vocabulary, run_kernel
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

FILES = {
    "vocabulary": pb.DOWNLOAD_FILE_VOCABULARY,
    "low_orders": pb.DOWNLOAD_FILE_LOW_ORDERS,
}

Source: TypeAlias = tuple[int, Connection]

LOCK_POLL_S = 0.05
RETRY_S = 0.1  # seconds before all servers are tried again; doubled each time, up to 2


@dataclass(frozen=True, eq=False)
class LowGrams:
    """Vocabulary and low orders of one shard set, mapped from `directory`."""

    directory: Path
    manifest: Manifest
    low: LowOrders
    vocabulary: Vocabulary

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> LowGrams:
        """Maps a folder that is whole; raises `ShardFormatError` where it is not."""
        found = layout.read_manifest(directory)
        if found.shard_set != manifest.shard_set:
            raise ShardFormatError(
                f"{directory} holds shard set {found.shard_set}, not {manifest.shard_set}"
            )
        low = LowOrders.open(directory, manifest)
        return cls(directory, manifest, low, open_vocabulary(directory, manifest))

    def score(self, groups: QueryGroups) -> tuple[Answers, NDArray[np.bool_]]:
        """Answers from the low orders; and for each context whether they are not enough."""
        answers, needs_shard = run_kernel(self.low.view, self.manifest.order, groups)
        return answers, needs_shard.astype(np.bool_)


def check_queries(
    order: int,
    size: int,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> None:
    """Raises `QueryError` unless shapes agree, lengths are below `order` and ids below `size`."""
    width = max(order - 1, 0)
    rows = len(contexts)
    if contexts.shape != (rows, width) or lengths.shape != (rows,) or counts.shape != (rows,):
        raise QueryError(
            f"contexts have shape {contexts.shape}, lengths {lengths.shape}, counts "
            f"{counts.shape}; ({rows}, {width}), ({rows},) and ({rows},) are expected"
        )
    if words.ndim != 1 or int(counts.sum(dtype=np.uint64)) != len(words):
        raise QueryError(
            f"{int(counts.sum(dtype=np.uint64))} words are counted and an array of shape "
            f"{words.shape} was given; as many words as are counted are expected"
        )
    if rows and int(lengths.max()) > width:
        raise QueryError(f"a context of {int(lengths.max())} words; {width} at most are expected")
    for ids in (contexts, words):
        if ids.size and int(ids.max()) >= size:
            raise QueryError(f"word id {int(ids.max())}; ids are below {size}")


def fetch(
    manifest: Manifest,
    sources: Sequence[Source],
    cache_dir: Path,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    shuffle: Callable[[list[Source]], None] = random.shuffle,
) -> LowGrams:
    """The low orders of `manifest`, from the cache or else from any of the servers.

    Args
        sources    (shard, connection) of each server; `shuffle` puts them in the order in which
                   they are asked, so that clients that start together do not all ask one
        timeout_s  for a turn of the lock, and for a server that has time: after that, and a second
                   for every megabyte, the last error is raised
    Raises
        ConfigError       the cache folder cannot be written
        UnavailableError  no server gave them in time
        ProtocolError     what they gave is not what the manifest says
    """
    home = cache_dir / manifest.shard_set
    sources = list(sources)
    shuffle(sources)
    until = clock() + timeout_s
    try:
        try:
            return LowGrams.open(home, manifest)
        except ShardFormatError:
            pass  # not there, or damaged: fetched below, under the lock
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f"{manifest.shard_set}.lock").open("w") as lock:
            while not (locked := _try_lock(lock)) and clock() < until:
                sleep(LOCK_POLL_S)
            # A process that holds the lock and does nothing keeps nobody out: this one then
            # fetches into a folder of its own.
            part = home.with_name(home.name + (".part" if locked else f".part-{os.getpid()}"))
            try:
                return _fetch_into(part, manifest, sources, home, timeout_s, clock, sleep)
            finally:
                if locked:
                    # Closing is not enough: a child forked meanwhile holds the same open file.
                    fcntl.flock(lock, fcntl.LOCK_UN)
                else:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as exc:
        raise ConfigError(
            f"the low orders cannot be kept in {cache_dir}: {exc}. Make room there, "
            "or name another folder in DLM_CACHE_DIR"
        ) from exc


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fetch_into(
    part: Path,
    manifest: Manifest,
    sources: Sequence[Source],
    home: Path,
    timeout_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> LowGrams:
    try:
        return LowGrams.open(home, manifest)  # another process was faster
    except ShardFormatError:
        shutil.rmtree(home, ignore_errors=True)
    part.mkdir(exist_ok=True)
    until = clock() + timeout_s
    for kind in FILES:
        until += manifest.file(kind).bytes / 1e6
        pause_s = RETRY_S
        while True:
            try:
                _fetch_file(manifest, kind, sources, part, max(until - clock(), 0.1))
                break
            except UnavailableError as exc:
                # Servers let few clients download at once, and say so: come again.
                if not exc.retryable or clock() + pause_s >= until:
                    raise
                sleep(pause_s * (0.5 + random.random()))
                pause_s = min(2 * pause_s, 2.0)
    with (part / layout.MANIFEST).open("wb") as out:
        out.write(manifest.text)
        out.flush()
        os.fsync(out.fileno())
    layout.sync_directory(part)
    try:
        part.rename(home)
    except OSError:
        if not home.exists():
            raise  # else another process put its copy there meanwhile
    return LowGrams.open(home, manifest)


def _fetch_file(
    manifest: Manifest,
    kind: str,
    sources: Sequence[Source],
    part: Path,
    timeout_s: float,
) -> None:
    """Fetches one file, from where an earlier try stopped; a server that fails is passed over."""
    entry = manifest.file(kind)
    path = part / entry.name
    last: DlmError = ShardDown(f"no server of shard set {manifest.shard_set} is known")
    if path.exists() and _is_whole(path, entry):
        return
    # Each server twice: a stream that breaks goes on where it stopped, and where the beginning that
    # another left turns out to be wrong, the same server is asked for all of it.
    for shard, connection in sources:
        for _ in range(2):
            if path.exists() and path.stat().st_size > entry.bytes:
                path.unlink()
            resumed = path.exists() and path.stat().st_size > 0
            try:
                _receive(manifest, kind, shard, connection, path, timeout_s)
            except DlmError as exc:
                # One that may do better later decides: whether to come again depends on it.
                if not (isinstance(last, Overloaded) and isinstance(exc, UnavailableError)):
                    last = exc
                continue
            if _is_whole(path, entry):
                return
            path.unlink()
            last = ProtocolError(
                f"{connection.address} sent a {kind} file that is not the manifest's; "
                "the server's files are damaged (dlm verify DIR there tells)"
            )
            if not resumed:
                break
    raise last


def _is_whole(path: Path, entry: layout.FileEntry) -> bool:
    return path.stat().st_size == entry.bytes and layout.file_checksum(path) == entry.xxh3_128


def _receive(
    manifest: Manifest,
    kind: str,
    shard: int,
    connection: Connection,
    path: Path,
    timeout_s: float,
) -> None:
    """Appends to `path` what it lacks of the file."""
    entry = manifest.file(kind)
    with path.open("ab") as out:
        offset = out.tell()
        request = pb.DownloadRequest(
            shard_set=manifest.shard_set_bytes, shard=shard, file=FILES[kind], offset=offset
        )
        with closing(connection.download(request, timeout_s)) as chunks:
            for chunk in chunks:
                data = codec.decode_chunk(
                    chunk,
                    shard_set=manifest.shard_set_bytes,
                    shard=shard,
                    offset=offset,
                    file_bytes=entry.bytes,
                )
                out.write(data)
                offset += len(data)
        if offset != entry.bytes:
            raise ProtocolError(
                f"{connection.address} stopped at byte {offset} of {entry.bytes} of {entry.name}"
            )
        out.flush()
        os.fsync(out.fileno())
