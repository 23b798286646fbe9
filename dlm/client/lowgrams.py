"""The low orders on the client: fetched once, kept on disk, shared by processes.

A folder named by the shard set holds the manifest, the vocabulary and the 1- and 2-grams. Processes
take turns by a lock; what was fetched before an interruption is not fetched again; nothing is used
whose checksum is not the manifest's.

Paper: DLM 3.1 (caching). The bit that saves messages beyond it: shards/FORMAT.md, "Stored".
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.client.transport import Connection
from dlm.errors import ConfigError, ProtocolError, QueryError, ShardDown, ShardFormatError
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.shard import LowOrders, empty_tree, open_vocabulary, run_kernel
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

FILES = {
    "vocabulary": pb.DOWNLOAD_FILE_VOCABULARY,
    "low_orders": pb.DOWNLOAD_FILE_LOW_ORDERS,
}


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
        answers, needs_shard = run_kernel(self.low, empty_tree(), self.manifest.order, groups)
        return answers, needs_shard.astype(np.bool_)


def check_queries(
    order: int,
    size: int,
    contexts: NDArray[np.uint32],
    lengths: NDArray[np.uint8],
    words: NDArray[np.uint32],
) -> None:
    """Raises `QueryError` unless shapes agree, lengths are below `order` and ids below `size`."""
    width = max(order - 1, 0)
    if contexts.shape != (len(words), width) or lengths.shape != (len(words),):
        raise QueryError(
            f"contexts have shape {contexts.shape} and lengths {lengths.shape}; "
            f"({len(words)}, {width}) and ({len(words)},) are expected for {len(words)} words"
        )
    if len(words) and int(lengths.max()) > width:
        raise QueryError(f"a context of {int(lengths.max())} words; {width} at most are expected")
    for ids in (contexts, words):
        if ids.size and int(ids.max()) >= size:
            raise QueryError(f"word id {int(ids.max())}; ids are below {size}")


def fetch(
    manifest: Manifest, connections: list[Connection], cache_dir: Path, timeout_s: float
) -> LowGrams:
    """The low orders of `manifest`, from the cache or else from any of the servers.

    Raises
        ConfigError       the cache folder cannot be written
        UnavailableError  no server gave them in time
        ProtocolError     what they gave is not what the manifest says
    """
    home = cache_dir / manifest.shard_set
    try:
        try:
            return LowGrams.open(home, manifest)
        except ShardFormatError:
            pass  # not there, or damaged: fetched below, under the lock
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f"{manifest.shard_set}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return _fetch_locked(manifest, connections, home, timeout_s)
            finally:
                # Closing is not enough: a child forked meanwhile holds the same open file.
                fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError as exc:
        raise ConfigError(
            f"the low orders cannot be kept in {cache_dir}: {exc}. Make room there, "
            "or name another folder in DLM_CACHE_DIR"
        ) from exc


def _fetch_locked(
    manifest: Manifest, connections: list[Connection], home: Path, timeout_s: float
) -> LowGrams:
    try:
        return LowGrams.open(home, manifest)  # another process was faster
    except ShardFormatError:
        shutil.rmtree(home, ignore_errors=True)
    part = home.with_name(home.name + ".part")
    part.mkdir(exist_ok=True)
    for kind in FILES:
        _fetch_file(manifest, kind, connections, part, timeout_s)
    with (part / layout.MANIFEST).open("wb") as out:
        out.write(manifest.text)
        out.flush()
        os.fsync(out.fileno())
    layout.sync_directory(part)
    part.rename(home)
    return LowGrams.open(home, manifest)


def _fetch_file(
    manifest: Manifest, kind: str, connections: list[Connection], part: Path, timeout_s: float
) -> None:
    """Fetches one file, from where an earlier try stopped; a server that fails is passed over."""
    entry = manifest.file(kind)
    path = part / entry.name
    last: Exception = ShardDown(f"no server of shard set {manifest.shard_set} is known")
    # Each server twice: a stream that breaks goes on where it stopped, and where the beginning that
    # another left turns out to be wrong, the same server is asked for all of it.
    for connection in connections:
        for _ in range(2):
            if path.exists() and path.stat().st_size > entry.bytes:
                path.unlink()
            resumed = path.exists() and path.stat().st_size > 0
            try:
                _receive(manifest, kind, connection, path, timeout_s)
            except OSError:
                raise
            except Exception as exc:  # noqa: BLE001 - any server may fail; the last error is raised
                last = exc
                continue
            if layout.file_checksum(path) == entry.xxh3_128:
                return
            path.unlink()
            last = ProtocolError(
                f"{connection.address} sent a {kind} file that is not the manifest's; "
                "the server's files are damaged (dlm verify DIR there tells)"
            )
            if not resumed:
                break
    raise last


def _receive(
    manifest: Manifest, kind: str, connection: Connection, path: Path, timeout_s: float
) -> None:
    entry = manifest.file(kind)
    with path.open("ab") as out:
        offset = out.tell()
        request = pb.DownloadRequest(
            shard_set=manifest.shard_set_bytes, file=FILES[kind], offset=offset
        )
        # The deadline is for the whole stream; a slow line gets a second for every megabyte more.
        allowed = timeout_s + entry.bytes / 1e6
        with closing(connection.download(request, allowed)) as chunks:
            for chunk in chunks:
                data = codec.decode_chunk(
                    chunk,
                    shard_set=manifest.shard_set_bytes,
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
