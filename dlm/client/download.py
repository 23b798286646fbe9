"""The low orders are fetched once, kept on disk in a folder named after the shard set, and shared
by processes, which take turns by a lock."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from dlm.client.after import Again, Elsewhere, GiveUp, after_file, after_files
from dlm.client.router import LowGrams
from dlm.client.server import Connection
from dlm.errors import (
    ConfigError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    ShardDown,
    ShardFormatError,
    UnavailableError,
)
from dlm.files import lock_file, move, remove_unlocked, scratch_folder, sync_folder, unlock
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.progress import ProgressReporter, compiling_notice
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import plain

FILES = {
    "vocabulary": pb.DOWNLOAD_FILE_VOCABULARY,
    "low_orders": pb.DOWNLOAD_FILE_LOW_ORDERS,
}

Source: TypeAlias = tuple[int, Connection]
Clock: TypeAlias = Callable[[], float]

LOCK_POLL_S = 0.05
PUT_TRIES = 20  # each fails only if another process moved a copy there or away meanwhile
LEAST_S = 1.0  # least seconds for each of many servers, if that much is left
LEFT_S = 24 * 3600.0  # after this long, an unfinished download of another shard set is removed
KEEP_FREE_BYTES = 64 << 20  # to leave on the disk for others
PROGRESS_BYTES = codec.CHUNK_BYTES  # that a download must bring within its time, to get it anew
SHOWN_BYTES = 16 << 20  # more take seconds on a common network: the download is reported
RETRY_S = 0.1  # seconds before all servers are tried again; doubled each time, up to 2


def fetch(
    manifest: Manifest,
    sources: Sequence[Source],
    cache_dir: Path,
    timeout_s: float,
    *,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    shuffle: Callable[[list[Source]], None] = random.shuffle,
) -> LowGrams:
    """The low orders of `manifest`, from the cache or else from any of the servers.

    Args
        sources    (shard, connection) of each server; `shuffle` sets the order in which they are
                   asked, so that clients that start together do not all ask the same one
        timeout_s  without progress, at most half of it for another process that fetches the same
    Raises
        ConfigError       the cache folder cannot be written, or its disk is too full
        UnavailableError  no server sent them in time; the next try resumes the download
        ProtocolError     the files do not match the manifest
    """
    sources = list(sources)
    shuffle(sources)
    home = cache_dir / manifest.shard_set
    download = _Download(manifest, sources, home, timeout_s, clock, sleep)
    try:
        try:
            return LowGrams.open(home, manifest)
        except ShardFormatError:
            pass  # missing or damaged: fetched below, under the lock
        cache_dir.mkdir(parents=True, exist_ok=True)
        return download.run()
    except OSError as exc:
        raise ConfigError(
            f"cannot cache the low orders in {cache_dir}: {exc}. Free space there, "
            "or set DLM_CACHE_DIR to another folder"
        ) from exc


class _Download:
    """Fetches low orders into a folder beside `home`, and renames it when it is complete. It fails
    at `until`, unless `PROGRESS_BYTES` more arrive before."""

    def __init__(
        self,
        manifest: Manifest,
        sources: list[Source],
        home: Path,
        timeout_s: float,
        clock: Clock,
        sleep: Callable[[float], None],
    ) -> None:
        self.manifest, self.sources, self.home = manifest, sources, home
        self.timeout_s, self.clock, self.sleep = timeout_s, clock, sleep
        self.until = clock() + timeout_s
        self._fresh = 0  # bytes since then
        self._bytes = sum(manifest.file(kind).bytes for kind in FILES)
        self._progress = ProgressReporter(compiling_notice.tell)

    def run(self) -> LowGrams:
        home = self.home
        lock = home.with_name(home.name + ".lock")
        part = home.with_name(home.name + ".part")  # what is in it is not fetched again
        turn_until, before = self.clock() + self.timeout_s / 2, _arrived(part)
        while (turn := lock_file(lock, mode=0o666)) is None and self.clock() < turn_until:
            self.sleep(LOCK_POLL_S)
            if (now := _arrived(part)) >= before + PROGRESS_BYTES:
                turn_until, before = self.clock() + self.timeout_s / 2, now
        self.until = max(self.until, self.clock() + self.timeout_s / 2)
        if turn is None:
            # A process that holds the lock and does nothing must not block others: this one
            # then fetches into its own folder.
            with scratch_folder(home.parent, home.name) as own:
                return self._fetch_into(own / "part")
        try:
            return self._fetch_into(part)
        except UnavailableError:
            raise  # the next try resumes from what has arrived
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            unlock(turn)

    def _fetch_into(self, part: Path) -> LowGrams:
        home, manifest = self.home, self.manifest
        try:
            return LowGrams.open(home, manifest)  # another process was faster
        except ShardFormatError:
            pass  # a damaged one stays until a complete one can replace it
        _make_room(home.parent, part, manifest)
        part.mkdir(exist_ok=True)
        if self._bytes >= SHOWN_BYTES:
            size = self._bytes >> 20
            name = f"fetching {size:,} MiB of 1- and 2-grams, once, into {home.parent}"
            self._progress.stage(name, size, "MiB")
        for kind in FILES:
            self._fetch_in_time(kind, part)
        with (part / layout.MANIFEST).open("wb") as out:
            out.write(manifest.text)
            out.flush()
            os.fsync(out.fileno())
        sync_folder(part)
        # Mapped before it is moved: whatever others do to the name, this process has its copy.
        try:
            grams = LowGrams.open(part, manifest)
        except ShardFormatError as exc:
            # Their checksums match, so they were unusable when the manifest was made.
            raise ProtocolError(
                f"the servers of shard set {manifest.shard_set} sent unusable low orders: "
                f"{plain(str(exc))}. Make the shard set again"
            ) from exc
        _put(part, home, manifest)
        return replace(grams, directory=home)

    def _fetch_in_time(self, kind: str, part: Path) -> None:
        pause_s = RETRY_S
        while True:
            try:
                self._fetch_file(kind, part)
                return
            except UnavailableError as exc:
                rest_s = pause_s * (0.5 + random.random())
                if isinstance(after_files(exc, rest_s, self.until - self.clock()), GiveUp):
                    entry = self.manifest.file(kind)
                    path = part / entry.name
                    exc.add_note(
                        f"{path.stat().st_size if path.exists() else 0} of {entry.bytes} bytes of "
                        f"{entry.name} arrived, and less than {PROGRESS_BYTES} of them in the "
                        f"last {self.timeout_s:g} s (connect_s); connect again to resume"
                    )
                    raise
                self.sleep(rest_s)
                pause_s = min(2 * pause_s, 2.0)

    def _fetch_file(self, kind: str, part: Path) -> None:
        """Fetches one file, from where an earlier try stopped; skips a server that fails. None of
        several may take all the time that is left."""
        entry = self.manifest.file(kind)
        path = part / entry.name
        last: DlmError = (
            DeadlineExceeded(f"no time was left to fetch {entry.name}; raise connect_s")
            if self.sources
            else ShardDown(f"no server of shard set {self.manifest.shard_set} is known; start one")
        )
        if path.exists() and _is_whole(path, entry):
            return
        for place, (shard, connection) in enumerate(self.sources):
            then: Again | Elsewhere = Again()
            tries = 0
            while isinstance(then, Again):
                left_s = self.until - self.clock()
                if left_s <= 0:
                    raise last
                share_s = max(left_s / (len(self.sources) - place), min(left_s, LEAST_S))
                if path.exists() and path.stat().st_size > entry.bytes:
                    path.unlink()
                resumed = path.exists() and path.stat().st_size > 0
                tries += 1
                try:
                    self._receive(kind, shard, connection, path, share_s)
                except DlmError as exc:
                    # Trying again makes sense only if some server may do better later.
                    if not (isinstance(last, Overloaded) and isinstance(exc, UnavailableError)):
                        last = exc
                    then = after_file(tries, wrong=False, resumed=resumed)
                    continue
                if _is_whole(path, entry):
                    return
                path.unlink()
                last = ProtocolError(
                    f"{connection.address} sent a {kind} file that does not match the manifest; "
                    "the server's files are damaged (run `dlm verify DIR` there)"
                )
                then = after_file(tries, wrong=True, resumed=resumed)
        raise last

    def _receive(
        self, kind: str, shard: int, connection: Connection, path: Path, timeout_s: float
    ) -> None:
        until, entry = self.clock() + timeout_s, self.manifest.file(kind)
        shard_set = self.manifest.shard_set_bytes
        with path.open("ab") as out:
            offset = out.tell()
            request = pb.DownloadRequest(
                shard_set=shard_set, shard=shard, file=FILES[kind], offset=offset
            )
            with closing(connection.download(request, timeout_s)) as chunks:
                for chunk in chunks:
                    data = codec.decode_chunk(
                        chunk,
                        shard_set=shard_set,
                        shard=shard,
                        offset=offset,
                        file_bytes=entry.bytes,
                    )
                    out.write(data)
                    offset += len(data)
                    self._note(len(data))
                    if self.clock() >= until and offset < entry.bytes:
                        raise DeadlineExceeded(
                            f"{connection.address} sent only {offset} of {entry.bytes} bytes of "
                            f"{entry.name} in time"
                        )
            if offset != entry.bytes:
                raise ProtocolError(
                    f"{connection.address} stopped at byte {offset} of {entry.bytes} of "
                    f"{entry.name}; connect again to resume"
                )
            out.flush()
            os.fsync(out.fileno())

    def _note(self, size: int) -> None:
        self._fresh += size
        if self._fresh >= PROGRESS_BYTES:
            self.until = self.clock() + self.timeout_s
            self._progress.step(self._fresh >> 20)
            self._fresh = 0


def _arrived(part: Path) -> int:
    arrived = 0
    for file in part.glob("*.arrow"):
        with contextlib.suppress(OSError):  # it was moved meanwhile
            arrived += file.stat().st_size
    return arrived


def _make_room(cache_dir: Path, part: Path, manifest: Manifest) -> None:
    """Removes abandoned downloads of other shard sets that are old, or whose space is needed;
    raises `OSError` if there is still too little."""
    needed = sum(manifest.file(kind).bytes for kind in FILES) - _arrived(part) + KEEP_FREE_BYTES
    for age_s in (LEFT_S, 0.0):
        for other in cache_dir.glob("*.part"):
            with contextlib.suppress(OSError):
                if other != part and other.stat().st_mtime <= time.time() - age_s:
                    remove_unlocked(other, other.with_suffix(".lock"))
        free = shutil.disk_usage(cache_dir).free
        if free >= needed:
            return
    raise OSError(
        errno.ENOSPC,
        f"shard set {manifest.shard_set} needs {needed} bytes, "
        f"{KEEP_FREE_BYTES} of them as a reserve, but only {free} are free",
    )


def _put(part: Path, home: Path, manifest: Manifest) -> None:
    """Renames a complete copy to `home`, unless there is a complete one already. Others may do the
    same at any moment: a copy that seems damaged is first moved aside, and checked again there."""
    for tries_left in reversed(range(PUT_TRIES)):
        try:
            move(part, home)
            return
        except OSError:
            if not tries_left:
                raise
        if _is_whole_copy(home, manifest):
            return
        with scratch_folder(home.parent, home.name) as aside:
            try:
                move(home, aside / "damaged")
            except FileNotFoundError:
                continue  # another process was faster
            if _is_whole_copy(aside / "damaged", manifest):  # another process had replaced it
                with contextlib.suppress(OSError):
                    move(aside / "damaged", home)


def _is_whole_copy(folder: Path, manifest: Manifest) -> bool:
    try:
        LowGrams.open(folder, manifest)
    except ShardFormatError:
        return False
    return True


def _is_whole(path: Path, entry: layout.FileEntry) -> bool:
    return path.stat().st_size == entry.bytes and layout.file_checksum(path) == entry.xxh3_128
